"""What sparse FFNs are worth to the whole model, in a sentence for beside the FFN speedup.

Cost: that of `whole_model`, 30 ms.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from twell.analysis.figures.labels import SPACE, plural, times
from twell.analysis.speed.whole_model import whole_model
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def whole_beside(run: Run) -> str:
    """Return how much faster `twell bench --whole` found the model with sparse FFNs: its longest forward pass on text,
    and a step of decoding for each number of sequences, on the device that was timed last.

    Empty where it timed neither.
    """
    try:
        frame = whole_model(run)
    except Missing:
        return ""
    last = frame.iloc[-1]
    frame = frame[(frame["device"] == last["device"]) & (frame["dtype"] == last["dtype"])]
    said = "; ".join([*_passes(frame), *_steps(frame)])
    return f"The whole model by twell bench, dense time / sparse time on {last['device']}: {said}." if said else ""


def _passes(frame: pd.DataFrame) -> Iterator[str]:
    on_text = frame[frame["case"].str.startswith("on text")]
    longest = on_text[on_text["rows"] == on_text["rows"].max()].set_index("operation")
    names = {"whole": "eager", "whole, compiled": "compiled"}
    there = [operation for operation in names if operation in longest.index]
    if there:
        yield f"a forward pass {', '.join(f'{_gain(longest.loc[name])} {names[name]}' for name in there)}"


def _steps(frame: pd.DataFrame) -> Iterator[str]:
    steps = frame[frame["operation"] == "step"]
    numbers = steps["case"].str.extract(r"(\d+) sequence")[0].astype(float).dropna().sort_values()
    if len(numbers):
        gains = (f"{_gain(steps.loc[at])} for {plural(count, 'sequence')}" for at, count in numbers.items())
        yield f"a step of decoding {', '.join(gains)}"


def _gain(row: pd.Series) -> str:
    return times(row["speedup"]) + ("" if row["apart"] else f" (not told from 1{SPACE}× by its turns)")
