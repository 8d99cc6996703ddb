"""Classes of tokens, and tokens drawn towards the mean of all: against loops over every row."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy import stats
from scipy.optimize import brentq
from support.clusters import centred_error, effective, pooled

from twell.analysis import by_token, token_classes
from twell.analysis.summaries.token_class import CLASSES, Classes, class_number, classify
from twell.workbench.run.store import Run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", "function word"),
        ("the", "word-inner piece"),
        (" Vermont", "name"),
        (" congen", "word-initial piece"),
        ("ital", "word-inner piece"),
        (" 1984", "number"),
        ("7", "number"),
        (".", "punctuation"),
        (" (", "punctuation"),
        ("https", "URL part"),
        ("://", "URL part"),
        ("\\n", "whitespace"),
        ("   ", "whitespace"),
        ("n", "word-inner piece"),
        ("x86", "other"),
        ("�", "other"),
        (r"\n\n  ", "whitespace"),
        (" n", "word-initial piece"),
    ],
)
def test_classify(text: str, expected: str) -> None:
    assert classify(text) == expected


def test_a_part_of_a_url_is_one_beside_a_mark_of_urls() -> None:
    """Or where it holds one; elsewhere it is what it would be otherwise, and the end of a sequence is no neighbour."""
    texts = ["com", ".", " the", "://", " doi", "org/", "x"]
    kinds, elsewhere = (np.array([class_number(text, in_url) for text in [*texts, "?"]]) for in_url in (True, False))
    marks = np.array(
        [[text[:1] in "./:", text[-1:] in "./:", any(c in text for c in "./:")] for text in [*texts, "?"]]
    ).T
    classes = Classes(kinds, elsewhere, *marks)
    token = np.array([0, 1, 0, 2, 0, 3, 4, 5, 4, 0, 1])
    sequence = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3])
    names = CLASSES.take(pa.array(classes.of_rows(token, sequence))).to_pylist()
    url, word = "URL part", "word-inner piece"
    assert names == [
        url,
        "punctuation",
        url,
        "function word",
        url,
        url,
        "word-initial piece",
        "other",
        url,
        word,
        "punctuation",
    ]
    assert classes.of_tokens(np.array([0, 99])).tolist() == [kinds[0], kinds[-1]]


def test_token_classes(run: Run, scored: pd.DataFrame) -> None:
    used = scored[scored["flags"] == 0]
    text = run.vocab["text"]
    used = used.assign(kind=[classify(text[token]) for token in used["token_id"]])
    table = token_classes(run).set_index("class")
    assert set(table.index) == set(used["kind"])
    assert len(table) >= 3
    assert table["count"].sum() == len(used)
    by_type = used.groupby("token_id").agg(z=("z", "mean"), kind=("kind", "first"), count=("z", "size"))
    by_type["noise"] = variances(used)
    for kind, row in table.iterrows():
        here, there = used[used["kind"] == kind], used[used["kind"] != kind]
        assert (row["tokens"], row["count"]) == (here["token_id"].nunique(), len(here))
        assert row["share"] == pytest.approx(len(here) / len(used))
        assert row["z"] == pytest.approx(here["z"].mean(), rel=1e-9)
        assert row["others"] == pytest.approx(there["z"].mean(), rel=1e-9)
        assert row["mean"] == pytest.approx(here["nnz"].mean(), rel=1e-9)
        assert row["loss_mean"] == pytest.approx(here["loss"].mean(), rel=1e-9)
        gap, groups = row["difference"], sorted(set(used["document"] % 20))
        left = [standardised(used[used["document"] % 20 != group], run.layers) for group in groups]
        without = [rows[rows["kind"] == kind]["z"].mean() - rows[rows["kind"] != kind]["z"].mean() for rows in left]
        assert gap == pytest.approx(row["z"] - row["others"], abs=1e-12)
        error = np.sqrt(19 / 20 * np.nansum((np.array(without) - gap) ** 2))
        units = effective(here["document"] % 20)
        if not np.isnan(without).any():
            half = stats.t.ppf(0.975, units - 1) * error if units >= 8 else np.nan
            assert row["difference_high"] - gap == pytest.approx(half, rel=1e-9, nan_ok=True)
        k = effective(here["token_id"])
        if kind == "function word":
            assert row["clusters"] == "documents"
            own = np.array([rows[rows["kind"] == kind]["z"].mean() for rows in left])
            assert row["z_se"] == pytest.approx(np.sqrt(19 / 20 * np.sum((own - row["z"]) ** 2)), rel=1e-9)
            continue
        if here["token_id"].nunique() < 2:
            assert np.isnan(row["z_se"])
            continue
        residuals = (here["z"] - row["z"]).groupby(here["token_id"]).sum()
        moved = residuals / (len(here) - here.groupby("token_id").size())  # the mean, without a token
        expected = np.sqrt((moved**2).sum())
        assert row["z_se"] == pytest.approx(expected, rel=1e-9)
        half = stats.t.ppf(0.975, k - 1) * expected if k >= 10 else np.nan
        assert row["high"] - row["z"] == pytest.approx(half, rel=1e-9, nan_ok=True)
        a, b = (by_type[(by_type["kind"] == kind) == inside].query("count >= 20") for inside in (True, False))
        if len(a) < 2:
            assert np.isnan(row["effect"])
            continue
        size = len(a) + len(b)
        seen = ((len(a) - 1) * a["z"].var() + (len(b) - 1) * b["z"].var()) / (size - 2)
        true = seen - pd.concat([a, b])["noise"].mean()
        g = (a["z"].mean() - b["z"].mean()) / np.sqrt(true) * (1 - 3 / (4 * size - 9))
        apart = (a["z"].var() / len(a) + b["z"].var() / len(b)) / true
        welch = stats.ttest_ind(a["z"], b["z"], equal_var=False).df
        half = stats.t.ppf(0.975, welch) * np.sqrt(apart + (g * seen / true) ** 2 / 2 / size)
        expected = (g, g - half, g + half)
        assert (row["effect"], row["effect_low"], row["effect_high"]) == pytest.approx(expected, rel=1e-5)


def test_a_difference_over_under_eight_documents_has_no_interval(made: ModuleType, tmp_path: Path) -> None:
    few, more = (token_classes(made.make(tmp_path / str(n), sequences=2 * n, parts=1, tiles=False)) for n in (7, 12))
    assert few["difference"].notna().all() and few["difference_low"].isna().all()
    assert more["difference_low"].notna().any()


def standardised(rows: pd.DataFrame, layers: int) -> pd.DataFrame:
    """With z by the layers' means and sds of these rows."""
    counts = rows[list(range(layers))]
    return rows.assign(z=((counts - counts.mean()) / counts.std(ddof=0)).mean(axis=1))


def variances(used: pd.DataFrame) -> pd.Series:
    """Of each token's mean z: clustered by document, drawn towards those of tokens like it by ten more documents."""
    by_token = {}
    for token, there in used.groupby("token_id"):
        error = centred_error(there["z"], there["document"], used["z"], used["document"])
        by_token[token] = (len(there), effective(there["document"]), error, there["z"].mean())
    return pooled(pd.DataFrame(by_token, index=["n", "clusters", "error", "mean"]).T, prior=10)["error"] ** 2


def test_shrunk_tokens(run: Run, scored: pd.DataFrame, made: ModuleType) -> None:
    """By Paule and Mandel's equation, solved by scipy; the planted one keeps its place."""
    table = by_token(run, min_count=1).set_index("token_id")
    used = scored[scored["flags"] == 0]
    z, noise = used.groupby("token_id")["z"].mean(), variances(used)

    def centred(between: float) -> tuple[float, float]:
        centre = np.average(z, weights=1 / (noise + between))
        return centre, ((z - centre) ** 2 / (noise + between)).sum() - (len(z) - 1)

    between = brentq(lambda between: centred(between)[1], 0, 10, xtol=1e-15, rtol=1e-14)
    kept = between / (between + noise)
    np.testing.assert_allclose(table["shrunk"], (centred(between)[0] * (1 - kept) + kept * z)[table.index], rtol=1e-5)
    np.testing.assert_allclose(table["shrunk_se"], np.sqrt(kept * noise)[table.index], rtol=1e-5)
    assert table["shrunk"].idxmin() == made.QUIET
    again = by_token(run, min_count=int(table["count"].median())).set_index("token_id")["shrunk"]
    assert len(again) < len(table)
    pd.testing.assert_series_equal(again.sort_index(), table["shrunk"].loc[again.index].sort_index())


def test_shrinkage_of_tokens_in_one_sequence_takes_the_common_variance(made: ModuleType, tmp_path: Path) -> None:
    table = by_token(made.make(tmp_path / "few", sequences=6, parts=1, tiles=False), min_count=1)
    assert table["z_se"].isna().any()
    assert table["shrunk"].notna().all()
