"""Verifying a run: a right one, and ones whose counts or weights are off. Cost: 5 s."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import run_capture, save_model
from support.synthetic_training import make_training

from twell.kernels.modules import SparseFFN
from twell.workbench.capturing import progress
from twell.workbench.errors import UserError
from twell.workbench.options import VerifyOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import open_run
from twell.workbench.verify import PROBES, ROUNDS, WAYS, overhead, report, verify


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_run_is_verified(
    family: str, tmp_path: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model", family)
    run = run_capture(folder, tmp_path / "run", texts)
    assert (
        str(folder) not in (run.path / manifests.FILE).read_text()
    )  # the path is remembered beside the run, not in it
    verify(VerifyOptions(run=run.path, tokens=100, device="cpu"))
    manifest = open_run(run.path).manifest
    assert manifest.parity is not None and manifest.overhead is not None
    assert 100 <= manifest.parity["tokens"] < 130
    assert manifest.parity["counts"] == 3 * manifest.parity["tokens"]
    assert manifest.parity["beyond_rounding"] == 0
    assert manifest.parity["logit_error"] < 1e-5
    assert manifest.parity["same_choice"] == 1
    assert set(manifest.overhead) >= {"counts_over_none", "neurons_over_none", "all_over_none", "dense_over_none"}
    assert manifest.status == "complete" and run.damaged() == []
    printed = capsys.readouterr().out
    assert f"counts  {manifest.parity['counts']} compared" in printed and "0 beyond rounding" in printed
    dense, (low, high) = (manifest.overhead[f"dense_over_none{end}"] for end in ("", "_range"))
    assert low <= dense <= high and f"dense {dense:.2f} ({low:.2f}–{high:.2f})" in printed


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    tiny: Path,
    tmp_path: Path,
    texts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)
    monkeypatch.setattr(progress, "next_line", lambda lines: 0.0)
    verify(VerifyOptions(run=run.path, tokens=100, device="cpu"))
    lines = re.findall(r"^(\d+) of (\d+) batches(, about [\d,.]+ s left)?$", capsys.readouterr().out, re.MULTILINE)
    total = int(lines[0][1])
    assert total % (1 + (1 + ROUNDS) * WAYS) == 0 and [int(done) for done, _, _ in lines] == [*range(1, total)]
    assert not lines[0][2] and all(left for _, _, left in lines[1:])


def test_turns_that_differ_are_called_rough() -> None:
    parity = {"tokens": 1, "dtype": "", "kernel": "", "logit_error": 0, "same_choice": 1, "counts": 0}
    parity |= {"differing": 0, "beyond_rounding": 0}
    for high, expected in ((1.1, False), (1.5, True)):
        times: dict[str, Any] = {f"{way}_over_none": 1.0 for way in (*PROBES, "dense")}
        times |= {f"{way}_over_none_range": [0.95, 1.0] for way in (*PROBES, "dense")}
        times |= {"counts_over_none_range": [1.0, high], "rounds": 3}
        assert ("rough, as turns differ up to 1.5 ×" in report(parity, times)[-1]) == expected


def test_what_others_wrote_meanwhile_stays(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)

    def meddled(*given: Any) -> dict[str, Any]:
        manifests.update(run.path, name="renamed")
        return overhead(*given)

    monkeypatch.setattr("twell.workbench.verify.overhead", meddled)
    verified = verify(VerifyOptions(run=run.path, tokens=100, model=str(tiny), device="cpu"))
    assert verified.manifest == open_run(run.path).manifest
    assert verified.manifest.name == "renamed" and verified.manifest.parity is not None


def test_counts_and_outputs_that_are_off_are_told(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)
    forward = SparseFFN.forward

    def off(self: SparseFFN, x: torch.Tensor) -> torch.Tensor:
        heard = self.probe.on_stats

        def wrong(layer: int, x: torch.Tensor, stats: Any) -> None:
            stats.nnz[::4] += 1
            if heard is not None:
                heard(layer, x, stats)

        self.probe.on_stats = wrong
        try:
            return forward(self, x) * 1.01
        finally:
            self.probe.on_stats = heard

    monkeypatch.setattr(SparseFFN, "forward", off)
    with pytest.raises(UserError, match="by no more than rounding"):
        verify(VerifyOptions(run=run.path, tokens=100, model=str(tiny), device="cpu"))
    parity = open_run(run.path).manifest.parity
    assert parity is not None
    assert parity["beyond_rounding"] > 0.15 * parity["counts"]
    assert parity["logit_error"] > 1e-4


def test_other_weights_are_refused(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)
    other = save_model(tmp_path / "other", initializer_range=0.3)
    with pytest.raises(UserError, match="got others in"):
        verify(VerifyOptions(run=run.path, model=str(other), device="cpu"))


def test_what_cannot_be_verified_is_refused(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"got a training: capture its model on a text, and give that run\.$"):
        verify(VerifyOptions(run=make_training(tmp_path / "training").path, device="cpu"))
    run = run_capture(tiny, tmp_path / "run", texts)
    with pytest.raises(UserError, match="--tokens of at least 1, got 0"):
        verify(VerifyOptions(run=run.path, tokens=0, model=str(tiny), device="cpu"))
    part = run.parts("activity")[0]
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(UserError, match="Expected a readable part at"):
        verify(VerifyOptions(run=run.path, model=str(tiny), device="cpu"))


def test_a_model_that_this_machine_does_not_remember_is_asked_for(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_capture(tiny, tmp_path / "run", texts)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="give it by --model"):
        verify(VerifyOptions(run=run.path, tokens=100, device="cpu"))
