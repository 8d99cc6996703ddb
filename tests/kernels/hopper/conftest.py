"""What tests of the Hopper kernel share: the GPU that they need, and memory that holds garbage beforehand."""

from __future__ import annotations

import pytest
from support.gpu_checks import plan_small_calls, poison, skip_without

from twell.kernels.backends import hopper, hopper_compact
from twell.kernels.calls import whole_calls


@pytest.fixture
def gpu_without_plans() -> None:
    """Skip without a Hopper GPU; poison the memory that workspaces will come from."""
    skip_without(hopper)
    poison()


@pytest.fixture
def gpu(gpu_without_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan calls of few rows too, on a GPU as above."""
    plan_small_calls(monkeypatch)


@pytest.fixture(params=[False, True], ids=["traced ops", "whole calls"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each of the two ways from Python to the launches of training."""
    monkeypatch.setattr(whole_calls, "ENABLED", request.param)


@pytest.fixture
def worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in the workspace of the worst case, where what was not kept is computed again."""
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
