"""Each claim on runs where the truth is known to be one way, and the other, and out of reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import findings, layer_gains, surprisal_within, token_classes
from twell.analysis.claims import speed
from twell.analysis.claims.beyond import BEYOND
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, VERDICTS
from twell.analysis.claims.speed import energy, follows_nnz
from twell.analysis.claims.tokens import follows_surprisal, quiet_class
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

Columns = dict[str, Any]


def verdicts_of(run: Run) -> pd.Series:
    return findings(run).set_index("claim")["verdict"]


def verdict(run: Run, words: str) -> str:
    (answer,) = [verdict for claim, verdict in verdicts_of(run).items() if words in claim]
    return answer


def level(*means: float) -> Callable[[Columns], Columns]:
    """Counts of these means by layer, the same wherever the token stands and whatever it is."""

    def change(columns: Columns) -> Columns:
        rng = np.random.default_rng(5)
        counts = {
            name: rng.poisson(mean, len(columns["flags"])) for name, mean in zip(nnz_columns(9), means, strict=False)
        }
        return {**columns, **{name: count.astype(np.uint16) for name, count in counts.items()}}

    return change


def other_order(columns: Columns) -> Columns:
    """The loss falls where nnz rises; the loud token stands where the quiet one stood."""
    token, loss = columns["token_id"].copy(), columns["loss"]
    token[columns["token_id"] == 40], token[columns["token_id"] == 41] = 41, 40
    return {**columns, "token_id": token, "loss": np.ma.masked_array(30 - loss.data, mask=loss.mask)}


def rising(columns: Columns) -> Columns:
    """Counts that rise along the sequence, from its first token on."""
    rng = np.random.default_rng(6)
    counts = {name: rng.poisson(10 + columns["position"]).astype(np.uint16) for name in nnz_columns(4)}
    return {**columns, **counts}


def fullest(columns: Columns) -> Columns:
    """One token of each layer fires 450 neurons, the others about 2."""
    columns = level(2, 2, 2, 2)(columns)
    for name in nnz_columns(4):
        columns[name][100] = 450
    columns["flags"][100] = 0
    return columns


def whole_model(made: ModuleType, gain: float, watts: float | None) -> Callable[[Columns], Columns]:
    """Add timings of the whole model: dense 1000 µs at 400 W, sparse so much faster."""
    dense = {"layer": -1, "op": "model_dense", "microseconds": 1000.0, "watts": watts and 400.0}
    sparse = {"layer": -1, "op": "model_sparse", "microseconds": 1000.0 / gain, "watts": watts, "kernel": "cuda"}
    return lambda table: made.more_timings(table, [{"batch": b, **row} for b in range(3) for row in (dense, sparse)])


def test_every_claim_has_an_answer(run: Run) -> None:
    table = findings(run)
    assert set(table["verdict"]) <= set(VERDICTS)
    assert table["claim"].is_unique
    assert (table["reason"] != "").all()
    settled = table["verdict"] != UNTOLD
    assert (table.loc[settled, ["this_run", "statistic", "interval", "claim_scope"]] != "").all(axis=None)
    assert (table["scope"] != "").all()
    assert table.loc[settled, "reason"].str.startswith("rule: ").all()
    assert settled.sum() >= 11
    for _, claim, _ in BEYOND:
        assert table.set_index("claim").loc[claim, "verdict"] == UNTOLD


def test_as_made(run: Run) -> None:
    """What `made` plants."""
    table = verdicts_of(run)
    for words, expected in {
        "half a percent": FAILS,
        "More than 30 %": HOLDS,
        "first two layers": REVERSED,
        "orders of magnitude": IN_PART,
        "Function words": HOLDS,
        "first token of a sequence": HOLDS,
        "exponentially": IN_PART,
        "doesn": HOLDS,
        "formaldehyde": HOLDS,
        "knows what comes next": HOLDS,
        "two thirds": UNTOLD,
        "Pearson": HOLDS,
        "Energy": UNTOLD,
    }.items():
        assert [verdict for claim, verdict in table.items() if words in claim] == [expected], words


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (level(2, 2, 2, 2), {"half a percent": HOLDS}),
        (level(6, 6, 6, 6), {"half a percent": IN_PART}),
        (level(2, 2, 2, 20), {"half a percent": IN_PART}),
        (level(2, 3, 9, 5), {"first two layers": HOLDS}),
        (level(2, 9, 9, 9), {"first two layers": IN_PART}),
        (level(9, 8, 3, 5), {"first two layers": REVERSED}),
        (level(3, 9, 2, 2), {"peaks in the early": HOLDS}),
        (level(9, 9, 9, 9.01), {"peaks in the early": UNTOLD}),
        (level(9, 9.05, 9, 9), {"peaks in the early": UNTOLD}),  # the greatest lies there by chance, as likely as not
        (level(2, 3, 5, 9), {"peaks in the early": FAILS}),
        (
            level(9, 9, 9, 9),
            {
                "first token of a sequence": FAILS,
                "exponentially": FAILS,
                "knows what comes next": UNTOLD,
                "Function words": UNTOLD,
            },
        ),
        (other_order, {"knows what comes next": REVERSED, "doesn": REVERSED, "formaldehyde": REVERSED}),
        (rising, {"exponentially": REVERSED, "first token of a sequence": REVERSED}),
        (fullest, {"orders of magnitude": HOLDS}),
    ],
)
def test_the_other_way(
    made: ModuleType, tmp_path: Path, change: Callable[[Columns], Columns], expected: dict[str, str]
) -> None:
    table = verdicts_of(made.make(tmp_path / "other", change=change, tiles=False, timings=0))
    for words, answer in expected.items():
        assert [verdict for claim, verdict in table.items() if words in claim] == [answer], words


@pytest.mark.parametrize(
    ("gain", "watts", "expected"),
    [
        (1.25, 400.0, {"17 to 20.5 %": HOLDS, "30 % at 1.5": IN_PART, "Energy": HOLDS}),
        (1.1, 400.0, {"17 to 20.5 %": IN_PART, "30 % at 1.5": IN_PART, "Energy": IN_PART}),
        (1.4, 560.1, {"17 to 20.5 %": HOLDS, "up to 30 %": HOLDS, "Energy": REVERSED}),
        (0.9, None, {"17 to 20.5 %": REVERSED, "up to 30 %": REVERSED, "Energy": UNTOLD}),
    ],
)
def test_speed(made: ModuleType, tmp_path: Path, gain: float, watts: float | None, expected: dict[str, str]) -> None:
    run = made.make(tmp_path / "timed", sequences=12, parts=1, change_timings=whole_model(made, gain, watts))
    assert verdict(run, "17 to 20.5 %") == UNTOLD, "a model of a million parameters"
    run.manifest.model["parameters"] = int(5e8)
    assert verdict(run, "30 % at 1.5") == UNTOLD, "a model of half a billion"
    run.manifest.model["parameters"] = int(1.5e9)
    for words, answer in expected.items():
        claims = {
            claim: verdict for claim, verdict in verdicts_of(run).items() if words in claim and "neurons" not in claim
        }
        assert set(claims.values()) == {answer}, words


@pytest.mark.parametrize(
    ("joules", "says", "verdict"),
    [(0.8, "20 % less", HOLDS), (0.95, "5 % less", IN_PART), (1.0, "0 % less", FAILS), (1.05, "5 % more", REVERSED)],
)
def test_energy_is_less_or_more(
    run: Run, monkeypatch: pytest.MonkeyPatch, joules: float, says: str, verdict: str
) -> None:
    """As much energy is not more, and what is more is not said as a negative saving."""
    timed = speed.Pass(1.2, 1.2, 1.2, 3, "batches", "a mean", "a device", "here", joules, 3)
    monkeypatch.setattr(speed, "_of_size", lambda *_: timed)
    answer = energy(run)
    assert (answer.verdict, answer.says) == (verdict, f"a token takes {says} energy")


def test_contribution_is_preferred_where_the_whole_model_was_timed(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "timed", sequences=30, parts=1, change_timings=whole_model(made, 1.25, None))
    row = findings(run).set_index("topic").loc["speed"].set_index("claim").filter(like="Pearson", axis=0).iloc[0]
    gains = layer_gains(run)
    pearson = np.corrcoef(gains["nnz_mean"], gains["contribution"])[0, 1]
    assert f"what a layer adds to the model's speed: Pearson {pearson:.3f}" in row["this_run"]
    assert "a layer's FFN speedup: Pearson" in row["this_run"]
    assert row["verdict"] == HOLDS


def test_an_interval_is_that_of_the_correlation_beside_it(made: ModuleType, tmp_path: Path) -> None:
    """Recomputed from the layers: Pearson's, not Spearman's, and in its interval."""
    run = made.make(tmp_path / "whole", sequences=60, change_timings=whole_model(made, 1.08, 600.0))
    layers, within = layer_gains(run), surprisal_within(run)
    x, y = layers["nnz_mean"].to_numpy(), layers["contribution"].to_numpy()
    without = [stats.pearsonr(np.delete(x, i), np.delete(y, i)).statistic for i in range(len(x))]
    answer = follows_nnz(run)
    assert answer.interval.startswith(f"Pearson {min(without):.3f} to {max(without):.3f}, each layer left out once")
    assert f"speed: Pearson {stats.pearsonr(x, y).statistic:.3f}" in answer.says
    assert answer.statistic.startswith("Pearson of what a layer adds to the model's speed, n = 4 layers, p = ")
    middle = within.iloc[(within["pearson"] - within["pearson"].median()).abs().argmin()]
    of_layer = f"{middle['pearson']:+.3f} ({middle['low']:+.3f} to {middle['high']:+.3f})"
    assert follows_surprisal(run).interval == f"Pearson of layer {middle['layer']:.0f}, in the middle: {of_layer}"


def test_dense_layers_are_slow_or_not(made: ModuleType, tmp_path: Path) -> None:
    """Made timings cost 20 µs and 6 a non-zero against 400: past 63 non-zeros they are slower than dense."""
    for name, means, expected in (
        ("one of two", (9, 9, 40, 100), IN_PART),
        ("neither", (9, 9, 40, 45), REVERSED),
        ("none", (9, 9, 9, 9), UNTOLD),
        ("one alone", (9, 9, 9, 100), UNTOLD),
        ("both", (9, 9, 100, 120), HOLDS),
    ):
        run = made.make(tmp_path / name, sequences=12, parts=1, change=level(*means))
        assert verdict(run, "not sparse") == expected, name


def test_bare_runs_say_why(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(
        tmp_path / "bare", layers=1, vocab=40, sequences=12, neurons=False, tiles=False, loss=False, timings=0, parts=1
    )
    table = findings(run).set_index("claim")
    reasons = {claim: row["reason"] for claim, row in table.iterrows() if row["verdict"] == UNTOLD}
    for words, reason in {
        "30 % of the neurons": "--probes counts",
        "first two layers": "at least 4",
        "knows what comes next": "--no-loss",
        "formaldehyde": "single token",
        "Pearson": "no timings: capture with --timings",
    }.items():
        assert any(words in claim and reason in text for claim, text in reasons.items()), words


def test_a_few_words_settle_nothing_about_layers(made: ModuleType, tmp_path: Path) -> None:
    for name, length, settled in (("words", 14, False), ("pages", 1081, True)):  # 12 tokens counted, and 1 000
        run = made.make(tmp_path / name, sequences=1, length=length, parts=1, change=level(2, 2, 2, 2))
        table = findings(run).set_index("claim")
        for words in ("half a percent", "30 % of the neurons", "first two", "peaks", "orders of", "exponentially"):
            (row,) = [row for claim, row in table.iterrows() if words in claim]
            assert (row["this_run"] != "") == settled, words
            assert (
                settled or row["reason"] == "A verdict on layers takes 1,000 counted tokens or more, the run has 12."
            ), words


def test_one_document_gives_the_reason_that_it_is(made: ModuleType, tmp_path: Path) -> None:
    """Its counts vary; what is not known is an interval."""
    run = made.make(tmp_path / "one", sequences=1, length=1200, parts=1)
    with pytest.raises(Missing, match=r"Too few documents for an interval; pooled over tokens, .* Spearman [+-]0\."):
        follows_surprisal(run)
    table = findings(run).set_index("claim")
    (fall,) = [row for claim, row in table.iterrows() if "exponentially" in claim]
    assert fall["interval"] == "early less late not known"
    (few,) = [row for claim, row in table.iterrows() if "half a percent" in claim]
    assert few["interval"] == "none: one document, so the share decides" and few["verdict"] != UNTOLD


def test_a_class_of_a_run_without_losses_has_none(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "quiet", loss=False)
    classes = token_classes(run).dropna(subset="difference_high")["class"]
    assert len(classes)
    for kind in classes:
        answer = quiet_class(kind)(run)
        assert answer.says.endswith("of all other tokens")


def test_reference_claims_no_speed(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "oracle", kernel="reference", sequences=12, parts=1)
    table = findings(run).set_index("claim")
    speed = table[table["topic"] == "speed"]
    assert set(speed["verdict"]) == {UNTOLD}
    assert speed["reason"].str.contains("oracle").any()


def test_large_models_have_a_share(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "large", sequences=12, parts=1, timings=0)
    assert verdict(run, "two thirds") == UNTOLD
    run.manifest.model["vocab_size"] = 1000
    for d_model, expected in ((64, FAILS), (50_000, IN_PART), (65_000, HOLDS)):  # 3 × 65 000 × 512 × 4 of 500 M
        run.manifest.model.update(parameters=int(5e8), d_model=d_model)
        assert verdict(run, "two thirds") == expected
    run.manifest.options["threshold"] = 0.01  # of any FFN, with two matrices or three
    assert verdict(run, "two thirds") == UNTOLD
    run.manifest.model["ffn_parameters"] = 2 * 65_000 * 512 * 4
    assert verdict(run, "two thirds") == FAILS
