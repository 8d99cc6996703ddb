"""Capture: a model reads text, and what its FFN neurons do goes to disk while it reads.

The idea: text is tokenised ahead in a thread of its own, batches of whole sequences run one after another, and while
the device works on one the host writes the one before. Counts are reduced on the device; a token costs a few bytes of
copy and of disk. Sums stay on the device until their part of the run closes. With `--generate` each sequence is
a prompt, and the model writes on (`generate.py`).

Ctrl-C and SIGTERM stop at the end of a window, within a few batches: what was counted is kept and the run is marked
`interrupted`. So does text that cannot be read further, and a full disk or a killed process keeps the parts that are
whole. `--resume` goes on from there, at the cost of tokenising once more what was read.

    twell capture builtin:demo --text builtin:passages --out runs/passages
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import chain

from rich.console import Console

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.capturing.firings import parse_fired
from twell.workbench.capturing.prefetch import Texts, prompt_length, read_batches, until_unreadable
from twell.workbench.capturing.progress import Bar, Interrupt, expected_tokens, outcome, plan, refuse_if_full
from twell.workbench.capturing.recorder import Recorder, new_manifest
from twell.workbench.capturing.resume import Recorded
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter, refuse_existing
from twell.workbench.text.batches import Batch
from twell.workbench.text.sources import Source, open_sources


def capture(options: CaptureOptions) -> Run:
    """Record a run. Nothing is written before the model is loaded and the first text is read.

    Raises UserError, and KeyboardInterrupt when stopped; the run written until then stays readable.
    """
    for name in ("tokens", "seq_len", "batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"Expected --{name.replace('_', '-')} of at least 1, got {value}.")
    for name in ("threshold", "generate", "temperature", "examples", "timings", "timings_share"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"Expected --{name.replace('_', '-')} of at least 0, got {value}.")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"Expected --seed from 0 to 2^32 - 1, got {options.seed}.")
    ranks = Ranks.here(options.device)
    try:
        recorded = Recorded.find(options, ranks) if ranks.rank == 0 else None
        if recorded is not None and recorded.run.manifest.status == COMPLETE:
            print(f"{options.out} is complete: nothing is left to capture.")
            ranks.say("begun", COMPLETE)
            return recorded.run
        if recorded is None and ranks.rank == 0:
            refuse_existing(options.out)
        opened = open_sources(options.text)
        ranks.refuse(opened)
        where = options.revision, options.device
        loaded = load(options.model, *where, kernel=options.kernel, threshold=options.threshold)
        return record(loaded, options, opened, recorded, ranks)
    except BaseException:
        ranks.say("begun", "no")
        raise
    finally:
        ranks.release()


def record(
    loaded: LoadedModel,
    options: CaptureOptions,
    sources: list[Source],
    recorded: Recorded | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """`capture` with a model that is loaded already, from the beginning or from where a recorded run ends."""
    ranks = ranks or Ranks()
    if options.loss and not loaded.head_is_all:
        raise UserError(
            f"Expected logits that are the head's product with the last hidden state, got others in {loaded.name} "
            f"({loaded.family}), as by a cap or a scale: add --no-loss, which counts without them."
        )
    if options.fired:
        parse_fired(options.fired, loaded.layers)  # refused while nothing is written
    manifest = new_manifest(loaded, options, [source.name for source in sources])
    manifest.ranks = ranks.planned()
    unreadable: list[UserError] = []
    with closing(read_batches(loaded, options, sources, ranks)) as texts:
        first = None
        if recorded is None and not (ranks.rank and options.resume):  # a run that goes on has something to skip first
            try:
                first = next(texts, None)
            except UserError as error:
                if not ranks.rank:
                    raise
                unreadable.append(error)  # the run is rank 0's to begin: it ends where this rank's text does
        if first is None and recorded is None and not ranks.rank:
            raise UserError(f"Expected a token of text in {', '.join(options.text)}, got none: give other text.")
        total = expected_tokens(loaded.tokenizer, sources, options.tokens)
        if total is not None and options.generate:  # at least: of prompts that are as long as they can be
            total += total * options.generate // prompt_length(loaded, options)
        refuse_if_full(loaded, options, total)
        if ranks.world > 1:
            share = ranks.begin(options.out, manifest, recorded)
            if share is None:
                return open_run(options.out)
            recorded = Recorded(share)
        if recorded is not None:
            manifest = recorded.goes_on(manifest)
            texts = recorded.skip(texts)
            first = next(texts, None) if first is None else first
        writer = RunWriter(options.out, manifest, resume=recorded is not None, ranks=ranks)
        recorder = Recorder(loaded, writer, options)
        rest = chain([] if first is None else [first], until_unreadable(texts, unreadable))
        return _record(recorder, ranks, sources, rest, texts, unreadable, total)


def _record(
    recorder: Recorder,
    ranks: Ranks,
    sources: list[Source],
    batches: Iterable[Batch],
    texts: Texts,
    unreadable: list[UserError],
    total: int | None,
) -> Run:
    """Runs `batches`, which come from `texts` until one is `unreadable`, and ends the run."""
    loaded, options, writer = recorder.loaded, recorder.options, recorder.writer
    console = Console(highlight=False, soft_wrap=True, quiet=ranks.rank > 0)
    console.print(plan(loaded, options, total))
    try:
        with Interrupt() as interrupt, Bar(total, console, writer.manifest.tokens * ranks.world) as bar:
            for batch in batches:
                recorder.step(batch)
                bar.advance(recorder.fresh_tokens * ranks.world, recorder.nnz_mean)
                if interrupt.asked and batch.ends:
                    break
            texts.close()  # nobody reads the sources any more
            for examples in ranks.gather(options.out, lambda: interrupt.asked or bool(unreadable)):
                recorder.take_examples(examples)
            recorder.finish(INTERRUPTED if interrupt.asked or unreadable else COMPLETE, sources)
            ranks.ended(options.out)
    except BaseException:
        recorder.rescue()
        raise
    run = open_run(options.out)
    console.print(outcome(run, recorder.nnz_mean))
    if unreadable:
        raise unreadable[0]
    if ranks.lost:
        raise ranks.died(run.manifest)
    if interrupt.asked:
        raise KeyboardInterrupt
    return run
