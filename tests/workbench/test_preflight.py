"""Wrong options are refused before torch is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures import run_capture

from twell.workbench import preflight
from twell.workbench.ablations.options import AblateOptions, PruneOptions
from twell.workbench.errors import UserError
from twell.workbench.options import TrainOptions, VerifyOptions
from twell.workbench.preflight import has_no_gpu

PROGRAM = """
import json, sys
from twell.workbench.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["twell", *arguments]
    try:
        main()
    except SystemExit as stopped:
        assert stopped.code == 2
    else:
        raise AssertionError(arguments)
assert "torch" not in sys.modules
"""

WITHOUT_GPU = (
    (["text", "words", "--device", "cuda"], "a CUDA device for --device cuda"),
    (["bench", "--shape", "64,64", "--device", "cuda"], "a CUDA device for --device cuda"),
)


def test_wrong_options_are_refused_without_torch(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """Numbers, names, folders and contradictions of each command that has a model; a number for each sentence."""
    run = str(run_capture(tiny, tmp_path / "run", texts[:1]).path)
    new = ["--out", str(tmp_path / "new")]
    train = ["train", "--text", texts[0], *new, "--config"]
    cases = (
        (["capture", "m", "--text", texts[0], *new, "--tokens", "0"], "--tokens of at least 1, got 0"),
        (["capture", "m", "--text", texts[0], *new, "--seq-len", "1"], "--seq-len of at least 2, got 1"),
        (["capture", "m", "--text", "gone.txt", *new], "Expected a text file at gone.txt, got nothing there"),
        (["capture", "m", "--text", texts[0], "--out", run], "already holds a run"),
        (["bench", "--rows", "0"], "numbers of at least 1 for --rows, got 0"),
        (["bench", "--kernel", "foo"], "--kernel of hopper, cuda, cpu, reference, got 'foo'"),
        (["bench", "m", "--shape", "64,64"], "got MODEL and --shape: give one of them"),
        (["bench", "--seconds", "0"], "--seconds above 0, got 0"),
        (["bench", "m", "--inputs", "text,even"], "--inputs of text, uniform, got 'even'"),
        (["bench", "--shape", "64,64", "--inputs", "text"], "--inputs of heavy, even, dense, got 'text'"),
        (["ablate", run, "--condition", "foo"], "got 'foo'"),
        (["ablate", run, "--condition", "ffn@9"], "Expected a layer from 0 to 2, got 9"),
        (["ablate", "gone"], "got gone: there is no such folder"),
        (["prune", "m", "gone", *new], "Expected a run in gone"),
        (["prune", "m", run, "--out", run], "already holds a run"),
        (["verify", "gone"], "Expected a run in gone"),
        ([*train, "foo"], "Expected a recipe"),
        ([*train, "demo", "--holdout", "1"], "--holdout between 0 and 1"),
        ([*train, "demo", "--teacher", "m"], "Expected --from beside --teacher m"),
        (["demo", "--port", "70000"], "--port from 1 to 65535, got 70000"),
        (["app", "--port", "0"], "--port from 1 to 65535, got 0"),
        (["text", "words", "--generate", "-1"], "--generate of at least 0, got -1"),
        *WITHOUT_GPU * has_no_gpu(),
    )
    program = [sys.executable, "-c", PROGRAM, json.dumps([arguments for arguments, _ in cases])]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    shown = result.stderr.splitlines()
    assert len(shown) == len(cases) and result.stdout == ""
    for line, (arguments, message) in zip(shown, cases, strict=True):
        assert line.startswith("twell: Expected ") and message in line, arguments


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests' user may be one who may write anywhere, so the system's answer is made."""
    (run := tmp_path / "locked" / "run").mkdir(parents=True)
    (run / "run.json").touch()
    access, locked = os.access, run.parent
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (mode == os.F_OK or path == tmp_path))
    out = "Expected --out in a folder that can be written to, got .*: choose another --out"
    own = "Expected a run that can be written to, got .*: copy it to a folder of yours"
    for options, message in (
        (PruneOptions(model="m", run=run, out=locked / "new" / "smaller"), out),
        (TrainOptions(config="demo", text=("t",), out=locked), out),
        (VerifyOptions(run=run), own),
        (AblateOptions(target=str(run)), own),
    ):
        with pytest.raises(UserError, match=message):
            preflight.refuse_unwritable(options)
    preflight.refuse_unwritable(PruneOptions(model="m", run=run, out=tmp_path / "new"))
    monkeypatch.setitem(preflight.CHECKS, PruneOptions, lambda _: None)
    with pytest.raises(UserError, match=out):
        preflight.refuse(PruneOptions(model="m", run=run, out=locked / "new"))


@pytest.mark.parametrize(
    ("built", "driver", "library", "expected"),
    [
        ("cuda, hip = None, None", True, True, True),
        ("cuda, hip = '13.0', None", False, False, True),
        ("cuda, hip = '13.0', None", True, False, False),
        ("cuda, hip = '13.0', None", False, True, False),
        ("cuda, hip = None, '7.0'", False, False, False),
        ("built = 'in a way of its own'", True, False, False),
    ],
)
def test_a_gpu_is_missing_for_certain_or_pytorch_is_asked(
    built: str, driver: bool, library: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what PyTorch was built for, what the driver shows of itself, and whether its library loads."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(built)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preflight, "DRIVER", ("/gone", *[str(tmp_path)] * driver))
    monkeypatch.setattr(preflight, "LIBRARY", "libc.so.6" if library else "libgone.so.1")
    assert has_no_gpu() is expected
    (tmp_path / "torch" / "version.py").unlink()
    assert has_no_gpu() is False
