"""Page Kernels: how much faster sparse is than dense, layer by layer, timed on the same input."""

from __future__ import annotations

import html
from contextlib import suppress
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures.speed.bench_beside import beside_capture
from twell.analysis.figures.speed.bench_rows import ffn_times
from twell.analysis.figures.speed.kernels import audit_map, break_even, of_tile, time_split
from twell.analysis.figures.speed.timings import batch_times, dense_and_sparse, over_batches, speedup_by_nnz, summed
from twell.analysis.memo import built_once
from twell.analysis.speed.ffn_speedup import caveats, conditions, layer_names, numbered
from twell.analysis.speed.speedup import is_scaled, rows_timed, sizes, timings
from twell.app.jobs.live_view import draw_calls, follow
from twell.app.jobs.measure import measure
from twell.app.jobs.status import job_status
from twell.app.speed.bench_view import draw_bench
from twell.app.speed.compression_view import draw_compressions
from twell.app.speed.potential_view import draw_potential, say_where_to_gain
from twell.app.speed.whole_model_view import draw_whole_model
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, message_markdown, number, pass_spread, percent, plural, times, typeset, whole
from twell.app.ui.query import QueryResult, fetch, query
from twell.app.ui.url_state import current_run, one_of, url_param
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run
from twell.workbench.run.tables.absent import UNTIMED


def note_reference_kernel(run: Run) -> None:
    """Draw a note that the timed kernel is the reference, which is not meant to be fast."""
    reason = run.manifest.kernel.get("reason", "").rstrip(".")
    st.info(
        "This run used the reference kernel, against which the other kernels are tested. It is written to be correct, "
        "not fast. Its times show what was run; no speedup is claimed from them."
        + (message_markdown(f" Why it ran: {reason}.") if reason else "")
    )


def draw_layer_times(run: Run, result: QueryResult) -> None:
    """Draw the dense and sparse time of each layer.

    Args:
        run: the run.
        result: its `analysis.speedup`.
    """
    frame = result.frame
    comparable, repeats = frame.attrs["comparable"], int(frame["repeats"].min())
    caption = (
        f"FFN of {rows_in_words(run, 'ffn_sparse')}, {'median over ' * (repeats > 1)}"
        f"{plural(repeats, 'timed batch', 'es')}; {brought_to(run)}; "
        f"{', '.join(sorted(set(frame['kernel'])))} kernel on {run.manifest.device}, {run.manifest.dtype}. "
        f"{ratio_sentence(frame) if comparable else ''}"
    )
    if len(frame) < run.layers:
        caption += (
            f" Only {len(frame)} of {plural(run.layers, 'layer')} were timed. To time all of them, capture more tokens "
            "or raise --timings-share."
        )
    widgets.heading("Time by layer", caption, result)
    widgets.draw(built_once(dense_and_sparse, frame, comparable), "layer-times", "Dense and sparse time by layer")


def ratio_sentence(frame: pd.DataFrame) -> str:
    """Return what stands at the right of each layer of its times, and which layers are not told apart from dense.

    Args:
        frame: the run's `analysis.speedup`.
    """
    if frame["low"].isna().all():
        return "At the right: dense / sparse, of too few batches for an interval: no layer is told apart from dense."
    alike = [int(layer) for layer in frame.loc[~((frame["low"] > 1) | (frame["high"] < 1)), "layer"]]
    told = f" Not told apart from dense, and grey: {numbered(alike)}." if alike else ""
    return f"At the right: dense / sparse, geometric mean of those batches with its 95 % interval.{told}"


def draw_speedup_by_activity(run: Run, result: QueryResult) -> None:
    """Draw each layer's speedup against its mean nnz, with both correlations or the reason why there are none.

    Args:
        run: the run.
        result: its `analysis.speedup`.

    Raises Missing where nothing fires.
    """
    frame = result.frame
    figure = built_once(speedup_by_nnz, frame)  # before the heading, which is left out with it
    try:
        correlation = correlation_sentence(fetch(run, analysis.speedup_correlation))
    except Missing as error:
        correlation = str(error)
    lines = " The line is the 95 % interval of its batches." if frame["low"].notna().any() else ""
    caption = f"One dot per layer.{lines} {correlation}{break_even_sentence(run, frame)}"
    widgets.heading("Speedup and activity", caption, result)
    widgets.draw(figure, "speedup", "Speedup against mean nnz")


def correlation_sentence(result: dict[str, Any]) -> str:
    """Return both correlations of `analysis.speedup_correlation` as a sentence."""
    return (
        f"Correlation of speedup with nnz over {plural(result['n'], 'layer')}: Pearson {fixed(result['pearson'])} "
        f"(p = {number(result['p'], 2)}, {result['method']}; {fixed(result['low'])} to {fixed(result['high'])} with "
        f"95 % confidence, were layers a sample), Spearman {fixed(result['spearman'])}."
    )


def break_even_sentence(run: Run, frame: pd.DataFrame) -> str:
    """Return a sentence, after a space, with the sparsity at which sparse takes as long as dense; empty if unknown.

    Args:
        run: the run, whose FFN width turns nnz into sparsity.
        frame: its `analysis.speedup`.
    """
    nnz = break_even(frame)
    if nnz is None:
        return ""
    if nnz > run.d_ff:
        return " A line through the layers' times puts sparse ahead at any nnz."
    is_within = frame["nnz_mean"].min() <= nnz <= frame["nnz_mean"].max()
    if not is_within and faster_beyond(run, nnz):  # measured points say otherwise than the line
        return ""
    return (
        f" A line through the layers' times puts the break-even at about {number(nnz, 2)} of {whole(run.d_ff)} "
        f"neurons, a sparsity of {percent(1 - nnz / run.d_ff)}{'' if is_within else ', outside the layers measured'}."
    )


def faster_beyond(run: Run, nnz: float) -> bool:
    """Return whether the run's bench measured its kernel faster than dense at an nnz of `nnz` or more."""
    if not run.has("bench"):
        return False
    rows = fetch(run, ffn_times)
    own = rows["sparse"] & rows["operation"].str.startswith(f"{run.manifest.kernel['name']} kernel")
    return bool((own & (rows["nnz_mean"] >= nnz) & (rows["speedup"] > 1)).any())


def draw_pass_time(run: Run) -> None:
    """Draw the time of a forward pass split by component; nothing if whole passes were not timed."""
    result = query(run, analysis.model_time)
    if not result.known:
        return
    frame = result.frame
    rest = frame.set_index("part").loc["rest", ["dense_us", "sparse_us"]]
    warning = (
        ""
        if (rest >= 0).all()
        else " Timed separately, the components add up to more than the whole pass: shares are of their sum."
    )
    widgets.heading(
        "Where the time goes",
        f"One forward pass of {rows_in_words(run, 'model_dense')}, medians over the timed batches, on "
        f"{run.manifest.device}. Rest: norms, embedding, output projection and kernel launches.{warning}",
        result,
    )
    widgets.draw(built_once(time_split, frame), "time-split", "Time of a forward pass by part, dense and sparse")


def draw_tile_audit(run: Run) -> None:
    """Draw the share of tokens that overflow a tile, at every compression; nothing if overflows were not counted."""
    tile = run.manifest.layout["tile"]
    result = query(run, analysis.tile_audit).then(of_tile, tile)
    if not result.known or result.frame.empty:
        return
    widgets.heading(
        "Tile audit",
        f"TwELL, the format of what fired, cuts a layer into tiles of {tile} neurons with as many slots each as its "
        "compression leaves. Here: the share of tokens that fire more neurons in at least one tile than it has slots, "
        f"by compression; this run used {run.manifest.layout['compression']}. The workbench's kernels store the "
        "overflow elsewhere, so results stay exact; other kernels may drop it.",
        result,
    )
    widgets.draw(
        built_once(audit_map, result.frame), "audit", "Share of tokens that overflow a tile, by layer and compression"
    )


def draw_times_over_capture(run: Run) -> None:
    """Draw dense and sparse time per token over the batches of the capture; nothing if a single batch was timed."""
    all_layers = query(run, batch_times)
    if all_layers.frame["batch"].nunique() < 2:
        return  # one batch has no drift
    heading_area = st.container()
    differ = timings(run)["tokens"].nunique() > 1
    names = ["all layers", *[f"L{layer}" for layer in sorted(all_layers.frame["layer"].unique())]]
    param = url_param("layer", names[0], one_of(names))
    choice = st.selectbox("Layer", names, width=160, label_visibility="collapsed", **param)
    result = all_layers.then(summed, *([] if choice == names[0] else [int(choice[1:])]))
    with heading_area:
        widgets.heading(
            "Over the capture",
            "FFN time per token in each timed batch, in the order they ran. Shows drift and outliers, which medians "
            f"hide{'; a batch of few tokens takes longer per token' * differ}.",
            result,
        )
    widgets.draw(built_once(over_batches, result.frame), "batches", "Dense and sparse time per token by batch")


def note_speedup(run: Run, total: dict[str, Any]) -> None:
    """Show the speedup of all timed layers together, what it holds for, and what to mind of it."""
    if not total["comparable"]:
        return
    several = total["turns"] > 1
    confidence = f"with 95 % confidence, geometric mean of {plural(total['turns'], 'batch', 'es')}"
    span = f" ({times(total['low'])} to {times(total['high'])} {confidence})" if several else ""
    st.markdown(f"**FFN speedup {times(total['speedup'])}**{span}, {layer_names(total)}{whole_pass(run)}.")
    widgets.note(html.escape(typeset(f"{total['kernel']} kernel, {conditions(run)}.")))
    for sentence in [*caveats(total), *filter(None, [fetch(run, beside_capture)])]:
        widgets.note(html.escape(typeset(sentence)))


def whole_pass(run: Run) -> str:
    """Return a clause on the speedup of the whole forward pass, with its interval; empty where it was not timed."""
    try:
        timing = fetch(run, analysis.model_speedup)
    except Missing:
        return ""
    spread = pass_spread(timing["low"], timing["high"], timing["repeats"])
    return f"; the whole pass {times(timing['speedup'])} ({spread})"


def rows_in_words(run: Run, op: str) -> str:
    """Return in words how many rows the times of an operation are brought to, as the table `timings` names it."""
    return plural(sizes(run)[op], "row")


def brought_to(run: Run) -> str:
    """Return in a clause on which rows dense and sparse ran, where times are scaled, by the row, to another number."""
    timed = rows_timed(run)
    dense, sparse = (between(*map(whole, timed[op])) for op in ("ffn_dense", "ffn_sparse"))
    if not is_scaled(run):
        return "the same input for both"
    if dense == sparse:
        return f"both ran on the same {dense} rows of a batch, and times are scaled by the row"
    return f"scaled by the row: dense ran on the first {dense} rows of a batch, sparse on {sparse}"


def between(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def draw_timings(run: Run) -> None:
    """Draw the timings taken during the capture. Raises Missing, with how to take some, if there are none."""
    if not run.has("timings"):
        if run.counts_above_threshold:
            raise Missing(f"No layer has been timed: {UNTIMED}.")
        when, how = (" yet", "") if run.manifest.status == "recording" else ("", "Choose Measure now above, or: ")
        raise Missing(
            f"No layer has been timed in the capture{when}. {how}Capture with --timings above 0 to time each layer's "
            "FFN every few batches, dense and sparse on the same input."
        )
    result = query(run, analysis.speedup)
    if not result.frame.attrs["comparable"]:
        note_reference_kernel(run)
        draw_layer_times(run, result)
    else:
        left, right = widgets.pair("pair")
        with left:
            draw_layer_times(run, result)
        with right, widgets.show_errors():
            draw_speedup_by_activity(run, result)
    with widgets.show_errors():
        draw_potential(run)
    if run.manifest.status != "recording":  # while it is, the figure above follows the capture
        with widgets.show_errors():
            draw_calls(run)
    with widgets.show_errors():
        draw_times_over_capture(run)
    with widgets.show_errors():
        draw_pass_time(run)


with st.container(horizontal=True, vertical_alignment="center"):
    widgets.title("How much faster is sparse?")
    measure(current_run())
job_status()
if current_run().manifest.status == "recording":
    say_where_to_gain(current_run())  # above the figure that follows the capture
    follow(str(current_run().path), with_figure=True)
with suppress(Missing):  # said once, where the timings would stand
    note_speedup(current_run(), fetch(current_run(), analysis.ffn_speedup))
if current_run().manifest.status != "recording":
    say_where_to_gain(current_run())
with widgets.show_errors():
    draw_whole_model(current_run())
with widgets.show_errors():
    draw_bench(current_run())
if current_run().manifest.status != "recording" or current_run().has("timings"):
    with widgets.show_errors():
        draw_timings(current_run())
if current_run().manifest.status != "recording":  # the audit reads summaries, which a run that is being recorded lacks
    with widgets.show_errors():
        draw_tile_audit(current_run())
    with widgets.show_errors():
        draw_compressions(current_run())
