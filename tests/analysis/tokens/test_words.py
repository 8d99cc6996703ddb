"""Words, classes and shrinkage of tokens against the rows, the long way round."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats
from scipy.optimize import brentq
from support.rewritten import relisted

from twell.analysis import by_token, by_word, summarize, token_classes
from twell.analysis.summaries import build
from twell.analysis.summaries.token_class import CLASSES, Classes, class_number, classify
from twell.workbench.errors import Missing
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run


@pytest.fixture
def scored(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """All rows with z, the mean over layers."""
    layers = list(range(run.layers))
    plain = rows.loc[rows["flags"] == 0, layers]
    return rows.assign(
        z=((rows[layers] - plain.mean()) / plain.std(ddof=0)).mean(axis=1), nnz=rows[layers].mean(axis=1)
    )


def letter(byte: int) -> bool:
    return byte > 127 or chr(byte).isalpha() or chr(byte).isdigit()


def spelt(run: Run, scored: pd.DataFrame) -> dict[bytes, list[tuple[int, list[float], list[float]]]]:
    """By word: sequence, z and nnz of its pieces, a token at a time. Each document has two sequences."""
    pieces = run.vocab["bytes"]
    words: dict[bytes, list[tuple[int, list[float], list[float]]]] = defaultdict(list)
    for sequence, group in scored.groupby("sequence"):
        word: list[Any] = []

        def close(word: list[Any], sequence: int) -> None:
            text = b"".join(pieces[row.token_id] for row in word)
            if word and not any(row.flags for row in word) and any(map(letter, text)):
                words[text.strip()].append((sequence, [row.z for row in word], [row.nnz for row in word]))

        for row in group.sort_values("position").itertuples():
            before, here = pieces[word[-1].token_id] if word else b"", pieces[row.token_id]
            if not (before and here and letter(before[-1]) and letter(here[0])):
                close(word, sequence)
                word = []
            word.append(row)
        close(word, sequence)
    return words


def test_by_word(run: Run, scored: pd.DataFrame) -> None:
    words = spelt(run, scored)
    table = by_word(run, min_count=3).set_index("word")
    assert len(table) == sum(len(places) >= 3 for places in words.values()) > 20
    assert (table["pieces"] > 1).any()
    assert table["z"].is_monotonic_decreasing
    for text, places in words.items():
        if len(places) < 3:
            continue
        row = table.loc[text.decode("utf-8", errors="replace")]
        if isinstance(row, pd.DataFrame):  # broken characters spelt alike
            continue
        z = pd.Series([np.mean(piece) for _, piece, _ in places])
        sequences = pd.Series([sequence for sequence, _, _ in places])
        assert (row["count"], row["sequences"]) == (len(places), sequences.nunique())
        assert row["pieces"] == pytest.approx(np.mean([len(piece) for _, piece, _ in places]))
        assert row["z"] == pytest.approx(z.mean(), rel=1e-9, abs=1e-11)
        assert row["mean"] == pytest.approx(np.mean([np.mean(nnz) for _, _, nnz in places]), rel=1e-9)
        residuals = (z - z.mean()).groupby(sequences // 2).sum()
        assert row["documents"] == len(residuals)
        if len(residuals) > 1:
            k = effective(sequences // 2)
            expected = np.sqrt(k / (k - 1) * (residuals**2).sum()) / len(z)
            assert row["z_se"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_word_is_not_cut_where_parts_and_chunks_meet(made: ModuleType, tmp_path: Path) -> None:
    """However the run is cut at documents, and whatever order its parts lie in, the words are the same."""
    one, many = (made.make(tmp_path / str(parts), sequences=40, parts=parts) for parts in (1, 10))
    reverse = replace(many.manifest, parts=many.manifest.parts[::-1])
    shutil.copytree(many.path, tmp_path / "reverse")
    tables = [by_word(run, min_count=1) for run in (one, many, Run(tmp_path / "reverse", reverse))]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0], rtol=1e-12, atol=1e-12)
    assert (tables[0]["pieces"] > 1).any()


def test_pieces_of_every_kind(made: ModuleType, tmp_path: Path) -> None:
    """White space is stripped from the ends, spellings that agree are one word, unknown tokens end a word, and so does
    the end of a sequence; a word with a flagged piece is left out."""
    pieces = {
        1: b" for",
        2: b"mal",
        3: b" form",
        4: b"al ",
        5: b" ",
        6: b"!",
        7: b"\xc3",
        8: b"\xa9t",
        9: b" 7",
        10: b".",
    }
    text = [[1, 2, 6, 3, 4], [3, 4, 5, 9, 10, 9], [7, 8, 7, 8, 6, 1, 12, 2], [1, 2], [], []]

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        length = [len(tokens) + 1 for tokens in text]  # each begins with a special token, but for the last two
        rows = np.arange(sum(length))
        new = {name: values[rows] for name, values in columns.items()}
        new["sequence"] = np.repeat(np.arange(len(text)), length).astype(np.int32)
        new["position"] = np.concatenate([np.arange(n) for n in length]).astype(np.int32)
        new["token_id"] = np.concatenate([[0, *tokens] for tokens in text]).astype(np.int32)
        new["flags"] = (new["position"] == 0).astype(np.uint8)
        new["flags"][-3] = 4  # the second piece of a word is not finite
        new["token_id"][-2:], new["flags"][-2:] = (1, 2), 0  # a word does not go on in the next sequence
        return new

    spelt = [pieces.get(token, b"") for token in range(12)]
    run = made.make(
        tmp_path / "pieces", vocab=12, sequences=20, parts=1, tiles=False, neurons=False, timings=0, change=change
    )
    (file,) = run.parts("vocab")
    pq.write_table(pq.read_table(file).set_column(1, "bytes", pa.array(spelt, pa.binary())), file)
    run = relisted(run, "vocab")
    table = by_word(run, min_count=1).set_index("word")
    expected = {"formal": (3, 2), "7": (2, 1), "étét": (1, 1), "for": (2, 2), "mal": (2, 2)}
    assert {word: (row["count"], row["sequences"]) for word, row in table.iterrows()} == expected
    assert table["pieces"].to_dict() == {"formal": 2, "7": 1, "étét": 4, "for": 1, "mal": 1}
    rows = run.activity()
    rows["nnz"] = rows[[name for name in rows if name.startswith("nnz_")]].mean(axis=1)
    assert table.loc["étét", "mean"] == pytest.approx(rows.loc[rows["token_id"].isin([7, 8]), "nnz"].mean(), rel=1e-12)


def test_a_run_of_many_words_keeps_the_frequent_ones(
    run: Run, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = by_word(run, min_count=1)
    least = int(every["count"].nlargest(20).min()) + 1
    fits = (every["count"] >= least).sum()
    assert fits > 5
    monkeypatch.setattr(build, "MOST_WORDS", int(fits))
    few = made.make(tmp_path / "made", sequences=run.manifest.sequences)  # as `run`: fired and bench are drawn last
    table = by_word(few, min_count=least)
    pd.testing.assert_frame_equal(table, by_word(run, min_count=least))
    assert (
        table.attrs["note"]
        == f"left out: {len(every) - fits:,} of {len(every):,} words, which occur under {least} times"
    )
    told = int(every.loc[every["count"] < least, "count"].max()) + 1
    with pytest.raises(
        Missing, match=f"made has {len(every):,} words, .* occur {told} times or more, got .* 1: ask for {told}"
    ):
        by_word(few, min_count=1)


def test_no_vocabulary(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "mute", sequences=10, parts=1)
    bare = Run(run.path, replace(run.manifest, parts=[part for part in run.manifest.parts if part.table != "vocab"]))
    with pytest.raises(Missing, match="holds no words: it has no vocab table"):
        by_word(bare)
    assert set(token_classes(bare)["class"]) == {"other"}


def test_a_copy_spells_out_no_text(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "whole", sequences=10, parts=1)
    (copy,) = summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    assert by_word(run, min_count=1) is not None
    assert not copy.summary_path("words").exists()
    with pytest.raises(Missing, match="summary-only run, which spells out none of its text"):
        by_word(copy)


def test_rare_words(run: Run) -> None:
    with pytest.raises(Missing, match="No word of made occurs 100000 times"):
        by_word(run, min_count=100_000)


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
    found = CLASSES.take(pa.array(classes.of_rows(token, sequence))).to_pylist()
    url, word = "URL part", "word-inner piece"
    assert found == [
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
        gap, without = row["difference"], []
        for group in range(20):
            left = used["document"] % 20 != group
            without.append(
                used[left & (used["kind"] == kind)]["z"].mean() - used[left & (used["kind"] != kind)]["z"].mean()
            )
        assert gap == pytest.approx(row["z"] - row["others"], abs=1e-12)
        error = np.sqrt(19 / 20 * np.nansum((np.array(without) - gap) ** 2))
        if effective(here["document"] % 20) >= 5 and not np.isnan(without).any():
            half = stats.t.ppf(0.975, effective(here["document"] % 20) - 1) * error
            assert row["difference_high"] - gap == pytest.approx(half, rel=1e-9)
        k = effective(here["token_id"])
        if kind == "function word":
            assert row["clusters"] == "documents"
            continue
        if here["token_id"].nunique() < 2:
            assert np.isnan(row["z_se"])
            continue
        residuals = (here["z"] - row["z"]).groupby(here["token_id"]).sum()
        expected = np.sqrt(k / (k - 1) * (residuals**2).sum()) / len(here)
        assert row["z_se"] == pytest.approx(expected, rel=1e-9)
        half = stats.t.ppf(0.975, k - 1) * expected if k >= 5 else np.nan
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
        half = 1.96 * np.sqrt(apart + (g * seen / true) ** 2 / 2 / size)
        expected = (g, g - half, g + half)
        assert (row["effect"], row["effect_low"], row["effect_high"]) == pytest.approx(expected, rel=1e-9)


def effective(clusters: pd.Series) -> float:
    """Kish's effective number of the clusters of each row."""
    return float(len(clusters) ** 2 / (clusters.value_counts() ** 2).sum())


def variances(used: pd.DataFrame) -> pd.Series:
    """Of each token's mean z: clustered by document, drawn towards the common one as if by ten more documents."""
    found = {}
    for token, there in used.groupby("token_id"):
        residuals = (there["z"] - there["z"].mean()).groupby(there["document"]).sum()
        g, n = effective(there["document"]), len(there)
        found[token] = (n, g, g / (g - 1) * (residuals**2).sum() / n if g > 1 else 0.0)
    table = pd.DataFrame(found, index=["n", "g", "alone"]).T
    common = np.average(table["alone"], weights=table["g"] - 1)
    return (table["alone"] * (table["g"] - 1) + 10 * common) / (table["g"] - 1 + 10) / table["n"]


def test_shrunk_tokens(run: Run, scored: pd.DataFrame, made: ModuleType) -> None:
    """By Paule and Mandel's equation, solved by scipy; the planted one keeps its place."""
    table = by_token(run, min_count=1).set_index("token_id")
    used = scored[scored["flags"] == 0]
    z, noise = used.groupby("token_id")["z"].mean(), variances(used)

    def pooled(between: float) -> tuple[float, float]:
        centre = np.average(z, weights=1 / (noise + between))
        return centre, ((z - centre) ** 2 / (noise + between)).sum() - (len(z) - 1)

    between = brentq(lambda between: pooled(between)[1], 0, 10, xtol=1e-15, rtol=1e-14)
    kept = between / (between + noise)
    np.testing.assert_allclose(table["shrunk"], (pooled(between)[0] * (1 - kept) + kept * z)[table.index], rtol=1e-9)
    np.testing.assert_allclose(table["shrunk_se"], np.sqrt(kept * noise)[table.index], rtol=1e-9)
    assert table["shrunk"].idxmin() == made.QUIET
    again = by_token(run, min_count=int(table["count"].median())).set_index("token_id")["shrunk"]
    assert len(again) < len(table)
    pd.testing.assert_series_equal(again.sort_index(), table["shrunk"].loc[again.index].sort_index())


def test_shrinkage_of_tokens_in_one_sequence_takes_the_common_variance(made: ModuleType, tmp_path: Path) -> None:
    table = by_token(made.make(tmp_path / "few", sequences=6, parts=1, tiles=False), min_count=1)
    assert table["z_se"].isna().any()
    assert table["shrunk"].notna().all()
