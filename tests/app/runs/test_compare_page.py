"""Compare: runs side by side, the run to compare with, and runs that no other beats."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
from streamlit.testing.v1 import AppTest
from support.copied_runs import copy_run
from support.page_elements import figure, layout, markup, notices

from twell.analysis import by_layer, compare_layers, compare_tokens
from twell.analysis.changes import headline_changes
from twell.analysis.comparisons import FALSE_DISCOVERIES
from twell.analysis.figures.compare import differences, frontier
from twell.app.runs.changes_view import NAMES, beyond_chance, most_changed_layer
from twell.app.ui.formatting import fixed, number, percent, plural, signed, times
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


def test_two_runs_stand_side_by_side(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "compare", run="made", **{"with": "oracle"})
    assert not test.exception
    html = markup(test)
    mean = by_layer(made_run)["mean"].mean()
    assert f"<span>{number(mean)}</span>" in html
    assert f"<span>{percent(1 - mean / made_run.d_ff)}</span>" in html
    other = open_run(runs / "oracle")
    changes = headline_changes([other, made_run])
    rows = re.findall(r"<div><span>(.*?)</span><span>(.*?)</span><span>(.*?)</span>", html.split("tw-changes")[1])
    assert [row[0] for row in rows][: len(changes)] == [NAMES[name] for name in changes["number"]]
    nnz = changes.set_index("number").loc["nnz_mean"]
    assert f"<span>{signed(nnz['difference'])} ({signed(nnz['low'])} to {signed(nnz['high'])})</span>" in html
    assert f"<span>{times(nnz['ratio'])} ({number(nnz['ratio_low'])} to {number(nnz['ratio_high'])})</span>" in html
    changes_html = html.split("tw-two four")[0]
    assert ", may be chance</span>" not in changes_html, "the reference claims no speed, and nothing else may be chance"
    layers = compare_layers([other, made_run])
    clear = layers[layers["q"] <= FALSE_DISCOVERIES]
    most = clear.loc[clear["difference"].abs().idxmax()]
    changed = f"by {signed(most['difference'])} neurons a token ({times(most['ratio'])})"
    of = f" of the {len(clear)} layers whose change can be told from none"
    assert len(clear) < len(layers)
    assert f"L{most['layer']} / L{most['first_layer']} changed most{of}, {changed}; in the other" in html
    assert html.index("What changed most") < html.index("What was run")
    ratios = [times(ratio) for ratio in compare_layers([other, made_run])["ratio"]]
    assert [note["text"] for note in layout(test, "differences")["annotations"]] == ratios
    assert "compared as independent" in html
    (titles,) = [trace for trace in figure(test, "ratios")["data"] if trace.get("name") == "titles"]
    assert titles["text"] == ["L0", "L2 / L1", "L4 / L2"], "the first with the first, the last with the last"
    assert "paired by relative depth, since the models have 5 and 3" in html
    assert "equal counts are not equal" not in html, "layers of one width, in 5 and in 3 layers"
    tokens = compare_tokens([other, made_run])
    differ = tokens["q"] <= FALSE_DISCOVERIES
    assert "Tokens with the clearest difference" in html and beyond_chance(differ)[1:] in html
    assert html.count(", may be chance</span>") == int((~differ.head(12)).sum())
    assert "Loss, nnz and speed" in html
    test.selectbox(key="with").set_value("counts").run()
    assert test.query_params["with"] == "counts"
    for gone in ("../made", "nowhere", "made"):
        assert not show(runs, "compare", run="made", **{"with": gone}).exception


def test_tokens_of_one_document_go_by_their_difference_alone(show: Show, made: ModuleType, tmp_path: Path) -> None:
    one, other = (
        made.make(tmp_path / f"book-{n}", layers=2, sequences=3, of_document=3, length=900, timings=0, seed=n)
        for n in (1, 2)
    )
    table = compare_tokens([other, one])
    assert table["low"].isna().all()
    assert table["difference"].abs().is_monotonic_decreasing
    html = markup(show(tmp_path, "compare", run="book-1", **{"with": "book-2"}))
    assert "Tokens with the largest difference" in html and "without intervals, which take several documents" in html
    assert f"<span>{fixed(table['difference'].iloc[0])}</span>" in html and "(– to –)" not in html


def test_a_token_of_one_document_of_many_has_no_empty_interval(show: Show, made: ModuleType, tmp_path: Path) -> None:
    def in_one(columns: dict[str, Any]) -> dict[str, Any]:
        """Token 60 in one document alone, and few other tokens."""
        columns["token_id"] %= 8
        columns["token_id"][np.flatnonzero(columns["sequence"] == 0)[2:30]] = 60
        return columns

    for n in (1, 2):
        made.make(tmp_path / f"few-{n}", layers=2, sequences=12, timings=0, seed=n, change=in_one)
    result = compare_tokens([open_run(tmp_path / f"few-{n}") for n in (2, 1)])
    row = result.set_index("token_id").loc[60]
    assert result["low"].isna().sum() == 1 and pd.isna(row["low"])
    test = show(tmp_path, "compare", run="few-1", **{"with": "few-2"})
    html = markup(test)
    assert f"<span>{fixed(row['difference'])}</span>" in html and "– to –" not in html
    layers = compare_layers([open_run(tmp_path / f"few-{n}") for n in (2, 1)])
    (dots,) = [trace for trace in differences(layers.assign(low=np.nan, high=np.nan)).data if trace.mode == "markers"]
    assert not any("– to –" in text for text in dots.text)


def test_the_layer_that_changed_most_is_clear_and_told_in_neurons() -> None:
    rows = {"layer": [0, 1, 2], "first_layer": [0, 1, 2], "difference": [-60.0, 0.4, 90.0], "ratio": [0.8, 9.0, 1.5]}
    frame = pd.DataFrame(rows | {"low": [-65.0, 0.3, -10.0], "high": [-55.0, 0.5, 190.0], "q": [1e-9, 1e-3, 0.1]})
    assert most_changed_layer(frame) == (
        f"L0 changed most of the 2 layers whose change can be told from none, by {signed(-60.0)} neurons a token "
        f"({times(0.8)}); in the other {plural(1, 'layer')} it may be chance."
    )
    known = most_changed_layer(frame.iloc[:2])
    assert known.startswith(f"Of the layers L0 changed most, by {signed(-60.0)} neurons a token ({times(0.8)})")
    assert known.endswith(f"and L1 least, by {signed(0.4)} neurons a token ({times(9.0)}).")
    assert "L0 changed most of all layers, the only one whose" in most_changed_layer(frame.iloc[[0, 2]])
    assert "more than chance" in most_changed_layer(frame.assign(low=-100.0, high=100.0, q=0.6))
    assert "more than chance" in most_changed_layer(frame.assign(q=0.06)), "though two intervals of three leave 0 out"
    assert "L2 changed most" in most_changed_layer(frame.assign(low=np.nan, high=np.nan, q=np.nan))


def test_how_many_tokens_differ_by_more_than_chance() -> None:
    none, one, two = (beyond_chance(pd.Series([*clear, False, False])) for clear in ([], [True], [True, True]))
    assert none.startswith(" None differs by more than chance may among so many") and "of 2 intervals" in none
    assert one.startswith(" 1 token differs by more") and two.startswith(" 2 tokens differ by more")


def test_runs_that_no_other_beats_are_told_from_the_rest() -> None:
    frame = pd.DataFrame(
        {
            "run": ["a", "b", "c"],
            "loss": [3.0, 3.5, 3.6],
            "sparsity": [0.9, 0.99, 0.95],
            "nnz_mean": [10.0, 1.0, 5.0],
            "ffn_speedup": [2.0, float("nan"), 3.0],
            "model_speedup": [1.1, float("nan"), 1.2],
            "best": pd.array([True, True, False], dtype="boolean"),
        }
    )
    line, dots = frontier(frame, "b").data
    assert list(line["y"]) == [3.5, 3.0]
    assert list(dots["marker"]["symbol"]) == ["circle", "circle", "circle-open"]
    assert [text.split(" · ")[0] for text in dots["text"]] == ["a", "b", "c"]
    assert times(3.0) in dots["text"][2]


def test_a_run_alone_has_none_to_compare_with(show: Show, recording: Path) -> None:
    test = show(recording, "compare", run="live")
    assert "no other run" in notices(test)


def test_runs_at_one_place_have_their_names_above_one_another(show: Show, runs: Path) -> None:
    test = show(runs, "compare", run="made", **{"with": "summary"})
    labels = [text for trace in figure(test, "frontier")["data"] for text in trace.get("text", [])]
    assert any({"made", "summary"} <= {line.split(" ")[0] for line in text.split("<br>")} for text in labels)
    assert labels.count("") == len(labels) - len({text for text in labels if text})


def test_the_run_to_compare_with_is_at_first_the_one_most_like_it(show: Show, made: ModuleType, tmp_path: Path) -> None:
    runs = ("a few words", 2, 3, 200), ("b", 30, 3, 200), ("c", 60, 4, 200), ("d", 90, 3, 150), ("this", 20, 3, 200)
    for name, sequences, layers, vocab in runs:
        made.make(tmp_path / name, layers=layers, sequences=sequences, vocab=vocab, tiles=False)
    assert show(tmp_path, "compare", run="this").selectbox(key="with").value == "b"
    for name in ("a few words", "c", "this"):
        manifest = manifests.read(tmp_path / name)
        manifest.model["weights"] = "1"
        manifest.text = [entry | {"sha256": name} for entry in manifest.text]
        manifests.write(tmp_path / name, manifest)
    test = show(tmp_path, "compare", run="this")
    assert test.selectbox(key="with").value == "c", "of the same weights"
    said = markup(test)
    assert "The same: weights, vocabulary, family, d_ff, kernel, number format, device" in said
    assert "Different: text, number of layers (3 against 4)" in said
    manifest.device = "made up, 4 threads"
    manifests.write(tmp_path / "this", manifest)
    manifests.update(tmp_path / "c", device="made up, 2 threads")
    assert "threads (4 against 2)" in markup(show(tmp_path, "compare", run="this"))
    assert "the losses do not show" in markup(test)


def test_a_copy_of_a_run_is_not_proposed_nor_drawn_beside_it(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """Such as a run that ships, and its copy in the folder."""
    made.make(tmp_path / "this", layers=3, sequences=20)
    copy_run(tmp_path / "this", tmp_path / "copy")
    alone = show(tmp_path, "compare", run="this")
    assert alone.selectbox(key="with").value == "copy", "where there is no other"
    assert "Loss, nnz and speed" not in markup(alone), "a run has no trade-off with itself"
    made.make(tmp_path / "other", layers=4, sequences=20, vocab=150)
    test = show(tmp_path, "compare", run="this")
    assert test.selectbox(key="with").value == "other" and test.selectbox(key="with").options == ["other"]


def test_a_run_is_compared_while_it_is_recorded(show: Show, made: ModuleType, recording: Path) -> None:
    made.make(recording / "whole", layers=3, sequences=20)
    manifest = manifests.read(recording / "live")
    manifest.text = [{"source": entry["source"]} for entry in manifest.text]  # as a capture has it until its end
    manifests.write(recording / "live", manifest)
    test = show(recording, "compare", run="live")
    assert not test.exception
    assert "compared as independent" in markup(test)


def test_a_loss_over_generated_tokens_is_said_to_be_one(show: Show, made: ModuleType, tmp_path: Path) -> None:
    for name in ("read", "written"):
        run = made.make(tmp_path / name, sequences=20, timings=0)
    clause = "Mind that the loss of written is over generated tokens too, which are easier to predict."
    assert clause not in markup(show(tmp_path, "compare", run="read", **{"with": "written"}))
    manifests.update(run.path, options=run.manifest.options | {"generate": 8})
    assert clause in markup(show(tmp_path, "compare", run="read", **{"with": "written"}))
