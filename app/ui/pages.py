"""The pages of the dashboard: the address, title and file of each.

To add a page, write its file and add a line to PAGES. If its first results take a moment to compute, list them as
`DEFAULT_QUERIES` in a module of its data, name that module in the line, and they are computed before it is opened.
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
        in_bar: whether the bar at the top links to it.
        of_training: whether it is about a training, and the bar links to it only where the run is one.
    """

    title: str
    file: str
    data: str | None = None
    in_bar: bool = True
    of_training: bool = False


PAGES: dict[str, Page] = {  # by address
    "overview": Page("Overview", "activity/overview_page.py"),
    "text": Page("Text", "text/text_page.py"),
    "tokens": Page("Tokens", "tokens/tokens_page.py", data="tokens.token_data"),
    "token": Page("Token", "tokens/token_page.py", in_bar=False),
    "layers": Page("Layers", "activity/layers_page.py", data="activity.layer_data"),
    "positions": Page("Positions", "activity/positions_page.py", data="activity.position_data"),
    "neurons": Page("Neurons", "neurons/neurons_page.py", data="neurons.neuron_data"),
    "neuron": Page("Neuron", "neurons/neuron_page.py", in_bar=False),
    "kernels": Page("Kernels", "speed/kernels_page.py"),
    "training": Page("Training", "training/training_page.py", of_training=True),
    "findings": Page("Findings", "runs/claims_page.py", data="runs.claims_data"),
    "compare": Page("Compare", "runs/compare_page.py"),
    "export": Page("Export", "runs/export_page.py"),
}
FRONT = "overview"  # the page at the root of the address; it is found under its name too
