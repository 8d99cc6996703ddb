"""Passage: one sequence token by token, and the scale that shades it.

    passage(run, sequence)     a row for each token of the sequence
    scale(run, shade)          the values of the faintest and the strongest shade
    loudest(run, shade)        the tokens of greatest value in the run

A shade is one of `all` (nnz summed over the layers), `L3` (nnz in layer 3), `surprisal` (loss of the token, as
predicted one position before it) and `L3/N42` (the value of that neuron, where the run keeps it). Its scale runs from
the 1st to the 99th percentile of the run's unflagged tokens, a neuron's from 0 to its largest value, so that two
passages of a run are shaded alike; a longer run of the same weights can lend its own scale to a short one. Cost: 10 ms
for a sequence, and for `loudest` by nnz; by surprisal it reads every loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from twell.analysis.activity.layers import histogram
from twell.analysis.neurons.by_neuron import by_neuron, last_neuron, parse_neuron
from twell.analysis.neurons.examples import examples
from twell.analysis.neurons.values import firings, in_sequence
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.highest import ORDER, SEEN, fullest_tokens, loss_quantiles, most_surprising
from twell.analysis.tokens.text_around import split_text, token_windows
from twell.analysis.tokens.token_text import spell
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.part_files import open_part, unreadable_part
from twell.workbench.run.schema import DECODE, PREFILL, nnz_columns
from twell.workbench.run.store import Run

ALL, SURPRISAL = "all", "surprisal"
AROUND = 10  # tokens shown on each side of one
PHASES = {"prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True)
class Scale:
    """The scale of a shade.

    name, unit: of its values; low, high: values of the faintest and the strongest shade; range_note: where low and high
    come from, in words.
    """

    name: str
    unit: str
    low: float
    high: float
    range_note: str = "1st to 99th percentile of the run"

    @property
    def short(self) -> str:
        """Return the heading of a column of the values."""
        return self.unit or "value"

    def share(self, values: np.ndarray) -> np.ndarray:
        """Return values scaled to 0 (low and below) to 1 (high and above); NaN stays NaN."""
        return np.clip((values - self.low) / max(self.high - self.low, 1e-9), 0, 1)

    def lent_by(self, run: Run) -> Scale:
        """Return the same scale, named as that of `run`, for the passages of another run."""
        return replace(self, range_note=self.range_note.replace("the run", run.name))


def shades(run: Run) -> list[str]:
    """Return the names of all shades of a run but those of single neurons."""
    return [ALL, *(f"L{layer}" for layer in range(run.layers)), *([SURPRISAL] if run.manifest.loss_tokens else [])]


def scale(run: Run, shade: str) -> Scale:
    """Return the scale of a shade, shared by all passages of the run."""
    if "/" in shade:
        layer, neuron = _neuron(run, shade)
        high = float(by_neuron(run, layer=layer)["value_max"].iloc[neuron])
        return Scale(f"value of {shade}", "", 0.0, high, "0 to the largest of the run; unshaded: silent, or not kept")
    if shade == SURPRISAL:
        # The loss at a first token, which is flagged, is the surprisal of the second, which is not.
        low, high = loss_quantiles(run, (0.01, 0.99))
        return Scale("surprisal of the token", "nats", low, high)
    layer = -1 if shade == ALL else int(shade[1:])
    counted = histogram(open_summaries(run))
    counted = counted[counted["layer"] == layer]
    up_to = np.cumsum(counted["tokens"].to_numpy(float))
    low, high = (float(counted["nnz"].to_numpy()[np.searchsorted(up_to, share * up_to[-1])]) for share in (0.01, 0.99))
    return Scale("neurons over all layers" if layer < 0 else f"nnz in layer {layer}", "neurons", low, high)


def can_lend(run: Run, to: Run) -> bool:
    """Return whether the scales of `run` can shade passages of the run `to`.

    They can if `run` has the same weights and definition of nnz, is longer, and has all tables that the shades of `to`
    need.
    """
    ours, theirs = run.manifest, to.manifest
    same = ours.model.get("weights") is not None and ours.model["weights"] == theirs.model.get("weights")
    tables = [table for table in ("activity", "neurons") if to.has(table)]
    return (
        same
        and ours.nnz_definition == theirs.nnz_definition
        and ours.tokens > theirs.tokens
        and bool(ours.loss_tokens) >= bool(theirs.loss_tokens)
        and all(run.has(table) for table in tables)
    )


def percentiles(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the run's values of nnz over all layers, ascending, and for each the percentage of tokens with at most
    that many."""
    counted = histogram(open_summaries(run))
    counted = counted[counted["layer"] == -1]
    up_to = np.cumsum(counted["tokens"].to_numpy(float))
    return counted["nnz"].to_numpy(), 100 * up_to / up_to[-1]


def _neuron(run: Run, shade: str) -> tuple[int, int]:
    """Return layer and index of the neuron that a shade names. Raises Missing if the run has no such neuron."""
    neuron = parse_neuron(shade, run)
    if neuron is None:
        raise Missing(f"This run's neurons are called L0/N0 to {last_neuron(run)}; it has no {shade}.")
    return neuron


def phases(run: Run) -> list[str]:
    """Return the names of the phases that the run's tokens belong to."""
    numbers: set[int] = set()
    for path in run.parts("activity"):
        numbers |= _phases_of(path)
    return [name for name, number in PHASES.items() if number in numbers]


def _phases_of(path: Path) -> set[int]:
    """Return the phases in a part: the least and the greatest in the metadata of each row group."""
    try:
        file = open_part(path).metadata
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None
    column = file.schema.names.index("phase")
    statistics = [file.row_group(group).column(column).statistics for group in range(file.num_row_groups)]
    return {end for of_group in statistics for end in (of_group.min, of_group.max)}


def _numbers(run: Run) -> str:
    """Return which sequences a run has: numbers are left out where parts are, and where a beam had read no token."""
    known = sorted(run.arrow("activity", ["sequence"])["sequence"].unique().to_pylist())
    whole = not known or known == [*range(known[-1] + 1)]
    return f"0 to {len(known) - 1}" if whole else f"{len(known)} of the numbers from {known[0]} to {known[-1]}"


def passage(run: Run, sequence: int) -> pd.DataFrame:
    """Return the tokens of a sequence in order. Columns: position; token_id; flags; phase; loss (nats, of the next
    token as predicted here); surprisal (nats, of this token); nnz (sum over layers); nnz_LL. Missing if the run has no
    such sequence, UserError for what is no number."""
    if not isinstance(sequence, int | np.integer):
        raise UserError(
            f"Expected a sequence's number, got {sequence!r}: {run.name} has 0 to {run.manifest.sequences - 1}."
        )
    rows = run.rows("activity", [("sequence", "=", sequence)]).to_pandas()
    rows = rows.sort_values("position", ignore_index=True)
    if rows.empty:
        raise Missing(f"{run.name} holds no sequence {sequence}: it has {_numbers(run)}.")
    rows["loss"] = rows["loss"].astype("float64")
    rows["surprisal"] = rows["loss"].shift(1)
    names = nnz_columns(run.layers)
    rows["nnz"] = rows[names].sum(axis=1).astype("int64")
    rows = rows[["position", "token_id", "flags", "phase", "loss", "surprisal", "nnz", *names]]
    rows.attrs = {"sequence": sequence}
    return rows


def values(rows: pd.DataFrame, run: Run, shade: str) -> np.ndarray:
    """Return the value that shades each row of a passage; NaN where it is not known."""
    if "/" in shade:
        of_neuron = in_sequence(run, *_neuron(run, shade), sequence=int(rows.attrs["sequence"]))
        return of_neuron.reindex(rows["position"]).to_numpy(float)
    if shade == SURPRISAL:
        return rows["surprisal"].to_numpy(float)
    return rows["nnz" if shade == ALL else nnz_columns(run.layers)[int(shade[1:])]].to_numpy(float)


def shaded(rows: pd.DataFrame, run: Run, shade: str, phase: str | None, begin: int, limit: int) -> pd.DataFrame:
    """Return up to `limit` tokens of a passage from index `begin` on, with one more column: shade.

    That is the value that shades the token; NaN where it is not known, or where the token is not of `phase`, if one is
    given. rows: as `passage` returns them.
    """
    stretch = rows.iloc[begin : begin + limit]
    shades = values(stretch, run, shade)
    if phase is not None:
        shades = np.where(stretch["phase"] == PHASES[phase], shades, np.nan)
    return stretch.assign(shade=shades)


def shaded_anew(rows: pd.DataFrame, anew: Run, shade: str, phase: str | None, begin: int, limit: int) -> pd.DataFrame:
    """Return what `shaded` does, with a neuron's values from a run of this passage alone, its only sequence."""
    alone = rows.copy()
    alone.attrs = {"sequence": 0}
    return shaded(alone, anew, shade, phase, begin, limit)


def token_texts(bytes_of_tokens: Iterable[object]) -> list[str]:
    """Return the text of each token by itself, as `spell` writes it; "" for a token that the vocabulary lacks."""
    return [spell(piece) if isinstance(piece, bytes) else "" for piece in bytes_of_tokens]


def loudest(run: Run, shade: str, phase: str | None = None) -> pd.DataFrame:
    """Return the positions of greatest value in the run, or in one phase of it, with the text around: each token once,
    but for a neuron each of its firings. Columns: sequence, position, token_id (not for a neuron), value, before,
    token, after."""
    number = None if phase is None else PHASES[phase]
    if "/" in shade and (run.has("examples") or not run.has("fired")):
        rows = examples(run, *_neuron(run, shade), width=AROUND)
        rows = rows[rows["kind"] == "top"].head(SEEN).reset_index(drop=True)
        return rows[["sequence", "position", "value", "before", "token", "after"]]
    if "/" in shade:
        top = firings(run, *_neuron(run, shade)).sort_values(ORDER, ascending=[False, True, True]).head(SEEN)
        top = top.reset_index(drop=True)
    elif shade == SURPRISAL:
        top = most_surprising(run, number)
    else:
        top = fullest_tokens(run, -1 if shade == ALL else int(shade[1:]), number)
    top = top.astype({"sequence": "int64", "position": "int64"})
    windows = token_windows(run, top, AROUND)
    if "/" not in shade:
        top.insert(2, "token_id", [window.token_id for window in windows])
        top = top.reset_index(drop=True).drop_duplicates("token_id").head(SEEN)
    texts = [split_text(run, windows[row]) for row in top.index]
    top = top.assign(**{name: [text[n] for text in texts] for n, name in enumerate(("before", "token", "after"))})
    return top.reset_index(drop=True)


def sequences(run: Run) -> pd.DataFrame:
    """Return the run's sequences, in order. Columns: sequence, document, source, tokens."""
    return run.frame("sequences", ["sequence", "document", "source", "tokens"]).sort_values("sequence")
