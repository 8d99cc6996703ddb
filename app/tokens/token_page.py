"""Page Token: a token's numbers, its activity by layer, its neurons, and where in the text it occurs; or a word's."""

from __future__ import annotations

import html
from contextlib import suppress
from urllib.parse import urlencode

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from twell import analysis
from twell.analysis.figures.tokens import profile
from twell.analysis.statistics import t_half
from twell.app.tokens.fired_data import fired_by_token, token_places
from twell.app.tokens.fired_view import can_tell, draw_fired
from twell.app.tokens.token_data import ALL_TOKENS, address_filters
from twell.app.tokens.token_neurons import neurons_of
from twell.app.tokens.token_rows import draw_its_neurons, draw_neurons, say_mostly_layer, titled_row
from twell.app.tokens.word_view import draw_word
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, layer_width, nats, number, plural, running, visible, whole, with_intervals
from twell.app.ui.query import fetch, query
from twell.app.ui.questions import noted, say_left_out
from twell.app.ui.url_state import current_run, parameter, run_name, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

OCCURRENCES = 50  # shown at most
ORDERS = {"loudest": "Most active first", "quietest": "Least active first", "text": "In text order"}


def draw_numbers(run: Run, row: pd.Series) -> None:
    """Draw the token's numbers, each with a line on what it is.

    Args:
        run: the run.
        row: the token's row of `analysis.by_token`.
    """
    z, mean, error = fixed(row["z"]), number(row["mean"]), "no interval: it occurs in one document only"
    if pd.notna(row["z_se"]):
        half_z, half = t_half(row["degrees"]) * row["z_se"], t_half(row["effective"] - 1) * row["mean_se"]
        z, mean = f"{z} ± {half_z:.2f}", mean if pd.isna(half) else f"{mean} ± {number(half, 2)}"
        error = "± its 95 % interval"
    widgets.numbers(
        (
            ("z", z, f"mean over layers; {error}"),
            ("nnz per layer", mean, f"of {layer_width(run)} neurons; {error}"),
            ("Count", whole(row["count"]), f"in {plural(row['sequences'], 'sequence')}"),
            ("Surprisal", nats(row["surprisal_mean"]), "loss of this token, predicted from those before it"),
            ("Next loss", nats(row["loss_mean"]), "loss of the next token, predicted here"),
        )
    )


def draw_layers(run: Run, token: int) -> None:
    """Draw the z of the token with id `token` in each layer."""
    result = query(run, analysis.token_profile, token_id=token)
    figure = profile(result.frame)  # before the heading, which is left out with it
    told = with_intervals(result.frame["z_se"], " clustered by document")
    widgets.heading("Over the layers", f"Standard deviations from each layer's mean nnz, {told}.", result)
    widgets.draw(figure, "profile", "The token's z by layer")


def draw_occurrences(run: Run, token: int, count: int, top: DeltaGenerator) -> None:
    """Draw where the token occurs, a line an occurrence, shaded by nnz; at `top` a link to the neurons of the first.

    Args:
        run: the run.
        token: the token's id.
        count: how often it occurs.
        top: an empty place under the numbers.
    """
    heading_area = st.container()
    run.files("activity")  # raises Missing, with the reason
    order = widgets.url_choice("Order", ORDERS, "order", "loudest", label_visibility="collapsed")
    result = query(run, analysis.contexts, token_id=token, limit=OCCURRENCES, order=order)
    caption = (
        f"{whole(min(OCCURRENCES, count))} of {plural(count, 'occurrence')}. nnz: sum over layers; z: mean over "
        "layers; loss: of the next token, in nats. The shade is the percentile of nnz among all tokens of the run."
    )
    with heading_area:
        widgets.heading("In the text", caption, result)
    with widgets.scanning(run):
        frame = result.frame
    with top:
        draw_its_neurons(run, frame.head(1), frame["token"].head(1).tolist())
    st.html(occurrences_html(frame))


def occurrences_html(frame: pd.DataFrame) -> str:
    """Return the rows of `analysis.contexts` as HTML, a grid with the token in its middle column."""
    titles = ("sequence:position", "", "", "", "nnz", "z", "loss")
    classes = ("where", "before", "token", "after", "number nnz", "number", "number loss")
    lines = ['<div class="tw-places"><div class="tw-place names">']
    lines += [f'<span class="{name}">{title}</span>' for name, title in zip(classes, titles, strict=True)]
    lines.append("</div>")
    for row in frame.itertuples():
        shade = 0.04 + 0.6 * float(row.percentile) / 100
        loss = "–" if pd.isna(row.loss) else f"{row.loss:.2f}"
        cells = (
            f"<span>{html.escape(running(row.before[-90:]))}</span>",
            html.escape(visible(row.token)),
            html.escape(running(row.after[:90])),
            whole(row.nnz),
            fixed(row.z),
            loss,
        )
        tooltip = html.escape(f"{row.source}, document {row.document}; percentile {row.percentile:.0f}", quote=True)
        query = {"run": run_name(), "sequence": row.sequence, "position": row.position}
        address = html.escape("text?" + urlencode(query), quote=True)
        lines.append(f'<div class="tw-place" title="{tooltip}">')
        lines.append(f'<a class="where" href="{address}">{row.sequence}:{row.position}</a>')
        for name, cell in zip(classes[1:], cells, strict=True):
            style = f' style="background: rgba(47,126,216,{shade:.2f})"' if name == "token" else ""
            lines.append(f'<span class="{name}"{style}>{cell}</span>')
        lines.append("</div>")
    return "".join([*lines, "</div>"])


def draw_page(run: Run) -> None:
    """Draw the token that the address names, or say that there is none."""
    if word := parameter("word"):
        widgets.page_link("tokens", "← All words", **address_filters())
        draw_word(run, word)
        return
    widgets.page_link("tokens", "← All tokens", **address_filters())
    token = whole_number(parameter("token"))
    row = titled_row(fetch(run, ALL_TOKENS), "token_id", token, f"token {token}")
    if row is None or token is None:
        return
    draw_numbers(run, row)
    with suppress(Missing):  # which the figure over the layers names
        say_mostly_layer(run, "token", fetch(run, analysis.token_profile, token_id=token).set_index("layer")["mean"])
    top = st.container()
    left, right = widgets.pair("pair")
    lacking: dict[str, list[str]] = {}
    with left, widgets.show_errors(), noted("over the layers", lacking):
        draw_layers(run, token)
    beside = left if can_tell(run, fired_by_token, token=token) else right
    with beside, widgets.show_errors(), noted("neurons with an example at this token", lacking):
        draw_neurons(run, "token", neurons_of, token=token)
    with widgets.show_errors(), noted("in the text", lacking):
        draw_occurrences(run, token, int(row["count"]), top)
    with right, widgets.show_errors(), noted("neurons that this token fires", lacking):  # last: the model may read
        draw_fired(run, "token", fired_by_token, token_places, token=token)
    say_left_out(run, lacking)


with widgets.show_errors():
    draw_page(current_run())
