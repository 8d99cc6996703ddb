"""What the ranks of a training wrap around its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from twell.workbench.training.ranks import TrainingRanks
from twell.workbench.training.recipes import Recipe
from twell.workbench.training.sparse_llama import Objective, build


def test_a_compiled_layer_stays_whole_though_gradients_are_sent_in_buckets(tiny_recipe: Recipe) -> None:
    """Cut in two, as dynamo does where a bucket ends, each piece keeps its inputs for the backward pass."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = build(replace(tiny_recipe, d_ff=2**14), 0, torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        wrapped = TrainingRanks(0, 2).wrap(Objective(model, compiled=True, backend=backend))
        wrapped(torch.zeros(1, 9, dtype=torch.int64))
    finally:
        dist.destroy_process_group()
    assert len(graphs) == 2, "a layer, whose code all share, and the head"
