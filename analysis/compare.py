"""Compare: two runs or more, which differ in L1, model, text or kernel.

    twell compare runs/a runs/b runs/c
    compare_runs([a, b, c])      a row a run: loss, nnz, speed, and which runs no other beats
    compare_layers([a, b])       differences by layer to the first run, with intervals
    compare_positions([a, b])    the same by band of positions
    compare_tokens([a, b])       the same by token, the most significant differences first

Runs over the same sequences are compared in pairs, which makes the intervals narrower; other runs are taken as
independent. Layers of models of one depth are compared by number; of different depths each layer of the shallower one
with that of the other at the same relative depth, first with first and last with last. Cost: 0.1 s a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_float_dtype

from twell.analysis.activity.layers import by_layer, counted_in
from twell.analysis.activity.replicates import apart, effective_groups, mean_counts, replicate_totals, same_replicates
from twell.analysis.comparisons import difference_p, q_values
from twell.analysis.speed.ffn_speedup import caveats, ffn_speedup, layer_names
from twell.analysis.speed.speedup import model_speedup
from twell.analysis.statistics import t_half, welch_degrees
from twell.analysis.tokens.by_token import by_token
from twell.analysis.tokens.paired import can_be_paired, paired_errors
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import CompareOptions
from twell.workbench.run.store import Run, open_run

SHOWN = {  # by column of the printed tables: its heading, with the unit, and how a value is written
    "tokens": ("counted tokens", "{:,}"),
    "loss": ("loss, nats", "{:.3f}"),
    "nnz_mean": ("nnz", "{:.1f}"),
    "sparsity": ("sparsity", "{:.2%}"),
    "dead_share": ("dead", "{:.1%}"),
    "ffn_speedup": ("FFN ×", "{:.2f}"),
    "model_speedup": ("model ×", "{:.2f}"),
    "difference": ("difference", "{:+.2f}"),
    "low": ("95 % from", "{:+.2f}"),
    "high": ("95 % to", "{:+.2f}"),
    "ratio_low": ("ratio from", "{:.2f}"),
    "ratio_high": ("ratio to", "{:.2f}"),
    "q": ("q", "{:.2g}"),
}


def compare(options: CompareOptions) -> pd.DataFrame:
    """Print the runs side by side, then the differences by layer; return the first table.

    A run that cannot be read is named, and the others are compared. Raises its UserError when they have been, or where
    fewer than two are left.
    """
    runs, unreadable = list[Run](), list[UserError]()
    for path in options.runs:
        try:
            run = open_run(path, options.without_damaged)
            by_layer(run)
            print(f"{run.name}: {run.left_out}\n" if run.left_out else "", end="")
            runs.append(run)
        except UserError as error:
            unreadable.append(error)
    if unreadable and len(runs) < 2:
        raise unreadable[0]
    table, layers = compare_runs(runs), compare_layers(runs)
    if (layers["layer"] == layers["first_layer"]).all():
        layers = layers.drop(columns="first_layer")
    printed = table if table.attrs["comparable"] else table.drop(columns="best")
    notes = f"  {table.attrs['note']}\n  {table.attrs['counted']}"
    print(f"{_text(printed)}\n{notes}\n\nMean nnz by layer, against {runs[0].name}:\n{_text(layers)}")
    print("".join(f"  {note}\n" for note in table.attrs["speed_notes"]), end="")
    told = "q up to 0.05: more than chance may do among so many layers"
    print(f"  {layers.attrs['note']}; {told}; paired: both ran the same sequences")
    for other in unreadable[1:]:
        print(f"Left out: {other}", file=sys.stderr)
    if unreadable:
        raise UserError(f"Left out: {unreadable[0]}")
    return table


def _text(frame: pd.DataFrame) -> str:
    """Return a table as text: shares in per cent, speedups as factors, other numbers with two decimals."""
    printed = pd.DataFrame(index=frame.index)
    for name, values in frame.replace([np.inf, -np.inf], np.nan).items():  # a ratio to a run that fires nothing
        heading, form = SHOWN.get(str(name), (str(name), "{:.2f}" if is_float_dtype(values) else "{}"))
        values = values.map({True: "yes", False: "no"}) if is_bool_dtype(values) else values
        printed[heading] = ["–" if pd.isna(value) else form.format(value) for value in values]
    return printed.to_string(index=False)


def of_one_text(runs: Sequence[Run]) -> bool:
    """Return whether the runs read one text, as much of it, with one vocabulary, so that their losses can be compared.

    A text's checksum is recorded when a capture ends, so this is False for a run that is being recorded or was killed;
    and for one that is used without damaged parts.
    """
    if any(run.left_out for run in runs):
        return False
    read = ("sha256", "documents", "tokens")  # a checksum is of blocks that were opened, which --tokens may leave early
    texts = {tuple(tuple(entry.get(name) for name in read) for entry in run.manifest.text) for run in runs}
    vocab_sizes = {run.manifest.tokenizer["vocab_size"] for run in runs}
    return len(texts) == len(vocab_sizes) == 1 and None not in {entry[0] for entry in texts.pop()}


def of_generated(runs: Sequence[Run]) -> list[str]:
    """Return a clause for each run whose loss is over generated tokens too: what a model writes it finds likely."""
    those = [run.name for run in runs if run.manifest.loss is not None and run.manifest.options.get("generate")]
    return [f"the loss of {name} is over generated tokens too, which are easier to predict" for name in those]


def _require_two(runs: Sequence[Run]) -> None:
    """Raise UserError for fewer than two runs."""
    if len(runs) < 2:
        also = "give another one, as in twell compare runs/mine runs/demo"
        raise UserError(f"Expected two runs or more to compare, got {len(runs)}: {also}.")


def compare_runs(runs: Sequence[Run]) -> pd.DataFrame:
    """Return loss, activity and speed of each run; a row a run, in the order given. Columns:

    run; model; tokens (those counted: attrs["counted"] says which); loss (nats); nnz_mean (mean over layers); sparsity;
    dead_share; ffn_speedup, model_speedup (empty where not timed or where the reference ran); best (no other run is as
    good in loss and in the share of neurons firing, and better in one; empty without a loss, and where losses cannot be
    compared). Losses compare only over the same text and vocabulary: attrs["note"] says if not, attrs["comparable"] is
    False then.
    """
    _require_two(runs)
    rows, damaged, notes = [], list[str](), list[str]()
    for run in runs:
        layers, (speeds, damage, mind) = by_layer(run), _speed(run)
        notes += [mind] if mind else []
        row = {"run": run.name, "model": run.manifest.model["name"], "tokens": int(layers["tokens"].iloc[0])}
        row |= {"loss": np.nan if run.manifest.loss is None else run.manifest.loss, "nnz_mean": layers["mean"].mean()}
        of_all = {name: np.average(layers[name], weights=run.widths) for name in ("sparsity", "dead_share")}
        rows.append({**row, **of_all, **speeds})
        damaged += [damage.rstrip(".")] if damage else []
    frame = pd.DataFrame(rows)
    loss, firing = frame["loss"].to_numpy(), 1 - frame["sparsity"].to_numpy()
    behind = (loss[:, None] >= loss) & (firing[:, None] >= firing)
    beaten = (behind & ((loss[:, None] > loss) | (firing[:, None] > firing))).any(axis=1)
    same_text = of_one_text(runs)
    frame["best"] = pd.array(np.where(np.isnan(loss) | (not same_text), None, ~beaten), dtype="boolean")
    note = "the same text" if same_text else "texts, their lengths or vocabularies differ, so losses cannot be compared"
    left_out = [f"{run.name}: {run.left_out.rstrip('.')}" for run in runs if run.left_out]
    note = "; ".join(["losses over other tokens cannot be compared", *left_out]) if left_out else note
    note = "; ".join([note, *of_generated(runs), *damaged])
    frame.attrs = {"note": note, "counted": counted_in(runs), "comparable": same_text, "speed_notes": notes}
    return frame


def _speed(run: Run) -> tuple[dict[str, float], str, str]:
    """Return the speedups of the FFN and of the whole model, NaN where not timed or where the reference ran; a sentence
    where the timings are damaged, else ""; and what to mind of the FFN's speedup, else ""."""
    speeds, damage, mind = {"ffn_speedup": np.nan, "model_speedup": np.nan}, "", ""
    try:
        total = ffn_speedup(run)
        if total["comparable"]:
            speeds["ffn_speedup"] = total["speedup"]
            part = [] if total["all_layers"] else [f"FFN × is of {layer_names(total)}."]
            mind = " ".join([f"{run.name}:", *part, *caveats(total)]) if part or caveats(total) else ""
            speeds["model_speedup"] = model_speedup(run)["speedup"]
    except Missing:
        pass
    except UserError as error:
        damage = str(error)
    return speeds, damage, mind


def compare_layers(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the difference of mean nnz to the first run; a row a layer and run after the first. Columns: run; layer;
    first_layer (of the first run, that it is compared with: `paired_layers`); mean, first (mean nnz here and in the
    first run); difference, low, high (95 %); ratio, ratio_low, ratio_high (95 %, by its logarithm); q (of the
    rows of a run with a q up to 0.05, 5 % at most are there by chance; of 20 that do not differ, one has an interval
    that leaves 0 out all the same); paired (whether both ran the same sequences). Ends and q are NaN where one group of
    documents, or hardly more, has tokens there, and where up to five differ by exactly as much."""
    return _against(runs, ["layer"])


def compare_positions(runs: Sequence[Run]) -> pd.DataFrame:
    """Return compare_layers by band of positions: below 8 each, then floor(√(8·p)). Columns: run; layer; first_layer;
    band; mean, first, difference, low, high; ratio, ratio_low, ratio_high; q; paired."""
    return _against(runs, ["layer", "band"])


def paired_layers(first: int, other: int) -> dict[int, int]:
    """Return by layer of a model with `other` layers the layer of one with `first` layers that it is compared with.

    Models of one depth are compared by number. Of different depths, each layer of the shallower model has a partner,
    the nearest at the same relative depth, from the first layer to the last; other layers of the deeper one have none.
    """
    fewest, most = min(first, other), max(first, other)
    deep = np.rint(np.arange(fewest) * (most - 1) / max(fewest - 1, 1)).astype(int).tolist()
    shallow = list(range(fewest))
    return dict(zip(deep, shallow, strict=True)) if other > first else dict(zip(shallow, deep, strict=True))


def _against(runs: Sequence[Run], keys: list[str]) -> pd.DataFrame:
    """Return the differences of mean nnz to the first run by these keys, as compare_layers describes them."""
    _require_two(runs)
    every = replicate_totals(runs[0], keys)
    pieces = []
    for run in runs[1:]:
        paired = same_sequences(runs[0], run)
        partners = paired_layers(runs[0].layers, run.layers)
        totals, first = replicate_totals(run, keys), _renumbered(every, partners)
        shared = totals.index.intersection(first.index)
        both = first.loc[shared], totals.loc[shared]
        a, b = (mean_counts(sums) for sums in (same_replicates(*both) if paired else both))
        degrees = np.stack([effective_groups(sums) - 1 for sums in both])
        difference, error, freedom = apart(a, b, degrees, paired)
        half, q = t_half(freedom) * error, q_values(difference_p(difference, error, freedom))
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm, error, freedom = apart(
                (np.log(a[0]), np.log(a[1])), (np.log(b[0]), np.log(b[1])), degrees, paired
            )
            reach = t_half(freedom) * error
            ends = {"ratio_low": np.exp(logarithm - reach), "ratio_high": np.exp(logarithm + reach)}
        piece = shared.to_frame(index=False)
        piece.insert(0, "run", run.name)
        piece.insert(2, "first_layer", piece["layer"].map(partners).astype(piece["layer"].dtype))
        piece = piece.assign(
            mean=b[0], first=a[0], difference=difference, low=difference - half, high=difference + half
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            pieces.append(piece.assign(ratio=b[0] / a[0], **ends, q=q, paired=paired))
    frame = pd.concat(pieces, ignore_index=True)
    frame.attrs = {"note": f"against {runs[0].name}; intervals from groups of documents, each left out once"}
    return frame


def _renumbered(totals: pd.DataFrame, partners: dict[int, int]) -> pd.DataFrame:
    """Return the totals of the first run under the numbers of the layers that they are compared with."""
    layer = totals.index.get_level_values("layer")
    numbers = {first: other for other, first in partners.items()}
    kept = totals[layer.isin(list(numbers))]
    renamed = kept.reset_index()
    renamed["layer"] = renamed["layer"].map(numbers).astype(layer.dtype)
    return renamed.set_index(totals.index.names)


def same_sequences(a: Run, b: Run) -> bool:
    """Return whether two runs cut the same text into the same sequences."""

    def cut(run: Run) -> list[Any]:
        return [*(entry.get("sequences") for entry in run.manifest.text), run.manifest.tokens, run.manifest.sequences]

    return of_one_text([a, b]) and cut(a) == cut(b)


def compare_tokens(runs: Sequence[Run], min_count: int = 20) -> pd.DataFrame:
    """Return the difference of each token's z to the first run, those that differ most surely (for their half-width)
    first, or where no interval tells, those that differ most; a row a token and run after the first. Columns: run;
    token_id; text; count, first_count; z, first_z; difference, low, high (95 %, clustered by document); q (as in
    compare_layers: the first of many tokens have intervals that leave 0 out by chance alone); paired (whether
    the interval is over the differences within documents: of runs over the same sequences whose rows are here, 8
    million tokens at most; others are taken as independent, which makes it too wide where they read the same). Missing
    where the vocabularies differ or no token occurs often enough in both.

    min_count: occurrences in each run, at least.
    """
    _require_two(runs)
    for run in runs[1:]:
        if run.manifest.tokenizer["vocab_size"] != runs[0].manifest.tokenizer["vocab_size"]:
            raise Missing(f"{run.name} has another vocabulary than {runs[0].name}: their tokens cannot be compared.")
    first = by_token(runs[0], min_count, spelled=True).set_index("token_id")
    pieces = []
    for run in runs[1:]:
        both = by_token(run, min_count, spelled=True).set_index("token_id")
        both = both.join(first.add_suffix("_first"), how="inner")
        if (both["text"] != both["text_first"]).any():
            raise Missing(
                f"{run.name} has other tokens than {runs[0].name} under the same ids: they cannot be compared."
            )
        paired = same_sequences(runs[0], run) and can_be_paired(runs[0], run)
        errors = both[["z_se", "z_se_first"]].to_numpy().T
        error, degrees = np.hypot(*errors), welch_degrees(errors, both[["degrees", "degrees_first"]].to_numpy().T)
        if paired:
            error, degrees = paired_errors(runs[0], run).loc[both.index].to_numpy().T
        difference, half = both["z"] - both["z_first"], t_half(degrees) * error
        piece = pd.DataFrame({"run": run.name, "token_id": both.index, "text": both["text"].to_numpy()})
        columns = {"count": both["count"], "first_count": both["count_first"]}
        columns |= {"z": both["z"], "first_z": both["z_first"]}
        columns |= {"difference": difference, "low": difference - half, "high": difference + half}
        for name, values in columns.items():
            piece[name] = np.asarray(values)
        piece["q"] = q_values(difference_p(difference, error, degrees))
        piece["paired"] = paired
        pieces.append(piece.assign(sure=(difference.abs() / half).to_numpy(), size=difference.abs().to_numpy()))
    frame = pd.concat(pieces, ignore_index=True)
    if frame.empty:
        raise Missing(f"No token occurs {min_count} times in both runs: ask for a lower minimum count.")
    by = ["sure", "size", "token_id"]  # one document alone gives no interval: by size then
    frame = frame.sort_values(by, ascending=[False, False, True], ignore_index=True).drop(columns=["sure", "size"])
    frame.attrs = {"note": f"against {runs[0].name}"}
    return frame
