"""The fastest safe compression, from made benches whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from support.rewritten import relisted

from twell.analysis import tile_audit, tile_settings
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


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
    fullest = run.frame("tiles").query("rows > 0").groupby("layer")["occupancy"].max()
    fits = [fullest[row.layer] <= row.slots and (row.layer, row.compression) != (0, 16) for row in table.itertuples()]
    assert table["safe"].tolist() == fits


def test_rows_of_the_run_make_a_setting_unsafe(made: ModuleType, tmp_path: Path) -> None:
    """Layer 3 has no row past its slots in the bench; without tile counts of the run that is all that is known."""
    table = tile_settings(made.make(tmp_path / "bare", sequences=10, parts=1, tiles=False, bench=True))
    assert table["rows_over_share"].isna().all()
    assert table.loc[table["fastest"], ["layer", "compression"]].to_numpy().tolist() == [[0, 8], [3, 16]]


def test_what_was_not_timed(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no benchmark"):
        tile_settings(made.make(tmp_path / "none", sequences=10, parts=1))
    wide = made.make(tmp_path / "wide", sequences=10, parts=1, bench=True)
    wide.manifest.model["d_ff"] = 4096
    with pytest.raises(Missing, match="no timing of its layers at any compression"):
        tile_settings(wide)


def only(keep: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """The rows of a bench that are to stay."""
    return lambda bench: bench[keep(bench)].reset_index(drop=True)


def benched(made: ModuleType, path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], **shape: Any) -> Run:
    """A made run whose bench has been changed."""
    run = made.make(path, sequences=10, parts=1, bench=True, **shape)
    (file,) = run.parts("bench")
    change(pd.read_parquet(file)).to_parquet(file)
    return relisted(run, "bench")


def test_one_compression_leaves_nothing_to_choose_from(run: Run, made: ModuleType, tmp_path: Path) -> None:
    assert tile_settings(run).attrs["note"].startswith("safe:")
    one = benched(made, tmp_path / "one", only(lambda bench: bench["compression"].isin([0, 8])))
    assert set(tile_settings(one)["compression"]) == {8}
    assert "Every kernel was timed at one compression" in tile_settings(one).attrs["note"]
    each = only(lambda bench: (bench["compression"] != 4) | (bench["layer"] == 0))
    apart = benched(made, tmp_path / "apart", lambda bench: each(bench.assign(kernel=bench["compression"].astype(str))))
    assert tile_settings(apart)["compression"].nunique() == 3
    assert "Every kernel was timed at one compression" in tile_settings(apart).attrs["note"], "no two of one kernel"


def test_a_bench_that_counts_no_rows_past_slots(made: ModuleType, tmp_path: Path) -> None:
    """What the run counted decides; where it counted nothing either, no setting is called safe."""
    without = only(lambda bench: bench["metric"] != "rows_past_slots")
    table = tile_settings(benched(made, tmp_path / "counted", without))
    assert table["past_share"].isna().all()
    assert table["safe"].tolist() == (table["rows_over_share"] == 0).tolist()
    assert table["safe"].any()
    assert table["fastest"].any()
    unknown = tile_settings(benched(made, tmp_path / "unknown", without, tiles=False))
    assert not unknown["safe"].any()
    assert not unknown["fastest"].any()
