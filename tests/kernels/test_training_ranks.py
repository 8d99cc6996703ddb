"""The training op under FSDP2: two processes that share weights and rows do the steps of one."""

from __future__ import annotations

from pathlib import Path

import torch
from support import sharded_training
from support.forked import as_rank
from support.servers import free_port
from support.sharded_training import WORLD, Two, train


def test_fsdp2_does_the_steps_of_one_process(tmp_path: Path) -> None:
    model = Two()
    alone = train(model, lambda x: x)
    path = tmp_path / "trained.pt"
    ranks = [as_rank(sharded_training.main, rank, free_port(), str(path)) for rank in range(WORLD)]
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0] * WORLD
    trained = torch.load(path)
    torch.testing.assert_close(trained["losses"], torch.stack(alone), rtol=1e-5, atol=1e-6)
    for got, want in zip(trained["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
