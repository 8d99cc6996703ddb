"""Compute what predictions cost and what they expected to cost: cross-entropy and entropy, from logits.

On a GPU one kernel reads each row of 16-bit logits once, and makes nothing of their size. Elsewhere torch makes the
logarithms of all probabilities, and the probabilities a block of rows at a time.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, nll_loss

from twell.kernels import build
from twell.kernels.build import Library, Source

CHANCES = {"cpu": 2**18, "cuda": 2**22}  # elements of the probabilities: of a block that stays in the cache


@cache
def library(capability: tuple[int, int]) -> Library:
    """Return the library for GPUs of this compute capability, (major, minor)."""
    arch = "-gencode=arch=compute_{0}{1},code=sm_{0}{1}".format(*capability)
    sources = (Source("predictions/predictions.cu", (arch,)), Source("predictions/bindings.cpp"))
    return Library("predictions", sources, headers=("common/*", "predictions/*"), seconds=8, cuda=True)


def loss_and_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy of each row's token and the entropy of the row's prediction, in nats, float32 [2, n].

    logits: [n, vocabulary]; ids: int64 [n]
    """
    return by_kernel(logits, ids) if takes(logits) else by_torch(logits, ids)


def takes(logits: Tensor) -> bool:
    """Return whether `by_kernel` can take these logits. Compiles the library to find out, once a process."""
    if logits.device.type != "cuda" or logits.dtype not in (torch.bfloat16, torch.float16) or logits.shape[1] % 8:
        return False
    capability = torch.cuda.get_device_capability(logits.device)
    return capability >= (8, 0) and build.failure(library(capability)) is None


def by_kernel(logits: Tensor, ids: Tensor) -> Tensor:
    """Do what `loss_and_entropy` does in one launch, whose sums are in float32."""
    logits = logits.contiguous()
    logits = logits if logits.data_ptr() % 16 == 0 else logits.clone()
    out = logits.new_empty(2, len(logits), dtype=torch.float32)
    torch.ops.twell.loss_and_entropy(logits, ids.contiguous(), out)
    return out


def by_torch(logits: Tensor, ids: Tensor) -> Tensor:
    """Do what `loss_and_entropy` does by torch; the loss has the bits of cross_entropy of float32 logits."""
    logs = log_softmax(logits.float(), 1)
    step = max(1, CHANCES.get(logits.device.type, CHANCES["cpu"]) // logits.shape[1])
    chances = torch.empty_like(logs[:step])  # for every block: fresh memory would cost a CPU more than the sums
    entropy = [_entropy(rows, chances[: len(rows)]) for rows in logs.split(step)]
    return torch.stack([nll_loss(logs, ids, reduction="none"), torch.cat(entropy)])


def _entropy(logs: Tensor, chances: Tensor) -> Tensor:
    """Return the entropy of each row from its logarithms of probabilities; chances: of the same shape, overwritten.

    A probability of 0 adds nothing, though 0 · -inf is NaN.
    """
    torch.exp(logs, out=chances)
    if logs.is_cuda:
        return torch.special.entr(chances, out=chances).sum(1)  # in three launches
    return -chances.mul_(logs).nansum(1)  # without a logarithm, which costs a CPU more than the rest
