"""The runs that ship with the package open on every page, and so does what is made to ship."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import by_layer, by_token
from twell.analysis.figures.speed.whole_beside import whole_beside
from twell.app.ui.formatting import typeset
from twell.data.recorded import ship
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import open_run

Show = Callable[..., AppTest]


def test_every_page_opens_on_the_recorded_runs(show: Show) -> None:
    recorded = Path(__file__).resolve().parents[2] / "data" / "recorded"
    names = [path.parent.name for path in recorded.glob("*/run.json")]
    assert names
    for name in names:
        for page in ("overview", "text", "tokens", "layers", "positions", "neurons", "kernels", "findings", "export"):
            test = show(recorded, page, run=name)
            assert not test.exception
            assert not test.warning
            if page not in ("text", "tokens", "neurons"):  # which quote the text
                assert "`" not in markup(test), "what is quoted is set as code"
        assert not show(recorded, "neuron", run=name, neuron="L0/N0").exception


def test_overview_says_what_the_whole_model_is_worth_where_it_was_timed(show: Show) -> None:
    recorded = Path(__file__).resolve().parents[2] / "data" / "recorded"
    said = {path.parent.name: whole_beside(open_run(path.parent)) for path in recorded.glob("*/run.json")}
    assert any(said.values()) and not all(said.values())
    for name, sentence in said.items():
        page = markup(show(recorded, run=name))
        assert (f"{typeset(sentence)} <a " in page) if sentence else "The whole model by" not in page


def test_what_ships_is_small_and_its_pages_open(
    show: Show, made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with its rows, and one with the least that is kept of summaries."""
    run = made.make(tmp_path / "made", layers=3, sequences=24, parts=2, fired=True)
    manifests.update(run.path, text=[{**run.manifest.text[0], "source": "builtin:passages"}])
    shipped = ship.ship(run.path, tmp_path / "ships" / "text", rows=True)
    frame, kept = run.activity(), shipped.activity()
    pd.testing.assert_frame_equal(kept, frame)
    pd.testing.assert_frame_equal(by_token(shipped), by_token(run))
    assert len(shipped.sql("select neuron from fired")) and shipped.damaged() == []
    *_, least = ship.drafts_of_summaries(run, tmp_path / "ships" / "least")
    assert least.startswith("without z_position_sum and z_position_square and") and least.endswith(" of token_scores")
    assert ship.size(tmp_path / "ships" / "least") < ship.size(shipped.path) / 2
    values = ["mean", "sparsity", "low", "high"]
    pd.testing.assert_frame_equal(by_layer(open_run(tmp_path / "ships" / "least"))[values], by_layer(run)[values])
    for name, page in (("text", "token"), ("least", "token"), ("least", "tokens"), ("least", "neurons")):
        assert not show(tmp_path / "ships", page, run=name, token=40).exception, (name, page)
    assert "tw-passage" in markup(show(tmp_path / "ships", "text", run="text", sequence=1))
    assert "tw-example" in markup(show(tmp_path / "ships", "neuron", run="text", neuron="L0/N3"))
    manifests.update(run.path, text=[{**run.manifest.text[0], "source": "diary.txt"}])
    with pytest.raises(UserError, match=r"got diary\.txt"):
        ship.ship(run.path, tmp_path / "ships" / "never", rows=True)
    with pytest.raises(UserError, match=r"Expected at most 1,000 bytes"):
        ship.ship(run.path, tmp_path / "ships" / "never", limit=1000)
    assert not (tmp_path / "ships" / "never").exists()
    assert "bytes without surprisal_ranks" in capsys.readouterr().out
