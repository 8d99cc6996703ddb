"""The tokens of a run as a terminal shows them, against the table of the API."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from twell.analysis import by_token, by_word
from twell.analysis.exports.terminal import shaded_lines, token_lines, tokens
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import TokensOptions
from twell.workbench.run.store import Run, open_run


@pytest.mark.parametrize("words", [False, True])
def test_the_list_is_that_of_the_table_by_neurons_fired(run: Run, words: bool) -> None:
    table, name = (by_word(run), "word") if words else (by_token(run), "text")
    table = table.sort_values("mean", ascending=False)
    lines = list(token_lines(run, words, rows=4))
    listed = [line for line in lines if " × " in line]
    for line, (_, row) in zip(listed, [*table.head(4).iterrows(), *table.tail(4).iterrows()], strict=True):
        assert line.split()[0] == f"{row['mean']:,.1f}"
        assert f"{row['count']:,} ×  {row[name]!r}" in line
    assert [line.count("█") for line in listed] == sorted((line.count("█") for line in listed), reverse=True)
    assert listed[0].count("█") == 24
    few = list(token_lines(run, words, rows=len(table)))
    assert len([line for line in few if " × " in line]) == len(table)
    assert "fewest:" not in "".join(few)


def test_where_nothing_fires_no_token_fires_most_or_fewest(made: ModuleType, tmp_path: Path) -> None:
    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return {name: values * 0 if name.startswith("nnz_") else values for name, values in columns.items()}

    run = made.make(tmp_path / "none", sequences=40, timings=0, neurons=False, tiles=False, change=nothing)
    for words in (False, True):
        lines = list(token_lines(run, words))
        assert lines[-1] == "\nnone of them fires a neuron" and not any(" × " in line for line in lines)
    assert list(shaded_lines(run, colored=False))[-1] == "no neuron fires on any of these tokens"


def test_the_command_prints_it_and_refuses_no_rows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tokens(TokensOptions(run=run.path, rows=2))
    assert "\n".join(token_lines(run, rows=2)) == capsys.readouterr().out.rstrip("\n")
    with pytest.raises(UserError, match="Expected --rows from 1 to 1000, got 0"):
        tokens(TokensOptions(run=run.path, rows=0))


def test_a_line_end_is_escaped_once_and_words_have_no_error() -> None:
    """Texts of the vocabulary have their control characters written out: they are not written out again."""
    shipped = open_run(Path(str(files("twell.data"))) / "recorded" / "h200-8x2048-text")
    text = "\n".join(token_lines(shipped, rows=1000))
    assert "'\\n'" in text and "'\\\\n'" not in text
    assert "± standard error" in text and "±" not in "\n".join(token_lines(shipped, words=True))


def test_what_a_refusal_advises_can_be_done(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged run is refused with the advice of an option, and with that option the other parts answer."""
    path = Path(shutil.copytree(run.path, tmp_path / "torn", ignore=shutil.ignore_patterns("summary")))
    (path / next(part.file for part in run.manifest.parts if part.table == "activity")).write_bytes(b"torn")
    with pytest.raises((Missing, UserError), match="--without-damaged"):
        tokens(TokensOptions(run=path))
    tokens(TokensOptions(run=path, without_damaged=True))
    assert "most:" in capsys.readouterr().out


def test_the_loss_of_a_text_is_apart_from_that_of_what_was_generated(made: ModuleType, tmp_path: Path) -> None:
    """The model writes what it finds likely, so a mean over both would say that it knows the text well."""

    def generated(columns: dict[str, Any]) -> dict[str, Any]:
        new = columns["position"] >= 20
        loss = np.ma.where(columns["position"] >= 19, np.float16(1), np.float16(6))  # of the next token
        return columns | {"phase": new.astype(np.uint8), "loss": np.ma.masked_where(columns["loss"].mask, loss)}

    run = made.make(tmp_path / "made", layers=3, sequences=20, timings=0, change=generated)
    new = run.arrow("activity")["phase"].to_numpy().sum()
    line = next(iter(shaded_lines(run, colored=False)))
    assert f" tokens, {new:,} of them generated, " in line
    assert line.endswith(", loss 6.00 nats of the text and 1.00 of what was generated")
