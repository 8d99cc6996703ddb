"""The training op under FSDP2: two processes that share weights and rows do the steps of one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from support import sharded_training
from support.sharded_training import WORLD, Two, train


def test_fsdp2_does_the_steps_of_one_process(tmp_path: Path) -> None:
    model = Two()
    alone = train(model, lambda x: x)
    path = tmp_path / "trained.pt"
    command = [sys.executable, sharded_training.__file__, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(WORLD)]
        for rank in ranks:
            stack.callback(rank.kill)
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * WORLD
    trained = torch.load(path)
    torch.testing.assert_close(trained["losses"], torch.stack(alone), rtol=1e-5, atol=1e-6)
    for got, want in zip(trained["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
