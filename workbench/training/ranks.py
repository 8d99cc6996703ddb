"""Train with several processes, a GPU each: `torchrun --nproc-per-node N -m twell.workbench train …`.

Data parallel, by torch's DistributedDataParallel: each rank takes its share of a step's rows, gradients are averaged,
and rank 0 writes the folder. A step sees the same rows as in a single process, and does the same up to rounding.

With --shard, by torch's FSDP2: each rank keeps an equal share of the rows of every weight, its gradient and its moments
in AdamW, as DTensors. A layer's weights are gathered before its forward pass and again before its backward pass.

Cost of --shard: in each step a layer's weights are sent twice in bfloat16, their gradients once in float32; the memory
of a rank is 16 bytes a parameter divided by the number of ranks, and one or two whole layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from twell.workbench.errors import UserError, first_line
from twell.workbench.training.sparse_llama import Objective

PATIENCE = timedelta(minutes=30)  # for a rank that evaluates or writes while others wait


class TrainingRanks:
    """The processes that train together, seen from one of them; `TrainingRanks()` is a training by a single process."""

    def __init__(self, rank: int = 0, world: int = 1, sharded: bool = False) -> None:
        self.rank, self.world, self.sharded = rank, world, sharded

    @classmethod
    def from_environment(cls, device: str, sharded: bool = False) -> TrainingRanks:
        """Join the ranks that torchrun started, as its environment variables say; a single process without them.

        device: auto | cpu | cuda; unless it is cpu, the rank's GPU becomes the current one, where there are any
        sharded: whether weights, gradients and moments are divided over the ranks
        Raises UserError for ranks without a GPU each, and for variables that no launcher sets.
        """
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            if sharded:
                raise UserError(
                    "Expected several processes for --shard, got one: launch with torchrun --nproc-per-node N, or "
                    "leave --shard out."
                )
            return cls()
        on_gpu = device != "cpu" and torch.cuda.is_available()
        try:
            if on_gpu:
                local = int(os.environ.get("LOCAL_RANK", "0"))
                if local >= torch.cuda.device_count():
                    raise UserError(
                        f"Expected a GPU for each rank, got {torch.cuda.device_count()} for rank {local}: launch fewer "
                        "processes, or give --device cpu."
                    )
                torch.cuda.set_device(local)
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"Expected the variables that torchrun sets beside WORLD_SIZE={world}, got an error "
                f"({first_line(error)}): launch with torchrun, or unset WORLD_SIZE."
            ) from None
        return cls(dist.get_rank(), dist.get_world_size(), sharded)

    @property
    def first(self) -> bool:
        """Whether this process writes the folder."""
        return self.rank == 0

    @property
    def evaluates(self) -> bool:
        """Whether this process runs an evaluation; all do where none has the whole model."""
        return self.first or self.sharded

    def leave(self) -> None:
        """End the communication with the other ranks."""
        if self.world > 1:
            dist.destroy_process_group()

    def wrap(self, objective: Objective) -> nn.Module:
        """Return the module whose backward pass averages gradients over the ranks; make its optimizer afterwards."""
        if self.world == 1:
            return objective
        if self.sharded:
            shard(objective, self.world)
            return objective
        # gradients are views of what is sent, or each would be there twice
        return DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)

    def without_averaging(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of a wrapped module keep gradients to this rank."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's share of a step's rows [rows, …]."""
        return rows.chunk(self.world)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, in every rank."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value in every rank."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def first_then_others(self, function: Callable[[], Any]) -> Any:
        """Call a function in rank 0, then in the other ranks, which find what it left on disk; return its value.

        An error of rank 0 is raised in every rank: as it is there, as a sentence that refers to it elsewhere.
        """
        if self.world == 1:
            return function()
        result, failed = None, None
        if self.first:
            try:
                result = function()
            except UserError as error:
                failed = error
        if self.agreed(failed is not None):
            raise failed or UserError("Expected rank 0 to begin the training, it could not: see its message.")
        return result if self.first else function()


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
