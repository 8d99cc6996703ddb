"""Draw figures as PNG images, with kaleido and a Chrome or Chromium of this machine.

Code hosts and nbconvert show no figure of plotly, but any image beside it. Both programs are optional: without them
`png_images` raises Missing, with what to install. Nothing is fetched from anywhere: plotly.js is that of the package.
Cost: a browser's start, 1 to 3 s, and 0.2 s an image.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import Missing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WIDTH = 900  # pixels of an image on a page
SCALE = 1.5  # its own pixels to one of a page
COLORS = 192  # in an image: a third of its bytes, and no difference that is seen
SECONDS = 60  # until an image that does not come is given up
HOW = "pip install kaleido, and have a Chrome or Chromium"


def png_images(figures: Sequence[Figure]) -> list[bytes]:
    """Return each figure as a PNG image on white, WIDTH pages' pixels wide and as high as the figure says.

    Raises Missing, with the reason in a sentence, where they cannot be drawn.
    """
    if not figures:
        return []
    try:
        import kaleido
    except ImportError:
        raise Missing(
            f"Figures have no images beside plotly's data, because kaleido is not installed: {HOW}."
        ) from None
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a loop of events already
            images = thread.submit(asyncio.run, _draw(kaleido, figures)).result()
    except Exception as error:  # a browser that is missing, does not start or ends early: whatever kaleido raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Missing(f"Figures have no images beside plotly's data ({reason}): {HOW}.") from None
    return [_smaller(image) for image in images]


async def _draw(kaleido: Any, figures: Sequence[Figure]) -> list[bytes]:
    """Return the images of one browser, one after another."""
    images = []
    async with kaleido.Kaleido(n=1, timeout=SECONDS, mathjax=False) as browser:  # MathJax would come from a network
        for figure in figures:
            size = {"width": WIDTH, "height": height(figure), "scale": SCALE}
            images.append(await browser.calc_fig(_on_white(figure), opts={"format": "png", **size}))
    return images


def height(figure: Figure) -> int:
    """Return a figure's height in pixels; 400 where it has none."""
    return int(figure.layout.height or 400)


def _on_white(figure: Figure) -> dict[str, Any]:
    """Return a figure's data and layout, its background white, as code hosts may be dark."""
    described: dict[str, Any] = figure.to_plotly_json()
    described["layout"] = {**described["layout"], "paper_bgcolor": "#fff", "plot_bgcolor": "#fff"}
    return described


def figure_of_svg(svg: str, tall: int) -> Figure:
    """Return a figure that shows a drawing, WIDTH by `tall` pixels, and nothing else; its image is the drawing's."""
    from plotly.graph_objects import Figure

    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    whole = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "sizex": 1, "sizey": 1, "sizing": "stretch"}
    hidden = {"visible": False}
    margin = dict.fromkeys("lrtb", 0)
    return Figure(
        layout={"height": tall, "margin": margin, "xaxis": hidden, "yaxis": hidden}
        | {"template": "none", "images": [{**whole, "source": source}]}
    )


def _smaller(image: bytes) -> bytes:
    """Return a PNG image with COLORS colors; as it is where Pillow is not there."""
    try:
        from PIL import Image
    except ImportError:
        return image
    small = io.BytesIO()
    with Image.open(io.BytesIO(image)) as drawn:
        drawn.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()
