"""A token that is a part of a character stands by its bytes where it stands alone; tables and running text keep �."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rewritten import relisted
from support.split_characters import bytes_of, split_run

from twell.analysis import by_neuron, by_token, compare_tokens
from twell.analysis.exports.terminal import shaded_lines, token_lines
from twell.analysis.neurons.logit_lens import promoted, written
from twell.analysis.neurons.top_tokens import top_tokens
from twell.analysis.overview import overview
from twell.analysis.passage import loudest as loudest_places
from twell.analysis.passage import token_texts
from twell.analysis.tokens.contexts import loudest
from twell.analysis.tokens.token_text import spell, token_text
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run

BUNDLED = Path(__file__).resolve().parents[3] / "data" / "demo-model"


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of parts of characters."""
    return split_run(tmp_path_factory.mktemp("split") / "split")


def test_bytes_of_no_whole_character_are_written_out() -> None:
    assert spell(b"\xe2\x80") == "\\xe2\\x80"
    assert spell(b" \xc3") == " \\xc3" and spell("é".encode()) == "é" and spell(b"\xef\xbf\xbd") == "�"
    assert token_texts([b"\xe2\x80", b"\x99", None]) == ["\\xe2\\x80", "\\x99", ""]


def test_a_table_keeps_the_displayed_text_unless_it_is_asked(split: Run) -> None:
    table, spelled = by_token(split), by_token(split, spelled=True)
    assert table["text"].str.startswith("�").all() and table["token_id"].is_unique
    assert spelled["text"].tolist() == [spell(bytes_of(token)) for token in table["token_id"]]
    assert table.drop(columns="text").equals(spelled.drop(columns="text"))
    assert list(token_text(split, np.array([0, 40, 999]), spelled=True)) == ["<�>", spell(bytes_of(40)), "<999>"]
    assert list(token_text(split, np.array([0, 40]))) == ["<�>", "�"], "the special one adds no bytes to the text"


def test_a_token_that_stands_alone_is_spelled(split: Run) -> None:
    for table in (loudest(split), loudest_places(split, "all"), top_tokens(split).rename(columns={"text": "token"})):
        assert table["token"].tolist() == [spell(bytes_of(token)) for token in table["token_id"]]
    neurons = by_neuron(split)
    assert neurons["one_token"].any() and not neurons["token_text"].str.contains("�").any()
    assert "\\x" in overview(split)["loudest"]["text"]
    assert compare_tokens([split, split])["text"].str.contains("\\x", regex=False).all()


def test_a_terminal_shows_it_with_one_backslash(split: Run) -> None:
    listed = [line for line in token_lines(split) if " ×  '" in line]
    assert listed and all("'\\x" in line and "�" not in line for line in listed)
    places = [line for line in shaded_lines(split, colored=False) if "  at " in line]
    assert places and all("'\\x" in line and "\\\\" not in line and "�" not in line for line in places)


def test_what_a_neuron_writes_is_spelled(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "writes", layers=8, d_ff=768, vocab=6144, sequences=10)
    manifests.update(run.path, model=run.manifest.model | {"d_model": 256})
    (file,) = run.parts("vocab")
    pq.write_table(pq.read_table(file).set_column(2, "text", pa.array(["�"] * 6144)), file)
    run = relisted(run, "vocab")
    for frame in (written(run, str(BUNDLED), 5, 100), promoted(run, str(BUNDLED), ((5, 100),))):
        names = run.vocab["bytes"].reindex(frame["token_id"])
        assert len(names) and frame["text"].tolist() == [spell(name) for name in names]
