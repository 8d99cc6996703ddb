"""The choices on the Text page: the filters above the passage, and the choice that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from twell.analysis import passage
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.values import known
from twell.app.text.search_view import draw_results, passages_button, search_field
from twell.app.ui import widgets
from twell.app.ui.query import fetch
from twell.app.ui.run_catalog import find_runs
from twell.app.ui.url_state import one_of, parameter, sync_url, url_param, whole_number
from twell.workbench.run.store import Run

ALL_PHASES = "both"
THIS_RUN = "this run"


@dataclass(frozen=True)
class PassageChoice:
    """The passage and shade that the user has chosen.

    Attributes:
        shown: the run whose passage is drawn: the page's, or that of the user's own text.
        own: the name of the user's own text in the address, or None.
        sequence: the sequence's number.
        shade: what shades the tokens, as `analysis.passage` names it.
        phase: the phase of generation that is shaded; None for all.
        scale_run: the run whose scale is used.
        lender: the name of that run if it is another than the page's; otherwise None.
        can_ask: whether the model is at hand, and reads anew what the run does not keep of its passages.
    """

    shown: Run
    own: str | None
    sequence: int
    shade: str
    phase: str | None
    scale_run: Run
    lender: str | None
    can_ask: bool

    @property
    def parameters(self) -> dict[str, str]:
        """The query parameters that a link to another position of the run keeps."""
        shade = {} if self.shade == passage.ALL else {"neuron" if "/" in self.shade else "shade": self.shade}
        phase = {"phase": self.phase} if self.phase else {}
        own = {"own": self.own} if self.own else {}
        return own | shade | phase | ({"scale": self.lender} if self.lender else {})

    def scale(self) -> passage.Scale:
        """Return the scale of the shades."""
        scale: passage.Scale = fetch(self.scale_run, passage.scale, shade=self.shade)
        return scale.lent_by(self.scale_run) if self.lender or self.own else scale


def shade_name(shade: str) -> str:
    """Return a shade's name in the list of shades."""
    if shade == passage.ALL:
        return "neurons over all layers"
    return "surprisal" if shade == passage.SURPRISAL else f"nnz, layer {shade[1:]}"


def neuron_name(text: str, run: Run) -> str | None:
    """Return the name of the neuron that a user typed, such as L3/N42; None if the run has no such neuron."""
    location = parse_neuron(text, run)
    return f"L{location[0]}/N{location[1]}" if location else None


def chosen(
    run: Run, shown: Run, sequences: pd.DataFrame, can_ask: bool, is_own: bool, own_text: Callable[[Run], None]
) -> PassageChoice:
    """Draw the filters, the ways to a passage and the button for own text; return what is chosen.

    Args:
        run: the page's run.
        shown: the run whose passages are drawn: `run`, or that of the user's own text.
        sequences: the rows of `passage.sequences` of `shown`.
        can_ask: whether the run's model is at hand.
        is_own: whether `shown` is of the user's own text.
        own_text: draws the button.
    """
    own = parameter("own") if is_own else None
    # A run with two phases and a lender of its scale has eight of them, which just fit into 1440 pixels.
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        shades = [shade for shade in passage.shades(run) if shade in passage.shades(shown)]
        param = url_param("shade", passage.ALL, one_of(shades))
        shade = st.selectbox("Shade by", shades, format_func=shade_name, width=210, **param)
        neuron = _neuron_field(run) if known(shown) or can_ask else ""
        shade = neuron_name(neuron, run) or shade
        scale_run, lender = _chosen_scale(run)
        phase = _chosen_phase(shown)
        sequence = _chosen_sequence(sequences)
        words = ""
        if not own:
            passages_button(shown)
            words = search_field()
        own_text(run)
    if neuron and not neuron_name(neuron, run):
        widgets.no_such_neuron(run)
    if words:
        with widgets.show_errors():
            draw_results(shown, words)
    return PassageChoice(shown, own, sequence, shade, phase, scale_run, lender, can_ask and not own)


def _neuron_field(run: Run) -> str:
    """Draw the field for a neuron that shades the passage; return its text."""
    return st.text_input(
        "or by one neuron",
        placeholder="L3/N42",
        width=120,
        max_chars=20,
        help="Shades each token by this neuron's value.",
        **url_param("neuron", "", lambda text: neuron_name(text, run) or text),
    )


def _chosen_phase(run: Run) -> str | None:
    """Draw the choice of a phase if the run has several; return the phase, None for all."""
    phases = fetch(run, passage.phases)
    if len(phases) < 2:
        return None
    param = url_param("phase", ALL_PHASES, one_of(phases))
    phase = st.segmented_control("Phase", [ALL_PHASES, *phases], required=True, **param)
    return None if phase in (ALL_PHASES, None) else str(phase)


def _chosen_scale(run: Run) -> tuple[Run, str | None]:
    """Draw the choice of a run whose scale is used, if a longer run of the same weights can lend its own.

    Returns:
        The run, and its name if it is another than `run`.
    """
    lenders = {name: other for name, other in find_runs().runs.items() if passage.can_lend(other, run)}
    if not lenders:
        return run, None
    param = url_param("scale", THIS_RUN, one_of(lenders))
    name = str(st.selectbox("Scale of", [THIS_RUN, *lenders], width=170, **param))
    return (run, None) if name == THIS_RUN else (lenders[name], name)


def _chosen_sequence(sequences: pd.DataFrame) -> int:
    """Draw the choice of a sequence, and of a source if there are several; return the sequence's number."""
    last = int(sequences["sequence"].max())

    def read(text: str) -> int | None:
        return None if (n := whole_number(text)) is None else min(n, last)

    there_is = f"there {'is' if len(sequences) == 1 else 'are'} {len(sequences)}, 0 to {last}"
    param = url_param("sequence", 0, read, ("position", "to", "from"), there_is)
    sequence = int(st.number_input("Sequence", 0, last, step=1, width=130, **param))
    sources = list(dict.fromkeys(sequences["source"]))
    if len(sources) > 1:
        st.session_state["source"] = sequences.set_index("sequence")["source"].get(sequence, sources[0])
        options: dict[str, Any] = {"on_change": _to_source, "args": (sequences,)}
        st.selectbox("Source", sources, key="source", width=200, **options)
    return sequence


def _to_source(sequences: pd.DataFrame) -> None:
    """Choose the first sequence of the chosen source; `sequences` are the rows of `passage.sequences`."""
    first = sequences.loc[sequences["source"] == st.session_state["source"], "sequence"].min()
    st.session_state["sequence"] = int(first)
    sync_url()
