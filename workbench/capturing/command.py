"""Capture: a model reads text, and what its FFN neurons do goes to disk while it reads.

The idea: text is tokenised ahead in a thread of its own, batches of whole sequences run one after another, and while
the device works on one batch the host writes the batch before. Counts are reduced on the device; a token costs a few
bytes of copy and of disk. Sums stay on the device until their part of the run closes. With `--generate` each sequence
is a prompt, which the model continues (`generate.py`).

Ctrl-C and SIGTERM stop at the end of a window, within a few batches: what was counted is kept, and the run is marked
`interrupted`. The same happens when text cannot be read further. A run in which no token could be counted is kept, and
ends with a sentence and exit code 2. After a full disk or a killed process the parts that are whole remain. `--resume`
continues such a run; it costs tokenising once more what was read.

    twell capture builtin:demo --text builtin:passages --out runs/passages
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain

from rich.console import Console

from twell.workbench.capturing.batch_size import about_batches, batch_rows
from twell.workbench.capturing.distributed import FAILED, Ranks
from twell.workbench.capturing.firings import parse_fired
from twell.workbench.capturing.prefetch import BatchStream, read_batches
from twell.workbench.capturing.progress import Bar, expected_tokens, nnz_sum, outcome, plan, refuse_if_full
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import ResumePoint, new_manifest
from twell.workbench.errors import UserError
from twell.workbench.interrupt import Interrupt
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.option_fields import check_bounds
from twell.workbench.options import CaptureOptions
from twell.workbench.run.checks.uncounted import counts_no_token, no_counted_token, nonfinite_note
from twell.workbench.run.checks.unfinished import refuse_unfinished
from twell.workbench.run.homes.model_home import remember
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter, refuse_existing
from twell.workbench.text.batches import Batch
from twell.workbench.text.sources import TextSource, open_sources

HANDS = "the batches in hand, so that what is counted is kept"  # what an interrupt waits for


def capture(options: CaptureOptions, given: list[TextSource] | None = None, quiet: bool = False) -> Run:
    """Record a run. Nothing is written before the model is loaded and the first text is read.

    given: the text, opened, in place of the options' names; quiet: print nothing
    Raises UserError, and KeyboardInterrupt when stopped; the run written until then stays readable.
    """
    check_bounds(options)
    ranks = Ranks.from_environment(options.device)
    try:
        resume_point = ResumePoint.find(options, ranks) if ranks.rank == 0 else None
        if resume_point is not None and resume_point.run.manifest.status == COMPLETE:
            resume_point.refuse_other_options(options)
            print(f"{options.out} is complete: nothing is left to capture.")
            ranks.post_begun(COMPLETE)
            return resume_point.run
        if resume_point is None and ranks.rank == 0:
            refuse_unfinished(options.out)
            refuse_existing(options.out)
        sources = open_sources(options.text) if given is None else given
        ranks.refuse_stdin(sources)
        loaded = load(
            options.model, options.revision, options.device, kernel=options.kernel, threshold=options.threshold
        )
        return record(loaded, options, sources, resume_point, ranks, quiet)
    except BaseException:
        ranks.post_begun(FAILED)
        raise
    finally:
        ranks.release()


def record(
    loaded: LoadedModel,
    options: CaptureOptions,
    sources: list[TextSource],
    resume_point: ResumePoint | None = None,
    ranks: Ranks | None = None,
    quiet: bool = False,
) -> Run:
    """Record a run with a model that is loaded already.

    sources: the text, opened; resume_point: the run in --out that is continued, None for a new run
    ranks: the processes that capture together; default: this process alone
    quiet: print nothing
    """
    ranks = ranks or Ranks()
    _refuse_model(loaded, options)
    remember(loaded.weights, options.model)
    rows = batch_rows(loaded, options, [source.size for source in sources], ranks.world)
    if resume_point is not None and options.batch_tokens is None:
        rows = int(resume_point.run.manifest.options.get("batch_tokens", rows))
    if options.batch_tokens is None:
        rows = ranks.agreed_batch(rows)
    note, options = about_batches(rows, options), replace(options, batch_tokens=rows)
    planned = new_manifest(loaded, options, [source.name for source in sources])
    planned.ranks = ranks.blank_ranks()
    with closing(read_batches(loaded, options, sources, ranks)) as stream:
        batches: Iterator[Batch] = stream
        if resume_point is None and ranks.rank == 0:  # text that cannot be read is refused while nothing is written
            first = next(stream, None)
            if first is None:
                raise UserError(f"Expected a token of text in {', '.join(options.text)}, got none: give other text.")
            batches = chain([first], stream)
        total = expected_tokens(loaded, options, sources)
        refuse_if_full(loaded, options, total)
        if ranks.world > 1:
            share = ranks.begin(options.out, planned if resume_point is None else resume_point.resume_manifest(planned))
            if share is None:
                return open_run(options.out)
            resume_point = ResumePoint(share)
        manifest = planned
        if resume_point is not None:
            manifest = resume_point.resume_manifest(planned)
            batches = resume_point.skip_recorded(batches)
            if resume_point.sequences:  # other text is refused while the run is as it was
                batches = chain([first] if (first := next(batches, None)) is not None else [], batches)
        if resume_point is None:
            refuse_unfinished(options.out)  # another capture may have begun it while the model was loaded
        writer = RunWriter(options.out, manifest, resume=resume_point is not None, share=ranks)
        console = Console(highlight=False, soft_wrap=True, markup=False, quiet=quiet or ranks.rank > 0)
        console.print(plan(loaded, options, total, note))
        return _record(Recorder(loaded, writer, options), ranks, sources, stream, batches, total, console)


def _refuse_model(loaded: LoadedModel, options: CaptureOptions) -> None:
    """Raise UserError for options that this model cannot be captured with."""
    if options.loss and not loaded.head_is_all:
        raise UserError(
            f"Expected logits that are the head's product with the last hidden state, got others in {loaded.name} "
            f"({loaded.family}), as by a cap or a scale: add --no-loss, which counts without them."
        )
    if options.fired:
        parse_fired(options.fired, loaded.layers)


def _record(
    recorder: Recorder,
    ranks: Ranks,
    sources: list[TextSource],
    stream: BatchStream,
    batches: Iterator[Batch],
    total: int | None,
    console: Console,
) -> Run:
    """Run the batches, end the run, and print what was recorded.

    stream: what reads the sources, closed once no batch is needed any more; batches: those of it that are to be run
    total: about how many tokens they come to in all ranks, None if unknown
    """
    options, writer = recorder.options, recorder.writer
    recorder.tell = console.print
    try:
        with Interrupt(HANDS) as interrupt, Bar(total, console, writer.manifest.tokens * ranks.world) as bar:
            unreadable = _run_batches(recorder, batches, bar, interrupt, ranks.world)
            stream.close()
            for examples in ranks.gather_examples(options.out, lambda: interrupt.requested or unreadable is not None):
                recorder.merge_examples(examples)
            stopped = interrupt.requested or unreadable is not None
            recorder.finish(INTERRUPTED if stopped else COMPLETE, sources)
            ranks.end(options.out)
    except BaseException:
        recorder.rescue()
        raise
    run = open_run(options.out)
    if ranks.rank == 0:  # it ends last: to the others the run may lack parts that are still being written
        counted, nnz_mean = (recorder.counted, recorder.nnz_mean) if ranks.world == 1 else _counted(run)
        console.print(outcome(run, nnz_mean, counted))
        if note := nonfinite_note(run):
            console.print(note)
    if unreadable is not None:
        raise unreadable
    if ranks.lost:
        raise ranks.lost_error(run.manifest)
    if interrupt.requested:
        raise KeyboardInterrupt
    if recorder.nnz_mean is None and ranks.rank == 0 and counts_no_token(run):
        raise no_counted_token(run)
    return run


def _counted(run: Run) -> tuple[int, float | None]:
    """Return the unflagged tokens of all ranks, and their mean nnz over all layers; None where there are none."""
    tokens, total = nnz_sum(run)
    return tokens, total / (tokens * run.layers) if tokens else None


def _run_batches(
    recorder: Recorder, batches: Iterator[Batch], bar: Bar, interrupt: Interrupt, world: int
) -> UserError | None:
    """Run batches until their end, an interrupt, or text that cannot be read; return the error of the last.

    world: how many ranks advance alike, for the bar
    """
    while True:
        try:
            batch = next(batches, None)
        except UserError as error:
            return error
        if batch is None:
            return None
        recorder.step(batch)
        bar.advance(recorder.fresh_tokens * world, recorder.nnz_mean, recorder.timings.spent)
        if interrupt.requested and batch.ends:
            return None
