"""One question, three doors: which tokens of a text fire most, by the page, the command line and Python."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from streamlit.testing.v1 import AppTest
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell.analysis.exports.terminal import shaded_lines
from twell.app.ui.formatting import visible
from twell.workbench import capture, cli, options, watch
from twell.workbench.errors import UserError
from twell.workbench.models.checkpoint import find
from twell.workbench.run.store import Run
from twell.workbench.text.given import GivenTexts

WORDS = "A lichen grows on the bark of an old tree.\nIt grows a millimetre a year, while \x1b[2Jthe tree stands."
ROW = re.compile(r"^ +([\d,]+)  ('.*?'|\".*?\") +at (\d+)  (?: *(L\d+/N\d+ [\d.]+(?:, )?)+)$", re.MULTILINE)
Found = list[tuple[int, str, int]]  # nnz, token and position, the most first


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The words as `twell capture` records them, in a folder for the dashboard."""
    out = tmp_path_factory.mktemp("runs") / "words"
    return capture("builtin:demo", GivenTexts([WORDS]), out=out, fired="all", timings=0)


def by_watch(recorded: Run) -> Found:
    """Python: the model reads the same ids under a watch."""
    folder, _, _ = find("builtin:demo", None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([recorded.activity()["token_id"].tolist()])
    with torch.inference_mode(), watch(model, tokenizer) as w:
        model(ids)
    table = w.table()
    table["nnz"] = w.nnz.sum(1)
    counted = table[table["flags"] == 0].sort_values(["nnz", "position"], ascending=[False, True])
    first = counted.drop_duplicates("token_id")
    return [(row.nnz, recorded.decode([row.token_id]), row.position) for row in first.itertuples()]


def by_page(folder: Path, show: Callable[..., AppTest]) -> Found:
    test = show(folder, "text", run="words")
    page_html = "\n".join(str(element.proto.body) for element in test.get("html"))
    cells = r'class="where">0:(\d+)</span>.*?class="token"[^>]*>(.*?)</span>.*?class="number">([^<]*)</span>'
    rows = re.findall(rf'<a class="tw-jump".*?{cells}', page_html, re.DOTALL)
    return [(int(nnz), html.unescape(token), int(position)) for position, token, nnz in rows]


def test_page_command_and_python_answer_alike(
    recorded: Run, show: Callable[..., AppTest], capsys: pytest.CaptureFixture[str]
) -> None:
    python = by_watch(recorded)
    cli.text(options.TextOptions(text=WORDS))
    printed = capsys.readouterr().out
    command = [
        (int(nnz.replace(",", "")), eval(token), int(position)) for nnz, token, position, _ in ROW.findall(printed)
    ]
    page = by_page(recorded.path.parent, show)
    assert len(page) == 12
    assert command == python[:12]
    assert page == [(nnz, visible(token), position) for nnz, token, position in python[:12]]


def test_a_terminal_is_shaded_and_a_pipe_is_not(recorded: Run) -> None:
    colored, plain = ("\n".join(shaded_lines(recorded, colored=on)) for on in (True, False))
    assert "\x1b" not in plain
    assert "⟨U+001B⟩[2J" in plain and "\x1b[2J" not in colored, "what the text holds is not obeyed"
    assert "A lichen grows on the bark" in plain
    strong = re.findall(r"\x1b\[97;48;5;25m(.+?)\x1b", colored)
    top = recorded.activity().assign(nnz=lambda rows: rows.filter(like="nnz_").sum(axis=1)).query("flags == 0")
    most = top.sort_values("nnz", ascending=False)["token_id"].iloc[0]
    assert recorded.decode([int(most)]) in strong
    assert not any(line.startswith("\x1b[0m") or line.endswith("48;5;25m") for line in colored.splitlines())


def test_a_layer_alone(recorded: Run) -> None:
    lines = "\n".join(shaded_lines(recorded, layer=3, colored=False))
    named = re.findall(r"(L\d+)/N\d+", lines)
    assert set(named) == {"L3"}
    assert "nnz in layer 3" in lines
    with pytest.raises(UserError, match="Expected a layer from 0 to 7, got 8"):
        next(shaded_lines(recorded, layer=8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": " \n"}, "Expected some words"),
        ({"text": "words", "generate": -1}, "Expected generate= of at least 0"),
        ({"text": "caf\udce9"}, "got half a surrogate pair at character 3"),
        ({"text": "-"}, "Expected UTF-8 in standard input, got byte 0xe9 at byte offset 3"),
    ],
)
def test_what_cannot_be_read_is_refused_before_a_model_is_loaded(
    given: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), "utf-8"))
    with pytest.raises(UserError, match=message):
        cli.text(options.TextOptions(model="no/where", **given))  # type: ignore[arg-type]
