"""How near each neuron comes to firing on some text: its pre-activations, which no run records below 0.

    nearest(loaded, [[5, 17, 3]], counted=[[False, True, True]], out="folder/nearest.parquet")

The idea: a neuron fires where its gate row times what the layer reads is above 0; what every layer reads is taken while
the model runs its own sparse FFNs, and multiplied densely. Cost: a forward pass, and one dense gate product a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.modules import SparseFFN
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel


class GateSums:
    """The pre-activations of a layer's neurons so far: greatest, sum and sum of squares, each float64 [d_ff]."""

    def __init__(self, ffn: SparseFFN) -> None:
        self.ffn, self.tokens = ffn, 0
        self.most = torch.full((ffn.d_ff,), -torch.inf, dtype=torch.float64)
        self.sum, self.squares = torch.zeros(2, ffn.d_ff, dtype=torch.float64)
        self.counted = torch.zeros(0, dtype=torch.bool)  # of the tokens that are running

    def read(self, _module: Any, args: tuple[Tensor, ...]) -> None:
        """Add what the layer reads; a hook that runs before the FFN."""
        x = args[0].reshape(-1, args[0].shape[-1])[self.counted.to(args[0].device)]
        if not len(x):
            return
        z = linear(x, self.ffn.w_gate, self.ffn.b_gate).double().cpu()
        self.most = torch.maximum(self.most, z.amax(0))
        self.sum += z.sum(0)
        self.squares += z.square().sum(0)
        self.tokens += len(z)

    def columns(self, layer: int) -> dict[str, Any]:
        """Return the columns of the table for this layer."""
        n = max(self.tokens, 1)
        mean = self.sum / n
        sd = (self.squares / n - mean.square()).clamp(min=0).sqrt()
        names = {"largest": self.most.numpy(), "mean": mean.numpy(), "sd": sd.numpy()}
        return {"layer": np.full(len(mean), layer), "neuron": np.arange(len(mean)), **names}


def nearest(loaded: LoadedModel, texts: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]], out: Path) -> int:
    """Write a row a neuron to the Parquet file `out`; return how many tokens were counted. Columns:

    layer; neuron; largest, mean, sd (of its pre-activations over the counted tokens). texts: token ids by sequence;
    counted: of each token, whether it counts
    Raises UserError for a model whose FFNs run as they are, and for ids that it has not.
    """
    if not loaded.ffns:
        raise UserError(f"Expected a model with a ReLU, {loaded.name} is counted by a threshold: it has none.")
    sums = [GateSums(ffn) for ffn in loaded.ffns]
    hooks: list[Callable[[], None]] = [
        ffn.register_forward_pre_hook(one.read).remove for ffn, one in zip(loaded.ffns, sums, strict=True)
    ]
    try:
        with torch.inference_mode():
            for ids, counts in zip(texts, counted, strict=True):
                if not ids or min(ids) < 0 or max(ids) >= loaded.vocab_size:
                    raise UserError(
                        f"Expected token ids from 0 to {loaded.vocab_size - 1}, the vocabulary, got others."
                    )
                for one in sums:
                    one.counted = torch.tensor(list(counts), dtype=torch.bool)
                loaded.body(input_ids=torch.tensor([list(ids)], device=loaded.model.device), use_cache=False)
    finally:
        for remove in hooks:
            remove()
    if not sums[0].tokens:
        raise UserError("Expected a token that counts in the text, got none.")
    columns = [one.columns(layer) for layer, one in enumerate(sums)]
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: np.concatenate([each[name] for each in columns]) for name in columns[0]}), out)
    return sums[0].tokens
