"""Page Positions: how nnz changes along a sequence, layer by layer."""

from __future__ import annotations

from twell import analysis
from twell.analysis.figures import plots
from twell.analysis.figures.positions import decay_lengths, described
from twell.analysis.memo import built_once
from twell.app.activity.position_data import FITS, POSITION_BINS, by_position
from twell.app.ui import widgets
from twell.app.ui.formatting import BANDS, plural, whole, with_intervals
from twell.app.ui.query import Query, query
from twell.app.ui.questions import Question, draw_questions
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run

QUESTIONS = (
    Question(
        "Position 0 against later positions",
        Query(analysis.first_positions),
        plots.starts,
        "Mean nnz at position 0 over that of later positions, by layer, {intervals}. The start "
        "of a document, which may carry a special token, stands apart from a cut, where a sequence goes on within one."
        " A layer far above 1 spends its busiest rows on tokens without context.",
    ),
    Question(
        "Firings in common with earlier tokens",
        Query(analysis.reuse),
        plots.lags,
        "Of the neurons that a token fires, the share that the token so many places back fired as well. Dotted: with a "
        "token of another sequence, what chance gives. Blue: first layers; amber: last. How far a line stands above "
        "its dotted one says what the sequence itself repeats.",
        reads_firings=True,
    ),
    Question(
        "What a cache of neurons would serve",
        Query(analysis.reuse_cache),
        plots.cache,
        "A cache holds the neurons that the last tokens fired, one to many of them from left to right. Drawn is the "
        "share of the next token's firings that it serves against its mean size. Blue: first layers; amber: last. "
        "A steep line says that the weights of few neurons must be near, and the rest may stay in slower memory.",
        reads_firings=True,
    ),
)


def draw_decay(run: Run) -> None:
    """Draw over how many tokens nnz decays along a sequence, layer by layer."""
    result = query(run, FITS)
    fits = result.frame
    verdicts = fits.loc[fits["layer"] >= 0, "verdict"].value_counts()
    counts = ", ".join(f"{verdict} in {count}" for verdict, count in verdicts.items())
    if described(fits).empty:
        widgets.heading(
            "How fast it falls off",
            f"As an exponential in no layer. Which curve fits best (AICc): {counts} of {verdicts.sum()} layers. "
            "Data has the fits.",
            result,
        )
        return
    widgets.heading(
        "How fast it falls off",
        "After how many tokens, λ, what the beginning fires more has shrunk to 37 %: of a + b·exp(−p/λ), fitted to "
        "bands of positions p from 1 on, with 95 % intervals over groups of documents. Which curve fits best (AICc): "
        f"{counts} of {verdicts.sum()} layers; at the right with R² on the means of the bands. Left out are "
        "layers that another curve describes better, or whose λ has no finite interval: Data has their fits.",
        result,
    )
    widgets.draw(built_once(decay_lengths, fits), "decay", "Length over which nnz falls off, by layer")


def draw_page(run: Run) -> None:
    """Draw nnz by position, a panel a layer, and the fits."""
    result = query(run, POSITION_BINS)
    bins = result.frame
    fitted = " Dashed: the fitted exponential, in layers that have a λ below." if "fit" in bins else ""
    first = bins["first"].any()
    sequences = int(bins.loc[bins["first"], "tokens"].max()) if first else run.manifest.sequences
    first_position = (
        "The first position of a sequence (amber) is drawn separately and is not part of the mean."
        if first
        else "The first position of every sequence is a special token and is left out."
    )
    caption = (
        f"{plural(sequences, 'sequence')}, up to {whole(bins['position_to'].max() + 1)} tokens; both axes logarithmic; "
        f"{with_intervals(bins['low'], BANDS + ', or a few that are alike')}. {first_position}{fitted}"
    )
    title = "Mean nnz by position, relative to the layer's mean"
    widgets.heading(title, caption, result)
    widgets.draw(by_position(run), "positions", "Mean nnz by position, a panel a layer", wide=True)
    with widgets.show_errors():
        draw_decay(run)


widgets.title("How does activity change along a sequence?")
with widgets.show_errors():
    draw_page(current_run())
    draw_questions(current_run(), QUESTIONS)
