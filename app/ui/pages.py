"""The pages: the address, title and file of each.

A page joins the dashboard by one line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page: its title, its file below `app/`, and whether the bar at the top links to it."""

    title: str
    file: str
    in_bar: bool = True


PAGES: dict[str, Page] = {  # by address
    "overview": Page("Overview", "activity/overview_page.py"),
    "text": Page("Text", "text/text_page.py"),
    "tokens": Page("Tokens", "tokens/tokens_page.py"),
    "token": Page("Token", "tokens/token_page.py", in_bar=False),
    "layers": Page("Layers", "activity/layers_page.py"),
    "positions": Page("Positions", "activity/positions_page.py"),
    "neurons": Page("Neurons", "neurons/neurons_page.py"),
    "neuron": Page("Neuron", "neurons/neuron_page.py", in_bar=False),
    "kernels": Page("Kernels", "speed/kernels_page.py"),
    "findings": Page("Findings", "runs/claims_page.py"),
    "compare": Page("Compare", "runs/compare_page.py"),
    "export": Page("Export", "runs/export_page.py"),
}
FRONT = "overview"  # the page that is served at the root, and found under its name too
