"""Loss and entropy of predictions against float64 numpy, on the bundled model's logits and on ones that are hard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from twell.workbench.capturing import forward
from twell.workbench.capturing.forward import loss_and_entropy
from twell.workbench.models.load import load

DATA = Path(__file__).resolve().parents[3] / "data"


@pytest.fixture(scope="module")
def predicted() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bundled model's logits for the beginning of its passages, and the tokens that follow."""
    if not (DATA / "demo-model" / "config.json").exists():
        pytest.skip("data/demo-model is not trained yet")
    loaded = load(str(DATA / "demo-model"), device="cpu")
    text = (DATA / "passages.jsonl").read_text(encoding="utf-8")[:3000]
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:300]])
    with torch.inference_mode():
        return loaded.head(loaded.body(input_ids=ids).last_hidden_state[0, :-1]).float().clone(), ids[0, 1:]


def in_float64(logits: torch.Tensor, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    logs = log_softmax(logits.double().numpy(), axis=1)
    chances = np.exp(logs)
    terms = np.where(chances > 0, chances * np.where(chances > 0, logs, 0), 0)
    return -logs[np.arange(len(ids)), ids.numpy()], -terms.sum(axis=1)


def test_of_the_bundled_model(predicted: tuple[torch.Tensor, torch.Tensor]) -> None:
    loss, entropy = loss_and_entropy(*predicted)
    expected = in_float64(*predicted)
    np.testing.assert_allclose(loss.numpy(), expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=1e-5, atol=1e-5)
    assert 1 < entropy.mean() < np.log(predicted[0].shape[1])
    assert torch.equal(loss, cross_entropy(*predicted, reduction="none")), "the same bits as without an entropy"


def test_of_logits_that_are_hard() -> None:
    """All alike; one far above the rest; far apart; some, or all but one, ruled out."""
    drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 97)).astype(np.float32))
    logits = torch.cat([torch.full((1, 97), 7.0), drawn * 1e-3, drawn * 50, drawn, drawn])
    logits[0, :] = 7
    logits[1, 5] = 300
    logits[7:10, ::2] = -torch.inf
    logits[10:, :-1] = -torch.inf
    ids = torch.full((len(logits),), 95)
    ids[10:] = 96
    loss, entropy = loss_and_entropy(logits, ids)
    expected = in_float64(logits, ids)
    np.testing.assert_allclose(loss.numpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=1e-5, atol=1e-6)
    assert entropy[0] == pytest.approx(np.log(97), rel=1e-6)
    assert (entropy >= 0).all() and (entropy[10:] == 0).all()


class Sizes(TorchDispatchMode):
    """Note the most elements that each operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        each = result if isinstance(result, list | tuple) else [result]
        sizes = [one.numel() for one in each if isinstance(one, torch.Tensor)]
        self.most[name] = max([self.most.get(name, 0), *sizes])
        return result


def test_probabilities_are_held_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the logarithms that the loss takes anyway; and blocks of any size tell the same."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(61, 513)).astype(np.float32))
    ids = torch.arange(61)
    whole = loss_and_entropy(logits, ids)
    for rows in (1, 7):
        monkeypatch.setitem(forward.CHANCES, "cpu", rows * 513 + 5)
        with Sizes() as sizes:
            torch.testing.assert_close(loss_and_entropy(logits, ids), whole, rtol=1e-6, atol=0)
        assert sizes.most["exp"] == rows * 513
        assert [name for name, most in sizes.most.items() if most >= logits.numel()] == ["_log_softmax"]
