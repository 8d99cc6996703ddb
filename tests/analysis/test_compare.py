"""Comparisons by run, layer, position and token against the rows, and what they refuse."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.clusters import centred_error, effective, jackknife, pooled
from support.questions import degrees
from support.rewritten import edit_manifest

from twell.analysis import (
    by_layer,
    by_token,
    compare_layers,
    compare_positions,
    compare_runs,
    compare_tokens,
    ffn_speedup,
    summarize,
)
from twell.analysis.compare import compare, paired_layers
from twell.analysis.figures.compare import differences, layers_of, side_by_side
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import CompareOptions, SummarizeOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run

LIMITS = ["95 % from", "95 % to", "ratio from", "ratio to"]


def test_compare_runs(run: Run, sparser: Run, other_text: Run) -> None:
    table = compare_runs([run, sparser, other_text])
    assert table["run"].tolist() == ["made", "sparser", "other"]
    for one, row in zip((run, sparser, other_text), table.itertuples(), strict=True):
        layers = by_layer(one)
        assert row.loss == pytest.approx(one.frame("activity")["loss"].astype(float).mean())
        assert row.nnz_mean == pytest.approx(layers["mean"].mean())
        assert row.dead_share == pytest.approx(layers["dead_share"].mean())
        assert row.ffn_speedup == ffn_speedup(one)["speedup"]
        assert np.isnan(row.model_speedup)
    loss, firing = table["loss"].to_numpy(), 1 - table["sparsity"].to_numpy()
    for i, best in enumerate(table["best"]):
        ahead = [j for j in range(3) if loss[j] <= loss[i] and firing[j] <= firing[i]]
        assert best == all((loss[j], firing[j]) == (loss[i], firing[i]) for j in ahead)
    assert table["best"].tolist()[:2] == [False, True], "the same loss, fewer neurons"


def test_layers_of_the_same_text_are_compared_in_pairs(run: Run, sparser: Run) -> None:
    table = compare_layers([run, sparser]).set_index("layer")
    assert table["paired"].all()
    a, b = (one.activity(flagged=False) for one in (run, sparser))
    groups = a["sequence"].to_numpy() // 2 % 20
    for layer, name in enumerate(nnz_columns(4)):
        row, difference = table.loc[layer], b[name].astype(float).to_numpy() - a[name].astype(float).to_numpy()
        assert row["difference"] == pytest.approx(difference.mean(), rel=1e-9, abs=1e-9)
        assert row["ratio"] == pytest.approx(b[name].mean() / a[name].mean())
        half = stats.t.ppf(0.975, degrees(pd.Series(groups))) * jackknife(difference, groups)
        assert row["high"] - row["difference"] == pytest.approx(half, rel=1e-6, abs=1e-9)
    assert (table["high"][:3] < 0).all()
    assert table.loc[3, "low"] <= 0 <= table.loc[3, "high"]


def test_layers_of_unequal_depths_are_paired_by_relative_depth(run: Run, made: ModuleType, tmp_path: Path) -> None:
    assert paired_layers(8, 28) == {0: 0, 4: 1, 8: 2, 12: 3, 15: 4, 19: 5, 23: 6, 27: 7}
    assert paired_layers(28, 8) == {other: first for first, other in paired_layers(8, 28).items()}
    assert (paired_layers(3, 3), paired_layers(1, 4)) == ({0: 0, 1: 1, 2: 2}, {0: 0})
    deep = made.make(tmp_path / "deep", layers=7, sequences=20)
    for runs in ([run, deep], [deep, run]):
        means = [one.activity(flagged=False)[nnz_columns(one.layers)].mean().to_numpy() for one in runs]
        table, partners = compare_layers(runs), paired_layers(runs[0].layers, runs[1].layers)
        assert dict(zip(table["layer"], table["first_layer"], strict=True)) == partners
        assert sorted(partners.values() if len(means[0]) == 7 else partners) == [0, 2, 4, 6]
        np.testing.assert_allclose(table["mean"], means[1][table["layer"]])
        np.testing.assert_allclose(table["first"], means[0][table["first_layer"]])
        bands = compare_positions(runs)
        assert set(zip(bands["layer"], bands["first_layer"], strict=True)) == set(partners.items())
    labels = differences(compare_layers([run, deep])).layout.yaxis.ticktext
    assert labels == ("L0", "L2 / L1", "L4 / L2", "L6 / L3")
    beside = layers_of([run, deep])
    lines = side_by_side(beside, {"mean": "mean nnz"}).data
    assert [trace.mode for trace in lines] == ["markers", "markers"], "no line joins layers that are no pair"
    assert [max(trace.y) for trace in lines] == [1.0, 1.0]


def test_other_text_is_independent(run: Run, other_text: Run) -> None:
    table = compare_layers([run, other_text]).set_index("layer")
    assert not table["paired"].any()
    a, b = (one.activity(flagged=False) for one in (run, other_text))
    for layer, name in enumerate(nnz_columns(4)):
        errors = [jackknife(one[name].astype(float).to_numpy(), one["sequence"].to_numpy() // 2 % 20) for one in (a, b)]
        parts = [error**4 / degrees(one["sequence"] // 2 % 20) for error, one in zip(errors, (a, b), strict=True)]
        half = stats.t.ppf(0.975, np.hypot(*errors) ** 4 / sum(parts)) * np.hypot(*errors)  # Welch's
        assert table.loc[layer, "high"] - table.loc[layer, "difference"] == pytest.approx(half, rel=1e-6)


def test_compare_positions(run: Run, sparser: Run) -> None:
    table = compare_positions([run, sparser]).set_index(["layer", "band"])
    a, b = (one.activity(flagged=False) for one in (run, sparser))
    band = np.where(a["position"] < 8, a["position"], np.floor(np.sqrt(8.0 * a["position"]))).astype(int)
    assert set(table.index.get_level_values("band")) == set(band)
    for number in (1, 5, 12):
        expected = b["nnz_01"][band == number].mean() - a["nnz_01"][band == number].mean()
        assert table.loc[(1, number), "difference"] == pytest.approx(expected)


def test_compare_tokens(run: Run, other_text: Run, made: ModuleType) -> None:
    table = compare_tokens([run, other_text]).set_index("token_id")
    a, b = (by_token(one).set_index("token_id") for one in (run, other_text))
    assert set(table.index) == set(a.index) & set(b.index)
    for token in table.index[:20]:
        row = table.loc[token]
        assert row["difference"] == pytest.approx(b.loc[token, "z"] - a.loc[token, "z"])
        errors, k = [one.loc[token, "z_se"] for one in (a, b)], [one.loc[token, "degrees"] for one in (a, b)]
        welch = np.hypot(*errors) ** 4 / (errors[0] ** 4 / k[0] + errors[1] ** 4 / k[1])
        half = stats.t.ppf(0.975, welch) * np.hypot(*errors)
        assert (row["low"], row["high"]) == pytest.approx((row["difference"] - half, row["difference"] + half))
        assert (row["count"], row["first_count"]) == (b.loc[token, "count"], a.loc[token, "count"])
    sure = (table["difference"] / (table["high"] - table["difference"])).abs()
    assert sure.iloc[0] > sure.iloc[-1]
    loud = table.loc[made.LOUD]
    assert loud["low"] <= 0 <= loud["high"], "loud in both"


def in_z(run: Run) -> pd.DataFrame:
    """Unflagged rows with their document and z, a mean over layers."""
    rows, names = run.activity(flagged=False), nnz_columns(run.layers)
    z = ((rows[names] - rows[names].mean()) / rows[names].std(ddof=0)).mean(axis=1)
    return pd.DataFrame({"token": rows["token_id"], "document": rows["sequence"] // 2, "z": z})


def test_tokens_of_the_same_text_are_compared_in_pairs(run: Run, sparser: Run, other_text: Run) -> None:
    """By differences of occurrences, which the same documents hold in both."""
    table = compare_tokens([run, sparser]).set_index("token_id")
    assert table["paired"].all() and not compare_tokens([run, other_text])["paired"].any()
    a, b = in_z(run), in_z(sparser)
    rows = a.assign(change=b["z"] - a["z"], z=(a["z"] + b["z"]) / 2)
    told = {
        token: (
            len(here),
            effective(here["document"]),
            centred_error(here["change"], here["document"], rows["change"], rows["document"]),
            here["z"].mean(),
        )
        for token, here in rows.groupby("token")
    }
    drawn = pooled(pd.DataFrame(told, index=["n", "clusters", "error", "mean"]).T, prior=10)
    for token, row in table.iterrows():
        expected = drawn.loc[token]
        half = stats.t.ppf(0.975, expected["degrees"]) * expected["error"]
        assert row["difference"] == pytest.approx(rows[rows["token"] == token]["change"].mean(), rel=1e-9, abs=1e-9)
        assert row["high"] - row["difference"] == pytest.approx(half, rel=1e-4)


def test_runs_that_are_the_same_do_not_differ(run: Run) -> None:
    """An engine adds in any order, so that a sum differs by 1e-16 from one build to the next: no error is less."""
    table = compare_tokens([run, run])
    assert (table["low"] < -1e-13).all() and (table["high"] > 1e-13).all()


def test_a_copy_without_rows_is_compared_as_independent(run: Run, sparser: Run, tmp_path: Path) -> None:
    (copy,) = summarize(SummarizeOptions(runs=(sparser.path,), summary_only=tmp_path / "copy"))
    apart = compare_tokens([run, copy]).set_index("token_id")
    assert not apart["paired"].any()
    half = [(each["high"] - each["low"]) / 2 for each in (apart, compare_tokens([run, sparser]).set_index("token_id"))]
    assert (half[1] < half[0].loc[half[1].index]).mean() > 0.9


def test_what_cannot_be_compared(run: Run, made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for question in (compare_runs, compare_layers, compare_positions, compare_tokens):
        with pytest.raises(UserError, match="two runs or more to compare, got 1: give another one"):
            question([run])
    other = made.make(tmp_path / "words", vocab=150, sequences=12, parts=1, layers=2, loss=False)
    with pytest.raises(Missing, match="another vocabulary"):
        compare_tokens([run, other])
    with pytest.raises(Missing, match="occurs 100000 times"):
        compare_tokens([run, run], min_count=100_000)
    assert sorted(compare_layers([run, other])["layer"]) == [0, 1], "as many as the shallower has"
    table = compare_runs([run, other])
    assert "cannot be compared" in table.attrs["note"]
    assert table["best"].isna().all()
    compare(CompareOptions(runs=(run.path, other.path)))
    output = capsys.readouterr().out
    assert "cannot be compared" in output and " best\n" not in output, "no run is best where losses cannot be compared"


def test_a_run_whose_text_has_no_checksum_yet_is_like_no_other(run: Run, made: ModuleType, tmp_path: Path) -> None:
    """As a capture leaves it until its end, and for ever where it was killed."""
    for name in ("one", "two"):
        made.make(tmp_path / name, sequences=run.manifest.sequences, layers=2, timings=0, status="recording")
        manifest = manifests.read(tmp_path / name)
        manifest.text = [{"source": entry["source"]} for entry in manifest.text]
        manifests.write(tmp_path / name, manifest)
    one, two = (open_run(tmp_path / name) for name in ("one", "two"))
    for runs in ([run, one], [one, two]):
        assert not compare_runs(runs).attrs["comparable"]
        assert not compare_layers(runs)["paired"].any()


@pytest.mark.parametrize("name", ["documents", "tokens"])
def test_losses_over_more_of_one_text_are_not_compared(run: Run, sparser: Run, tmp_path: Path, name: str) -> None:
    """As with another --tokens: the checksum is the same, but the losses are over other tokens."""
    longer = open_run(shutil.copytree(sparser.path, tmp_path / "longer"))
    table = compare_runs([run, longer])
    assert table.attrs["comparable"] and table["best"].notna().all()
    edit_manifest(longer.path, lambda manifest: manifest["text"][0].update({name: 7}))
    table = compare_runs([run, open_run(longer.path)])
    assert not table.attrs["comparable"] and "their lengths" in table.attrs["note"]
    assert table["best"].isna().all(), "nor told which is best, by its loss"


def test_two_vocabularies_of_one_size_are_told_apart(
    run: Run, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made.vocabulary

    def other(size: int) -> dict[str, Any]:
        columns = plain(size)
        columns["text"] = [text + "s" for text in columns["text"]]
        return columns

    monkeypatch.setattr(made, "vocabulary", other)
    with pytest.raises(Missing, match="other tokens than made under the same ids"):
        compare_tokens([run, made.make(tmp_path / "words", sequences=60)])


def test_a_run_that_fires_nothing_has_no_ratio(
    run: Run, made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: np.zeros_like(columns[name]) for name in nnz_columns(2)}

    none = made.make(tmp_path / "none", layers=2, sequences=12, change=nothing)
    compare(CompareOptions(runs=(none.path, run.path)))
    output = capsys.readouterr().out
    assert "against none" in output and not re.search(r"\binf\b", output)


def test_a_run_keeps_its_name(run: Run, sparser: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Though a truth is printed as yes or no."""
    named = shutil.copytree(sparser.path, tmp_path / "True")
    assert compare(CompareOptions(runs=(run.path, named)))["best"].tolist() == [False, True]
    rows = [line.split() for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:3]] == [("made", "no"), ("True", "yes")]


def test_the_command(run: Run, sparser: Run, capsys: pytest.CaptureFixture) -> None:
    table = compare(CompareOptions(runs=(run.path, sparser.path)))
    output = capsys.readouterr().out
    assert "sparser" in output
    assert "by layer, against made" in output and table.attrs["note"] in output
    assert " counted tokens " in output and f"  {table.attrs['counted']}\n" in output
    assert output.count("\n") == len(table) + run.layers + 7
    assert f"{table['sparsity'].iloc[1]:.2%}" in output and " best\n" in output
    frame, lines = compare_layers([run, sparser]), output.splitlines()
    headings = next(line for line in lines if line.split()[:2] == ["run", "layer"])
    assert re.findall(r"95 % from|95 % to|ratio from|ratio to", headings) == LIMITS, "a heading a limit"
    row = frame.iloc[0]
    change = [f"{row[name]:+.2f}" for name in ("difference", "low", "high")]
    ratio = [f"{row[name]:.2f}" for name in ("ratio", "ratio_low", "ratio_high")]
    assert lines[lines.index(headings) + 1].split()[-8:-1] == [*change, *ratio, f"{row['q']:.2g}"]


def test_a_loss_over_generated_tokens_is_said_to_be_one(
    run: Run, made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = made.make(tmp_path / "written", sequences=20, timings=0)
    clause = "the loss of written is over generated tokens too, which are easier to predict"
    assert "generated" not in compare_runs([run, written]).attrs["note"]
    manifests.update(written.path, options=written.manifest.options | {"generate": 8})
    compare(CompareOptions(runs=[run.path, written.path]))
    assert clause in capsys.readouterr().out
    silent = made.make(tmp_path / "silent", sequences=20, timings=0, loss=False)
    manifests.update(silent.path, options=silent.manifest.options | {"generate": 8})
    assert "generated" not in compare_runs([run, open_run(silent.path)]).attrs["note"], "it has no loss"
