"""The whole model on the Kernels page: tokens a second with dense FFNs and with sparse ones, and energy a token."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.speed.whole_model import SIDES, meanings
from twell.app.ui import widgets
from twell.app.ui.formatting import interval, marked_up, number, percent, plural, times, typeset, whole
from twell.app.ui.query import query
from twell.workbench.run.store import Run

TEXTS = ("case", "operation")
RATIO, ENERGY = "× dense", "energy a token"


def draw_whole_model(run: Run) -> None:
    """Draw the table of the whole model; nothing where `twell bench --whole` has timed none."""
    result = query(run, analysis.whole_model)
    if not result.known:
        return
    frame = result.frame
    widgets.heading("Whole model", caption(frame), result)
    shown = table(frame)
    bold = [row for row, apart in enumerate(frame["apart"]) if apart]
    figures = {name: st.column_config.TextColumn(alignment="right") for name in shown if name not in TEXTS}
    widgets.table(
        shown.style.set_properties(subset=(bold, [RATIO]), **{"font-weight": "bold"}),
        width="content",
        height="content",
        column_config=figures,
    )
    said = " ".join(f"<em>{name.capitalize()}</em>: {marked_up(text)}" for name, text in meanings(frame).items())
    widgets.note(said)


def caption(frame: pd.DataFrame) -> str:
    """Return what the table shows, how it was measured, and what does not tell which side is faster.

    frame: as `analysis.whole_model` returns it
    """
    turns = sorted(set(frame["repeats"]))
    settings = frame[["device", "dtype", "commit"]].drop_duplicates().itertuples(index=False)
    where = "; ".join(f"{each.device}, {each.dtype}, commit {each.commit}" for each in settings)
    kernels = ", ".join(sorted(set(frame["kernel"])))
    unclear = "" if frame["apart"].all() else " Where they do, the figures do not tell which side is faster."
    energy = " Energy: dense to sparse." if frame["energy_change"].notna().any() else ""
    return (
        "What sparse FFNs are worth to the whole model: tokens a second, read in forward passes and generated in other "
        "operations, with dense FFNs and with sparse ones, which count nnz too. Medians of "
        f"{plural(turns[0], 'turn')}"
        f"{' or more' * (len(turns) > 1)}, in brackets the slowest and the fastest; {kernels} kernel, {where}. "
        f"{RATIO}: dense time / sparse time, bold where the turns of the two sides do not overlap.{unclear}{energy}"
    )


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the figures as they are shown, a row a case and operation. frame: as `analysis.whole_model` returns it"""
    rows = frame.to_dict("records")
    columns: dict[str, list[str] | list[str | None]] = {
        "case": [typeset(row["case"]) for row in rows],
        "operation": [row["operation"] for row in rows],
        **{f"{side}, tokens/s": [rate(row, side) for row in rows] for side in SIDES},
        RATIO: [times(row["speedup"]) for row in rows],
        ENERGY: [energy(row) for row in rows],
        "mean nnz": [number(row["nnz_mean"]) for row in rows],
    }
    return pd.DataFrame(columns).dropna(axis="columns", how="all")  # no energy where none was measured


def rate(row: dict[str, float], side: str) -> str:
    """Return the tokens a second of a side: the median, and those of the slowest and the fastest turn where known."""
    median, low, high = (row[f"{side}_tokens{end}"] for end in ("", "_low", "_high"))
    return "–" if median != median else whole(median) + interval(low, high, whole)


def energy(row: dict[str, float]) -> str | None:
    """Return the energy of a token, dense and sparse, and what changes; None where it was not measured."""
    change = row["energy_change"]
    if change != change:
        return None
    dense, sparse = (number(row[f"{side}_millijoules"]) for side in SIDES)
    return f"{dense} to {sparse} mJ ({'+' * (change > 0)}{percent(change).replace('-', '−')})"
