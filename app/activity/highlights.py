"""The sentences under "Worth a look" on the Overview, each computed from the run, with the page that shows more.

A sentence is safe HTML: every token in it has gone through `token_html`. If the run lacks the data for a sentence, the
sentence is left out.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from twell import analysis
from twell.analysis.figures.tokens import MIN_COUNT
from twell.app.activity.layer_data import CORRELATION
from twell.app.ui.formatting import SPACE, fixed, number, percent, plural, times, token_html, visible, whole
from twell.app.ui.query import fetch
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

MOST_WORDS = 40  # bars of the picture of words


@dataclass(frozen=True)
class Highlight:
    """A sentence, as HTML, and the address of the page about it (a key of PAGES)."""

    page: str
    sentence: str


def highlights(run: Run) -> list[Highlight]:
    """Return the sentences about a run, those about one page next to each other."""
    result: list[Highlight] = []
    for page, describe in DESCRIPTIONS:
        try:
            sentence = describe(run)
        except Missing:
            continue
        if sentence:
            result.append(Highlight(page, sentence))
    return result


def _tokens(run: Run) -> str:
    """Return the three words that fire most neurons and the three that fire fewest, as page Tokens ranks them."""
    frame = _ranked_words(run)
    if len(frame) < 6 or not frame["mean"].any():
        return ""

    def links(rows: pd.DataFrame) -> str:
        return ", ".join(
            f'<a href="{link("token", word=row["word"])}">{token_html(row["word"])}</a> ({number(row["mean"])})'
            for row in rows.to_dict("records")
        )

    several = run.layers > 1
    return (
        f"Of {plural(len(frame), 'word')} that occur at least {MIN_COUNT} times, these fire the most neurons in a "
        f"layer: {links(frame.head(3))}. These fire the fewest: {links(frame.tail(3)[::-1])}. In brackets: the mean "
        f"over {'all layers and ' * several}all places where the word occurs. Ranked by single token"
        f"{', by single place, or with every layer counting alike' if several else ' or by single place'}, others come "
        "first."
    )


def _ranked_words(run: Run) -> pd.DataFrame:
    """Return `analysis.by_word`, the words that fire most neurons first."""
    return fetch(run, analysis.by_word, min_count=MIN_COUNT).sort_values("mean", ascending=False, kind="stable")


def _layers(run: Run) -> str:
    """Return the layers with the most and the fewest neurons per token."""
    frame = fetch(run, analysis.by_layer)
    if not frame["mean"].any():
        return f"No neuron of any layer fires on any of {plural(frame['tokens'].max(), 'counted token')}."
    if len(frame) == 1:
        return f"The only layer fires {number(frame['mean'].iloc[0])} neurons per token."
    high, low = frame.loc[frame["mean"].idxmax()], frame.loc[frame["mean"].idxmin()]
    return (
        f"Layer {high['layer']:.0f} fires the most neurons: {number(high['mean'])} per token, "
        f"{percent(high['share'])} of the model's nnz. Layer {low['layer']:.0f} fires the fewest: "
        f"{number(low['mean'])} per token."
    )


def _dead(run: Run) -> str:
    """Return the layer with the largest share of dead neurons."""
    frame = fetch(run, analysis.by_layer)
    if "dead_share" not in frame or not frame["dead_share"].notna().any():
        return ""
    worst = frame.loc[frame["dead_share"].idxmax()]
    if worst["dead"] == 0:
        return f"Every neuron fired at least once in {plural(worst['tokens'], 'counted token')}."
    dead = link("neurons", kind="dead")
    most = f", most in layer {worst['layer']:.0f}: {percent(worst['dead_share'])} of its neurons"
    return (
        f"{whole(frame['dead'].sum())} of {plural(run.neurons, 'neuron')} "
        f'<a class="plain" href="{dead}">never fired</a>{most if len(frame) > 1 else ""}.'
    )


def _positions(run: Run) -> str:
    """Return how many times more neurons the first position fires than later ones: over all layers, and by layer."""
    frame = fetch(run, analysis.by_position)
    first = frame[frame["first"]].set_index("layer")["mean"]
    later = frame[~frame["first"]]
    if not len(first) or not len(later):
        return ""
    weighted = (later["mean"] * later["tokens"]).groupby(later["layer"]).sum() / later.groupby("layer")["tokens"].sum()
    ratio = (first / weighted).replace(float("inf"), float("nan")).dropna()
    if not len(ratio):
        return ""
    numbers = fetch(run, analysis.overview)
    low, high = numbers["first_low"], numbers["first_high"]
    span = f" ({times(low)} to {times(high)} with 95{SPACE}% confidence)" if low is not None else ""
    said = f"The first position of a sequence fires {times(numbers['first_ratio'])} as many neurons as later positions"
    if len(ratio) == 1:
        return f"{said}{span}."
    by_layer = f"{number(ratio.min(), 2)} to {number(ratio.max(), 2)}{SPACE}×"
    return f"{said}, summed over layers{span}; layer by layer {by_layer}."


def _surprisal(run: Run) -> str:
    """Return the range over layers of the correlation between nnz and the next token's loss."""
    frame = fetch(run, CORRELATION)
    if frame["spearman"].isna().all():  # as where nothing fires
        return ""
    strongest = frame.loc[frame["spearman"].abs().idxmax()]
    low, high = fixed(strongest["low"]), fixed(strongest["high"])
    interval = f"95{SPACE}% {low} to {high}, " if pd.notna(strongest["low"]) else ""  # a run of one document has none
    more, fewer = int((frame["low"] > 0).sum()), int((frame["high"] < 0).sum())
    rest = len(frame) - more - fewer
    neither = f", and neither for sure in {rest}" if rest else ""
    told = f"({interval}n = {whole(strongest['n'])})"
    if len(frame) == 1:
        verdict = "more neurons" if more else "fewer neurons" if fewer else "neither more nor fewer neurons for sure"
        return (
            f"Where the next token is harder to predict, a token fires {verdict}: rank correlation "
            f"{fixed(strongest['spearman'])} {told}."
        )
    if rest == len(frame):
        return (
            "Whether a token fires more neurons where the next token is harder to predict cannot be told for sure in "
            f"any layer: rank correlations from {fixed(frame['spearman'].min())} to {fixed(frame['spearman'].max())} "
            f"(n = {whole(strongest['n'])})."
        )
    return (
        f"Where the next token is harder to predict, a token fires more neurons in {more} of "
        f"{plural(len(frame), 'layer')}, fewer in {fewer}{neither}: rank correlations from "
        f"{fixed(frame['spearman'].min())} to {fixed(frame['spearman'].max())}, strongest in layer "
        f"{strongest['layer']:.0f} {told}."
    )


def _kernels(run: Run) -> str:
    """Return the layers with the smallest and the largest speedup."""
    frame = fetch(run, analysis.speedup)
    if (frame["kernel"] == "reference").all():
        return "The timed kernel is the reference, which is not meant to be fast: no speedup is claimed from it."
    best, worst = frame.loc[frame["speedup"].idxmax()], frame.loc[frame["speedup"].idxmin()]
    if len(frame) == 1:
        return (
            f"Layer {best['layer']:.0f} alone was timed: sparse ran {_with_interval(best)} as fast as dense, at a "
            f"mean nnz of {number(best['nnz_mean'])} in the timed batches."
        )
    return (
        f"FFN speedup is smallest in layer {worst['layer']:.0f}: {_with_interval(worst)}, at a mean nnz of "
        f"{number(worst['nnz_mean'])} in the timed batches; largest in layer {best['layer']:.0f}: "
        f"{_with_interval(best)}, at {number(best['nnz_mean'])}."
        + ("" if worst["high"] < best["low"] else " These timings do not tell the two apart.")
    )


def _with_interval(row: pd.Series) -> str:
    """Return a layer's speedup with its 95 % interval over batches, and whether that leaves out 1. row: `speedup`'s"""
    if pd.isna(row["low"]):
        return f"{times(row['speedup'])} (in {plural(row['repeats'], 'batch', 'es')}, too few for an interval)"
    told = ", not told apart from dense" if row["low"] <= 1 <= row["high"] else ""
    return f"{times(row['speedup'])} ({times(row['low'])} to {times(row['high'])} with 95{SPACE}% confidence{told})"


def _verified(run: Run) -> str:
    """Return what `twell verify` measured of the agreement with the dense model."""
    parity = run.manifest.parity
    if not parity or not {"same_choice", "tokens", "counts", "differing", "beyond_rounding"} <= set(parity):
        return ""
    beyond = parity["beyond_rounding"]
    rounding = "none by more than rounding" if not beyond else f"{whole(beyond)} by more than rounding"
    differ = f"{whole(parity['differing'])} of {plural(parity['counts'], 'count')} differ"
    return (
        f"Verified against the dense model: the same next token for {percent(parity['same_choice'])} of "
        f"{plural(parity['tokens'], 'token')}; {differ}{', ' + rounding if parity['differing'] else ''}."
    )


def _overhead(run: Run) -> str:
    """Return what `twell verify` measured of the cost of counting."""
    overhead = run.manifest.overhead or {}
    probes = {"counts": "counts", "neurons": "counts and neuron sums", "all": "everything"}
    ratios = [
        f"{times(overhead[f'{key}_over_none'])} with {name}"
        for key, name in probes.items()
        if f"{key}_over_none" in overhead
    ]
    return f"Time of a forward pass with counting on, over the time with it off: {', '.join(ratios)}." if ratios else ""


DESCRIPTIONS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("tokens", _tokens),
    ("layers", _layers),
    ("layers", _surprisal),
    ("neurons", _dead),
    ("positions", _positions),
    ("kernels", _kernels),
    ("kernels", _verified),
    ("kernels", _overhead),
)


def _bars(page: str, bars: list[tuple[str, float]], name: str) -> str:
    """Return values as a small picture of bars, which is a link to a page.

    Args:
        page: the page.
        bars: the label and the value of each.
        name: what the picture shows, for readers who do not see it and above it for those who do.

    Raises Missing where no bar has a value, as along the sequence where nothing fires.
    """
    values = [value for _, value in bars if value == value]
    if not values:
        raise Missing("There is nothing to draw.")
    largest = max(values) or 1.0
    cells = "".join(
        f'<i title="{html.escape(label, quote=True)}" style="height:{100 * max(value, 0) / largest:.0f}%"></i>'
        for label, value in bars
        if value == value
    )
    text = html.escape(name)
    return f'<a class="tw-mini" href="{link(page)}" aria-label="{text}"><span>{text}</span><b>{cells}</b></a>'


def _picture_of_tokens(run: Run) -> str:
    frame = _ranked_words(run)
    rows = frame.head(MOST_WORDS).to_dict("records")
    bars = [(f"{visible(row['word'])}: {number(row['mean'])}", row["mean"]) for row in rows]
    which = f"{MOST_WORDS} most active words" if len(frame) > MOST_WORDS else f"each of {plural(len(frame), 'word')}"
    return _bars("tokens", bars, f"neurons fired, {which}")


def _picture_of_layers(run: Run) -> str:
    frame = fetch(run, analysis.by_layer)
    bars = [(f"L{row.layer}: {number(row.mean)}", row.mean) for row in frame.itertuples()]
    return _bars("layers", bars, "nnz by layer")


def _picture_of_neurons(run: Run) -> str:
    frame = fetch(run, analysis.by_layer)
    if not frame["dead_share"].notna().any():
        raise Missing("This run keeps no sums of neurons.")
    bars = [(f"L{row.layer}: {percent(row.dead_share)}", row.dead_share) for row in frame.itertuples()]
    return _bars("neurons", bars, "never fired, share of each layer")


def _picture_of_positions(run: Run) -> str:
    blocks = fetch(run, analysis.position_blocks, blocks=16).groupby("position_from")["relative"].mean()
    bars = [(f"from position {start}: {number(ratio)} × the mean", ratio) for start, ratio in blocks.items()]
    return _bars("positions", bars, "nnz along the sequence")


def _picture_of_kernels(run: Run) -> str:
    frame = fetch(run, analysis.speedup)
    if not frame.attrs["comparable"]:
        raise Missing("The reference kernel is not meant to be fast: its times are no picture of a speedup.")
    bars = [(f"L{row.layer}: {times(row.speedup)}", row.speedup) for row in frame.itertuples()]
    return _bars("kernels", bars, "FFN speedup by layer")


PICTURES: dict[str, Callable[[Run], str]] = {
    "tokens": _picture_of_tokens,
    "layers": _picture_of_layers,
    "neurons": _picture_of_neurons,
    "positions": _picture_of_positions,
    "kernels": _picture_of_kernels,
}
