"""`twell ablate`: take things away from the model of a run, and write what the loss says into the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from twell.workbench.ablations.appended import append, appending
from twell.workbench.ablations.first_order import chosen_neurons, first_order
from twell.workbench.ablations.options import AblateOptions, refuse_target
from twell.workbench.ablations.spelled import STUDY, STUDY_WITHOUT_ZEROS, Condition, parse
from twell.workbench.ablations.study import Study, effective, neuron_fires, note_budget, run_study
from twell.workbench.capturing.command import capture
from twell.workbench.capturing.progress import Batches
from twell.workbench.errors import UserError
from twell.workbench.interrupt import stopped_by_sigterm
from twell.workbench.models.own_code import OwnModel, open_own, refuse_other_weights, where_of
from twell.workbench.option_fields import check_bounds
from twell.workbench.options import CaptureOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.tables.effects import OWN_TOKENS
from twell.workbench.text.batches import batches
from twell.workbench.text.recorded import recorded_sequences
from twell.workbench.text.sequences import Sequence as TokenSequence
from twell.workbench.text.sequences import documents, sequences
from twell.workbench.text.sources import TextSource, open_sources

MIXTURES = 5  # that are run together for a budget, each smaller than the one before, until one keeps it
SHARES = "smallest:0.25,0.4,0.5,0.6,0.75,0.9"  # that a budget is divided by, in each layer
TOKENS = {"cpu": 20_000, "cuda": 500_000}
BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}


@stopped_by_sigterm()
def ablate(
    options: AblateOptions,
    allocated: Callable[[Run, float, Sequence[str]], str] | None = None,
    measured: Callable[[int], object] = lambda _: None,
) -> Run:
    """Measure a study, write it into the run, and return the run.

    allocated: returns the condition for a budget, once each layer was measured alone, after conditions that broke it;
    "" where the last of them keeps it, or nothing smaller is left; measured: called with the number of each study in
    the run

    Raises UserError for a run, a model or a condition that cannot be used, and KeyboardInterrupt when stopped; batches
    that were measured until then stay.
    """
    check_bounds(options)
    if not (Path(options.target) / manifests.FILE).exists():
        options = _captured(options)
    run = open_run(options.target)
    if run.manifest.only_trains:
        raise UserError(f"Expected a run of `twell capture`, {run.path} is a training: capture its model first.")
    own = model_of(run, options.model, options.device)
    sources = open_sources(options.text) if options.text else None
    if options.budget is None or allocated is None:
        return measure(run, own, options, sources, False, measured)
    alone = tuple(f"{SHARES}@{layer}" for layer in range(own.layers))
    run = measure(run, own, replace(options, condition=(*options.condition, *alone)), sources, False, measured)
    run_together: list[str] = []
    while len(run_together) < MIXTURES and (condition := allocated(run, options.budget, run_together)):
        run_together.append(condition)
        mixture = replace(options, condition=(condition,), neurons=0)
        run = measure(run, own, mixture, sources, False, measured, options.budget)
    return run


def measure(
    run: Run,
    own: OwnModel,
    options: AblateOptions,
    sources: list[TextSource] | None = None,
    quiet: bool = True,
    measured: Callable[[int], object] = lambda _: None,
    budget: float | None = None,
) -> Run:
    """Measure a study of a model that is loaded already. sources: the text, None for the run's own tokens; measured:
    called with the study's number in the run; budget: that its one condition is to keep, in nats a token."""
    with_zeros = own.has_zeros and not run.manifest.options.get("threshold")
    default = () if options.neurons else STUDY if with_zeros else STUDY_WITHOUT_ZEROS
    study = Study(
        parse(options.condition or default, own.layers),
        _sequences(run, own, options, sources),
        [OWN_TOKENS] if sources is None else [source.name for source in sources],
        options.batch_tokens or BATCH_TOKENS[own.device.type],
        options.seed,
    )
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=quiet)
    if options.neurons:
        study = replace(
            study, conditions=[*study.conditions, *_single_neurons(run, own, study, options.neurons, console)]
        )
    study, left_out = effective(run, own, study)
    for sentence in left_out:  # a caller from Python is told too
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(sentence)
    tokens = sum(len(sequence.ids) for sequence in study.sequences)
    count = f"{len(study.conditions)} condition{'s' if len(study.conditions) > 1 else ''}"
    console.print(f"{count} on {tokens:,} tokens, beside the untouched model …")
    with Batches(console) as bar:
        run, number = run_study(run, own, study, lambda _, total: bar.advance(total))
    measured(number)
    return run if budget is None else note_budget(run, number, budget)


def unprinted(run: Run) -> str:
    """Return the line on a study's effects where the analysis that prints them is not installed."""
    return (
        f"{run.path}: recorded, in its table effects. To see it here, or where you copy the run to: pip install "
        "'twell-workbench[dashboard]', then page What matters of `twell app`, or `effects` of twell.analysis."
    )


def _single_neurons(run: Run, own: OwnModel, study: Study, count: int, console: Console) -> list[Condition]:
    """Estimate every neuron's effect, write the estimates into the run, and return the neurons to measure exactly."""
    console.print(f"Estimating the effect of {sum(own.widths):,} neurons by gradient × activation …")
    cut = list(batches(study.sequences, study.batch_tokens, study.special))
    with Batches(console) as bar:
        change, tokens = first_order(own, cut, partial(bar.advance, len(cut)))
    layer, neuron = np.nonzero(np.arange(own.d_ff) < np.array(own.widths)[:, None])
    estimates = change[layer, neuron]
    columns = {"layer": layer, "neuron": neuron, "estimate_sum": estimates, "tokens": np.full(len(layer), tokens)}
    with appending(run.path):
        append(run.path, "neuron_effects", columns)
    by_layer = chosen_neurons(change, neuron_fires(run), count, study.seed)
    return [Condition("neurons", neurons={layer: (neuron,)}) for layer, chosen in by_layer.items() for neuron in chosen]


def model_of(run: Run, given: str | None, device: str) -> OwnModel:
    """Load the model that a run was recorded with, by its own code. Raises UserError for other weights."""
    name, revision = where_of(run, given)
    dtype = getattr(torch, run.manifest.dtype)
    own = open_own(name, revision, device, dtype)
    if own.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        own.model.float()  # a CPU has no fast products of these
    refuse_other_weights(run, own.weights, name)
    return own


def refuse_other_model(run: Run, own: OwnModel) -> None:
    """Raise UserError for a model of other sizes than a run's."""
    if (own.layers, own.d_ff) != (run.layers, run.d_ff):
        raise UserError(
            f"Expected the model of {run.path}, {run.layers} layers of {run.d_ff:,} neurons, got {own.name} with "
            f"{own.layers} of {own.d_ff:,}."
        )


def _captured(options: AblateOptions) -> AblateOptions:
    """Capture a model on a text, and return the options of a study of that run."""
    refuse_target(options)
    chosen: dict[str, Any] = {"model": options.target, "text": options.text, "out": options.out, "timings": 0}
    capture(CaptureOptions(**chosen, tokens=options.tokens, device=options.device, resume=True))
    return replace(options, target=str(options.out), text=(), model=None if options.model else options.target)


def _sequences(
    run: Run, own: OwnModel, options: AblateOptions, sources: list[TextSource] | None
) -> list[TokenSequence]:
    """Return the study's text as sequences."""
    refuse_other_model(run, own)
    tokens = options.tokens or TOKENS[own.device.type]
    if sources is None:
        return recorded_sequences(run, tokens, spread=True, or_else="give a text by --text")
    return text_sequences(run, own, sources, tokens)


def text_sequences(run: Run, own: OwnModel, sources: list[TextSource], tokens: int) -> list[TokenSequence]:
    """Return the first tokens of a text, cut as the run's were, as sequences."""
    from transformers import AutoTokenizer

    folder = own.checkpoint.folder if own.checkpoint else own.model.name_or_path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    chosen: list[TokenSequence] = []
    for sequence in sequences(documents(sources), tokenizer, int(run.manifest.options.get("seq_len", 2048))):
        chosen.append(replace(sequence, ids=sequence.ids[:tokens]))
        tokens -= len(sequence.ids)
        if tokens <= 0:
            break
    return chosen
