"""Layers: how active each layer is, how that spreads over tokens, and whether it follows the loss."""

from __future__ import annotations

from twell.app import parts
from twell.app.figures import small_multiples
from twell.app.layer_figures import ridges
from twell.app.state import ask, shown
from twell.app.words import number, plural, signed, whole
from twell.workbench.store import Run


def distributions(run: Run) -> None:
    """Distribution, share and dead neurons, a row a layer."""
    frame = ask(run, "by_layer")
    histogram = ask(run, "layer_histogram")
    tokens = int(frame["tokens"].max())
    parts.heading(
        "Activity by layer",
        f"Exact counts of {plural(tokens, 'token')} in {plural(run.manifest.sequences, 'sequence')}, logarithmic axis "
        "with a place for 0. Dead: never fired in these tokens; the density of such a neuron is under "
        f"{number(3e6 / max(tokens, 1), 2)} per million tokens (95 %).",
        frame,
        run,
        "analysis.by_layer(run), analysis.layer_histogram(run)",
    )
    parts.draw(ridges(histogram, frame), "ridges", "Distribution of nnz in each layer")


def surprisal(run: Run) -> None:
    """Whether a token fires more neurons where the model predicts worse."""
    frame = ask(run, "surprisal")
    correlation = ask(run, "surprisal_correlation").set_index("layer")
    means = frame.groupby("layer")[["nnz_mean", "tokens"]].apply(
        lambda part: (part["nnz_mean"] * part["tokens"]).sum() / max(part["tokens"].sum(), 1)
    )
    frame = frame.assign(layer_mean=frame["layer"].map(means), loss=(frame["loss_low"] + frame["loss_high"]) / 2)
    frame = frame[(frame["layer_mean"] > 0) & (frame["tokens"] > 0)]
    for name, shift in (("relative", 0.0), ("low", -1.96), ("high", 1.96)):
        frame[name] = (frame["nnz_mean"] + shift * frame["nnz_se"].fillna(0)) / frame["layer_mean"]
    frame["hover"] = [
        f"loss {r.loss_low:.2f}–{r.loss_high:.2f} nats<br>mean nnz {number(r.nnz_mean)}, n = {whole(r.tokens)}"
        for r in frame.itertuples()
    ]
    parts.heading(
        "Activity and surprise",
        "Mean nnz relative to the layer's mean, against the loss of the prediction made at the token, in bins of equal "
        "counts; bands are 95 % intervals. ρ: Spearman over tokens.",
        frame.drop(columns="hover"),
        run,
        "analysis.surprisal(run)",
    )
    titles = {
        layer: f"L{layer} · ρ {signed(correlation['spearman'].get(layer, float('nan')), 2)}"
        for layer in frame["layer"].unique()
    }
    figure = small_multiples(frame, "loss", titles, "loss, nats", "nnz / layer mean")
    parts.draw(figure, "surprisal", "Mean nnz against loss, by layer")


parts.title("How active is each layer?")
with parts.told():
    distributions(shown())
with parts.told():
    surprisal(shown())
