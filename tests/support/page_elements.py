"""Read what a page that is run by AppTest shows."""

from __future__ import annotations

import json
import re
from typing import Any

from streamlit.testing.v1 import AppTest

PAGES = ("overview", "text", "tokens", "layers", "positions", "neurons", "kernels", "findings", "compare", "export")


def figures(test: AppTest) -> int:
    """Return how many figures the page draws."""
    return len(test.get("plotly_chart"))


def drawn(test: AppTest, place: int) -> str:
    """Return what the figure at a place is made of, as text."""
    return json.dumps(json.loads(test.get("plotly_chart")[place].proto.spec), ensure_ascii=False)


def markup(test: AppTest) -> str:
    """Return the HTML of all `st.html` blocks of the page."""
    return "\n".join(str(element.proto.body) for element in test.get("html"))


def notices(test: AppTest) -> str:
    """Return the texts of the page's notices and warnings, without the marks of Markdown."""
    return "\n".join(element.value for element in (*test.info, *test.warning)).replace("\\", "")


def figure(test: AppTest, key: str) -> dict[str, Any]:
    """Return the data and layout of the page's figure with that key."""
    (chart,) = [chart for chart in test.get("plotly_chart") if chart.key == key]
    specification: dict[str, Any] = json.loads(chart.proto.spec)
    return specification


def layout(test: AppTest, key: str) -> dict[str, Any]:
    """Return the layout of the page's figure with that key."""
    of_figure: dict[str, Any] = figure(test, key)["layout"]
    return of_figure


def shades(body: str) -> list[float]:
    """Return the opacity of each token of a passage, in order; NaN where it is not shaded."""
    tokens = re.findall(r'<a class="t(?: [a-z]+)*"(?: style="background:rgba\(47,126,216,([0-9.]+)\)")?', body)
    return [float(shade) if shade else float("nan") for shade in tokens]
