"""Page Training: how a model gets sparse while it trains, what the loss says, and what a sparse step gains."""

from __future__ import annotations

import html
import shlex

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures.training import (
    WIDEST,
    layer_map,
    loss_curves,
    rows_a_column,
    speed_curves,
    went_sparse,
)
from twell.analysis.memo import built_once
from twell.analysis.training import SPARSE_SHARE, reached
from twell.app.ui import widgets
from twell.app.ui.formatting import nats, number, percent, plural, times, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def headline(run: Run) -> None:
    """Draw where the training stands, from the last row of its log."""
    steps = fetch(run, analysis.training_steps)
    last, heldout = steps.iloc[-1], steps["heldout_loss"].dropna()
    timed, total = steps["step_speedup"].dropna(), last["total_steps"]
    gain = (
        f"dense step / sparse step, median of {plural(len(timed), 'turn')}, with {_sparse_then(run, steps)}"
        if len(timed)
        else "not timed: every layer runs densely"
    )
    of_steps = f"of {whole(total)}" if total == total and total is not None else "so far"
    widgets.numbers(
        (
            ("Steps", whole(last["step"]), f"{of_steps}; {plural(int(last['tokens']), 'token')}"),
            (
                "Held-out loss",
                nats(heldout.iloc[-1]) if len(heldout) else "–",
                f"training loss {number(last['loss'])} nats{_original(steps)}",
            ),
            (
                "nnz per token and layer",
                number(last["nnz"]),
                f"of {whole(run.d_ff)}: sparsity {percent(last['sparsity'])}",
            ),
            ("Silent neurons", percent(last["dead"]), "fired on none of the tokens since the log's row before"),
            (
                "Speed",
                f"{whole(round(last['tokens_per_second']))} tokens/s",
                f"last row, on {run.manifest.device}{step_rows(run)}",
            ),
            ("Sparse step", times(timed.median()) if len(timed) else "–", gain),
        )
    )


def _sparse_then(run: Run, steps: pd.DataFrame) -> str:
    """Return in words how many layers ran sparse in the turns that were timed."""
    counts = steps.loc[steps["step_speedup"].notna(), "sparse_layers"].fillna(0).astype(int)
    fewest, most = counts.min(), counts.max()
    return f"{fewest if fewest == most else f'{fewest} to {most}'} of {run.layers} layers sparse"


def _original(steps: pd.DataFrame) -> str:
    """Return the loss of the model that the training goes on from as part of a caption; "" for other trainings."""
    loss = steps.attrs.get("origin_loss")
    return "" if loss is None else f"; the original {number(loss)}"


def _line_to_reach(steps: pd.DataFrame) -> str:
    """Return a sentence on the dashed line and the step that reached it; "" for other trainings."""
    loss, step = steps.attrs.get("origin_loss"), reached(steps)
    if loss is None:
        return ""
    when = "not reached yet" if step is None else f"reached by step {whole(step)}"
    return f" Dashed: {steps.attrs['origin']} as it was, {number(loss)} nats on the held-out text: {when}."


def losses(run: Run) -> None:
    """Draw the loss and the L1 term over the steps."""
    steps = fetch(run, analysis.training_steps)
    term = "; the L1 term is what the objective adds to it" if steps["l1"].notna().any() else ""
    widgets.heading(
        "Loss",
        f"Cross-entropy of the training tokens, means over the steps between two rows of the log{term}."
        f"{_line_to_reach(steps)}",
        query(run, analysis.training_steps),
    )
    widgets.draw(built_once(loss_curves, steps), "losses", "Loss and L1 term by step", wide=True)


def maps(run: Run) -> None:
    """Draw nnz and silent neurons by layer and step."""
    layers = fetch(run, analysis.training_layers)
    rows = layers["step"].nunique()
    widgets.heading(
        "Activity by layer and step",
        f"Mean nnz of a token in each layer, {plural(rows, 'row')} of the log{_together(rows)}; the stronger the blue, "
        "the more neurons fire, from the least of these means to the greatest.",
        query(run, analysis.training_layers),
    )
    widgets.draw(built_once(layer_map, layers, "nnz"), "nnz-map", "nnz by layer and step", wide=True)
    widgets.heading(
        "Silent neurons by layer and step",
        "Share of each layer's neurons that fired on none of the tokens since the row before"
        f"{_together(rows)}. A neuron that is silent for a while may fire again.",
        query(run, analysis.training_layers),
    )
    widgets.draw(built_once(layer_map, layers, "dead"), "dead-map", "Silent neurons by layer and step", wide=True)


def _together(rows: int) -> str:
    """Return how many rows a column of the maps is the mean of, as the end of a clause. rows: of the log"""
    return f", a column the mean of {rows_a_column(rows)}" if rows > WIDEST else ""


def since(run: Run) -> None:
    """Draw when each layer went sparse."""
    frame = fetch(run, analysis.sparse_since)
    last = int(fetch(run, analysis.training_steps)["step"].iloc[-1])
    dense = int(frame["step"].isna().sum())
    rest = f" {plural(dense, 'layer')} without a dot did not get there." if 0 < dense < len(frame) else ""
    widgets.heading(
        "When each layer went sparse",
        f"First step from which on a token fires at most {percent(SPARSE_SHARE)} of the layer's neurons, where the "
        f"sparse kernels begin to pay.{rest}",
        query(run, analysis.sparse_since),
    )
    try:
        figure = built_once(went_sparse, frame, last)
    except Missing as reason:
        widgets.note(str(reason))
        return
    widgets.draw(figure, "sparse-since", "Step from which each layer is sparse")


def step_rows(run: Run) -> str:
    """Return how many tokens a training step has, as the end of a clause; empty where the recipe does not tell."""
    recipe = (run.manifest.training or {}).get("recipe", {})
    tokens = int(recipe.get("rows") or 0) * int(recipe.get("seq_len") or 0)
    return f", {whole(tokens)} tokens a step" if tokens else ""


def speed(run: Run) -> None:
    """Draw tokens a second, a step's speedup and memory over the steps."""
    kernel = f"{run.manifest.kernel['name']}, {run.manifest.kernel['reason']}"
    widgets.heading(
        "What a step takes",
        f"On {run.manifest.device}{step_rows(run)}. Kernel: {kernel}.",
        query(run, analysis.training_steps),
    )
    widgets.draw(
        built_once(speed_curves, fetch(run, analysis.training_steps)), "training-speed", "Speed by step", wide=True
    )


widgets.title("How does this model get sparse?")
with widgets.show_errors():
    headline(current_run())
    for draw in (losses, maps, since, speed):
        draw(current_run())
    folder = current_run().path
    model = html.escape(shlex.quote(str(folder))) if (folder / "config.json").is_file() else "FOLDER"
    st.html(
        '<p class="tw-note">The saved model can be captured on any text: '
        f"<code>twell capture {model} --text SOURCE --out runs/NAME</code>.</p>"
    )
