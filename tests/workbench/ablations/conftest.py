"""A captured run of a small model in float64, on which studies are made."""

from __future__ import annotations

import pytest
import torch
from support.captures import run_capture, save_model

from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, texts: tuple[str, ...]) -> Run:
    folder = tmp_path_factory.mktemp("ablated")
    return run_capture(save_model(folder / "model"), folder / "run", texts, torch.float64)
