"""The pages of the dashboard: the address, title, file and group of each.

To add a page, write its file and add a line to PAGES. If its first results take a moment to compute, list them as
`DEFAULT_QUERIES` in a module of its data, and its first figures as `DEFAULT_FIGURES`; name that module in the line, and
they are computed before it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its name in the bar.
        file: its script, below `app/`.
        data: the module below `twell.app` whose DEFAULT_QUERIES are computed before the page is opened, if any.
        group: one of GROUPS, under which the bar at the top links to it; None: the bar does not.
        of_training: whether it is about a training, and the bar links to it only where the run is one.
    """

    title: str
    file: str
    data: str | None = None
    group: str | None = None
    of_training: bool = False


FIRES, BUYS, CLAIMED, ALONG = "what fires", "what it buys", "what is claimed", "take it along"
GROUPS = ("", FIRES, BUYS, CLAIMED, ALONG)  # of links in the bar, in order; the front page stands before them, in none

PAGES: dict[str, Page] = {  # by address
    "overview": Page("Overview", "activity/overview_page.py", group=""),
    "text": Page("Text", "text/text_page.py", group=FIRES),
    "tokens": Page("Tokens", "tokens/tokens_page.py", group=FIRES, data="tokens.token_data"),
    "token": Page("Token", "tokens/token_page.py"),
    "layers": Page("Layers", "activity/layers_page.py", group=FIRES, data="activity.layer_data"),
    "positions": Page("Positions", "activity/positions_page.py", group=FIRES, data="activity.position_data"),
    "neurons": Page("Neurons", "neurons/neurons_page.py", group=FIRES, data="neurons.neuron_data"),
    "neuron": Page("Neuron", "neurons/neuron_page.py"),
    "matters": Page("What matters", "ablations/effects_page.py", group=FIRES),
    "kernels": Page("Kernels", "speed/kernels_page.py", group=BUYS),
    "training": Page("Training", "training/training_page.py", group=BUYS, of_training=True),
    "findings": Page("Findings", "runs/claims_page.py", group=CLAIMED, data="runs.claims_data"),
    "compare": Page("Compare", "runs/compare_page.py", group=CLAIMED),
    "export": Page("Export", "runs/export_page.py", group=ALONG),
}
FRONT = "overview"  # the page at the root of the address; it is found under its name too
