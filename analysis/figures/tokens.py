"""Figures of the Tokens pages: both ends of a ranking, classes of tokens, and one token's z by layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.figures.labels import percent, plot_label
from twell.analysis.figures.style import BLUE, DOTTED, GREY, dots, finish, layers_across, log_scale, panel_title
from twell.analysis.statistics import t_half

ENDS = ("most active", "least active")
END_ROWS = 15  # tokens at each end of the ranking
Z_AXIS, MEAN_AXIS = "z: standard deviations from the layers' means", "neurons fired a layer, mean"
REACH = 0.6  # how far beyond the dots an axis follows their intervals, as a share of the dots' own range
MIN_COUNT = 20  # times that a token must occur to be ranked, unless the user chooses otherwise


def both_ends(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the first and the last rows of a ranking, the very last one first among the last.

    Args:
        frame: a table in order of rank.
        count: how many rows of each end, at most. In a short ranking no row is returned twice.

    Returns:
        The rows, with one more column: end (one of ENDS).
    """
    count = min(count, -(-len(frame) // 2))
    first, last = frame.head(count), frame[count:].tail(count)[::-1]
    return pd.concat([rows.assign(end=end) for rows, end in zip((first, last), ENDS, strict=True)], ignore_index=True)


def most_first(frame: pd.DataFrame, rank: str) -> pd.DataFrame:
    """Return rows of `analysis.by_token` or `by_word` by falling values of a column, such as mean (neurons fired)."""
    return frame.sort_values(rank, ascending=False, kind="stable", ignore_index=True)


def ranked_by(frame: pd.DataFrame, rank: str) -> pd.DataFrame:
    """Return `analysis.by_token` with z and z_se replaced by the columns that it is ranked by, and one more column,
    half: of the 95 % interval, by Student's t (a posterior's by the normal distribution).

    Args:
        frame: the table.
        rank: mean, shrunk, z or z_position; where nothing tells how much z varies, shrunk is empty and z stands in for
            it. `attrs` names the axis of mean.
    """
    rank = "z" if frame[rank].isna().all() else rank
    degrees = {"mean": frame["effective"] - 1, "shrunk": np.full(len(frame), np.inf)}.get(rank, frame["degrees"])
    error = frame[f"{rank}_se"]
    frame = frame.assign(z=frame[rank], z_se=error, half=t_half(np.asarray(degrees, float)) * error)
    frame.attrs["axis"] = MEAN_AXIS if rank == "mean" else Z_AXIS
    return frame


def as_ranked(words: pd.DataFrame) -> pd.DataFrame:
    """Return both ends of `analysis.by_word` as `ranking` draws them: words lead to no page."""
    half = t_half(words["degrees"].to_numpy()) * words["z_se"]
    return words.rename(columns={"word": "text"}).assign(token_id=-1, half=half)


def readable_range(low: pd.Series, value: pd.Series, high: pd.Series) -> list[float]:
    """Return the ends of an axis on which no wide interval squeezes the others: it is cut at the edge."""
    first, last = float(value.min()), float(value.max())
    reach = REACH * ((last - first) or 1.0)
    start = max(float(low.fillna(value).min()), first - reach)
    end = min(float(high.fillna(value).max()), last + reach)
    margin = 0.06 * ((end - start) or 1.0)
    return [start - margin, end + margin]


def ranking(both: pd.DataFrame) -> go.Figure:
    """Return z, or the mean nnz, with 95 % intervals, of the tokens at both ends of a ranking: two panels, one scale.

    Args:
        both: the rows of `both_ends`, as `ranked_by` returns them.
    """
    axis = both.attrs.get("axis", Z_AXIS)
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.2)
    panels = [both[both["end"] == end] for end in ENDS]
    half_width = both["half"].fillna(0)
    reach = readable_range(both["z"] - half_width, both["z"], both["z"] + half_width)
    row_count = max(map(len, panels))
    for column, rows in enumerate(panels, start=1):
        y = list(range(len(rows)))
        figure.add_scatter(
            x=rows["z"],
            y=y,
            mode="markers",
            marker={"color": BLUE, "size": 8},
            error_x={"type": "data", "array": rows["half"], "thickness": 1.4, "width": 0, "color": BLUE},
            customdata=np.column_stack([rows["token_id"], rows["count"], rows["sequences"], rows["mean"]]),
            text=[plot_label(text, 40) for text in rows["text"]],
            hovertemplate=("%{text}<br>" if axis == MEAN_AXIS else "%{text}<br>z %{x:.2f}, ")
            + "mean nnz %{customdata[3]:.3g}<br>"
            "count %{customdata[1]:,}, sequences %{customdata[2]:,}<extra></extra>",
            row=1,
            col=column,
        )
        figure.update_yaxes(
            tickvals=y,
            ticktext=[plot_label(text) for text in rows["text"]],
            range=[row_count - 0.4, -0.6],
            showgrid=False,
            row=1,
            col=column,
        )
        if axis == Z_AXIS:
            figure.add_vline(x=0, line=DOTTED, row=1, col=column)
    finish(figure, 80 + 22 * row_count, left=110, top=26)
    figure.update_yaxes(automargin=True)  # names may be as wide as any script
    figure.update_yaxes(tickfont={"family": "Source Code Pro, monospace", "size": 12})
    figure.update_xaxes(range=reach, title=axis)
    figure.update_layout(annotations=[panel_title(end, column) for column, end in enumerate(ENDS, start=1)])
    return figure


def class_dots(frame: pd.DataFrame) -> go.Figure:
    """Return the mean z of each class of tokens with its 95 % interval (`analysis.token_classes`)."""
    y = list(range(len(frame)))
    figure = go.Figure(
        dots(
            frame["z"],
            y,
            frame["low"],
            frame["high"],
            size=9,
            customdata=frame[["tokens", "count", "mean", "loss_mean"]],
            hovertemplate="z %{x:.2f}, mean nnz %{customdata[2]:.3g}, loss %{customdata[3]:.2f} nats<br>"
            "%{customdata[1]:,} tokens, %{customdata[0]:,} distinct<extra></extra>",
        )
    )
    finish(figure, 106 + 30 * len(frame), left=190, top=16, bottom=60)
    figure.add_vline(x=0, line=DOTTED)
    names = [f"{name} · {percent(share)}" for name, share in zip(frame["class"], frame["share"], strict=True)]
    figure.update_yaxes(tickvals=y, ticktext=names, range=[len(frame) - 0.4, -0.6], showgrid=False)
    title = Z_AXIS.replace(" from", "<br>from")  # beside the names a phone has no room for one line
    figure.update_xaxes(title=title, range=readable_range(frame["low"], frame["z"], frame["high"]))
    return figure


def word_by_layer(frame: pd.DataFrame) -> go.Figure:
    """Return a word's mean nnz in each layer, filled, beside that of all tokens, open.

    frame: columns layer, nnz, run_nnz
    """
    figure = go.Figure()
    for name, column, marker in (
        ("all tokens", "run_nnz", {"size": 9, "symbol": "circle-open", "color": GREY}),
        ("this word", "nnz", {"size": 8, "color": BLUE}),
    ):
        figure.add_scatter(
            name=name,
            x=frame["layer"],
            y=frame[column],
            mode="lines+markers",
            line={"color": marker["color"], "width": 1.2},
            marker=marker,
            hovertemplate=f"layer %{{x:.0f}}: %{{y:.3g}} neurons, {name}<extra></extra>",
        )
    finish(figure, 250)
    layers_across(figure, [int(layer) for layer in frame["layer"]])
    figure.update_yaxes(title="mean nnz", **log_scale(pd.concat([frame["nnz"], frame["run_nnz"]])))
    return figure


def profile(frame: pd.DataFrame) -> go.Figure:
    """Return one token's z in each layer, with 95 % intervals (`analysis.token_profile`)."""
    half = t_half(frame["effective"].to_numpy() - 1) * frame["z_se"]
    figure = go.Figure(
        go.Scatter(
            x=frame["layer"],
            y=frame["z"],
            mode="lines+markers",
            line={"color": BLUE, "width": 1.2},
            marker={"size": 8},
            error_y={"type": "data", "array": half, "thickness": 1.4, "width": 0},
            customdata=frame[["mean", "count"]],
            hovertemplate="layer %{x:.0f}: z %{y:.2f}<br>mean nnz %{customdata[0]:.3g}, n = %{customdata[1]:,}"
            "<extra></extra>",
        )
    )
    finish(figure, 250)
    figure.add_hline(y=0, line=DOTTED)
    layers_across(figure, [int(layer) for layer in frame["layer"]])
    figure.update_yaxes(title="z, standard deviations")
    return figure
