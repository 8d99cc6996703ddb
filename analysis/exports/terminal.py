"""A run in the terminal: its text, each token shaded by the neurons it fires, and a list of what fires most.

Shades are backgrounds of the 256 colours that terminals know, with black or white text of their own, so that they read
the same on dark and on light. Without colours the same lines come plain. What tokens hold that a terminal would obey is
written out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from twell.analysis.figures.labels import plural
from twell.analysis.neurons.at_token import neurons_at
from twell.analysis.passage import ALL, loudest, passage, scale, sequences, values
from twell.analysis.tokens.by_token import by_token
from twell.analysis.tokens.text_around import pieces
from twell.analysis.tokens.words import by_word
from twell.workbench.errors import Missing, UserError
from twell.workbench.option_fields import check_bounds
from twell.workbench.options import TokensOptions
from twell.workbench.run.manifest import spelled
from twell.workbench.run.schema import DECODE, nnz_columns
from twell.workbench.run.store import Run, open_run

SHADES = ("", "30;48;5;195", "30;48;5;153", "30;48;5;111", "97;48;5;32", "97;48;5;25")  # from the faintest to the most
UNCOUNTED, MADE = "4", "3"  # underlined, italic
LAYERS, NEURONS = 5, 3  # listed
BAR, EIGHTHS = 24, " ▏▎▍▌▋▊▉"  # characters of the longest bar; parts of one


def shaded_lines(run: Run, layer: int | None = None, colored: bool = True) -> Iterator[str]:
    """Yield the lines that show a run's text: one on the run, the text, a legend, top layers and top tokens.

    layer: shade by its nnz; None: by the sum of all layers. Raises UserError if the run has no such layer.
    """
    if layer is not None and not 0 <= layer < run.layers:
        raise UserError(f"Expected a layer from 0 to {run.layers - 1}, got {layer}.")
    shade = ALL if layer is None else f"L{layer}"
    of_run, numbers = scale(run, shade), sequences(run)["sequence"]
    passages = [passage(run, int(number)) for number in numbers]
    tokens = pd.concat(passages, ignore_index=True)
    counted = tokens[tokens["flags"] == 0]
    mean = counted[nnz_columns(run.layers)].mean()
    sparsity = 1 - mean.sum() / run.neurons
    made = int((tokens["phase"] == DECODE).sum())
    generated = f", {made:,} of them generated" if made else ""
    about = f"{run.manifest.model['name']}: {len(tokens):,} tokens{generated}, {len(counted):,} counted"
    about += f", mean nnz {mean.mean():,.1f} of {spelled(run.manifest.widths)} a layer"
    yield f"{about} (sparsity {sparsity:.2%}){_losses(run, tokens)}"
    yield ""
    for rows in passages:
        texts = pieces(run.vocab["bytes"].reindex(rows["token_id"]))
        shares = of_run.share(values(rows, run, shade))
        codes = [_code(share, row.flags, row.phase) for share, row in zip(shares, rows.itertuples(), strict=True)]
        yield "".join(_painted(text, code if colored else "") for text, code in zip(texts, codes, strict=True))
    yield ""
    if colored:
        steps = "".join(_painted("  ", code) for code in SHADES)
        italic = ", italic: generated" if made else ""
        yield f"{of_run.name}: ≤ {of_run.low:,.0f} {steps} ≥ {of_run.high:,.0f}   underlined: not counted{italic}"
    if not mean.any():
        yield "no neuron fires on any of these tokens"
        return
    top = mean.sort_values(ascending=False).head(LAYERS)
    named = (f"L{int(name[4:])} {value:,.1f}" for name, value in top.items())
    yield f"layers that fire most, neurons a token: {', '.join(named)}"
    yield f"tokens that fire most, {of_run.name}:"
    yield from _top_tokens(run, shade, layer)


def _losses(run: Run, tokens: pd.DataFrame) -> str:
    """Return the mean loss of the text in nats, and apart from it that of what was generated: the model itself found
    it likely. tokens: rows of `passage`, whose losses are in float16"""
    made = tokens["phase"] == DECODE
    if run.manifest.loss is None or not made.any():
        return "" if run.manifest.loss is None else f", loss {run.manifest.loss:.3f} nats"
    read, written = tokens["surprisal"][~made].mean(), tokens["surprisal"][made].mean()
    losses = [] if np.isnan(read) else [f"{read:.2f} nats of the text"]
    losses += [] if np.isnan(written) else [f"{written:.2f} of what was generated"]
    return f", loss {' and '.join(losses)}" if losses else ""


def _top_tokens(run: Run, shade: str, layer: int | None) -> Iterator[str]:
    """Yield a line for each of the tokens that fire most, with the neurons of its largest values."""
    rows = loudest(run, shade)
    names = [_quoted(token) for token in rows["token"]]
    width = max((len(name) for name in names), default=0)
    for name, row in zip(names, rows.itertuples(), strict=True):
        place = f"{row.sequence}:{row.position}" if run.manifest.sequences > 1 else str(row.position)
        try:
            fired = neurons_at(run, row.sequence, row.position)
            fired = fired if layer is None else fired[fired["layer"] == layer]
            neurons = ", ".join(f"{one.label} {one.value:.2f}" for one in fired.head(NEURONS).itertuples())
        except Missing:
            neurons = ""
        yield f"  {row.value:>6,.0f}  {name:<{width}}  at {place:<6} {neurons}".rstrip()


def tokens(options: TokensOptions) -> None:
    """Print the tokens or words of a run that fire most neurons a layer, then those that fire fewest."""
    check_bounds(options)
    for line in token_lines(
        open_run(options.run, options.without_damaged), options.words, options.rows, options.min_count
    ):
        print(line)


def token_lines(run: Run, words: bool = False, rows: int = 12, min_count: int = 20) -> Iterator[str]:
    """Yield the lines that list tokens, or whole words, by mean nnz a layer: `rows` at each end, each with its standard
    error over documents (words have none), its count and a bar."""
    table = by_word(run, min_count) if words else by_token(run, min_count, spelled=True)
    table = table.sort_values("mean", ascending=False, ignore_index=True)
    name, kind = ("word", "words") if words else ("text", "tokens")
    yield f"{run.name}: {len(table):,} {kind} that occur {min_count} or more times, by the neurons of a layer that"
    errors = "" if words else ", ± standard error over documents"
    yield f"they fire (of {spelled(run.manifest.widths)}; mean over {plural(run.layers, 'layer')}{errors})"
    ends = [("most", table.head(rows))]
    ends += [("fewest", table.iloc[max(rows, len(table) - rows) :])] if len(table) > rows else []
    longest = table["mean"].iloc[0]
    if not longest:
        yield "\nnone of them fires a neuron"
        return
    widest = max(len(_quoted(text)) for _, end in ends for text in end[name])
    for which, end in ends:
        yield f"\n{which}:"
        for row in end.to_dict("records"):
            error = row.get("mean_se", np.nan)
            spread = "" if np.isnan(error) else f"± {error:.2g}"
            line = f"  {row['mean']:>7,.1f} {spread:<8} {row['count']:>9,} ×  {_quoted(row[name]):<{widest}}"
            yield f"{line}  {_bar(row['mean'] / longest)}".rstrip()


def _quoted(text: str) -> str:
    """Return a text of the vocabulary, whose control characters are written out already, in quotation marks."""
    return repr(text).replace("\\\\", "\\")


def _bar(share: float) -> str:
    """Return a bar of blocks. share: of the longest, 0 to 1"""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _code(share: float, flags: int, phase: int) -> str:
    """Return the codes of a token's looks. share: of the scale, 0 to 1, or NaN."""
    step = 0 if np.isnan(share) or flags else min(int(share * len(SHADES)), len(SHADES) - 1)
    looks = (SHADES[step], UNCOUNTED if flags else "", MADE if phase == DECODE else "")
    return ";".join(look for look in looks if look)


def _painted(text: str, code: str) -> str:
    """Return text in the looks of a code, which do not run over the end of a line."""
    lines = [_seen(line) for line in text.split("\n")]
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if code and line else line for line in lines)


def _seen(text: str) -> str:
    """Return text with what a terminal would obey written out."""
    return "".join(char if char.isprintable() or char == "\t" else f"⟨U+{ord(char):04X}⟩" for char in text)
