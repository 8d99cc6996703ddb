"""What `twell bench` refuses, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.benches import quick, save_patterns

from twell.kernels.backends import gpu
from twell.kernels.benchmark.synthetic import KINDS
from twell.kernels.dispatch import KERNELS
from twell.kernels.params import NO_REQUIREMENTS
from twell.workbench.bench import command as benches
from twell.workbench.bench.command import bench
from twell.workbench.bench.options import SHAPE_INPUTS
from twell.workbench.errors import UserError
from twell.workbench.options import GPU_KERNELS, KernelName
from twell.workbench.run.writer import arrow_schema


def test_the_inputs_of_a_shape_are_those_that_are_made() -> None:
    assert SHAPE_INPUTS == KINDS  # these stand where torch is loaded, which options do without


def test_the_kernels_of_options_are_those_there_are() -> None:
    """Those that no processor runs are known without torch too."""
    here = torch.device("cpu"), torch.float32, 64, 64, 8, NO_REQUIREMENTS
    assert {name for name, kernel in KERNELS.items() if "device" in (kernel.refuses(*here) or "")} == GPU_KERNELS
    assert {"auto", *KERNELS} == set(get_args(KernelName))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shape": "64"}, "--shape D_MODEL,D_FF, two multiples of 8"),
        ({"shape": "64,100"}, "two multiples of 8 such as 2048,5632, got '64,100'"),
        ({"shape": "a,b"}, "whole numbers with commas between them for --shape, got 'a,b'"),
        ({"model": "here", "shape": "64,128"}, "a model, --shape or --patterns, got MODEL and --shape"),
        ({"model": "nowhere/at-all"}, "nowhere/at-all"),
        ({"model": "TINY", "plain": True}, "--plain beside --shape alone"),
        ({"model": "TINY", "layers": "0,3"}, "--layers from 0 to 2, got 3"),
        ({"model": "TINY", "inputs": "even"}, "--inputs of text, uniform, got 'even'"),
        ({"model": "TINY", "rows": "99999", "text": ("TEXT",)}, "Expected 99,999 tokens of text, got"),
        ({"rows": "0"}, "at least 1 for --rows, got 0"),
        ({"rows": "1,x"}, "for --rows, got '1,x'"),
        ({"rows": "999999999999", "nnz": "9"}, "memory for 999,999,999,999 rows, got too little: lower --rows"),
        ({"nnz": "120"}, "--nnz of at most 54 for 128 neurons, got 120"),
        ({"inputs": "light"}, "--inputs of heavy, even, dense, got 'light'"),
        ({"kernel": ("magic",)}, "--kernel of .*, got 'magic'"),
        ({"kernel": ("hopper",), "device": "cpu", "nnz": "9"}, "(an NVIDIA GPU|--device cuda) for --kernel hopper"),
        ({"kernel": ("cuda", "hopper"), "device": "cpu", "nnz": "9"}, "for --kernel cuda and hopper"),
        ({"compression": "8,3"}, "--compression of 2, 4, 8, 16, got 8,3"),
        ({"seconds": 0.0}, "--seconds above 0, got 0"),
        ({"seconds": float("inf")}, "--seconds above 0, got inf"),
        ({"device": "cuda"}, "a CUDA device for --device cuda"),
        ({"energy": True}, "a GPU that reports its power for --energy"),
        ({"out": "FOLDER"}, "a run's folder or a file that ends in .parquet, got"),
        ({"out": "FOLDER/figures.csv"}, r"got .*: name a file such as figures\.parquet, or capture the run first"),
        ({"out": "FOLDER/other.parquet"}, "a bench table at .*, got another file"),
        ({"patterns": "FOLDER/none_d64_f128.npz"}, r"npz of nnz_L and idx_L .*No such file"),
        ({"patterns": "FOLDER/other.parquet"}, r"an npz of .*, got a file that cannot be read \(it is no npz, or cut"),
        (
            {"patterns": "FOLDER/words.txt"},
            r"cannot be read \(it is no npz, or cut short\): give the recorded patterns",
        ),
        ({"patterns": "FOLDER/objects.npz"}, r"\(it has other things than numbers\): give the recorded patterns"),
        ({"patterns": "FOLDER/made.npz"}, "--shape D_MODEL,D_FF beside --patterns"),
        ({"patterns": "FOLDER/made_d64_f32.npz"}, "neurons below 32 in .*, got"),
        ({"patterns": "FOLDER/made.npz", "shape": "64,128", "layers": "1"}, "--layers of 3 in .*, got 1"),
        ({"patterns": "FOLDER/cut_d64_f128.npz"}, "another number of neurons than nnz_0 adds up to"),
        ({"patterns": "FOLDER/bare_d64_f128.npz"}, "got something: give"),
    ],
)
def test_bad_input_is_one_sentence(
    fields: dict[str, Any], sentence: str, tiny: Path, texts: tuple[str, ...], tmp_path: Path
) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    pq.write_table(arrow_schema("timings", 1, 8).empty_table(), tmp_path / "other.parquet")
    for name in ("made.npz", "made_d64_f32.npz"):
        save_patterns(tmp_path / name)
    np.savez(tmp_path / "cut_d64_f128.npz", nnz_0=np.array([3, 4]), idx_0=np.array([1, 2, 3]))
    np.savez(tmp_path / "bare_d64_f128.npz", something=np.array([3, 4]))
    np.savez(tmp_path / "objects.npz", nnz_0=np.array([None, {}]))
    (tmp_path / "words.txt").write_text("Ten metres.")
    known = {"TINY": str(tiny), "TEXT": texts[0]}

    def real(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(real, value))
        return known.get(value, value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value)

    given = {name: real(value) for name, value in fields.items()}
    given |= {name: Path(given[name]) for name in ("out", "patterns") if name in given}
    with pytest.raises(UserError, match=sentence) as raised:
        bench(quick(**given))
    message = str(raised.value)
    assert message.startswith(("Expected", "nowhere")) and message.endswith(".") and "\n" not in message


def test_kernels_that_cannot_run_are_refused_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "bench_case", None)
    with pytest.raises(UserError, match="for --kernel hopper and cuda"):
        bench(quick(kernel=("hopper", "cuda"), device="cpu"))


def test_a_gpus_kernels_are_not_asked_of_a_processor_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "bench_case", None)
    monkeypatch.setattr(gpu, "missing", lambda: None)
    with pytest.raises(UserError, match="Expected --device cuda for --kernel cuda, got cpu: leave --device out"):
        bench(quick(kernel=("cuda",), device="cpu"))
