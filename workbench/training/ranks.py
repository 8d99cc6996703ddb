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
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from twell.workbench.errors import UserError
from twell.workbench.run.rank_share import is_alive, not_launched
from twell.workbench.training.sparse_llama import Objective

PATIENCE = timedelta(minutes=30)  # for a rank that evaluates or writes while others wait


class TrainingRanks:
    """The processes that train together, seen from one of them; `TrainingRanks()` is a training by a single process."""

    def __init__(self, rank: int = 0, world: int = 1, sharded: bool = False, store: Any = None) -> None:
        """sharded: weights are divided over the ranks; store: torch's key-value store, which all ranks reach"""
        self.rank, self.world, self.sharded, self._store = rank, world, sharded, store
        self._processes: dict[int, int] = {}  # id of each rank's process on this host

    @classmethod
    def from_environment(cls, sharded: bool = False) -> TrainingRanks:
        """Return the ranks that torchrun started, as its environment variables say; a single process without them.

        Raises UserError for a single process that is to divide its weights, and for variables that no launcher sets.
        """
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            if sharded:
                raise UserError(
                    "Expected several processes for --shard, got one: launch with torchrun --nproc-per-node N, or "
                    "leave --shard out."
                )
            return cls()
        try:
            store, rank, ranks = next(dist.rendezvous("env://", timeout=PATIENCE))
            int(os.environ.get("LOCAL_RANK", "0"))
        except (ValueError, RuntimeError) as error:
            raise not_launched(world, error) from None
        return cls(rank, ranks, sharded, store)

    def join(self, device: str) -> None:
        """Make the rank's GPU the current one, where there are any, and wait until all ranks have joined.

        device: auto | cpu | cuda. Raises UserError, in every rank, where some of them have no GPU.
        """
        if self.world == 1:
            return
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = device != "cpu" and local < torch.cuda.device_count()
        self._store.set(f"rank/{self.rank}", f"{int(on_gpu)} {os.getpid()} {socket.gethostname()}")
        ranks = [self._store.get(f"rank/{rank}").decode().split(" ", 2) for rank in range(self.world)]
        without = [str(rank) for rank, (gpu, *_) in enumerate(ranks) if gpu == "0"]
        if 0 < len(without) < self.world:
            raise UserError(
                f"Expected a GPU for each of {self.world} ranks, got none for rank {' and '.join(without)}: launch "
                "fewer processes, or give --device cpu."
            )
        here = socket.gethostname()
        self._processes = {rank: int(process) for rank, (_, process, host) in enumerate(ranks) if host == here}
        if on_gpu:
            torch.cuda.set_device(local)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.world, timeout=PATIENCE)

    @contextmanager
    def one_message(self) -> Iterator[None]:
        """Let the rank that fails first raise its error out of this context; the ranks that fail after it end quietly.

        They end with exit code 0, so that torchrun reports the one that says why. Where a rank died, the error is a
        UserError that names it.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self.world == 1:
                raise
            lost = self._lost() if isinstance(error, RuntimeError) else []
            if not self._fails_first():
                raise SystemExit(0) from None
            if lost:
                raise UserError(
                    f"Expected {self.world} ranks to train, rank {' and '.join(map(str, lost))} died: give the same "
                    "command again, which continues from the last checkpoint."
                ) from error
            raise
        if self.world > 1:
            dist.destroy_process_group()

    def _fails_first(self) -> bool:
        """Return whether no rank has failed before; rank 0, which may hold the store, leaves others a second to ask."""
        try:
            first = bool(self._store.add("failed", 1) == 1)
            deadline = time.monotonic() + 1
            while self.first and self._store.add("failed", 0) < self.world and time.monotonic() < deadline:
                time.sleep(0.01)
        except RuntimeError:  # the process that holds the store is gone
            return True
        return first

    def _lost(self) -> list[int]:
        """Return the ranks of this host whose processes have died, once there are any, but within a second."""
        deadline = time.monotonic() + 1
        while True:
            lost = [rank for rank, process in self._processes.items() if not is_alive(process)]
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(0.01)

    @property
    def first(self) -> bool:
        """Whether this process writes the folder."""
        return self.rank == 0

    @property
    def evaluates(self) -> bool:
        """Whether this process runs an evaluation; all do where none has the whole model."""
        return self.first or self.sharded

    def wrap(self, objective: Objective) -> nn.Module:
        """Return the module whose backward pass averages gradients over the ranks; make its optimizer afterwards."""
        if self.world == 1:
            return objective
        if self.sharded:
            shard(objective, self.world)
            return objective
        # dynamo would cut each compiled layer where one of DDP's buckets ends, and keep what passes every cut for the
        # backward pass; gradients of a whole layer are sent beside the next one's work as well
        torch._dynamo.config.optimize_ddp = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a newer name of an argument, which 2.10 lacks
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

    def every(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in every rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def share_rows(self, rows: int, micro_batches: int) -> None:
        """Raise UserError unless the rows of a step divide into equal shares of equal micro-batches."""
        if rows % (self.world * micro_batches):
            raise UserError(
                f"Expected rows that divide into {self.world} ranks of {micro_batches} micro-batches, got {rows}: "
                "change rows or the number of processes."
            )

    def first_then_others(self, function: Callable[[], Any]) -> Any:
        """Call a function in rank 0, then in the other ranks, which find what it left on disk; return its value.

        Where it raises a UserError in rank 0, the other ranks end quietly.
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
            raise failed or SystemExit(0)
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
