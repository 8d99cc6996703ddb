"""What can go wrong with a capture: one sentence, exit code 2 and nothing on disk changed when it cannot begin; a
readable run marked `interrupted` when it is stopped. Cost: 20 s.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.captures import run_plain, sequences_of

from twell.workbench.capturing.command import capture
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.cli import main
from twell.workbench.errors import UserError
from twell.workbench.options import CaptureOptions
from twell.workbench.run import parquet_part, writer
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.text import batches

Twell = Callable[..., str]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.txt", None, "Expected a text file at"),
        ("empty.txt", b"", "got an empty file"),
        ("blank.txt", b" \n\n \t", "got no document that has any"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "Expected UTF-8 in"),
        ("no_text.jsonl", b'{"text": "fine"}\n{"body": "not"}\n', 'a string field "text" on line 2'),
        ("words.docx", b"PK", "Expected a text file that ends in"),
    ],
)
def test_text(name: str, content: bytes | None, sentence: str, tmp_path: Path, refused: Twell) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    message = refused(text=path)
    assert sentence in message
    assert name in message


def test_names_that_nothing_recorded_could_hold(tiny: Path, tmp_path: Path, refused: Twell) -> None:
    """Of files and folders, in bytes that are no UTF-8."""
    latin = os.fsdecode("caf\u00e9".encode("latin-1"))
    (tmp_path / f"{latin}.txt").write_text("Ten metres.")
    shutil.copytree(tiny, tmp_path / latin)
    message = "Expected a name in UTF-8, got "
    assert message in refused(text=tmp_path / f"{latin}.txt")
    assert message in refused(out=tmp_path / f"{latin}-run")
    assert message in refused(model=tmp_path / latin)


def test_options(refused: Twell) -> None:
    assert "--tokens of at least 1, got 0" in refused("--tokens", "0")
    assert "--batch-tokens of at least 1, got -5" in refused("--batch-tokens", "-5")
    for name, value in (("--examples", "-3"), ("--timings", "-1"), ("--generate", "-1")):
        assert f"{name} of at least 0, got {value}" in refused(name, value)
    for share in ("-0.5", "1.5"):
        assert f"--timings-share from 0 to 1, got {share}" in refused("--timings-share", share)
    for seed in ("-1", str(2**32)):
        assert f"--seed from 0 to 4294967295, got {seed}" in refused("--seed", seed)
    assert "--fired as LAYERS[:SHARE], layers from 0 to 2" in refused("--fired", "3")
    assert "--seq-len of at most 128" in refused("--seq-len", "129")
    if not torch.cuda.is_available():
        assert "--device cpu" in refused("--device", "cuda")


def test_a_disk_without_room(refused: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=10**9, free=120)
    monkeypatch.setattr("twell.workbench.capturing.progress.shutil.disk_usage", lambda _: full)
    sizes = re.search(r"Expected ([\d,]+) bytes of room for .*, got 120 bytes: free", refused())
    assert sizes and int(sizes[1].replace(",", "")) > 120  # not both 0.0 MB
    full.free = 10**6
    assert "got 1.0 MB" in refused("--examples", "100")
    full.total = full.free = 0  # as of /proc
    assert "Expected --out in a folder that can be written to, got " in refused()


def test_a_folder_that_holds_a_run(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], refused: Twell, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["twell", "capture", str(tiny), "--text", texts[0], "--out", str(out)])
    main()
    assert len(list(out.rglob("*.parquet"))) > 2
    assert "already holds a run" in refused(out=out)
    assert "already holds a run" in refused(out=out, model="nobody/asked-for-this-first")
    for more in ((), ("--resume",)):
        assert "run.json is a file" in refused(*more, out=out / "run.json")
        assert "got Not a directory" in refused(*more, out=out / "run.json" / "run")


# ---- runs that end before their text does


def run_capture(folder: Path, out: Path, text: tuple[str, ...], **given: Any) -> Run:
    """A capture of a model folder on the CPU; small batches and short sequences unless told otherwise."""
    fields = {"batch_tokens": 64, "seq_len": 24, "timings": 0, "device": "cpu", **given}
    return capture(CaptureOptions(model=str(folder), text=text, out=out, **fields))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_counted(
    number: signal.Signals, tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Recorder.step

    def stopping(self: Recorder, batch: Any) -> None:
        step(self, batch)
        if batch.number == 0:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Recorder, "step", stopping)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_capture(tiny, tmp_path / "run", texts)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    monkeypatch.setattr(Recorder, "step", step)
    run, whole = open_run(tmp_path / "run"), run_capture(tiny, tmp_path / "whole", texts)
    assert run.manifest.status == "interrupted"
    assert 0 < run.manifest.tokens < whole.manifest.tokens
    assert run.arrow("activity").equals(whole.arrow("activity").slice(0, run.manifest.tokens))
    assert run.frame("sequences")["tokens"].sum() == run.manifest.tokens
    assert run.damaged() == []


def test_who_stops_a_capture_is_told_how_it_goes_on(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """At once, and by the same command given again; what is printed at the end can be pasted."""
    step, out = Recorder.step, tmp_path / "a run"
    given = ["twell", "capture", str(tiny), "--text", texts[0], "--out", str(out), "--seq-len", "24", "--timings", "0"]

    def stopping(self: Recorder, batch: Any) -> None:
        step(self, batch)
        os.kill(os.getpid(), signal.SIGINT)

    def ended(*more: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [*given, "--batch-tokens", "24", *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    monkeypatch.setattr(Recorder, "step", stopping)
    code, error = ended()
    assert code == 130 and error.endswith("give the same command with --resume to go on with it.\ntwell: Stopped.\n")
    monkeypatch.setattr(Recorder, "step", step)
    code, error = ended()
    assert code == 2 and "already holds a run that was interrupted: give the same command with --resume" in error
    monkeypatch.setattr(sys, "argv", [*given, "--batch-tokens", "24", "--resume"])
    main()
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  twell ")]
    assert [shlex.split(line)[2] for line in commands] == [str(tmp_path), str(out), str(out)]
    assert shlex.split(commands[2])[4] == "a run.html"


def test_text_that_breaks_off_keeps_what_was_counted(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.workbench.text.sequences.BATCH", 1)  # characters tokenised at a time: no reading ahead
    path = tmp_path / "broken.txt"
    path.write_bytes(Path(texts[3]).read_bytes() * 1000 + b"\xff")  # longer than what is read at a time
    with pytest.raises(UserError, match="Expected UTF-8"):
        run_capture(tiny, tmp_path / "run", (str(path),), probes="counts", loss=False, batch_tokens=4096)
    run = open_run(tmp_path / "run")
    assert run.manifest.status == "interrupted"
    assert len(run.activity()) == run.manifest.tokens > 0


def test_a_full_disk_keeps_whole_parts(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 100)
    monkeypatch.setattr(batches, "WINDOW", 1)
    write = parquet_part.GrowingFile.write

    def full(self: parquet_part.GrowingFile, rows: Any) -> None:
        if "part-00002" in str(self.path):
            monkeypatch.setattr(pq.ParquetWriter, "write_table", no_room)
        write(self, rows)

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet_part.GrowingFile, "write", full)
    with pytest.raises(UserError, match="the disk is full"):
        run_capture(tiny, tmp_path / "run", texts)
    run = open_run(tmp_path / "run")
    assert run.manifest.status == "interrupted"
    assert len(run.parts("activity")) == 2
    assert len(run.activity()) == run.manifest.tokens > 0
    assert run.damaged() == []


def test_documents_too_long_and_empty_ones(tiny: Path, tmp_path: Path) -> None:
    """Longer than the context: cut, and each piece read from position 0; without text: left out, but numbered."""
    long = "The ferry waits for nobody. " * 40
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", long, " ", "", "x")), encoding="utf-8")
    run = run_capture(tiny, tmp_path / "run", (str(path),), seq_len=None, batch_tokens=300)
    sequences = run.frame("sequences")
    pieces = sequences[sequences["document"] == 1]
    assert pieces["start"].tolist() == [128 * place for place in range(len(pieces))] and len(pieces) > 1
    assert pieces["tokens"].max() == 128 == run.activity()["position"].max() + 1
    assert sequences["document"].tolist() == [*[1] * len(pieces), 2, 4]  # a space is a token, nothing is none
    assert run.decode(run.activity()["token_id"]) == f"{long} x"
    expected = run_plain(tiny, sequences_of(run), torch.float32)
    differs = run.activity()[nnz_columns(3)].to_numpy() != expected.nnz
    assert not (differs & ~expected.near).any()
