"""A run's length costs no memory: made-up counts through the real writer, in a process that says how much it took."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import re, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import numpy as np
from conftest import made_manifest
from twell.workbench.run import parquet_part, schema, writer
from twell.workbench.run.writer import RunWriter
tokens, out = int(sys.argv[1]), Path(sys.argv[2])
writer.PART_TOKENS = 2**18
if sys.argv[3] == "whole":  # as if a part were held until it is closed
    parquet_part.GROUP = writer.GROUP = 2**60
    writer.PART_TOKENS = 2**60
manifest = made_manifest(layers=8, d_ff=5632)
run = RunWriter(out, manifest)
drawn = np.random.default_rng(0)
batch = 2**15
names = schema.nnz_columns(8)
counts = {{name: np.minimum(drawn.lognormal(3.4, 0.8, batch), 5632).astype(np.uint16) for name in names}}
place = np.arange(batch, dtype=np.int32)
zeros = np.zeros(batch, dtype=np.uint8)
loss = np.ma.MaskedArray(drawn.gamma(2, 1.8, batch).astype(np.float16), mask=place % 512 == 511)
entropy = np.ma.MaskedArray(drawn.gamma(2, 1.5, batch).astype(np.float32), mask=loss.mask)
for at in range(0, tokens, batch):
    keys = {{"sequence": (at + place) // 512, "position": place % 512, "token_id": np.roll(place, at % 997) % 6144}}
    run.add("activity", keys | {{"phase": zeros, "flags": zeros, "loss": loss, "entropy": entropy}} | counts)
    if run.due:
        run.close_part()
run.finish()
assert run.manifest.tokens == tokens
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak(tokens: int, folder: Path, how: str = "stream") -> int:
    code = CODE.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", code, str(tokens), str(folder / f"{tokens}-{how}"), how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the kernel's account of a process's memory")
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    short, long = peak(2**19, tmp_path), peak(2**21, tmp_path)
    assert long < 1.1 * short
    assert peak(2**21, tmp_path, "whole") > 1.1 * short  # which a run held in memory does not pass
