"""Words: the pieces of each, where parts meet, and which of many are held; against loops over every row."""

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
from support.clusters import centred_error, effective, pooled
from support.rewritten import relisted

from twell.analysis import by_word, summarize, token_classes
from twell.analysis.summaries import build
from twell.workbench.errors import Missing
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run


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


def drawn(words: dict[bytes, list[tuple[int, list[float], list[float]]]], plain: pd.DataFrame) -> pd.DataFrame:
    """By word, the error of its z and its degrees of freedom: by documents, mixed with that of words like it."""
    told = {}
    for text, places in words.items():
        z = pd.Series([np.mean(piece) for _, piece, _ in places])
        documents = pd.Series([sequence // 2 for sequence, _, _ in places])
        error = centred_error(z, documents, plain["z"], plain["sequence"] // 2)
        told[text] = (len(places), effective(documents), error, z.mean())
    table = pooled(pd.DataFrame(list(told.values()), index=list(told), columns=["n", "clusters", "error", "mean"]), 10)
    return table.where(pd.Series({text: each[1] > 1 for text, each in told.items()}), np.nan)


def test_by_word(run: Run, scored: pd.DataFrame) -> None:
    words, plain = spelt(run, scored), scored[scored["flags"] == 0]
    table = by_word(run, min_count=3).set_index("word")
    assert len(table) == sum(len(places) >= 3 for places in words.values()) > 20
    assert (table["pieces"] > 1).any()
    assert table["z"].is_monotonic_decreasing
    expected = drawn(words, plain)
    near = 1e-5 if expected["error"].notna().sum() <= 2048 else 0.1  # of more words, some are fitted
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
        assert row["documents"] == (sequences // 2).nunique()
        assert row["z_se"] == pytest.approx(expected.loc[text, "error"], rel=near, abs=1e-9, nan_ok=True)
        assert row["degrees"] == pytest.approx(expected.loc[text, "degrees"], nan_ok=True)


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
        11: b"x",  # which 12, past the last of the vocabulary, is not
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
    same = table.columns.drop("z_se")  # drawn towards those of the words that are kept
    pd.testing.assert_frame_equal(table[same], by_word(run, min_count=least)[same])
    assert (
        table.attrs["note"]
        == f"left out: {len(every) - fits:,} of {len(every):,} words, which occur under {least} times"
    )
    needed = int(every.loc[every["count"] < least, "count"].max()) + 1
    with pytest.raises(
        Missing, match=f"made has {len(every):,} words, .* occur {needed} times or more, got .* 1: ask for {needed}"
    ):
        by_word(few, min_count=1)


def test_no_vocabulary(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "mute", sequences=10, parts=1)
    bare = Run(run.path, replace(run.manifest, parts=[part for part in run.manifest.parts if part.table != "vocab"]))
    with pytest.raises(Missing, match="holds no words: it has no vocabulary"):
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
