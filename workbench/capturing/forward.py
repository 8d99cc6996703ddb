"""One batch through the model: what goes in, and what the layers counted.

The idea: whole sequences, padded on the right to the longest of the batch. Attention is causal, so no real token sees
the padding and no mask is needed. The kernels compute the padded rows too, but `rows` keeps them out of every
statistic, and their counts are dropped on the device. Counts of all layers are stacked there and come back in one copy
that does not block; on a GPU the host works on one batch while the device runs the next.

Cost: that of the forward pass, the probes, and one cross-entropy over the vocabulary, in chunks of rows so that no
[tokens, vocabulary] matrix ever stands in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from twell.kernels.layout import TwELL
from twell.kernels.modules import Probe
from twell.kernels.params import Stats
from twell.workbench.capturing.layer_sums import Sums, blocks_of, union_counts
from twell.workbench.models.load import LoadedModel
from twell.workbench.text.batches import Batch

LOGITS = {"cpu": 2**22, "cuda": 2**27}  # logits at a time, in elements
OnLayer = Callable[..., None]  # layer, its input, its Stats; of what is generated also the phase
OnPacked = Callable[[int, TwELL], None]


@dataclass(frozen=True)
class Counted:
    """What a forward pass counted, on its way to the host; `wait` before reading the host's tensors.

    nnz int32 [layers, tokens], finite bool [tokens], loss float32 [tokens that predict] or None: on the host
    used: int32 [layers, tokens], of those that fired the ones whose product is not zero; None where all are
    sums: the batch's over unflagged tokens, on the device
    """

    nnz: Tensor
    finite: Tensor
    loss: Tensor | None
    sums: Sums
    done: torch.cuda.Event | None
    used: Tensor | None = None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


@dataclass(frozen=True)
class Inputs:
    """A batch on the device; n: its padded rows."""

    ids: Tensor  # int32 [n]
    rows: Tensor  # uint8 [n], 1 for real tokens without a flag
    sequence: Tensor  # int32 [n], the run's number
    place: Tensor  # int32 [tokens], rows of the real tokens
    predicts: Tensor  # int32 [m], rows of the real tokens with a next one
    blocks: list[Tensor]  # int32, as `blocks_of` has them
    longest: int

    @classmethod
    def of(cls, batch: Batch, device: torch.device, flags: np.ndarray | None = None) -> Inputs:
        """`flags`: uint8 [tokens], default the batch's own; tokens with one are left out of every sum."""
        place = batch.place
        ids, rows, sequence = (np.zeros(batch.padded, dtype=np.int32) for _ in range(3))
        rows[place] = (batch.flags if flags is None else flags) == 0
        ids[place], sequence[place] = batch.token_id, batch.sequence
        blocks = blocks_of(sequence, rows > 0)
        arrays = (ids, rows, sequence, place, place[batch.predicts], *(block.ravel() for block in blocks))
        joined = torch.from_numpy(np.concatenate(arrays))
        if device.type == "cuda":
            joined = joined.pin_memory()  # so that the one copy does not wait
        ids_, rows_, sequence_, place_, predicts, *flat = joined.to(device, non_blocking=True).split(
            [*map(len, arrays)]
        )
        blocks_ = [entries.view(block.shape) for entries, block in zip(flat, blocks, strict=True)]
        return cls(ids_, rows_.to(torch.uint8), sequence_, place_, predicts, blocks_, batch.longest)


@torch.inference_mode()
def forward(
    loaded: LoadedModel,
    inputs: Inputs,
    *,
    probes: str = "none",
    loss: bool = True,
    on_layer: OnLayer | None = None,
    on_packed: OnPacked | None = None,
) -> Counted:
    """Run a batch through the model and count. Returns once the device has been given its work.

    probes: none | counts | neurons (sums a neuron and the fullness of tiles too) | all (unions too)
    loss: compute the next token's cross-entropy too, in float32
    on_layer(layer, x, stats): told of each layer as it runs, padding included
    on_packed(layer, packed): handed each layer's packed hidden state, which may last until the next layer only
    """
    stats: list[Stats] = []
    unions: list[Tensor] = []

    def hear(layer: int, x: Tensor, counted: Stats) -> None:
        if counted.packed is not None:  # now: kernels may pack the next layer into the same memory
            if probes == "all":
                unions.append(union_counts(counted.packed, inputs.blocks))
            if on_packed is not None:
                on_packed(layer, counted.packed)
            counted.packed = None
        stats.append(counted)
        if on_layer is not None:
            on_layer(layer, x, counted)

    about = {"rows": inputs.rows, "tokens": inputs.ids, "sequences": inputs.sequence}
    with probing(loaded.probe, asked(loaded, probes, hear, on_packed is not None, **about)):
        hidden = loaded.body(input_ids=inputs.ids.view(-1, inputs.longest), use_cache=False).last_hidden_state
    losses = next_token_loss(loaded, hidden.flatten(0, 1), inputs) if loss else None
    return gather(stats, Sums.stack(stats, unions), inputs.place, losses)


def asked(loaded: LoadedModel, probes: str, hear: OnLayer, packed: bool, **about: Any) -> Probe:
    """What the layers are asked to count; about: rows, tokens and sequences, as a Probe has them."""
    if probes == "none":
        return Probe()
    if probes == "counts":
        return Probe(probes, loaded.layout if packed else None, packed, on_stats=hear, **about)
    return Probe("neurons", layout=loaded.layout, want_packed=packed or probes == "all", on_stats=hear, **about)


@contextmanager
def probing(probe: Probe, other: Probe) -> Iterator[None]:
    """A model's probe asks what `other` asks, for a while."""
    before = {item.name: getattr(probe, item.name) for item in fields(Probe)}
    probe.__dict__.update({name: getattr(other, name) for name in before})
    try:
        yield
    finally:
        probe.__dict__.update(before)


def next_token_loss(loaded: LoadedModel, hidden: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy in nats, float32 [m], of the token after each row that predicts; hidden [n, d_model]."""
    head, ids = loaded.head, inputs.ids.long()
    step = max(1, LOGITS[hidden.device.type] // head.weight.shape[0])
    pieces = [
        cross_entropy(head(hidden[rows]).float(), ids[rows + 1], reduction="none")
        for rows in inputs.predicts.split(step)
    ]
    return torch.cat(pieces)


def gather(stats: list[Stats], sums: Sums, place: Tensor, loss: Tensor | None) -> Counted:
    """The counts of all layers, stacked on the device and sent to the host."""
    nnz, finite = place.new_zeros((0, len(place))), torch.ones_like(place, dtype=torch.bool)
    used = None
    if stats:
        nnz = torch.stack([layer.nnz for layer in stats])[:, place]
        finite = torch.stack([layer.finite for layer in stats]).all(0)[place]
        wanted = [layer.nnz_used for layer in stats if layer.nnz_used is not None]
        used = torch.stack(wanted)[:, place] if wanted else None

    def sent(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to("cpu", non_blocking=True)

    host = [sent(tensor) for tensor in (nnz, finite, loss, used)]
    done = torch.cuda.Event() if place.is_cuda else None
    if done is not None:
        done.record()
    return Counted(host[0], host[1], host[2], sums, done, host[3])
