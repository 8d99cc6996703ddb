"""Record the inputs of a model's FFNs in its own forward passes, for benchmarks.

The idea: sequences run through the model as they are, padded on the right, and each layer's input is kept on the device
without the padding. Cost: a forward pass without the head, and rows x d_model values a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from twell.kernels.modules import Probe
from twell.kernels.stats import Stats
from twell.workbench.capturing.prefetch import sequence_length
from twell.workbench.models.load import LoadedModel
from twell.workbench.text.sequences import documents, sequences
from twell.workbench.text.vocabulary import special_ids

PASS_TOKENS = {"cpu": 4096, "cuda": 32_768}  # padded tokens of a forward pass


def text_ids(loaded: LoadedModel, text: tuple[str, ...], tokens: int) -> list[np.ndarray]:
    """Return token ids by sequence: `tokens` in all, or those of the whole text if it has fewer.

    text: names of sources
    """
    texts = sequences(documents(text), loaded.tokenizer, sequence_length(loaded, None))
    pieces: list[np.ndarray] = []
    for sequence in texts:
        pieces.append(sequence.ids[:tokens])
        tokens -= len(sequence.ids)
        if tokens <= 0:
            break
    return pieces


def uniform_ids(loaded: LoadedModel, pieces: list[np.ndarray]) -> list[np.ndarray]:
    """Draw sequences of the same lengths, uniformly from the ids that are not special."""
    vocabulary = min(len(loaded.tokenizer), loaded.head.weight.shape[0])
    ids = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.array(sorted(special_ids(loaded.tokenizer))))
    source = np.random.default_rng(0)
    return [source.choice(ids, len(piece)) for piece in pieces]


def layer_inputs(loaded: LoadedModel, pieces: list[np.ndarray], layers: set[int]) -> dict[int, Tensor]:
    """Return the input of each layer's FFN, [tokens, d_model], in the order of the pieces."""
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for group in _groups(pieces, PASS_TOKENS[loaded.device.type]):
        ids, real = (np.zeros((len(group), max(map(len, group))), kind) for kind in (np.int64, np.bool_))
        for row, piece in enumerate(group):
            ids[row, : len(piece)], real[row, : len(piece)] = piece, True
        row_of = torch.from_numpy(real.ravel()).to(loaded.device)

        def record(layer: int, x: Tensor, _stats: Stats, row_of: Tensor = row_of) -> None:
            if layer in inputs:
                inputs[layer].append(x[row_of])

        with torch.inference_mode(), loaded.probing(Probe(on_stats=record)):
            loaded.body(input_ids=torch.from_numpy(ids).to(loaded.device), use_cache=False)
    return {layer: torch.cat(rows) for layer, rows in inputs.items()}


def _groups(pieces: list[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Yield consecutive pieces of at most `tokens` tokens with padding, or one that is longer."""
    group: list[np.ndarray] = []
    for piece in pieces:
        if group and max(len(each) for each in (*group, piece)) * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
