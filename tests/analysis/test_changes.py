"""What changed between two runs: headline numbers against the rows, and their order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.clusters import jackknife
from support.questions import degrees

from twell.analysis import by_layer, compare_layers, ffn_speedup
from twell.analysis.changes import compare_means, headline_changes
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run


def test_means_over_all_layers_and_what_changed_most(
    run: Run, sparser: Run, other_text: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against rows: the interval of the same text from its groups of documents, each left out once."""
    means = compare_means(run, sparser)
    assert means["mean"] == pytest.approx(by_layer(sparser)["mean"].mean())
    assert means["difference"] == pytest.approx(compare_layers([run, sparser])["difference"].mean())
    assert means["ratio"] == pytest.approx(means["mean"] / means["first"])
    rows = [one.activity(flagged=False) for one in (run, sparser)]
    groups = rows[0]["sequence"].to_numpy() // 2 % 20
    a, b = (one[nnz_columns(run.layers)].to_numpy(float).mean(axis=1) for one in rows)
    t = stats.t.ppf(0.975, degrees(pd.Series(groups)))
    assert means["high"] - means["difference"] == pytest.approx(t * jackknife(b - a, groups))
    logs = [np.log(b[groups != group].mean() / a[groups != group].mean()) for group in np.unique(groups)]
    error = np.sqrt((1 - 1 / len(logs)) * np.sum((np.array(logs) - np.log(means["ratio"])) ** 2))
    assert means["ratio_low"] == pytest.approx(means["ratio"] * np.exp(-t * error))
    apart = compare_means(run, other_text)
    assert apart["high"] - apart["low"] > means["high"] - means["low"], "of another text, as independent"
    table = headline_changes([run, sparser]).set_index("number")
    for name in ("low", "high", "ratio_low", "ratio_high"):
        scale = run.d_ff if name in ("low", "high") else 1
        assert table.loc["firing_share", name] * scale == pytest.approx(table.loc["nnz_mean", name]) == means[name]
    assert table.loc["nnz_mean", "evidence"] == "clear" and table.loc["loss", "ratio"] == 1
    speeds = [ffn_speedup(one) for one in (run, sparser)]
    half = np.hypot(*(np.log(speed["high"] / speed["low"]) / 2 for speed in speeds))
    ratio = table.loc["ffn_speedup"]
    for end, side in (("ratio_low", -half), ("ratio_high", half)):
        assert ratio[end] == pytest.approx(speeds[1]["speedup"] / speeds[0]["speedup"] * np.exp(side))
    assert ratio["evidence"] == ("clear" if ratio["ratio_low"] > 1 or ratio["ratio_high"] < 1 else "chance")
    parts = table["evidence"].map({"clear": 20, "unknown": 10, "chance": 0})
    assert (table["of_whole"].abs() + parts).is_monotonic_decreasing, "what may be chance comes last"
    assert table.loc["nnz_mean", "of_whole"] == pytest.approx(table.loc["firing_share", "difference"])
    before, after = (1 / speed["speedup"] for speed in speeds)
    assert ratio["of_whole"] == pytest.approx(before - after), "of the dense time"
    monkeypatch.setattr("twell.analysis.changes.of_one_text", lambda runs: False)
    *_, dead, loss = headline_changes([run, other_text]).itertuples()
    assert loss.number == "loss" and np.isnan(loss.difference), "of other texts, losses tell nothing"
    assert dead.number == "dead_share" and np.isnan(dead.ratio), "nor do dead neurons of unequal amounts"


def test_a_small_count_that_doubled_comes_after_a_large_share(
    run: Run, sparser: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 of 1000 neurons more is a ratio of 2, a fifth of the dense time one of 1.5; that of no interval comes last."""
    nnz = {"mean": 2.0, "first": 1.0, "difference": 1.0, "low": 0.9, "high": 1.1}
    nnz |= {"ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}
    monkeypatch.setattr("twell.analysis.changes.compare_means", lambda first, run: dict(nnz))
    numbers = [
        {"dead_share": dead, "loss": 3.0, "tokens": 500, "speedup": speed, "pass_speedup": None}
        | {"speedup_low": speed / 1.01, "speedup_high": speed * 1.01}
        for dead, speed in ((0.001, 5 / 3), (0.5, 2.5))
    ]
    monkeypatch.setattr("twell.analysis.changes.overview", lambda one: numbers[one is sparser])
    table = headline_changes([run, sparser])
    assert table["number"].tolist() == ["ffn_speedup", "nnz_mean", "firing_share", "dead_share", "loss"]
    assert table["of_whole"].iloc[[0, 3]].tolist() == pytest.approx([0.2, 0.499])
    nnz |= {"low": -0.1}
    table = headline_changes([run, sparser])
    assert table["number"].tolist() == ["ffn_speedup", "dead_share", "loss", "nnz_mean", "firing_share"]
