"""Page Neurons: how often the neurons of each layer fire, and lists of the most frequent, rarest and dead ones."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures import plots
from twell.analysis.figures.neurons import density_label, density_names
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.app.jobs.dead_weights import why_dead
from twell.app.jobs.runner import weights_folder
from twell.app.neurons.near_view import near_values, nearness, with_nearest
from twell.app.neurons.neuron_data import (
    DENSITIES,
    KINDS,
    LIST,
    MAX_ROWS,
    NOTES,
    densities,
    first_rows,
    with_norms,
    with_snippets,
    with_tokens,
    with_written,
)
from twell.app.ui import widgets
from twell.app.ui.formatting import (
    column_form,
    dead_limit,
    decimals,
    layer_width,
    percent,
    plural,
    typeset,
    visible,
    whole,
)
from twell.app.ui.query import Query, QueryResult, fetch, query
from twell.app.ui.questions import Question, draw_questions
from twell.app.ui.url_state import current_run, link, one_of, open_page, run_name, sync_url, url_param
from twell.workbench.run.store import Run

# Columns of the list after the neuron's name; dead neurons have none of the first.
COLUMNS_IF_FIRED = ("density", "fires", "value_max", "fires_on", "in_text", "writes", "token_text", "first_sequence")
WRITES = (
    " Writes: the tokens that a neuron makes likelier where its product is positive, and less likely where it is "
    "negative, as in a gated FFN; read off the model's weights without the layers between."
)
NO_WEIGHTS = "Why they are dead cannot be told without the model's weights, which are not on this machine."
NONE_FOUND = "There are no such neurons here."
NONE = {  # where nothing else was asked for
    "dead": "Every neuron fired at least once.",
    "selective": "Every neuron here fires more often, or on fewer than 8 tokens: see Most frequent or Rarest.",
}
CHOOSE = " Choose a row to see where it fires.", " Choose a row to see more of it."  # of others, of dead ones
COLUMNS_IF_DEAD = ("why", "largest", "below", "gate_norm", "down_norm")

TOGETHER = Question(
    "Neurons that fire together",
    Query(analysis.firing_clusters),
    plots.clusters,
    "Clusters of neurons of a layer whose firings correlate, a dot each: how many neurons it has, and the mean "
    "correlation of its pairs. Large clusters at the top fire as one: a group that could be kept, moved or skipped as "
    "a whole.",
    reads_firings=True,
)


def draw_densities(run: Run) -> None:
    """Draw the share of each layer's neurons by density."""
    result = query(run, DENSITIES)
    tokens = int(fetch(run, analysis.by_layer)["tokens"].max())
    widgets.heading(
        "How often they fire, by layer",
        f"Each row: what share of a layer's {layer_width(run)} neurons fires how often. Density: the share of tokens "
        "that fire a neuron. "
        f"Dead: never fired on this text, {plural(tokens, 'token')} in {plural(run.manifest.sequences, 'sequence')}, "
        f"so it fires {dead_limit(run, tokens)}. Shades go by the square root. "
        "Choose a cell to list its neurons.",
        result,
        key="density-by-layer",
    )
    figure = densities(run)
    alt = "Share of neurons by density in each layer"
    event = widgets.draw(figure, "densities", alt, wide=True, on_select=sync_url, selection_mode="points")
    lows = [*density_names(result.frame)]
    for point in event.selection.points:
        low = lows[int(point["x"])]
        of = {"kind": "hot", "density": f"{low:g}"} if low else {"kind": "dead"}
        open_page("neurons", run=run_name(), layer=f"L{int(point['y'])}", **of)


def draw_dead(run: Run) -> None:
    """Draw how many neurons are dead and why, with a link to their list; nothing where the run does not tell."""
    layers = fetch(run, analysis.by_layer)
    if "dead" not in layers or layers["dead"].isna().any():
        return
    dead, of = int(layers["dead"].sum()), run.neurons
    if not dead:
        return
    why = why_dead(run)
    said = f"{whole(dead)} of {whole(of)} neurons ({percent(dead / of)}) are dead: they never fired on this text"
    said += f"; {why}." if why else "." if weights_folder(run) else f". {NO_WEIGHTS}"
    text = html.escape(typeset(said))
    st.html(f'<p class="tw-lead">{text} <a href="{link("neurons", kind="dead")}">The dead neurons</a></p>')


def go_to(label: str) -> None:
    """Open the page of a neuron, by its name."""
    open_page("neuron", run=run_name(), neuron=label)


def choices(run: Run) -> dict[str, Any]:
    """Draw the filters, and a field that opens a neuron by its name; return what is chosen, as arguments of
    `neuron_list`."""
    names = ["all layers", *(f"L{layer}" for layer in range(run.layers))]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        kind = widgets.url_choice("Neurons", KINDS, "kind", LIST.arguments["kind"])
        layer = st.selectbox("Layer", names, width=140, **url_param("layer", names[0], one_of(names)))
        density = None if kind == "dead" else chosen_density(run)
        find = st.text_input(
            "Fires most on",
            placeholder="part of a token",
            width=180,
            max_chars=100,
            help="Neurons with one of their largest values at such a token; ␣ stands for a space.",
            **url_param("find", "", lambda text: text[:100]),
        )
        label = st.text_input("Go to", placeholder="L3/N42", width=140, key="go", max_chars=20, on_change=sync_url)
    if label:
        location = parse_neuron(label, run)
        if location is not None:
            go_to(f"L{location[0]}/N{location[1]}")
        widgets.no_such_neuron(run)
    return {"kind": kind, "layer": None if layer == names[0] else int(layer[1:]), "find": find, "density": density}


def chosen_density(run: Run) -> tuple[float, float] | None:
    """Draw the choice of a bin of densities, a column of the map; return its bounds, None for all."""
    bins = fetch(run, DENSITIES)
    names = {f"{low:g}": name for low, name in density_names(bins).items() if low}
    bounds = {f"{low:g}": (low, high) for low, high in zip(bins["low"], bins["high"], strict=True)}
    any_density = url_param("density", "any", one_of(names))
    choice = st.selectbox(
        "Density", ["any", *names], format_func=lambda key: names.get(key, key), width=150, **any_density
    )
    return bounds.get(choice)


def list_result(run: Run, kind: str, layer: int | None, **bounds: Any) -> QueryResult:
    """Return the list of neurons of a kind, with the tokens they fire on and write; of dead ones, all of them, the
    lengths of their weights. Without the model's weights, or examples, columns are left out.

    bounds: further arguments of `neuron_list`, of which Code shows those with a value
    """
    bounds = {name: value for name, value in bounds.items() if value} | ({"most": None} if kind == "dead" else {})
    result = query(run, LIST.where(layer=layer, kind=kind, **bounds))
    folder = weights_folder(run)
    if kind == "dead":
        return result.then(with_norms, run, folder) if folder and fires_any(run) else result
    result = result.then(with_tokens, run).then(with_snippets, run)
    return result.then(with_written, run, folder) if folder else result


def fires_any(run: Run) -> bool:
    """Return whether any neuron fires in a run, so that others can be compared with it."""
    return bool(fetch(run, analysis.by_layer)["mean"].any())


def kinds_of_dead(run: Run, frame: pd.DataFrame) -> str:
    """Return a sentence, with a space after it, on why the neurons are dead, as far as their weights tell.

    frame: all of them
    """
    if frame.empty:
        return ""
    if not fires_any(run):
        return "No neuron fires, so there is none that their weights could be compared with. "
    if "gone" not in frame:
        return f"{NO_WEIGHTS} "
    gone, kept = int(frame["gone"].sum()), int((~frame["gone"]).sum())
    lost = (
        f"{'All ' * (not kept)}{whole(gone)} of them have hardly any weights left: the rows they read and write with "
        "are under a quarter as long as those of neurons that fire"
    )
    return f"{lost}; {whole(kept)} have longer ones, so another text may fire them. " if kept else f"{lost}. "


def draw_list(
    run: Run, kind: str, layer: int | None, find: str = "", density: tuple[float, float] | None = None
) -> None:
    """Draw the list of neurons of a kind; a click on a row opens the neuron's page.

    Args:
        run: the run.
        kind: a key of KINDS.
        layer: the layer; None for all.
        find: text in the tokens that they fire on.
        density: bounds of their density; None for all.
    """
    result = list_result(run, kind, layer, find=find, density=density)
    near = near_values(run) if kind == "dead" and not result.frame.empty else ""
    if near:  # the nearest of all of them, wherever they stand in the list
        result = result.then(with_nearest, near)
    frame = result.frame
    count = frame.attrs["count"]
    scope = "in all layers" if layer is None else f"in layer {layer}"
    scope += f" with a density of {' to '.join(map(density_label, density))}" if density else ""
    limit = f" ({'nearest' if near else 'first'} {whole(MAX_ROWS)} shown)" if count > MAX_ROWS else ""
    why, distance = "", ""
    if kind == "dead":
        why, distance = kinds_of_dead(run, frame), nearness(frame, run) if near else ""
        result = result.then(first_rows)
        frame = result.frame
    order = NOTES[kind] + distance + (WRITES if "writes" in frame else "")
    caption = f"{why}{plural(count, 'neuron')} {scope}{limit}. {order}{'' if frame.empty else CHOOSE[kind == 'dead']}"
    widgets.heading("Dead neurons" if kind == "dead" else KINDS[kind], caption, result)
    if frame.empty:
        st.info(NONE_FOUND if find or density else NONE.get(kind, NONE_FOUND))
        return
    texts = frame["token_text"].map(lambda text: visible(text) if text else "")
    shown = COLUMNS_IF_DEAD if kind == "dead" else COLUMNS_IF_FIRED
    rows = frame.assign(token_text=texts, density=100 * frame["density"])
    if not any(texts):
        rows = rows.drop(columns="token_text")
    if rows["first_sequence"].nunique() < 2:  # most fire in the first sequence
        rows = rows.drop(columns="first_sequence")
    widgets.choosable(
        rows,
        f"neuron-table-{kind}-{layer}",
        rows["label"],
        column_order=["label", *(name for name in shown if name in rows)],
        column_config=columns(rows),
    )


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the configuration of the list's columns, with the density in %.

    Numbers have formats of our own, because Streamlit's follow the language of the browser and the page does not.
    """
    column = st.column_config
    return {
        "label": column.TextColumn("neuron"),
        "density": column.ProgressColumn(
            "density, %",
            format=column_form(decimals(frame["density"])),
            min_value=0.0,
            max_value=max(float(frame["density"].max()), 1e-9),
            help="share of tokens that fire it",
        ),
        "fires": column.NumberColumn("fires", format=column_form(0), help="tokens that fire it"),
        "value_mean": column.NumberColumn(
            "mean value", format=column_form(decimals(frame["value_mean"])), help="mean over the tokens that fire it"
        ),
        "value_max": column.NumberColumn("largest value", format=column_form(decimals(frame["value_max"]))),
        "token_text": column.TextColumn("one token", help="the token that fires it, if it is the only one"),
        "fires_on": column.TextColumn("fires most on", width="medium", help="tokens at its largest values in the run"),
        "in_text": column.TextColumn("where its value is largest", width="large", help="the token is in ‹ ›"),
        "writes": column.TextColumn("writes", width="medium", help="tokens that a positive product makes likelier"),
        "why": column.TextColumn("why"),
        "largest": column.NumberColumn("largest pre-activation", format=column_form(4), help="it fires above 0"),
        "below": column.NumberColumn(
            "below 0 by", format=column_form(2), help="in standard deviations of its pre-activations"
        ),
        "gate_norm": column.NumberColumn(
            "reads with, × usual", format=column_form(3), help="its gate row's length over the median of firing neurons"
        ),
        "down_norm": column.NumberColumn(
            "writes with, × usual",
            format=column_form(3),
            help="its down row's length over the median of firing neurons",
        ),
        "first_sequence": column.NumberColumn("first sequence", format="%d", help="sequence in which it first fired"),
    }


def draw_page(run: Run) -> None:
    """Draw the map of densities, the filters and the list."""
    if (label := widgets.chosen_row()) is not None:
        go_to(str(label))
    st.query_params.pop("neuron", None)  # the link back from a neuron's page may leave it in the address
    with widgets.show_errors():
        draw_dead(run)
    draw_densities(run)
    chosen = choices(run)
    with widgets.show_errors():
        draw_list(run, **chosen)
    draw_questions(run, [TOGETHER])


widgets.title("How often does each neuron fire, and where?")
with widgets.show_errors():
    draw_page(current_run())
