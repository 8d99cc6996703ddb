"""What a model of each family fires while it generates, against one full pass over what came out. Cost: 10 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import counts_of, ends_with, run_capture, run_plain, save_model, sequences_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from twell.workbench.capturing.command import record
from twell.workbench.capturing.generate import GenerationRecorder
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.schema import DECODE, PREFILL
from twell.workbench.text.sources import TextSource
from twell.workbench.verify import Counts

FURTHER = 7  # tokens after each prompt
GIVEN: dict[str, Any] = {"generate": FURTHER, "batch_tokens": 120, "seq_len": 31}


def likeliest(folder: Path, prompt: np.ndarray, ends: Sequence[int]) -> list[int]:
    """Continue one prompt by the model's likeliest tokens, with a full pass for each."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), prompt.tolist()
    while len(ids) - len(prompt) < FURTHER and not set(ids[len(prompt) :]) & set(ends):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 12}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("nemotron", {"hidden_act": "relu2", "mlp_bias": True}),
        ("opt", {}),
    ],
)
def test_counts_are_those_of_one_full_pass(
    family: str, fields: dict[str, Any], tmp_path: Path, texts: tuple[str, ...]
) -> None:
    """With padding on the left of most prompts; the full pass has none."""
    folder = save_model(tmp_path / "model", family, **fields)
    ends_with(folder, 2)
    run = run_capture(folder, tmp_path / "run", texts, torch.float64, **GIVEN)
    ids = sequences_of(run)
    full = run_plain(folder, ids, torch.float64)
    np.testing.assert_array_equal(counts_of(run), full.nnz)
    rows, sequences = run.activity(), run.frame("sequences")
    prompts = rows[rows["phase"] == PREFILL].groupby("sequence").size().to_numpy()
    assert len(set(prompts)) > 4 and max(prompts) == 31 - FURTHER
    assert all(len(one) == FURTHER for one in sequences_of(run, DECODE))
    assert len(rows) == sequences["tokens"].sum() == run.manifest.tokens == prompts.sum() + FURTHER * len(prompts)
    np.testing.assert_array_equal(rows["position"], np.concatenate([np.arange(len(one)) for one in ids]))
    for one, length, tokens in list(zip(ids, prompts, sequences_of(run, DECODE), strict=True))[:6]:
        assert tokens.tolist() == likeliest(folder, one[:length], [2])
    expected = [
        cross_entropy(logits[:-1], torch.from_numpy(one[1:].astype(np.int64)), reduction="none").numpy()
        for logits, one in zip(full.logits, ids, strict=True)
    ]
    losses = rows["loss"].to_numpy().astype(float)
    np.testing.assert_allclose(losses[~np.isnan(losses)], np.concatenate(expected), rtol=1e-3)
    assert np.flatnonzero(np.isnan(losses)).tolist() == (np.cumsum([len(one) for one in ids]) - 1).tolist()


def on_gpu(dtype: torch.dtype) -> Any:
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.param("cuda", dtype, marks=[pytest.mark.gpu, needed])


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), on_gpu(torch.float64), on_gpu(torch.float32), on_gpu(torch.bfloat16)],
)
def test_counts_on_the_input_that_each_layer_had(
    device: str, dtype: torch.dtype, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every pass, whatever the attention over a cache was rounded to; in float32 and 64 as in one full pass too."""
    folder = save_model(tmp_path / "model", intermediate_size=768)
    ends_with(folder, 2)
    loaded = load(str(folder), device=device, dtype=dtype)
    counted_by_phase, on_stats = {phase: Counts(loaded) for phase in (PREFILL, DECODE)}, GenerationRecorder._on_stats

    def counting(self: GenerationRecorder, layer: int, x: torch.Tensor, stats: Any) -> None:
        phase = PREFILL if len(self.passes) == 1 else DECODE
        counted_by_phase[phase].on_layer(self.passes[-1].real.flatten().nonzero().squeeze(1), layer, x, stats)
        on_stats(self, layer, x, stats)

    monkeypatch.setattr(GenerationRecorder, "_on_stats", counting)
    given: dict[str, Any] = GIVEN | {"timings": 0, "device": device, "examples": 1, "fired": "all"}
    options = CaptureOptions(model=str(folder), text=texts, out=tmp_path / "run", **given)
    run = record(loaded, options, [TextSource(name) for name in texts])
    rows = run.activity()
    for phase, counted in counted_by_phase.items():
        assert counted.compared >= 3 * (rows["phase"] == phase).sum() > 200
        assert counted.beyond == 0
        assert counted.differing <= 0.01 * counted.compared
    fired = run.frame("fired").set_index(["sequence", "position", "layer"])["neuron"].map(len)
    np.testing.assert_array_equal(fired.sort_index().to_numpy(), counts_of(run).ravel())
    if dtype != torch.bfloat16:
        full = run_plain(folder, sequences_of(run), dtype)
        assert not ((counts_of(run) != full.nnz) & ~full.near).any()
