"""Trainings side by side on the Compare page: their logs, what their recipes differ in, and where each ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures.compare import trainings_side_by_side
from twell.analysis.memo import built_once
from twell.app.runs.comparison import is_copy
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, plural, times, typeset, whole
from twell.app.ui.query import query_with_others
from twell.app.ui.run_cache import shown
from twell.app.ui.run_catalog import RunCatalog, run_label
from twell.app.ui.url_state import run_name
from twell.workbench.run.store import Run

PROPOSED, MOST = 3, 5  # trainings beside the one that is shown: at first, and at most
ENDS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Tokens", "tokens", whole),
    ("Training loss, nats", "loss", number),
    ("Held-out loss, nats", "heldout_loss", number),
    ("nnz per token and layer", "nnz", number),
    ("Silent neurons", "dead", percent),
    ("Sparse layers", "sparse_layers", whole),
    ("Tokens a second", "tokens_per_second", lambda value: whole(round(value))),
    ("Dense step / sparse step", "step_speedup", times),
    ("Peak memory, GiB", "peak_bytes", lambda value: number(value / 2**30)),
)


def draw_trainings(run: Run, catalog: RunCatalog) -> None:
    """Draw the training beside others of the folder, those whose recipes differ least first."""
    others = {name: one for name, one in catalog.runs.items() if name != run_name() and one.has("training")}
    names = [name for name, other in others.items() if not is_copy(run, other)]  # lines of one name would be one
    if not names:
        st.info("There is no other training here to compare with. Train one more with twell train into this folder.")
        return
    names.sort(key=lambda name: differing_fields(run, catalog.runs[name]))
    chosen = st.multiselect(
        "Compare with",
        names,
        default=names[:PROPOSED],
        max_selections=MOST,
        format_func=lambda key: run_label(key, catalog),
        key="trainings",
    )
    if not chosen:
        return
    result = query_with_others(run, [shown(catalog.runs[name]) for name in chosen], analysis.compare_trainings)
    logs = result.frame
    devices = sorted({run.manifest.device, *(catalog.runs[name].manifest.device for name in chosen)})
    apart = ", so their speeds are not of one machine" if len(devices) > 1 else ""
    widgets.heading(
        "Loss, activity and speed",
        f"{plural(logs['run'].nunique(), 'training')} on {' and '.join(devices)}{apart}, means between two rows of "
        f"each log; {run.name} in blue. Losses of different texts or vocabularies cannot be compared.",
        result,
    )
    widgets.draw(built_once(trainings_side_by_side, logs, run.name), "logs", "Trainings side by side", wide=True)
    draw_ends(logs, run.name)


def differing_fields(run: Run, other: Run) -> int:
    """Return how many fields of two trainings' recipes differ."""
    first, second = ((one.manifest.training or {}).get("recipe", {}) for one in (run, other))
    return sum(first.get(field) != second.get(field) for field in first.keys() | second.keys())


def written(value: Any) -> str:
    """Return a field of a recipe as it is shown: numbers as elsewhere on the page."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return typeset(f"{value:,}") if is_number else str(value)


def draw_ends(logs: pd.DataFrame, current: str) -> None:
    """Draw what the recipes differ in, and the last value of each figure, a column a training, `current` first; each
    value of another with its ratio to that of `current`, the figures whose ratio is furthest from 1 first."""
    names = list(dict.fromkeys([current, *logs["run"]]))
    rows = [
        (str(field), [written(values[name]) for name in names]) for field, values in logs.attrs["recipes"].iterrows()
    ]
    results = list[tuple[float, str, list[str]]]()
    for title, column, form in ENDS:
        known = [logs[logs["run"] == name][column].dropna() for name in names]
        if any(len(values) for values in known):
            last = [float(values.iloc[-1]) if len(values) else np.nan for values in known]
            ratios = [value / last[0] if last[0] else np.nan for value in last[1:]]
            cells = ["–" if np.isnan(value) else form(value) for value in last]
            cells[1:] = [
                cell if np.isnan(ratio) else f"{cell} ({times(ratio)})"
                for cell, ratio in zip(cells[1:], ratios, strict=True)
            ]
            sizes = [abs(math.log(ratio)) if ratio > 0 else math.inf for ratio in ratios if not np.isnan(ratio)]
            results.append((max(sizes, default=0.0), title, cells))
    rows += [(title, cells) for _, title, cells in sorted(results, key=lambda result: -result[0])]
    table = pd.DataFrame([cells for _, cells in rows], columns=names, index=[title for title, _ in rows])
    widgets.heading(
        "Recipes and results",
        f"Fields of the recipes that differ, then the last figure in each log, in brackets over that of {current}: "
        "what changed most comes first.",
    )
    widgets.table(table, hide_index=False, width="stretch")
