"""Measuring dense against sparse from the Kernels page: the choice of what to time, and the `twell bench` that does."""

from __future__ import annotations

import streamlit as st

from twell.app.jobs.asking import worker
from twell.app.jobs.runner import model_of
from twell.app.jobs.status import (
    INTERVAL,
    MEASUREMENT,
    fresh_key,
    is_busy,
    model_arguments,
    note_if_busy,
    note_model_missing,
    start_job,
)
from twell.app.ui import widgets
from twell.app.ui.url_state import redraw_page, run_name, sync_url
from twell.workbench.options import GPU_KERNELS
from twell.workbench.run.store import Run

KINDS = {
    "layers": "This model's layers",
    "whole": "The whole model",
    "compressions": "Compressions",
    "nnz": "Any sparsity",
}
NOTES = {
    "layers": "Times every layer with its own weights, at its own activity on the bundled text.",
    "whole": "Times forward passes, generation and steps of decoding on the bundled text, with dense FFNs and with "
    "sparse ones.",
    "compressions": "Times every layer with tiles of 63, 31 and 15 slots, to find the fastest in which every row fits.",
    "nnz": "Times synthetic weights of this shape, with 1 % to all of the neurons firing, to find the sparsity from "
    "which sparse is faster.",
}
COMPRESSIONS = "8,4,16"
WHOLE_CASES = 5  # passes on text and on uniform ids, batches of 1, 8 and 64 sequences
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # of the neurons that synthetic inputs fire


def measure(run: Run) -> None:
    """Draw the button under which the user chooses what to time, and starts it."""
    with st.popover("Measure now", key=fresh_key("measure")):
        model = model_of(run)
        if model is None:
            note_model_missing()
            return
        if run.manifest.status == "recording":
            widgets.note("This run is still being recorded. You can measure it once the capture has ended.")
            return
        widgets.note(
            "Times dense and sparse alternately on the same input, in a separate process on this machine. Each case "
            "appears here as soon as it is done, and is saved with the run. Other running programs slow down both."
        )
        kind = st.segmented_control(
            "What to time",
            list(KINDS),
            format_func=lambda key: KINDS[key],
            default="layers",
            required=True,
            key="measured",
            on_change=sync_url,
        )
        widgets.note(NOTES[str(kind)])
        waits = worker().busy
        st.fragment(_start, run_every=INTERVAL if waits else None)(run, model, str(kind), waits)


def _start(run: Run, model: tuple[str, str | None], kind: str, waits: bool) -> None:
    """Draw the button that starts a measurement. waits: whether the model was reading when it was drawn first, and the
    button is off until that is done."""
    reading = worker().busy
    if waits and not reading:
        redraw_page()
    off = is_busy() or reading
    if st.button("Measure", type="primary", key="measure-start", disabled=off, on_click=sync_url):
        arguments, cases = bench_arguments(run, model, kind)
        out = run.path.resolve()
        start_job(MEASUREMENT, out, run_name(), [*arguments, "--out", str(out)], cases=cases)
    note_if_busy()
    if reading:
        widgets.note("The model is reading a text, or getting ready to. Wait until it is done: both would be slower.")


def bench_arguments(run: Run, model: tuple[str, str | None], kind: str) -> tuple[list[str], int]:
    """Return the arguments of `twell bench`, and how many cases it will time.

    Args:
        run: the run whose shape is timed.
        model: where to load its model from, as (folder or hub id, revision).
        kind: a key of KINDS.
    """
    if kind == "whole":  # a GPU's users compile; where a processor runs the model, there may be no compiler
        on_gpu = run.manifest.kernel["name"] in GPU_KERNELS
        return ["bench", *model_arguments(model), "--whole", *([] if on_gpu else ["--no-compile"])], WHOLE_CASES
    if kind != "nnz":
        options = ["--compression", COMPRESSIONS] if kind == "compressions" else []
        return ["bench", *model_arguments(model), "--inputs", "text", "--no-compile", *options], run.layers
    nnz = [str(max(round(share * run.d_ff), 1)) for share in SHARES]
    shape = f"{run.manifest.model['d_model']},{run.d_ff}"
    return ["bench", "--shape", shape, "--inputs", "even,dense", "--nnz", ",".join(nnz), "--no-compile"], len(nnz) + 1
