"""What the FFNs of a model are given, taken from its own forward passes, for benchmarks.

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
    """Token ids by sequence, so many in all, or all there are."""
    texts = sequences(documents(text), loaded.tokenizer, sequence_length(loaded, None))
    found: list[np.ndarray] = []
    for sequence in texts:
        found.append(sequence.ids[:tokens])
        tokens -= len(sequence.ids)
        if tokens <= 0:
            break
    return found


def uniform_ids(loaded: LoadedModel, pieces: list[np.ndarray]) -> list[np.ndarray]:
    """Sequences of the same lengths, of ids drawn from all that are not special."""
    every = min(len(loaded.tokenizer), loaded.head.weight.shape[0])
    ids = np.setdiff1d(np.arange(every, dtype=np.int32), np.array(sorted(special_ids(loaded.tokenizer))))
    source = np.random.default_rng(0)
    return [source.choice(ids, len(piece)) for piece in pieces]


def layer_inputs(loaded: LoadedModel, pieces: list[np.ndarray], layers: set[int]) -> dict[int, Tensor]:
    """What the FFN of each layer gets, [tokens, d_model], token after token in the order of the pieces."""
    heard: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for group in _groups(pieces, PASS_TOKENS[loaded.device.type]):
        ids, real = (np.zeros((len(group), max(map(len, group))), kind) for kind in (np.int64, np.bool_))
        for row, piece in enumerate(group):
            ids[row, : len(piece)], real[row, : len(piece)] = piece, True
        place = torch.from_numpy(real.ravel()).to(loaded.device)

        def hear(layer: int, x: Tensor, _stats: Stats, place: Tensor = place) -> None:
            if layer in heard:
                heard[layer].append(x[place])

        with torch.inference_mode(), loaded.probing(Probe(on_stats=hear)):
            loaded.body(input_ids=torch.from_numpy(ids).to(loaded.device), use_cache=False)
    return {layer: torch.cat(parts) for layer, parts in heard.items()}


def _groups(pieces: list[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Consecutive pieces of at most so many padded tokens, or one that is longer."""
    held: list[np.ndarray] = []
    for piece in pieces:
        if held and max(len(each) for each in (*held, piece)) * (len(held) + 1) > tokens:
            yield held
            held = []
        held.append(piece)
    if held:
        yield held
