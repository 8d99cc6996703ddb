"""Run one batch through the model and collect what the layers counted.

The idea: whole sequences, padded on the right to the longest of the batch. Attention is causal, so no real token sees
the padding and no mask is needed. The kernels compute the padded rows too, but `rows` keeps them out of every
statistic, and their counts are dropped on the device. Counts of all layers are stacked there and come back in one copy
that does not block; on a GPU the host works on one batch while the device runs the next.

Cost: that of the forward pass, the probes, and one cross-entropy and one entropy over the vocabulary, in chunks of
rows so that no [tokens, vocabulary] matrix is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.kernels.layout import TwELL
from twell.kernels.modules import Probe
from twell.kernels.predictions import loss_and_entropy
from twell.kernels.stats import Stats
from twell.workbench.capturing.layer_sums import LayerSums, blocks_of, union_counts
from twell.workbench.capturing.timing.call_times import BatchTimes
from twell.workbench.models.load import LoadedModel
from twell.workbench.run.schema import PREFILL
from twell.workbench.text.batches import Batch

LOGITS = {"cpu": 2**22, "cuda": 2**27}  # elements of the logits computed at a time
OnLayer = Callable[[int, Tensor, Stats], None]
OnPacked = Callable[[int, TwELL], None]


@dataclass(frozen=True)
class Counted:
    """The counts of a forward pass, on their way to the host; call `wait` before reading the host's tensors.

    nnz int32 [layers, tokens], finite bool [tokens], loss float32 [tokens that predict] or None: on the host
    used: int32 [layers, tokens], how many fired neurons have a product that is not zero, all of them in a layer without
    a ReLU on the up branch; None where no layer has one
    sums: over the batch's unflagged tokens, on the device
    entropy: as the loss, of the prediction
    """

    nnz: Tensor
    finite: Tensor
    loss: Tensor | None
    sums: LayerSums
    done: torch.cuda.Event | None
    used: Tensor | None = None
    entropy: Tensor | None = None

    def wait(self) -> None:
        """Wait until the host's tensors have arrived."""
        if self.done is not None:
            self.done.synchronize()


@dataclass(frozen=True)
class Inputs:
    """A batch on the device; n: its rows, padding included."""

    ids: Tensor  # int32 [n]
    rows: Tensor  # uint8 [n], 1 for real tokens without a flag
    sequence: Tensor  # int32 [n], the run's number
    row_of: Tensor  # int32 [tokens], the row of each real token
    predicts: Tensor  # int32 [m], rows of the real tokens that have a next token
    blocks: list[Tensor]  # int32, as `blocks_of` has them
    longest: int

    @classmethod
    def of(cls, batch: Batch, device: torch.device, flags: np.ndarray | None = None) -> Inputs:
        """Copy a batch to a device. flags: uint8 [tokens], default the batch's; flagged tokens are in no sum."""
        row_of = batch.row_of
        ids, rows, sequence = (np.zeros(batch.padded, dtype=np.int32) for _ in range(3))
        rows[row_of] = (batch.flags if flags is None else flags) == 0
        ids[row_of], sequence[row_of] = batch.token_id, batch.sequence
        blocks = blocks_of(sequence, rows > 0)
        arrays = (ids, rows, sequence, row_of, row_of[batch.predicts], *(block.ravel() for block in blocks))
        joined = torch.from_numpy(np.concatenate(arrays))
        if device.type == "cuda":
            joined = joined.pin_memory()  # so that the one copy does not wait
        ids_, rows_, sequence_, row_of_, predicts, *flat = joined.to(device, non_blocking=True).split(
            [*map(len, arrays)]
        )
        blocks_ = [entries.view(block.shape) for entries, block in zip(flat, blocks, strict=True)]
        return cls(ids_, rows_.to(torch.uint8), sequence_, row_of_, predicts, blocks_, batch.longest)


@torch.inference_mode()
def forward(
    loaded: LoadedModel,
    inputs: Inputs,
    *,
    probes: str = "none",
    loss: bool = True,
    on_layer: OnLayer | None = None,
    on_packed: OnPacked | None = None,
    times: BatchTimes | None = None,
) -> Counted:
    """Run a batch through the model and count. Return once the device has been given its work.

    probes: none | counts | neurons (sums a neuron and the fullness of tiles too) | all (unions too)
    loss: compute the next token's cross-entropy and the entropy of its prediction too, in float32
    on_layer(layer, x, stats): called by each layer as it runs, with the rows of the padding
    on_packed(layer, packed): called with each layer's packed hidden state, which may be overwritten by the next layer
    times: takes the time of each sparse call and of the whole pass
    """
    stats: list[Stats] = []
    unions: list[Tensor] = []

    def collect(layer: int, x: Tensor, counted: Stats) -> None:
        if times is not None:
            times.end(layer, counted.nnz)
        if counted.packed is not None:  # read it now: kernels may pack the next layer into the same memory
            if probes == "all":
                unions.append(union_counts(counted.packed, inputs.blocks))
            if on_packed is not None:
                on_packed(layer, counted.packed)
            counted.packed = None
        stats.append(counted)
        if on_layer is not None:
            on_layer(layer, x, counted)
        if times is not None:
            times.calibrate(layer, x, PREFILL)

    about: dict[str, Any] = {"rows": inputs.rows, "tokens": inputs.ids, "sequences": inputs.sequence}
    about |= {} if times is None else {"before": times.begin}
    with nullcontext() if times is None else times.whole_pass():
        with loaded.probing(counting_probe(loaded, probes, collect, on_packed is not None, **about)):
            hidden = loaded.body(input_ids=inputs.ids.view(-1, inputs.longest), use_cache=False).last_hidden_state
        predicted = next_tokens(loaded, hidden.flatten(0, 1), inputs) if loss else None
    return gather(stats, LayerSums.stack(stats, unions), inputs.row_of, predicted)


def counting_probe(loaded: LoadedModel, probes: str, on_stats: OnLayer, packed: bool, **about: Any) -> Probe:
    """Return the Probe for one forward pass.

    probes: as in `forward`; packed: whether the packed hidden state is needed, whatever `probes` says
    about: the Probe's rows, tokens and sequences, and its `before`
    """
    if probes == "none":
        return Probe()
    if probes == "counts":
        return Probe(probes, loaded.layout if packed else None, packed, on_stats=on_stats, **about)
    return Probe("neurons", layout=loaded.layout, want_packed=packed or probes == "all", on_stats=on_stats, **about)


def next_tokens(loaded: LoadedModel, hidden: Tensor, inputs: Inputs) -> Tensor:
    """Return `loss_and_entropy` of the token after each row that predicts, float32 [2, m]; hidden [n, d_model]."""
    head, ids = loaded.head, inputs.ids.long()
    step = max(1, LOGITS[hidden.device.type] // head.weight.shape[0])
    return torch.cat([loss_and_entropy(head(hidden[rows]), ids[rows + 1]) for rows in inputs.predicts.split(step)], 1)


def gather(stats: list[Stats], sums: LayerSums, row_of: Tensor, predicted: Tensor | None) -> Counted:
    """Stack the counts of all layers on the device, keep the real tokens, and start their copy to the host.

    row_of: int32 [tokens], the row of each real token; predicted: as `next_tokens` returns it
    """
    nnz, finite = row_of.new_zeros((0, len(row_of))), torch.ones_like(row_of, dtype=torch.bool)
    used = None
    if stats:
        nnz = torch.stack([layer.nnz for layer in stats])[:, row_of]
        finite = torch.stack([layer.finite for layer in stats]).all(0)[row_of]
        counts = [layer.nnz if layer.nnz_used is None else layer.nnz_used for layer in stats]
        used = torch.stack(counts)[:, row_of] if any(layer.nnz_used is not None for layer in stats) else None

    def sent(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to("cpu", non_blocking=True)

    host = [sent(tensor) for tensor in (nnz, finite, predicted, used)]
    done = torch.cuda.Event() if row_of.is_cuda else None
    if done is not None:
        done.record()
    loss, entropy = (None, None) if host[2] is None else host[2]
    return Counted(host[0], host[1], loss, sums, done, host[3], entropy)
