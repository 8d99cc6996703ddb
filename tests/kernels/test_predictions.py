"""Loss and entropy of predictions against float64 numpy, on the bundled model's logits and on ones that are hard."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from twell.kernels import build, predictions
from twell.kernels.predictions import by_kernel, loss_and_entropy, takes
from twell.workbench.models.load import load

DATA = Path(__file__).resolve().parents[2] / "data"


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
        monkeypatch.setitem(predictions.CHANCES, "cpu", rows * 513 + 5)
        with Sizes() as sizes:
            torch.testing.assert_close(loss_and_entropy(logits, ids), whole, rtol=1e-6, atol=0)
        assert sizes.most["exp"] == rows * 513
        assert [name for name, most in sizes.most.items() if most >= logits.numel()] == ["_log_softmax"]


PROGRAM = r"""
#include <cstdio>
#include <vector>
#include "predictions/partial.cuh"
using namespace twell::predictions;
int main() {
  for (int columns; scanf("%d", &columns) == 1;) {
    std::vector<float> x(columns);
    for (auto& value : x) scanf("%f", &value);
    for (const int parts : {1, 3, columns}) {
      std::vector<Partial> sums(parts);
      for (int i = 0; i < columns; ++i) {
        auto& mine = sums[i % parts];
        if (x[i] > mine.most) mine.raise(x[i]);
        mine.add(x[i]);
      }
      for (int i = 1; i < parts; ++i) sums[0].merge(sums[i]);
      printf("%.9g %.9g ", sums[0].loss(x[columns - 2]), sums[0].entropy());
    }
    puts("");
  }
}
"""


def hard_logits() -> torch.Tensor:
    """All alike; one far above the rest; far apart; some, or all but one, ruled out."""
    drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 96)).astype(np.float32))
    logits = torch.cat([torch.full((1, 96), 7.0), drawn * 1e-3, drawn * 50, drawn * 1e4, drawn, drawn])
    logits[1, 5] = 300
    logits[10:13, 1::2] = -torch.inf
    logits[13:, :-2] = -torch.inf
    return logits


def test_sums_of_the_kernel_wherever_it_cuts_a_row(tmp_path: Path) -> None:
    """Its header runs on a CPU."""
    (tmp_path / "cuda_runtime.h").write_text("#pragma once\n#define __device__\n#define __forceinline__ inline\n")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    compiler = [
        build.find_compiler(False),
        "-std=c++20",
        f"-I{tmp_path}",
        f"-I{build.CSRC}",
        str(tmp_path / "program.cpp"),
    ]
    subprocess.run([*compiler, "-o", str(tmp_path / "program")], check=True)
    logits = hard_logits()
    lines = "\n".join(f"{len(row)} {' '.join(map(repr, row.tolist()))}" for row in logits)
    said = subprocess.run([str(tmp_path / "program")], input=lines, capture_output=True, text=True, check=True).stdout
    found = np.array([line.split() for line in said.splitlines()], dtype=float).reshape(-1, 3, 2)
    expected = np.stack(in_float64(logits, torch.full((len(logits),), 94)), axis=1)[:, None]
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=2e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_tells_what_torch_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for logits in (
        hard_logits().clamp(max=6e4),
        torch.randn(700, 32_000, generator=generator) * 3,
        torch.randn(5, 8, generator=generator),
    ):
        logits = logits.to(dtype)
        ids = torch.full((len(logits),), logits.shape[1] - 2)
        assert takes(logits.cuda())
        found = by_kernel(logits.cuda(), ids.cuda()).cpu().numpy()
        np.testing.assert_allclose(found, np.stack(in_float64(logits.float(), ids)), rtol=2e-5, atol=1e-5)
    broken = torch.randn(3, 64, generator=generator).to(dtype)
    broken[1, 3] = torch.nan
    found = by_kernel(broken.cuda(), torch.zeros(3, dtype=torch.int64).cuda()).cpu()
    assert found[:, 1].isnan().all() and found[:, [0, 2]].isfinite().all()
    assert not takes(torch.zeros(1, 12, dtype=dtype).cuda()) and not takes(torch.zeros(1, 16).cuda())
