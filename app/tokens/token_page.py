"""Token: one token's activity over the layers, and every place in the text where it stands."""

from __future__ import annotations

import html
from urllib.parse import urlencode

import pandas as pd
import streamlit as st

from twell import analysis
from twell.app.tokens.token_data import ALL_TOKENS, address_filters
from twell.app.tokens.token_figures import profile
from twell.app.tokens.token_neurons import neurons_html, neurons_of, said
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, number, plural, running, token_html, visible, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, one_of, parameter, run_name, url_param, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

PLACES = 50
ORDERS = {"loudest": "Loudest first", "quietest": "Quietest first", "text": "In text order"}


def facts(run: Run, row: pd.Series) -> None:
    """The token's numbers, each with what it is of."""
    z, mean, error = fixed(row["z"]), number(row["mean"]), "no standard error from one sequence"
    if pd.notna(row["z_se"]):
        z, mean = f"{z} ± {row['z_se']:.2f}", f"{mean} ± {number(row['mean_se'], 2)}"
        error = "± standard error"
    widgets.numbers(
        (
            ("z", z, f"mean over layers; {error}"),
            ("nnz per layer", mean, f"of {whole(run.d_ff)} neurons; {error}"),
            ("Count", whole(row["count"]), f"in {plural(row['sequences'], 'sequence')}"),
            ("Surprisal", widgets.nats(row["surprisal_mean"]), "loss of this token, predicted from those before it"),
            ("Next loss", widgets.nats(row["loss_mean"]), "loss of the next token, predicted here"),
        )
    )


def layers(run: Run, token: int) -> None:
    """The token's profile over layers."""
    result = query(run, analysis.token_profile, token_id=token)
    said = "Standard deviations from each layer's mean nnz, with 95 % intervals clustered by sequence."
    widgets.heading("Over the layers", said, result)
    widgets.draw(profile(result.frame), "profile", "The token's z by layer")


def neurons(run: Run, token: int) -> None:
    """The neurons that answer to the token."""
    try:
        result = query(run, neurons_of, token=token)
        frame = result.frame
    except Missing:
        widgets.heading("Its neurons")
        raise
    widgets.heading("Its neurons", said(frame), result)
    st.html(neurons_html(frame))


def places(run: Run, token: int, count: int) -> None:
    """Where the token stands, a line a place, shaded by nnz."""
    above = st.container()
    if run.manifest.summary_only:
        with above:
            widgets.heading("In the text")
        run.files("activity")
    order = st.segmented_control(
        "Order",
        list(ORDERS),
        format_func=lambda o: ORDERS[o],
        label_visibility="collapsed",
        required=True,
        **url_param("order", "loudest", one_of(ORDERS)),
    )
    result = query(run, analysis.contexts, token_id=token, limit=PLACES, order=order)
    said = (
        f"{whole(min(PLACES, count))} of {plural(count, 'place')}. nnz: sum over layers; z: mean over layers; loss: of "
        "the next token, in nats. The shade is the percentile of nnz among all tokens of the run."
    )
    with above:
        widgets.heading("In the text", said, result)
    with widgets.scanning(run):
        frame = result.frame
    st.html(lines(frame))


def lines(frame: pd.DataFrame) -> str:
    """The places as HTML, a grid with the token in its middle."""
    head = ("sequence:position", "", "", "", "nnz", "z", "loss")
    marks = ("where", "before", "token", "after", "number nnz", "number", "number loss")
    out = ['<div class="tw-places"><div class="tw-place names">']
    out += [f'<span class="{mark}">{text}</span>' for mark, text in zip(marks, head, strict=True)]
    out.append("</div>")
    for row in frame.itertuples():
        shade = 0.04 + 0.6 * float(row.percentile) / 100
        loss = "–" if pd.isna(row.loss) else f"{row.loss:.2f}"
        cells = (
            f"{row.sequence}:{row.position}",
            f"<span>{html.escape(running(row.before[-90:]))}</span>",
            html.escape(visible(row.token)),
            html.escape(running(row.after[:90])),
            whole(row.nnz),
            f"{row.z:+.2f}".replace("-", "−"),
            loss,
        )
        title = html.escape(f"{row.source}, document {row.document}; percentile {row.percentile:.0f}", quote=True)
        out.append(f'<div class="tw-place" title="{title}">')
        query = {"run": run_name(), "sequence": row.sequence, "position": row.position}
        address = html.escape("text?" + urlencode(query), quote=True)
        out.append(f'<a class="where" href="{address}">{cells[0]}</a>')
        for mark, cell in zip(marks[1:], cells[1:], strict=True):
            style = f' style="background: rgba(47,126,216,{shade:.2f})"' if mark == "token" else ""
            out.append(f'<span class="{mark}"{style}>{cell}</span>')
        out.append("</div>")
    return "".join([*out, "</div>"])


def page(run: Run) -> None:
    """The token that the address names."""
    widgets.page_link("tokens", "← All tokens", **address_filters())
    token = whole_number(parameter("token"))
    frame = fetch(run, ALL_TOKENS)
    rows = frame[frame["token_id"] == token]
    if rows.empty:
        st.html('<h1 class="tw-title">No such token</h1>')
        st.info("No token with that id is counted in this run. Choose one from the list of all tokens.")
        return
    row = rows.iloc[0]
    st.html(f'<h1 class="tw-title">{token_html(row["text"])} <span class="tw-note">token {token}</span></h1>')
    facts(run, row)
    with st.container(key="pair"):
        left, right = st.columns(2, gap="large")
    with left, widgets.show_errors():
        layers(run, int(row["token_id"]))
    with right, widgets.show_errors():
        neurons(run, int(row["token_id"]))
    with widgets.show_errors():
        places(run, int(row["token_id"]), int(row["count"]))


with widgets.show_errors():
    page(current_run())
