"""Show a capture to a person before, while and after it runs, and how far other passes over a text are.

On a terminal a bar with rate, estimate and current mean nnz; elsewhere a plain line now and then.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from twell.workbench.capturing.prefetch import prompt_length
from twell.workbench.doctor import device_name, why
from twell.workbench.errors import UserError, lacking
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import COMPLETE, spelled
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run
from twell.workbench.text.sequences import documents
from twell.workbench.text.sources import TextSource

SAMPLE = 2**16  # characters whose tokens are counted, to estimate how many a file has
BYTES_PER_COUNT = 1.2  # on disk, a token and layer
BYTES_PER_TOKEN = 6  # on disk, a token, whatever the layers
BYTES_PER_EXAMPLE = 35  # on disk
LINES = (2.0, 6.0)  # seconds after the first batch at which the first lines come, where there is no terminal
LINE_SECONDS = 15.0  # between two later ones


def expected_tokens(loaded: LoadedModel, options: CaptureOptions, sources: list[TextSource]) -> int | None:
    """Estimate the tokens of the run, at least those that --generate adds included; None if a size is not known."""
    total = _text_tokens(loaded.tokenizer, sources, options.tokens)
    if total is not None and options.generate:  # at the least: every prompt as long as it can be
        total += total * options.generate // prompt_length(loaded, options)
    return total


def _text_tokens(tokenizer: PreTrainedTokenizerFast, sources: list[TextSource], limit: int | None) -> int | None:
    """Estimate the tokens of the text, up to `limit`, from the beginning of each file; None if a size is not known."""
    total = 0.0
    for source in sources:
        if source.size is None:
            return limit
        piece = next(documents([TextSource(source.name)])).text[:SAMPLE]
        total += source.size * len(tokenizer(piece)["input_ids"]) / len(piece.encode())
    return round(total) if limit is None else min(limit, round(total))


def refuse_if_full(loaded: LoadedModel, options: CaptureOptions, tokens: int | None) -> None:
    """Raise UserError if --out cannot be written to, or its disk has less room than the run will take.

    tokens: of the run, None if not known
    """
    folder = options.out.absolute()
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    if not (disk.total and os.access(folder, os.W_OK)):  # no disk at all, as /proc, or one that this user only reads
        raise UserError(f"Expected --out in a folder that can be written to, got {options.out}: choose another --out.")
    needed = math.ceil(expected_bytes(loaded, options, tokens or 0))
    if needed > disk.free:
        wanted, there = (f"{size / 1e6:,.1f} MB" for size in (needed, disk.free))
        if wanted == there:
            wanted, there = (f"{size:,} bytes" for size in (needed, disk.free))
        raise UserError(
            f"Expected {wanted} of room for the run in {options.out}, got {there}: free some space, choose another "
            "--out, or record fewer --tokens."
        )


def expected_bytes(loaded: LoadedModel, options: CaptureOptions, tokens: int) -> float:
    """Estimate the bytes that a run of `tokens` tokens takes on disk."""
    examples = 2 * options.examples * loaded.layers * loaded.d_ff * BYTES_PER_EXAMPLE
    return tokens * (loaded.layers * BYTES_PER_COUNT + BYTES_PER_TOKEN) + examples


def plan(loaded: LoadedModel, options: CaptureOptions, tokens: int | None, about_batches: str = "") -> str:
    """Return three lines: the model and device, the kernel and why it was chosen, and the size of the run on disk.

    about_batches: what the last line says of them too
    """
    amount = (
        f"about {tokens:,} tokens, {expected_bytes(loaded, options, tokens) / 1e6:,.1f} MB on disk"
        if tokens
        else f"all of the text, {expected_bytes(loaded, options, 100_000) / 1e6:,.1f} MB on disk for 100,000 tokens"
    )
    sizes = f"{loaded.layers} layer{'s' * (loaded.layers != 1)} of {loaded.d_model} × {spelled(loaded.widths, str)}"
    return (
        f"{loaded.name} ({loaded.family}, {sizes}, {loaded.dtype}) "
        f"on {device_name(loaded.device)}\n"
        f"kernel {why(loaded.choice(options.rows_of_batch), options.kernel)}\n"
        f"{amount}{about_batches}"
    )


def nnz_sum(run: Run) -> tuple[int, int]:
    """Return the unflagged tokens of a run, and the neurons that they fired in all layers together."""
    names, tokens, total = nnz_columns(run.layers), 0, 0
    for rows in run.pieces("activity", ["flags", *names]):
        plain = rows["flags"].to_numpy() == 0
        tokens += int(plain.sum())
        total += sum(int(rows[name].to_numpy()[plain].sum(dtype=np.int64)) for name in names)
    return tokens, total


def outcome(run: Run, nnz_mean: float | None, counted: int) -> str:
    """Return one line on what was recorded and where it is. nnz_mean: over the counted tokens, None where there are
    none."""
    manifest = run.manifest
    made = ", generated tokens among them" if manifest.options.get("generate") else ""  # which are easier to predict
    loss = "" if manifest.loss is None else f", loss {manifest.loss:.3f} nats{made}"
    state = "" if manifest.status == COMPLETE else f" ({manifest.status})"
    rate = manifest.tokens / max(manifest.seconds, 1e-9)
    counts = (
        "no token counted"
        if nnz_mean is None
        else f"{counted:,} counted, mean nnz {nnz_mean:.1f} of {spelled(run.manifest.widths)}"
    )
    sparsity = "" if nnz_mean is None else f" (sparsity {1 - nnz_mean * run.layers / run.neurons:.2%})"
    return (
        f"{run.path}{state}: {manifest.tokens:,} tokens in {manifest.seconds:.1f} s ({rate:,.0f} tokens/s), "
        f"{counts}{sparsity}{loss}."
    )


def next_commands(run: Run) -> str:
    """Return a line for each command that goes on from a run here, quoted to be pasted, with what it is for."""
    above, path, page = (shlex.quote(str(word)) for word in (run.path.parent, run.path, f"{run.name}.html"))
    commands: tuple[tuple[str, str], ...] = (
        (f"twell app {above}", "look at it in the dashboard"),
        (f"twell verify {path}", "compare outputs and counts with the dense model"),
        (f"twell export {path} --out {page}", "take it along: a page, tables, a notebook"),
    )
    if lacking("dashboard"):  # the other two need it
        there = f"here, or where you copy {path} to: for `twell app`, which shows it, and `twell export`"
        commands = (commands[1], ("pip install 'twell-workbench[dashboard]'", there))
    return "\n".join(f"  {command:<48} {purpose}" for command, purpose in commands)


class Bar:
    """A progress bar; a context manager. Call `advance` after each batch.

    total, done: tokens in all (None if not known) and before the capture begins. Rates are over the time since the
    first batch, because compiling a kernel and timing the first batch say nothing about the rest.
    """

    def __init__(self, total: int | None, console: Console, done: int = 0) -> None:
        self._total, self._console = total, console
        self._done = done
        self._before: int | None = None  # tokens when the rate's clock began
        self._began, self._lines, self._aside = time.monotonic(), 0, 0.0
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), _Rate())
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
            self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, tokens: int, nnz_mean: float | None, aside: float = 0.0) -> None:
        """Show `tokens` more tokens, and the run's mean nnz so far; None until a token is counted.

        aside: seconds until now that went into something else than tokens
        """
        mean = "no token counted" if nnz_mean is None else f"mean nnz {nnz_mean:.1f}"
        self._done += tokens
        now = time.monotonic()
        if self._before is None:
            if not tokens:
                return
            self._before, self._began, self._aside = self._done, now, aside
            if self._progress is not None:
                self._progress.reset(self._task, completed=self._done)
        left = self._left(now - self._began - (aside - self._aside))
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, description=f"{left}{mean}")
        elif self._done > self._before and now - self._began >= next_line(self._lines):
            self._lines += 1
            rate = (self._done - self._before) / (now - self._began)
            self._console.print(f"{self._done:,} tokens, {rate:,.0f} tokens/s, {left}{mean}")

    def _left(self, seconds: float) -> str:
        """Return the time that is left, in words. seconds: that the tokens since the first batch took."""
        if not self._total or self._before is None or self._done <= self._before or seconds <= 0:
            return ""
        left = max(0, self._total - self._done) * seconds / (self._done - self._before)
        return f"{time_left(left)}, "


class Batches:
    """How many batches are done; a context manager. Call `advance` after each one.

    On a terminal a bar, which is drawn seldom, because it may run beside what is timed. The time that is left goes by
    the batches after the first one, before which other things are made ready.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._done, self._lines = console, 0, 0
        self._began = self._first = time.monotonic()
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("batches"), TimeRemainingColumn())
        drawn = console.is_terminal and not console.quiet
        self._bar = Progress(*columns, console=console, transient=True, disable=not drawn, refresh_per_second=2)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Batches:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, total: int) -> None:
        """Show that one more batch of `total` is done."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, total=total)
        now = time.monotonic()
        if self._done == 1:
            self._first = now
        if not self._console.is_terminal and self._done < total and now - self._began >= next_line(self._lines):
            self._lines += 1
            each = (now - self._first) / (self._done - 1) if self._done > 1 else 0.0
            left = f", {time_left((total - self._done) * each)}" if each else ""
            self._console.print(f"{self._done:,} of {total:,} batches{left}")


def next_line(lines: int) -> float:
    """Return when the next line is due where there is no terminal, in seconds; lines: so far"""
    return LINES[lines] if lines < len(LINES) else LINES[-1] + LINE_SECONDS * (lines - len(LINES) + 1)


def time_left(seconds: float) -> str:
    """Return in words how long something still takes, in seconds, or in hours or days where those would be many."""
    size, unit = next((one for one in ((86_400, "days"), (3600, "hours")) if seconds >= 2 * one[0]), (1, "s"))
    return f"about {max(0.0, seconds) / size:,.0f} {unit} left"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed: Any = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} tokens/s" if speed else "")
