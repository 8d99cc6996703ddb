"""The queries of the Neurons pages: neurons by density, lists of neurons, and one neuron's row.

All come from `analysis.by_neuron`. The results are small, however many neurons the model has.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from twell import analysis
from twell.analysis.figures.neurons import density_bins, density_map
from twell.analysis.memo import built_once
from twell.analysis.neurons.logit_lens import promoted
from twell.analysis.neurons.top_tokens import top_tokens, weight_norms
from twell.analysis.tokens.text_around import sides
from twell.app.ui.formatting import running, visible
from twell.app.ui.query import Query, query
from twell.app.ui.widgets import with_links
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NAMES = ["layer", "neuron"]
SELECTIVE, FEW = 0.01, 8  # density up to which a neuron is selective, and the firings that it must have
KINDS = {
    "selective": "Selective and strong",
    "hot": "Most frequent",
    "strong": "Strongest",
    "one": "One token only",
    "rare": "Rarest",
    "dead": "Dead",
}
NOTES = {
    "selective": f"They fire on at most {100 * SELECTIVE:.0f} % of tokens, {FEW} or more; largest value first.",
    "hot": "Highest density first.",
    "strong": "Largest value first.",
    "one": "These neurons fired more than once, always on the same token of the vocabulary.",
    "rare": "Lowest density first, without dead neurons.",
    "dead": "Dead neurons never fired on this text.",
}
MAX_ROWS = 1000  # of a list that go to the browser
SNIPPETS, AROUND = 100, 6  # rows of a list with text around the largest value, and tokens of it on either side
PRODUCTS = 4e9  # multiplications that the tokens which a list's neurons write may take, some 0.3 s


def neuron_list(
    run: Run,
    layer: int | None,
    kind: str,
    find: str = "",
    most: int | None = MAX_ROWS,
    density: tuple[float, float] | None = None,
) -> pd.DataFrame:
    """Return the first neurons of a kind, as rows of `analysis.by_neuron`.

    Args:
        run: the run.
        layer: the layer; None for all.
        kind: a key of KINDS; NOTES says in which order they come.
        find: text that a token at one of the neuron's largest values contains; empty for all neurons.
        most: how many neurons at most; None for all.
        density: bounds of a bin of `density_bins`, in which their density is; None for all.

    Returns:
        The rows. `attrs["count"]` is how many neurons of the kind there are.
    """
    frame = analysis.by_neuron(run) if layer is None else analysis.by_neuron(run, layer=layer)
    if find:
        needle = visible(find).lower()
        tokens = top_tokens(run)
        tokens = tokens[[needle in visible(text).lower() for text in tokens["text"].tolist()]]
        frame = frame[pd.MultiIndex.from_frame(frame[NAMES]).isin(pd.MultiIndex.from_frame(tokens[NAMES]))]
    if density is not None:
        low, high = density
        frame = frame[(frame["density"] >= low) & ((frame["density"] < high) | (high == 1))]
    fired = frame["fires"] > 0
    if kind == "dead":
        rows = frame[~fired]
    elif kind == "one":
        rows = frame[frame["one_token"] & (frame["fires"] > 1)].sort_values("fires", ascending=False, kind="stable")
    elif kind == "selective":
        rows = frame[(frame["fires"] >= FEW) & (frame["density"] <= SELECTIVE)]
        rows = rows.sort_values("value_max", ascending=False, kind="stable")
    elif kind == "strong":
        rows = frame[fired].sort_values("value_max", ascending=False, kind="stable")
    else:
        rows = frame[fired].sort_values("density", ascending=kind == "rare", kind="stable")
    return first_rows(rows, most)


def first_rows(frame: pd.DataFrame, most: int | None = MAX_ROWS) -> pd.DataFrame:
    """Return the first rows of a list, all if `most` is None; `attrs["count"]` is how many the whole list has."""
    first = frame.head(len(frame) if most is None else most).reset_index(drop=True)
    first.attrs = {"count": len(frame), **frame.attrs}
    return first


def with_tokens(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return rows of `neuron_list` with one column more: fires_on, the tokens at the neuron's largest values, as pages
    show them. The column is left out where the run keeps no examples or no tokens."""
    try:
        rows = top_tokens(run)
    except Missing:
        return frame
    rows = rows.merge(frame[NAMES], on=NAMES)
    texts = rows["text"].map(visible).groupby([rows["layer"], rows["neuron"]]).agg("  ".join).rename("fires_on")
    return _keeping(frame, frame.merge(texts.reset_index(), on=NAMES, how="left").fillna({"fires_on": ""}))


def with_snippets(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return rows of `neuron_list` with one column more: in_text, the text around the neuron's largest value with its
    token in ‹ ›, for the first SNIPPETS rows. The column is left out where the run keeps no examples or no tokens."""
    try:
        rows = run.frame("examples", [*NAMES, "kind", "value", "sequence", "position"])
        rows = rows[rows["kind"] == "top"].merge(frame[NAMES].head(SNIPPETS), on=NAMES)
        rows = rows.sort_values("value", ascending=False, kind="stable").drop_duplicates(NAMES)
        texts = sides(run, rows, AROUND) if len(rows) else []
    except Missing:
        return frame
    if not texts:
        return frame
    lines = [f"{running(before)} ‹{visible(token)}› {running(after)}" for before, token, after in texts]
    joined = frame.merge(rows[NAMES].assign(in_text=lines), on=NAMES, how="left")
    return _keeping(frame, joined.fillna({"in_text": ""}))


def with_written(frame: pd.DataFrame, run: Run, folder: str) -> pd.DataFrame:
    """Return rows of `neuron_list` with one column more: writes, the tokens that the neuron makes likelier, for as many
    rows as take a moment. folder: the model's weights."""
    each = PRODUCTS / (int(run.manifest.model["d_model"]) * len(run.vocab))
    first = frame.head(max(50, min(MAX_ROWS, int(each))))
    try:
        rows = promoted(run, folder, tuple(zip(first["layer"].tolist(), first["neuron"].tolist(), strict=True)))
    except Missing:
        return frame
    texts = rows["text"].map(visible).groupby([rows["layer"], rows["neuron"]]).agg("  ".join).rename("writes")
    return _keeping(frame, frame.merge(texts.reset_index(), on=NAMES, how="left").fillna({"writes": ""}))


def with_norms(frame: pd.DataFrame, run: Run, folder: str) -> pd.DataFrame:
    """Return rows of `neuron_list` with the columns of `weight_norms`: gate_norm, down_norm, gone."""
    try:
        rows = pd.concat([weight_norms(run, folder, int(layer)) for layer in frame["layer"].unique()])
    except (Missing, ValueError):  # no neuron at all
        return frame
    return _keeping(frame, frame.merge(rows, on=NAMES, how="left"))


def _keeping(frame: pd.DataFrame, joined: pd.DataFrame) -> pd.DataFrame:
    """Return a joined table with the `attrs` of the first one."""
    joined.attrs = dict(frame.attrs)
    return joined


def one_neuron(run: Run, layer: int, neuron: int) -> dict[str, object]:
    """Return a neuron's row of `analysis.by_neuron`, and its rank by density in its layer (1 is the highest)."""
    frame = analysis.by_neuron(run, layer=layer)
    row = dict(frame.iloc[neuron])
    row["rank"] = int((frame["density"] > row["density"]).sum()) + 1
    return row


DENSITIES = Query(density_bins)
LIST = Query(neuron_list, {"layer": None, "kind": "selective"})
DEFAULT_QUERIES = (DENSITIES, LIST)


def densities(run: Run) -> go.Figure:
    """Return the map of densities, whose cells can be chosen."""
    return built_once(with_links, density_map, query(run, DENSITIES).frame)


DEFAULT_FIGURES = (densities,)
