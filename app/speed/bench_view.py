"""What `twell bench` measured, on the Kernels page: it stands there as soon as a case is done."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell.app.speed.bench_data import equal_at, made_up, measured, of_setting, on_text, settings
from twell.app.speed.bench_figures import by_layer, by_nnz
from twell.app.speed.timing_figures import height
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, times, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import one_of, url_param
from twell.workbench.run.store import Run


def bench(run: Run) -> None:
    """Every FFN that was timed, by layer and by nnz; nothing where none was."""
    if not run.has("bench"):
        return
    groups = settings(fetch(run, measured))
    if not groups:
        return
    names = list(groups)
    name = names[0]
    if len(names) > 1:
        tie = url_param("setting", name, one_of(names))
        name = str(st.selectbox("Measured with", names, width=420, **tie))
    part = query(run, measured).then(of_setting, name)
    of_layers, of_made = part.then(on_text), part.then(made_up)
    layers, made = of_layers.frame, of_made.frame
    sparse = made[made["sparse"]]
    curve = sparse["nnz_mean"].nunique() > 1
    if len(layers) and curve:
        with st.container(key="pair-bench"):
            left, right = st.columns(2, gap="large")
    else:
        left = right = st.container()
    tall = height(layers["layer"].nunique()) + 60
    if len(layers):
        with left:
            where = "Recorded patterns. " if (layers["input"] == "patterns").all() else ""
            widgets.heading("Measured side by side", f"{where}{sums(layers)} {name}; {turns(layers)}.", of_layers)
            widgets.draw(by_layer(layers), "bench-layers", "Time of each FFN operation by layer")
    if curve:
        with right:
            said = f"Dense time over sparse time on synthetic inputs, {name}. {even_at(run, sparse)}"
            widgets.heading("Where it breaks even", said, of_made)
            widgets.draw(by_nnz(sparse, min(tall, 440)), "bench-nnz", "Speed against dense by nnz on synthetic inputs")


def sums(layers: pd.DataFrame) -> str:
    """Each operation over the layers that have it and dense, against dense, in a sentence."""
    said, every = [], layers["layer"].nunique()
    for what, part in layers[layers["what"] != "dense"].groupby("what", sort=False):
        dense, has = (part["us"] * part["times"]).sum(), part["layer"].nunique()
        some = "" if has == every else f" (over the {whole(has)} where it was timed)"
        said.append(f"{what} {times(dense / part['us'].sum())}{some}")
    if not said:
        return "Only dense was timed."
    return f"{whole(every)} layers together, against dense: {', '.join(said)}."


def turns(frame: pd.DataFrame) -> str:
    """How often each was timed."""
    low, high = int(frame["repeats"].min()), int(frame["repeats"].max())
    return f"medians of {low if low == high else f'{low} to {high}'} turns, alternating on the same input"


def even_at(run: Run, sparse: pd.DataFrame) -> str:
    """The sparsity at which each kernel takes as long as dense, in a sentence; of even rows if any, the harder."""
    said = []
    if (sparse["input"] == "even").any():
        sparse = sparse[sparse["input"] != "heavy"]
    for what, part in sparse.groupby("what", sort=False):
        nnz = equal_at(part)
        if nnz is not None:
            said.append(
                f"The {what} and dense take equally long at about {number(nnz, 2)} of {whole(run.d_ff)} neurons, a "
                f"sparsity of {percent(1 - nnz / run.d_ff)}."
            )
        elif (part["times"] > 1).all():
            most = float(part["nnz_mean"].max())
            said.append(f"The {what} is faster at every nnz measured, up to {number(most)} of {whole(run.d_ff)}.")
        else:
            said.append(f"The {what} is not faster throughout at the nnz measured.")
    return " ".join(said)
