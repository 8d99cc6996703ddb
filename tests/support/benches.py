"""Options of small benches, and recorded patterns for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twell.workbench.bench.options import BenchOptions


def quick(**fields: Any) -> BenchOptions:
    """Bench one kernel and one shape, without the compiler and in few turns."""
    given: dict[str, Any] = {"kernel": ("cpu",), "compile": False, "seconds": 0.001, "device": "cpu"}
    if not {"model", "patterns"} & set(fields):
        given |= {"shape": "64,128", "rows": "20", "nnz": "9", "inputs": "even"}
    return BenchOptions(**{**given, **fields})


def save_patterns(path: Path, neurons: int = 60) -> np.ndarray:
    """Save firing patterns of 40 rows, which fire 3 to 42 of so many neurons; return how many each fires."""
    nnz = np.arange(3, 43, dtype=np.uint16)
    index = np.concatenate([np.arange(n) * neurons // n for n in nnz.tolist()]).astype(np.uint16)
    np.savez(path, nnz_3=nnz, idx_3=index)
    return nnz
