"""Divide weights, gradients and AdamW's moments over the ranks, by torch's FSDP2, for models that one GPU cannot hold.

Each rank keeps an equal share of the rows of every weight, as a DTensor. A layer's weights are gathered before its
forward pass and before its backward pass, and dropped after each; its gradients are added up into shares.

Cost: per step, each weight is sent twice in bfloat16 and its gradient once in float32; a rank's memory for weights,
gradients and moments is 16 bytes a parameter over the number of ranks, and one or two whole layers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from twell.workbench.training.sparse_llama import Objective


def shard(objective: Objective, world: int) -> None:
    """Divide an objective's parameters over all ranks, layer by layer, in place; its optimizer is made afterwards.

    On a GPU, layers get their weights in bfloat16, in which autocast computes anyway; embedding and last norm stay
    float32, so that hidden states are what they are without sharding. Gradients are added up in float32.
    """
    device = objective.weights.device.type
    mesh = init_device_mesh(device, (world,))
    sent = torch.bfloat16 if device == "cuda" else None
    layers = MixedPrecisionPolicy(param_dtype=sent, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in objective.layers:
        fully_shard(layer, mesh=mesh, mp_policy=layers)
    # gathered again in the backward pass, or an evaluation would leave whole weights that later steps do not change
    fully_shard(
        objective, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)
    )


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be divided over ranks, in every rank; all of them have to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's share of a tensor that all ranks hold, divided as `like` is, without sending anything.

    A tensor without dimensions is returned as it is, and any where `like` is not divided.
    """
    if not isinstance(like, DTensor) or whole.dim() == 0:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
