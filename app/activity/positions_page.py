"""Positions: how activity changes along a sequence, layer by layer."""

from __future__ import annotations

from twell.app.activity.layer_data import span
from twell.app.activity.position_data import FITS, PANELS
from twell.app.activity.position_figures import decays
from twell.app.ui import widgets
from twell.app.ui.figures.small_multiples import small_multiples
from twell.app.ui.formatting import number, plural, whole
from twell.app.ui.query import query
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run


def decay(run: Run) -> None:
    """Over how many tokens nnz falls off, layer by layer."""
    result = query(run, FITS)
    fits = result.frame
    told = fits.loc[fits["layer"] >= 0, "verdict"].value_counts()
    said = ", ".join(f"{verdict} in {count}" for verdict, count in told.items())
    widgets.heading(
        "How fast it falls off",
        "λ of a + b·exp(−p/λ), fitted to bands of positions from 1 on, with 95 % intervals over groups of sequences. "
        f"Beside it, which of an exponential and a power law fits better by AICc: {said} of {told.sum()} layers. "
        "R² is computed on the means of the bands.",
        result,
    )
    widgets.draw(decays(fits), "decay", "Length over which nnz falls off, by layer")


def page(run: Run) -> None:
    """A panel a layer, then the fits."""
    result = query(run, PANELS)
    bins = result.frame
    fitted = " Dashed: the fitted exponential, in layers that it describes." if "fit" in bins else ""
    first = bins["first"].any()
    sequences = int(bins.loc[bins["first"], "tokens"].max()) if first else run.manifest.sequences
    apart = (
        "The first position of a sequence (amber) is drawn separately and is not part of the mean."
        if first
        else "The first position of every sequence is a special token and is left out."
    )
    widgets.heading(
        "Mean nnz by position, relative to the layer's mean",
        f"{plural(sequences, 'sequence')}, up to {whole(bins['position_to'].max() + 1)} tokens; both axes logarithmic; "
        f"{widgets.interval_note(run)}. {apart}{fitted}",
        result,
    )
    spans = [span(low, high) for low, high in zip(bins["position_from"], bins["position_to"], strict=True)]
    hover = [
        f"position {s}<br>mean nnz {number(r.mean)}, {number(r.relative)} × the layer's<br>n = {whole(r.tokens)}"
        for s, r in zip(spans, bins.itertuples(), strict=True)
    ]
    level = bins.groupby("layer")["layer_mean"].first()
    titles = {int(layer): f"L{layer} · mean {number(mean)}" for layer, mean in level.items()}
    axes = {"x_title": "position, tokens", "y_title": "nnz / layer mean"}
    figure = small_multiples(bins.assign(hover=hover), "position", titles, **axes, log=True, log_y=True)
    widgets.draw(figure, "positions", "Mean nnz by position, a panel a layer", wide=True)
    with widgets.show_errors():
        decay(run)


widgets.title("Where in a sequence does it fire?")
with widgets.show_errors():
    page(current_run())
