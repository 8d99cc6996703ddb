"""The whole model, dense and sparse side by side: forward passes, generation, steps of decoding.

    whole_model(run)   a row a case and operation that `twell bench MODEL --whole --out RUN` has timed

Cost: 30 ms.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from twell.analysis.memo import memoized
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

WHOLE = "whole_|generate_|step_"  # operations of a whole model in the table `bench`
SIDES = ("dense", "sparse")
MEANINGS = {
    "whole": "a forward pass without the head.",
    "compiled": "both sides by torch.compile, layer by layer, with the backend `twell`.",
    "generate": "prompts and generated tokens in transformers' own loop. The host sets its pace, so its turns differ "
    "much.",
    "graphed": "the same with fixed addresses, steps compiled (but with --no-compile) and, on a GPU, replayed from a "
    "CUDA graph.",
    "step": "one such step, a token of each sequence.",
}
LEAST_TURNS = 7  # of each side, for an interval of 95 %: 2 * 2^(1 - 7) is 3 %
SETTING = ["rows", "dtype", "device"]  # times are compared only if all of these are equal


@memoized
def bench_rows(run: Run) -> pd.DataFrame:
    """Return the table `bench` of a run, which several questions read."""
    return run.frame("bench")


def whole_model(run: Run) -> pd.DataFrame:
    """Return the speed of the whole model with dense FFNs and with sparse ones; a row a case and operation. Columns:

    case (on which text, or how many sequences are decoded); operation (whole: a forward pass without the head;
    generate: prompts and tokens after them; step: one token of each sequence; behind a comma, compiled or graphed);
    rows (in a call of an FFN); dtype; device; nnz_mean (over layers and rows of a forward pass; in decoding, over the
    prompts); repeats (turns); graph (replayed from a CUDA graph); commit; kernel (of the sparse side); dense_us,
    sparse_us (µs, medians of the turns); dense_tokens,
    sparse_tokens (tokens/s at the medians, read in forward passes and generated in others); dense_tokens_low,
    dense_tokens_high, sparse_tokens_low, sparse_tokens_high (tokens/s in the slowest and the fastest turn); speedup
    (dense over sparse time); apart (the turns of the sides do not overlap, else they do not tell which side is
    faster); dense_millijoules, sparse_millijoules (mJ a token, empty where not measured); energy_change (of a token:
    sparse over dense, less 1). Missing where no whole model was timed.
    """
    bench = bench_rows(run)
    bench = bench[(bench["d_ff"] == run.d_ff) & bench["op"].str.match(WHOLE)]
    if bench.empty:
        raise Missing(f"{run.name} holds no timing of its whole model: twell bench MODEL --whole --out RUN.")
    frame = side_by_side(bench)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "apart: every turn of one side is faster than any of the other; elsewhere they do not tell which is",
    }
    return frame


@memoized
def pass_on_text(run: Run) -> dict[str, Any] | None:
    """Return the speedup of the eager forward pass on text by `twell bench --whole`, with an interval. Keys:

    mean (ratio of the sides' median times), mean_low, mean_high (95 % and more, whatever the times' distribution: the
    median of a side lies within n turns with probability 1 - 2^(1-n), so that from LEAST_TURNS on the bounds by the
    ranges of both hold); energy (of a token: sparse over dense; NaN where it was not measured); repeats (turns);
    kernel; device; where (rows and dtype, in words). None where it was not timed, or in fewer turns.
    """
    try:
        frame = whole_model(run)
    except Missing:
        return None
    rows = frame[(frame["operation"] == "whole") & frame["case"].str.startswith("on text")]
    rows = rows[rows["repeats"] >= LEAST_TURNS].sort_values("rows")
    if rows.empty:
        return None
    row = rows.iloc[-1]
    tokens = {end: (row[f"sparse_tokens_{end}"], row[f"dense_tokens_{end}"]) for end in ("low", "high")}
    return {
        "mean": row["speedup"],
        "mean_low": tokens["low"][0] / tokens["high"][1],
        "mean_high": tokens["high"][0] / tokens["low"][1],
        "energy": 1 + row["energy_change"],
        "repeats": int(row["repeats"]),
        "kernel": row["kernel"],
        "device": row["device"],
        "where": f"{row['rows']:,} rows in twell bench, {row['dtype']}",
    }


def side_by_side(bench: pd.DataFrame) -> pd.DataFrame:
    """Return a row an operation of a case, as `whole_model` does. bench: rows of the table `bench` of whole models."""
    side = bench["op"].str.extract("_(dense|sparse)")[0]
    operation = bench["op"].str.replace("_dense|_sparse", "", regex=True).str.replace("_", ", ")
    case = bench["case"].str.removeprefix("whole model").str.lstrip(" ,")
    bench = bench.assign(case=case, operation=operation, side=side)
    keys = ["case", "operation", *SETTING]
    rows = bench.drop_duplicates([*keys, "side", "metric"], keep="last").set_index([*keys, "side", "metric"])
    frame = bench.drop_duplicates(keys)[[*keys, "nnz_mean", "repeats", "graph", "commit"]].reset_index(drop=True)
    index = list(frame[keys].itertuples(index=False, name=None))

    def figures(name: str, metric: str, column: str = "value") -> pd.Series:
        return rows[column].reindex([(*key, name, metric) for key in index]).reset_index(drop=True)

    frame["kernel"] = figures("sparse", "microseconds", "kernel")
    for name in SIDES:
        frame[f"{name}_us"] = figures(name, "microseconds")
    for name in SIDES:
        for end, column in (("", "value"), ("_low", "low"), ("_high", "high")):
            frame[f"{name}_tokens{end}"] = figures(name, "tokens_per_second", column)
    frame["speedup"] = frame["dense_us"] / frame["sparse_us"]
    least, most = (pd.concat([figures(name, "microseconds", end) for name in SIDES], axis=1) for end in ("low", "high"))
    frame["apart"] = least.max(axis=1) > most.min(axis=1)  # the slower side's fastest turn took longer
    for name in SIDES:
        frame[f"{name}_millijoules"] = figures(name, "millijoules_per_token")
    frame["energy_change"] = frame["sparse_millijoules"] / frame["dense_millijoules"] - 1
    return frame


def meanings(frame: pd.DataFrame) -> dict[str, str]:
    """Return what the operations of `whole_model` are, a sentence by each name that occurs in them."""
    named = {name for operation in frame["operation"] for name in operation.split(", ")}
    return {name: meaning for name, meaning in MEANINGS.items() if name in named}
