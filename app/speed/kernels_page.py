"""Kernels: what the sparsity buys, each layer's sparse time beside its dense time on the same input."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.app.jobs.measure import measure
from twell.app.jobs.status import job_status
from twell.app.speed.bench_view import bench
from twell.app.speed.compression_view import compressions
from twell.app.speed.kernel_figures import audit_map, break_even, of_tile, time_split
from twell.app.speed.timing_figures import batch_times, dense_and_sparse, over_batches, speedup_by_nnz, summed
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, number, percent, plural, whole
from twell.app.ui.query import QueryResult, fetch, query
from twell.app.ui.url_state import current_run, one_of, url_param
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def oracle(run: Run) -> None:
    """Say that the timings are the reference's."""
    reason = run.manifest.kernel.get("reason", "").rstrip(".")
    st.info(
        "This run used the reference kernel, against which the other kernels are tested. It is written to be correct, "
        "not fast. Its times show what was run; no speedup is claimed from them."
        + (widgets.escape_markdown(f" Why it ran: {reason}.") if reason else "")
    )


def layers(run: Run, result: QueryResult) -> None:
    """Dense and sparse time a layer."""
    frame = result.frame
    comparable, least = frame.attrs["comparable"], int(frame["repeats"].min())
    said = (
        f"FFN of one batch, {'median over ' * (least > 1)}{plural(least, 'timed batch', 'es')}, the same input for "
        f"both; {', '.join(sorted(set(frame['kernel'])))} kernel on {run.manifest.device}, {run.manifest.dtype}. "
        f"{'At the right: dense / sparse.' if comparable else ''}"
    )
    if len(frame) < run.layers:
        said += (
            f" {len(frame)} of {plural(run.layers, 'layer')} had their turn: to time them all, capture more tokens or "
            "raise --timings-share."
        )
    widgets.heading("Time by layer", said, result)
    widgets.draw(dense_and_sparse(frame, comparable), "layer-times", "Dense and sparse time by layer")


def against_activity(run: Run, result: QueryResult) -> None:
    """Speedup against mean nnz, with both correlations or the reason why there is none."""
    frame = result.frame
    try:
        said = correlation(fetch(run, analysis.speedup_correlation))
    except Missing as error:
        said = str(error)
    widgets.heading("Speedup and activity", f"A dot a layer. {said}{equal_times(run, frame)}", result)
    if (frame["nnz_mean"] > 0).any():
        widgets.draw(speedup_by_nnz(frame), "speedup", "Speedup against mean nnz")


def correlation(found: dict[str, Any]) -> str:
    """Both correlations in a sentence."""
    return (
        f"Pearson {fixed(found['pearson'])} (95 % {fixed(found['low'])} to {fixed(found['high'])}), "
        f"Spearman {fixed(found['spearman'])}; {plural(found['n'], 'layer')}, p = {number(found['p'], 2)}, "
        f"{found['method']}."
    )


def equal_times(run: Run, frame: pd.DataFrame) -> str:
    """Where this machine breaks even, in a sentence; nothing where the layers do not tell."""
    nnz = break_even(frame)
    if nnz is None:
        return ""
    if nnz > run.d_ff:
        return " By the line through the layers' times, sparse is faster at any nnz."
    edge = "" if frame["nnz_mean"].min() <= nnz <= frame["nnz_mean"].max() else ", beyond the layers measured"
    return (
        f" By the line through the layers' times, sparse and dense take equally long at about {number(nnz, 2)} of "
        f"{whole(run.d_ff)} neurons, a sparsity of {percent(1 - nnz / run.d_ff)}{edge}."
    )


def whole_pass(run: Run) -> None:
    """Where the time of a forward pass goes."""
    try:
        result = query(run, analysis.model_time)
        frame = result.frame
    except Missing:
        return
    rest = frame.set_index("part").loc["rest", ["dense_us", "sparse_us"]]
    more = "" if (rest >= 0).all() else " Timed separately, the parts took longer together than the whole pass."
    widgets.heading(
        "Where the time goes",
        f"One forward pass, medians over the timed batches, on {run.manifest.device}. Rest: norms, embedding, output "
        f"product and launches.{more}",
        result,
    )
    widgets.draw(time_split(frame), "time-split", "Time of a forward pass by part, dense and sparse")


def audit(run: Run) -> None:
    """What the slots of a tile would hold, at every compression."""
    try:
        tile = run.manifest.layout["tile"]
        result = query(run, analysis.tile_audit).then(of_tile, tile)
        part = result.frame
    except Missing:
        return
    if part.empty:
        return
    widgets.heading(
        "Tile audit",
        f"Share of tokens with a tile of {tile} neurons that fires more than its slots hold, by compression; this run "
        f"used {run.manifest.layout['compression']}. Here what does not fit goes to a spill, and the result stays "
        f"exact; a kernel without a spill would drop it.",
        result,
    )
    widgets.draw(audit_map(part), "audit", "Share of tokens that overflow a tile, by layer and compression")


def batches(run: Run) -> None:
    """Times as the capture went along."""
    every = query(run, batch_times)
    if every.frame["batch"].nunique() < 2:
        return  # one batch has no drift
    above = st.container()
    names = ["all layers", *[f"L{layer}" for layer in sorted(every.frame["layer"].unique())]]
    tie = url_param("layer", names[0], one_of(names))
    which = st.selectbox("Layer", names, width=160, label_visibility="collapsed", **tie)
    result = every.then(summed, *([] if which == names[0] else [int(which[1:])]))
    with above:
        widgets.heading(
            "Over the capture",
            "FFN time per token of each timed batch, in the order they ran. It shows drift and outliers, which medians "
            "hide.",
            result,
        )
    widgets.draw(over_batches(result.frame), "batches", "Sparse and dense time a token by batch")


def page(run: Run) -> None:
    """Times, speedup against activity, and times over the capture."""
    if not run.has("timings"):
        yet = " yet" if run.manifest.status == "recording" else ""
        raise Missing(
            f"No layer has been timed{yet}. Capture with --timings above 0 to time each layer's FFN every few batches, "
            "sparse and dense on the same input."
        )
    result = query(run, analysis.speedup)
    if not result.frame.attrs["comparable"]:
        oracle(run)
        layers(run, result)
    else:
        with st.container(key="pair"):
            left, right = st.columns(2, gap="large")
        with left:
            layers(run, result)
        with right:
            against_activity(run, result)
    with widgets.show_errors():
        batches(run)
    with widgets.show_errors():
        whole_pass(run)


with st.container(horizontal=True, vertical_alignment="center"):
    widgets.title("What does the sparsity buy?")
    measure(current_run())
job_status()
with widgets.show_errors():
    bench(current_run())
with widgets.show_errors():
    page(current_run())
if current_run().manifest.status != "recording":  # the audit is of sums that are read once a run is whole
    with widgets.show_errors():
        audit(current_run())
    with widgets.show_errors():
        compressions(current_run())
