"""Read one text, or the tokens of a passage, with a model that is loaded already, and write a run of it.

The run has what the pages ask of a text: every count, the loss, and every single firing with its value. Cost: a forward
pass, and some 0.1 s of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from twell.workbench.capturing.prefetch import prompt_length
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import new_manifest
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.writer import RunWriter
from twell.workbench.text.batches import batches
from twell.workbench.text.given import GivenTexts
from twell.workbench.text.sequences import Sequence as Tokens
from twell.workbench.text.sequences import documents, sequences
from twell.workbench.text.vocabulary import special_ids
from twell.workbench.watching.ablation import ablate


def read(
    loaded: LoadedModel,
    out: Path,
    *,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    threshold: float | None = None,
    generate: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    silent: Sequence[tuple[int, int]] = (),
) -> int:
    """Write the run of a text, or of one sequence of token ids, to the folder `out`; return its number of tokens.

    threshold: with which the model was loaded; generate, temperature, seed: as in `twell capture`; silent: neurons, as
    pairs of layer and index, that are kept from firing meanwhile
    Raises UserError for a text without a token, and for ids that the model has not.
    """
    source = GivenTexts([text or ""])
    options = CaptureOptions(
        model=loaded.name,
        text=(source.name,),
        out=out,
        timings=0,
        loss=loaded.head_is_all,
        probes="neurons",
        fired="all",
        threshold=threshold,
        generate=generate,
        temperature=temperature,
        seed=seed,
    )
    read_ahead = prompt_length(loaded, options)
    given: Iterator[Tokens] = (
        sequences(documents([source]), loaded.tokenizer, read_ahead) if ids is None else iter([_tokens(loaded, ids)])
    )
    ready = list(batches(given, options.rows_of_batch, special_ids(loaded.tokenizer), generate))
    if not ready:
        raise UserError("Expected a text with a token, got none: write some words.")
    recorder = Recorder(loaded, RunWriter(out, new_manifest(loaded, options, [source.name])), options)
    try:
        with _without(loaded, silent):
            for batch in ready:
                recorder.step(batch)
        recorder.finish(manifests.COMPLETE, [source])
    except BaseException:
        recorder.rescue()
        raise
    return int(recorder.writer.manifest.tokens)


def _without(loaded: LoadedModel, silent: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
    """Return a context in which these neurons do not fire."""
    by_layer: dict[int, list[int]] = {}
    for layer, neuron in silent:
        by_layer.setdefault(layer, []).append(neuron)
    return ablate(loaded.model, by_layer) if by_layer else nullcontext()


def _tokens(loaded: LoadedModel, ids: Sequence[int]) -> Tokens:
    """Return ids as a sequence of the model's tokens."""
    array: Any = np.array(ids, dtype=np.int32)
    if not array.size or array.min() < 0 or array.max() >= loaded.vocab_size:
        raise UserError(
            f"Expected token ids from 0 to {loaded.vocab_size - 1}, the vocabulary of {loaded.name}, got others: the "
            "passage is of another model."
        )
    return Tokens(0, GivenTexts([""]).name, 0, array)
