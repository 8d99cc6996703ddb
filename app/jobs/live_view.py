"""Timings while a capture runs: numbers and a figure that follow it every second, before its parts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from twell import analysis
from twell.analysis.figures.speed.live import no_calls, sparse_calls, times_and_nnz, tokens_per_second
from twell.analysis.memo import built_once, memo_scope
from twell.analysis.speed.ffn_speedup import caveats, layer_names
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, marked_up, plural, times, whole
from twell.app.ui.query import query
from twell.app.ui.run_cache import LiveRun, open_cached
from twell.app.ui.url_state import redraw_page
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.manifest import RECORDING
from twell.workbench.run.store import Run

INTERVAL = 1.0  # seconds between two looks
EAGER = 0.25  # seconds between two looks until there is a first time


def follow(path: str, with_figure: bool) -> None:
    """Draw the numbers of a capture as they stand, and its figure, again and again.

    Args:
        path: the run's folder.
        with_figure: whether the figure is drawn below the numbers.
    """
    timed = has_times(path)
    st.fragment(_look, run_every=INTERVAL if timed else EAGER)(path, with_figure, timed)


def has_times(path: str) -> bool:
    """Return whether a run has timed anything yet, in a part or beside the parts."""
    try:
        opened = open_cached(Path(path))
        return LiveRun(opened.path, opened.manifest).has("timings")
    except (UserError, OSError):
        return False


def _look(path: str, with_figure: bool, timed: bool) -> None:
    """Draw what a capture has timed by now. timed: whether it had timed anything when this look was first taken."""
    try:
        opened = open_cached(Path(path))
        if opened.manifest.status != RECORDING:
            return
        run = LiveRun(opened.path, opened.manifest)
        if not run.has("timings"):
            widgets.note("Times appear here with the first batch.")
            if with_figure:  # its axes stand there before its lines, so that the browser has loaded what draws them
                widgets.draw(times_and_nnz(no_calls()), "calls", "Axes of the figure that the first batch begins")
            return
        if not timed:
            redraw_page()  # from now on a look a second
        with memo_scope():
            widgets.numbers(live_numbers(run))
            if with_figure:
                draw_calls(run)
    except (Missing, UserError, OSError) as error:
        widgets.note(marked_up(str(error)))


def live_numbers(run: Run) -> list[tuple[str, str, str]]:
    """Return tokens a second, the calls that were timed, and the speedup so far, each as `widgets.numbers` takes it."""
    rows = run.frame("timings", ["op", "batch"])
    calls = int((rows["op"] == "ffn_sparse").sum())
    rate = tokens_per_second(run)
    shown = [
        ("Tokens per second", whole(rate) if rate == rate else "–", "over the last 10 s, timings included"),
        ("Sparse calls timed", whole(calls), f"in {plural(rows['batch'].nunique(), 'batch', 'es')}, each where it ran"),
    ]
    return [*shown, ("FFN speedup so far", *speedup_so_far(run))]


def speedup_so_far(run: Run) -> tuple[str, str]:
    """Return the speedup of all layers timed so far, and what it is of."""
    try:
        total: dict[str, Any] = analysis.ffn_speedup(run)
    except Missing:
        return "–", "dense layers are timed once the first batches are warm"
    if not total["comparable"]:
        return "–", "none is claimed from the slow reference kernel"
    low, high = times(total["low"]), times(total["high"])
    span = f", {low} to {high} with 95{SPACE}% confidence" if total["turns"] > 1 else ""
    text = f"dense time / sparse time, {layer_names(total)}{span}"
    return times(total["speedup"]), ". ".join([text, *(sentence.rstrip(".") for sentence in caveats(total))])


def draw_calls(run: Run) -> None:
    """Draw the milliseconds of each sparse call above its nnz; nothing for older runs, which have none."""
    result = query(run, sparse_calls)
    table = sparse_calls(run) if isinstance(run, LiveRun) else result.frame
    if table.empty:
        return
    caption = (
        f"Each layer's sparse FFN as it ran in the capture, scaled to {whole(table['tokens'].iloc[0])} rows, and the "
        "nnz of exactly that call. Light lines: first layers; dark: last."
    )
    widgets.heading("Time and activity as it ran", caption, None if isinstance(run, LiveRun) else result)
    figure = times_and_nnz(table) if isinstance(run, LiveRun) else built_once(times_and_nnz, table)
    widgets.draw(figure, "calls", "Milliseconds of each layer's sparse FFN above its nnz, over time")
