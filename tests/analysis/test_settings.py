"""The fastest safe compression, from made benches whose answer is known."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from twell.analysis import tile_audit, tile_settings
from twell.workbench.errors import Missing
from twell.workbench.store import Run


def test_every_number(run: Run) -> None:
    table = tile_settings(run)
    assert table[["layer", "compression"]].to_numpy().tolist() == [[layer, c] for layer in (0, 3) for c in (4, 8, 16)]
    assert table["slots"].tolist() == [63, 31, 15] * 2
    assert table["microseconds"].tolist() == [60, 50, 40, 60, 53, 40]
    assert table["speedup"].tolist() == pytest.approx([100 / 60, 2, 2.5, 100 / 60, 100 / 53, 2.5])
    assert table["past_share"].tolist() == [0, 0, 3 / 64, 0, 0, 0]
    risk = tile_audit(run).set_index(["layer", "compression"])["rows_over_share"]
    for row in table.itertuples():
        assert row.rows_over_share == risk[row.layer, row.compression]
        assert row.safe == (row.rows_over_share == 0 and row.past_share == 0)
    for _, case in table.groupby("layer"):
        safe = case[case["safe"]]
        assert case.index[case["fastest"]].tolist() == ([safe["microseconds"].idxmin()] if len(safe) else [])
    assert table["safe"].tolist() == [False, False, False, True, False, False]


def test_rows_of_the_run_make_a_setting_unsafe(made: ModuleType, tmp_path: Path) -> None:
    """Layer 3 has no row past its slots in the bench; without tile counts of the run that is all that is known."""
    table = tile_settings(made.make(tmp_path / "bare", sequences=10, parts=1, tiles=False, bench=True))
    assert table["rows_over_share"].isna().all()
    assert table.loc[table["fastest"], ["layer", "compression"]].to_numpy().tolist() == [[0, 8], [3, 16]]


def test_what_was_not_timed(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no bench table"):
        tile_settings(made.make(tmp_path / "none", sequences=10, parts=1))
    wide = made.make(tmp_path / "wide", sequences=10, parts=1, bench=True)
    wide.manifest.model["d_ff"] = 4096
    with pytest.raises(Missing, match="no timing of its layers at any compression"):
        tile_settings(wide)
