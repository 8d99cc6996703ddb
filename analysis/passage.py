"""The passage of one sequence, token by token, and the scale that shades it.

A shade is one of `all` (nnz summed over the layers), `L3` (nnz in layer 3), `surprisal` (loss of the token, as
predicted one position before it) and `L3/N42` (the value of that neuron, where the run keeps it). Its scale runs from
the 1st to the 99th percentile of the run's unflagged tokens, a neuron's from 0 to its largest value, so that two
passages of a run are shaded alike; a longer run of the same weights can lend its own to a short one. Cost: 10 ms for a
sequence; the loudest places read a column of every token once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from twell import analysis
from twell.analysis.activity.layers import histogram
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.values import in_sequence
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.schema import DECODE, PREFILL, nnz_columns
from twell.workbench.run.store import Run, read_part, unreadable_part

ALL, SURPRISAL = "all", "surprisal"
SEEN = 12  # loudest places that are listed
ORDER = ["value", "sequence", "position"]  # of the loudest places, the first by the greatest value
AROUND = 10  # tokens shown to either side of a place
PHASES = {"prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True)
class Scale:
    """What a shade stands for: its name, its unit, the values of the faintest and the strongest shade, and of what."""

    name: str
    unit: str
    low: float
    high: float
    said: str = "1st to 99th percentile of the run"

    @property
    def short(self) -> str:
        """What heads a column of the values."""
        return "nnz" if self.unit == "neurons" else self.unit or "value"

    def share(self, values: np.ndarray) -> np.ndarray:
        """The values from 0 (low and below) to 1 (high and above); NaN stays."""
        return np.clip((values - self.low) / max(self.high - self.low, 1e-9), 0, 1)

    def lent_by(self, run: Run) -> Scale:
        """The same, as another run's passages are told whose it is."""
        return replace(self, said=self.said.replace("the run", run.name))


def shades(run: Run) -> list[str]:
    """Every shade that the run can be shown in."""
    return [ALL, *(f"L{layer}" for layer in range(run.layers)), *([SURPRISAL] if run.manifest.loss_tokens else [])]


def scale(run: Run, shade: str) -> Scale:
    """The scale of a shade, shared by all passages of the run."""
    if "/" in shade:
        layer, neuron = _neuron(run, shade)
        high = float(analysis.by_neuron(run, layer=layer)["value_max"].iloc[neuron])
        return Scale(f"value of {shade}", "", 0.0, high, "0 to the largest of the run; unshaded: silent, or not kept")
    if shade == SURPRISAL:
        found = run.sql(
            "select quantile_cont(cast(loss as double), [0.01, 0.99]) as q from activity where flags = 0 and loss < 1e4"
        )["q"][0]
        return Scale("surprisal of the token", "nats", float(found[0]), float(found[1]))
    layer = -1 if shade == ALL else int(shade[1:])
    counted = histogram(open_summaries(run))
    counted = counted[counted["layer"] == layer]
    up_to = np.cumsum(counted["tokens"].to_numpy(float))
    low, high = (float(counted["nnz"].to_numpy()[np.searchsorted(up_to, share * up_to[-1])]) for share in (0.01, 0.99))
    return Scale("nnz, sum of all layers" if layer < 0 else f"nnz in layer {layer}", "neurons", low, high)


def can_lend(run: Run, to: Run) -> bool:
    """Whether a run can lend its scales: it is of the same weights, counted by the same rule, longer, and has what the
    other's shades ask for."""
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
    """The run's values of nnz over all layers, ascending, and the percentage of tokens with at most that many."""
    counted = histogram(open_summaries(run))
    counted = counted[counted["layer"] == -1]
    up_to = np.cumsum(counted["tokens"].to_numpy(float))
    return counted["nnz"].to_numpy(), 100 * up_to / up_to[-1]


def _neuron(run: Run, shade: str) -> tuple[int, int]:
    """The neuron that a shade names."""
    place = parse_neuron(shade, run)
    if place is None:
        raise Missing(f"This run's neurons are called L0/N0 to L{run.layers - 1}/N{run.d_ff - 1}; it has no {shade}.")
    return place


def phases(run: Run) -> list[str]:
    """The phases that the run's tokens are of."""
    found: set[int] = set()
    for path in run.parts("activity"):
        found |= _phases_of(path)
    return [name for name, number in PHASES.items() if number in found]


def _phases_of(path: Path) -> set[int]:
    """The phases in a part, from the least and the greatest of each row group, which the file's end states."""
    try:
        file = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None
    column = file.schema.names.index("phase")
    told = [file.row_group(group).column(column).statistics for group in range(file.num_row_groups)]
    return {end for statistics in told for end in (statistics.min, statistics.max)}


def passage(run: Run, sequence: int) -> pd.DataFrame:
    """The tokens of a sequence in order. Columns: position; token_id; flags; phase; loss (nats, of the next token as
    predicted here); surprisal (nats, of this token); nnz (sum over layers); nnz_LL."""
    found = [read_part(path, filters=[("sequence", "=", sequence)]) for path in run.parts("activity")]
    rows = pa.concat_tables(found).to_pandas().sort_values("position", ignore_index=True)
    if rows.empty:
        raise Missing(f"{run.name} holds no sequence {sequence}: it has 0 to {run.manifest.sequences - 1}.")
    rows["loss"] = rows["loss"].astype("float64")
    rows["surprisal"] = rows["loss"].shift(1)
    names = nnz_columns(run.layers)
    rows["nnz"] = rows[names].sum(axis=1).astype("int64")
    rows = rows[["position", "token_id", "flags", "phase", "loss", "surprisal", "nnz", *names]]
    rows.attrs = {"sequence": sequence}
    return rows


def values(rows: pd.DataFrame, run: Run, shade: str) -> np.ndarray:
    """What shades each token; NaN where it is not known."""
    if "/" in shade:
        known = in_sequence(run, *_neuron(run, shade), sequence=int(rows.attrs["sequence"]))
        return known.reindex(rows["position"]).to_numpy(float)
    if shade == SURPRISAL:
        return rows["surprisal"].to_numpy(float)
    return rows["nnz" if shade == ALL else nnz_columns(run.layers)[int(shade[1:])]].to_numpy(float)


def shaded(rows: pd.DataFrame, run: Run, shade: str, phase: str | None, begin: int, most: int) -> pd.DataFrame:
    """A stretch of a passage from a position on, of at most so many tokens, with one column more: shade (what shades
    the token; NaN where it is not known, or the token is of another phase)."""
    part = rows.iloc[begin : begin + most]
    found = values(part, run, shade)
    if phase is not None:
        found = np.where(part["phase"] == PHASES[phase], found, np.nan)
    return part.assign(shade=found)


def pieces(found: Iterable[object]) -> list[str]:
    """What each token adds to the text: a character that several tokens make up is the last one's, and the others add
    nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(piece) if isinstance(piece, bytes) else "" for piece in found]


def alone(found: Iterable[object]) -> list[str]:
    """Each token as text by itself; "" where the vocabulary lacks it."""
    return [piece.decode("utf-8", errors="replace") if isinstance(piece, bytes) else "" for piece in found]


def loudest(run: Run, shade: str, phase: str | None = None) -> pd.DataFrame:
    """The places of greatest value in the run, or in one phase of it, each token once. Columns: sequence, position,
    token_id, value, before, token, after."""
    only = "" if phase is None else f" and phase = {PHASES[phase]}"
    if "/" in shade:
        kept = analysis.examples(run, *_neuron(run, shade), width=AROUND)
        kept = kept[kept["kind"] == "top"].head(SEEN).reset_index(drop=True)
        return kept[["sequence", "position", "value", "before", "token", "after"]]
    if shade == SURPRISAL:
        value, place = "cast(loss as double)", "position + 1"
        where = "loss < 1e4"
        last = "join (select sequence, max(position) as final from activity group by sequence) using (sequence)"
        where += " and position < final" + only
        # The loss of a position is the surprisal of the next, whose token stands in the next row.
        query = (
            f"select sequence, {place} as position, {value} as value from activity {last} where {where} "
            f"order by value desc, sequence, position limit {4 * SEEN}"
        )
        run.parts("activity")
        top = run.sql(query)
    else:
        columns = nnz_columns(run.layers)
        top = _fullest(run, columns if shade == ALL else [columns[int(shade[1:])]], phase)
    found = [_place(run, *place) for place in top.itertuples(index=False)]
    return pd.DataFrame(found).drop_duplicates("token_id").head(SEEN).reset_index(drop=True)


def _fullest(run: Run, columns: list[str], phase: str | None) -> pd.DataFrame:
    """The SEEN tokens that fire most neurons, each where it first does. Columns: sequence, position, value (sum of the
    columns). Reads a part at a time: 0.3 s of a processor for a million tokens of 28 layers."""
    best = []
    for path in run.parts("activity"):
        rows = read_part(path, columns=["sequence", "position", "token_id", "phase", "flags", *columns])
        counted = np.zeros(rows.num_rows, np.int64)
        for name in columns:
            counted += rows[name].to_numpy()
        used = rows["flags"].to_numpy() == 0
        if phase is not None:
            used &= rows["phase"].to_numpy() == PHASES[phase]
        most, left = 64 * SEEN, int(used.sum())
        while True:  # until there are tokens enough among the rows of greatest value
            least = np.partition(counted[used], left - most)[left - most] if most < left else 0
            places = np.flatnonzero(used & (counted >= least))
            kept = rows.select(["sequence", "position", "token_id"]).take(places).to_pandas()
            kept = kept.assign(value=counted[places]).sort_values(ORDER, ascending=[False, True, True])
            kept = kept.drop_duplicates("token_id").head(SEEN)
            if len(kept) == SEEN or most >= left:
                break
            most *= 16
        best.append(kept)
    every = pd.concat(best).sort_values(ORDER, ascending=[False, True, True]).drop_duplicates("token_id")
    return every.head(SEEN)[["sequence", "position", "value"]]


def _place(run: Run, sequence: int, position: int, value: float) -> dict[str, object]:
    """A place with the text around it."""
    ids = passage(run, int(sequence))["token_id"].to_numpy()
    at = int(position)
    return {
        "sequence": int(sequence),
        "position": at,
        "token_id": int(ids[at]),
        "value": value,
        "before": run.decode(ids[max(0, at - AROUND) : at].tolist()),
        "token": run.decode([int(ids[at])]),
        "after": run.decode(ids[at + 1 : at + 1 + AROUND].tolist()),
    }


def sequences(run: Run) -> pd.DataFrame:
    """The run's sequences, in order. Columns: sequence, document, source, tokens."""
    return run.frame("sequences", ["sequence", "document", "source", "tokens"]).sort_values("sequence")
