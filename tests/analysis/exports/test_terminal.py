"""The tokens of a run as a terminal shows them, against the table of the API."""

from __future__ import annotations

import pytest

from twell.analysis import by_token, by_word
from twell.analysis.exports.terminal import token_lines, tokens
from twell.workbench.errors import UserError
from twell.workbench.options import TokensOptions
from twell.workbench.run.store import Run


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


def test_the_command_prints_it_and_refuses_no_rows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tokens(TokensOptions(run=run.path, rows=2))
    assert "\n".join(token_lines(run, rows=2)) == capsys.readouterr().out.rstrip("\n")
    with pytest.raises(UserError, match="Expected --rows from 1 to 1000, got 0"):
        tokens(TokensOptions(run=run.path, rows=0))
