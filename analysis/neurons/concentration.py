"""Concentration: how few neurons do most of the firing, and how many have never fired.

    concentration(run)   a row a layer: the share of the busiest 1, 5, 10 and 20 %, Gini, dead and one-token neurons
    lorenz(run)          the curve behind it: share of firings by share of neurons, busiest first
    dead_curve(run)      the share of neurons without a firing, by the number of sequences read
    dead_neurons(run)    their list; dead_mask(run) the same as an array, to restart them with

All count unflagged tokens, from the summary `neurons`. Cost: 20 ms for 45 000 neurons.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import dead_bound, of_unflagged, unflagged_tokens
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.checks.uncounted import no_counted_token
from twell.workbench.run.schema import NEVER_SEQUENCE
from twell.workbench.run.store import Run

BUSIEST = (0.01, 0.05, 0.10, 0.20)


def _table(summaries: Summaries, column: str, never: int) -> NDArray:
    """Return a column of the summary `neurons` as an array [layers, d_ff]; never: its value where a neuron never
    fired."""
    run, rows = summaries.run, summaries.columns("neurons", "layer", "neuron", column)
    if not unflagged_tokens(summaries):
        raise no_counted_token(run)
    table = np.full((run.layers, run.d_ff), never, dtype=np.int64)
    table[rows["layer"], rows["neuron"]] = rows[column]
    return table


def concentration(run: Run) -> pd.DataFrame:
    """Return how unevenly the firings of each layer spread over its neurons; a row a layer. Columns:

    layer; neurons; busiest_1, busiest_5, busiest_10, busiest_20 (share of the layer's firings on that percentage of its
    neurons, a part of a neuron counting in part); half (the fewest neurons that carry half of the firings); gini (0:
    all fire alike, 1: one does it all); dead, dead_share, dead_upper (no firing in the run's unflagged tokens; 95 %
    upper bound of such a neuron's density, 3 / tokens); one_token (neurons that a single token of the vocabulary fired,
    more than once). Shares are empty in a layer that never fires.
    """
    summaries = open_summaries(run)
    fires = _table(summaries, "fires", 0)
    low, high = _table(summaries, "token_min", 0), _table(summaries, "token_max", -1)
    tokens = unflagged_tokens(summaries)
    records = []
    for layer, width in enumerate(run.widths.tolist()):
        total, ranks = fires[layer].sum(), np.arange(width + 1)
        share = _up_to(fires[layer, :width]) / total if total else np.full(width + 1, np.nan)
        row: dict[str, float | None] = {"layer": layer, "neurons": width}
        row |= {
            f"busiest_{100 * share_of_neurons:.0f}": np.interp(share_of_neurons * width, ranks, share)
            for share_of_neurons in BUSIEST
        }
        row["half"] = int(np.searchsorted(share, 0.5)) if total else None
        row["gini"] = 2 * (share[:-1] + share[1:]).sum() / 2 / width - 1
        row["dead"] = int((fires[layer, :width] == 0).sum())
        row["one_token"] = int(((fires[layer] > 1) & (low[layer] == high[layer])).sum())
        records.append(row)
    frame = pd.DataFrame(records).astype({"half": "Int64"})
    frame.insert(frame.columns.get_loc("dead") + 1, "dead_share", frame["dead"] / run.widths)
    frame.insert(frame.columns.get_loc("dead") + 2, "dead_upper", dead_bound(tokens))
    frame.attrs = _about(run, tokens)
    return frame


def _up_to(fires: NDArray) -> NDArray:
    """Return the firings of the busiest 0, 1, 2, … neurons."""
    return np.append(0, np.cumsum(-np.sort(-fires)))


def _about(run: Run, tokens: int) -> dict[str, object]:
    """Return the `attrs` of a table; tokens: how many unflagged tokens it counts."""
    note = f"over {of_unflagged(tokens, run.manifest.sequences)}"
    return {"definition": run.manifest.nnz_definition, "note": note, "tokens": tokens}


def lorenz(run: Run, points: int = 50) -> pd.DataFrame:
    """Return the share of firings by share of neurons. Columns: layer; neurons (share of the layer's neurons, busiest
    first, from 0 to 1); firings (share of its firings that they carry). Layers that never fire are left out.

    points: of each layer's curve, about; UserError for under 2. Missing where the run counted no neurons.
    """
    if points < 2:
        raise UserError(f"Expected at least 2 points, got {points}.")
    summaries = open_summaries(run)
    fires = _table(summaries, "fires", 0)
    shares = np.linspace(0, 1, points)
    pieces = []
    for layer in np.flatnonzero(fires.sum(axis=1)):
        width = run.widths[layer]
        carried = np.interp(shares * width, np.arange(width + 1), _up_to(fires[layer, :width])) / fires[layer].sum()
        pieces.append(pd.DataFrame({"layer": layer, "neurons": shares, "firings": carried}))
    frame = pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame(columns=["layer", "neurons", "firings"])
    frame.attrs = _about(run, unflagged_tokens(summaries))
    return frame


def dead_curve(run: Run, points: int = 40) -> pd.DataFrame:
    """Return how many neurons had not fired yet as text went by. Columns: layer; sequences (seen so far, in the order
    of the run); dead_share (of the layer's neurons that had not fired by then). Where the last stretch still falls,
    more text would wake more neurons.

    points: of each layer's curve, about; UserError for under 2. Missing where the run counted no neurons.
    """
    if points < 2:
        raise UserError(f"Expected at least 2 points, got {points}.")
    summaries = open_summaries(run)
    first = _table(summaries, "first_sequence", NEVER_SEQUENCE)
    numbers = _sequences(run, int(first.max()) + 1)
    points_at = np.unique(np.round(np.geomspace(1, max(len(numbers), 1), points)).astype(int))
    pieces = []
    for layer, width in enumerate(run.widths):
        woken = np.searchsorted(numbers, np.sort(first[layer][first[layer] != NEVER_SEQUENCE]))
        share = 1 - np.searchsorted(woken, points_at, side="left") / width
        pieces.append(pd.DataFrame({"layer": layer, "sequences": points_at, "dead_share": share}))
    frame = pd.concat(pieces, ignore_index=True)
    frame.attrs = _about(run, unflagged_tokens(summaries))
    return frame


def _sequences(run: Run, least: int) -> NDArray:
    """Return the numbers of the run's sequences, ascending: some are left out where parts are, and where a beam had
    read no token. A summary-only copy does not list them: all up to `least` and to their number."""
    try:
        return np.sort(run.arrow("sequences", ["sequence"])["sequence"].to_numpy())
    except Missing:
        return np.arange(max(run.manifest.sequences, least))


def dead_mask(run: Run) -> NDArray[np.bool_]:
    """Return which neurons never fired in the run's unflagged tokens, bool [layers, d_ff].

    First and special tokens may fire them all the same, so that a model pruned by this mask has other logits: `twell
    prune` reads those tokens too.
    """
    return _dead(open_summaries(run))


def _dead(summaries: Summaries) -> NDArray[np.bool_]:
    run = summaries.run
    return (_table(summaries, "fires", 0) == 0) & (np.arange(run.d_ff) < run.widths[:, None])


def dead_neurons(run: Run) -> pd.DataFrame:
    """Return the neurons that never fired in the run's unflagged tokens. Columns: layer; neuron."""
    summaries = open_summaries(run)
    layer, neuron = np.nonzero(_dead(summaries))
    frame = pd.DataFrame({"layer": layer, "neuron": neuron})
    frame.attrs = _about(run, unflagged_tokens(summaries))
    return frame
