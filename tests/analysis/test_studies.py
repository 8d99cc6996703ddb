"""Trainings compared: what each ended at, what sparsity costs, and the claims that go by several of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.synthetic_training import ROWS, make_training

from twell.analysis import findings, studies, training_results, training_steps
from twell.analysis.claims import across, pairs
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD
from twell.analysis.figures.labels import SPACE
from twell.analysis.training import training_outcomes
from twell.app.runs.study_figures import cost_and_gain
from twell.workbench.errors import Missing
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

RECIPE = {"layers": 4, "d_model": 64, "d_ff": 512, "gated": True, "activation": "relu", "restart_every": 0, "seed": 0}
Trained = Callable[..., Run]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Return a function that writes a training with these fields of its recipe, and what it ended at."""

    def make(
        name: str,
        loss: float = 4.0,
        nnz: float = 50.0,
        size: float = 1e6,
        dead: float = 0.2,
        speed: Any = None,
        rows: int = ROWS,
        **recipe: Any,
    ) -> Run:
        path = make_training(tmp_path / name, rows=rows).path
        record = {
            "recipe": {"l1": 0.01, **RECIPE, **recipe},
            "heldout": {"loss": loss, "nnz": [nnz - 10, nnz + 10] * 2, "dead": [dead] * 4},
            "measured": {} if speed is None else {"model_speedup": speed},
        }
        manifest = manifests.read(path)
        manifests.update(path, training=record, model={**manifest.model, "parameters": 1_000_000})
        return open_run(path)

    return make


def answer(check: Callable[..., Any], *runs: Run) -> Any:
    return check(list(runs))


def test_results(trained: Trained, tmp_path: Path) -> None:
    """The rise is over the training without L1 of the same recipe and seed, and of no other."""
    runs = [
        trained("a", loss=4.0, nnz=200, l1=0.0, seed=0),
        trained(
            "b",
            loss=4.2,
            nnz=40,
            l1=0.02,
            seed=0,
        ),
        trained("c", loss=5.0, l1=0.0, seed=1),
        trained("d", loss=5.1, l1=0.02, seed=1),
        trained("e", loss=3.0, l1=0.02, seed=2),
        trained("f", loss=4.0, l1=0.02, seed=0, restart_every=100),
    ]
    table = training_results([*runs, make_training(tmp_path / "other")]).set_index("name")
    assert table["rise"].drop("other").round(6).to_dict() == pytest.approx(
        {"a": 0.0, "b": 0.05, "c": 0.0, "d": 0.02, "e": np.nan, "f": np.nan}, nan_ok=True
    )
    assert table.loc["b", ["nnz", "sparsity", "dead", "l1"]].to_list() == pytest.approx([40, 1 - 40 / 512, 0.2, 0.02])
    assert table.loc["other", "loss"] == pytest.approx(5.5 - 0.1 * 11)  # its log's last, as it has no other
    with pytest.raises(Missing, match="is a training"):
        training_results([])


def test_dead_neurons_are_a_share_of_all(trained: Trained) -> None:
    """Where layers differ in width, on held-out text as in the log."""
    run = trained("own")
    widths, dead = np.array([512, 128, 256, 128]), np.array([0.5, 0.0, 0.1, 0.0])
    record = dict(run.manifest.training or {})
    record["heldout"] = {**record["heldout"], "dead": dead.tolist()}
    manifests.update(run.path, model={**run.manifest.model, "widths": widths.tolist()}, training=record)
    assert training_results([open_run(run.path)])["dead"].iloc[0] == pytest.approx(dead @ widths / widths.sum())
    manifests.update(run.path, training={"recipe": record["recipe"]})
    logged = open_run(run.path)
    assert training_results([logged])["dead"].iloc[0] == pytest.approx(training_steps(logged)["dead"].iloc[-1])


@pytest.mark.parametrize(("nnz", "verdict"), [((50, 40, 30), HOLDS), ((50, 55, 30), IN_PART), ((30, 40, 50), REVERSED)])
def test_scale(trained: Trained, nnz: tuple[float, ...], verdict: str) -> None:
    """Three depths of one recipe are a series, if their tokens are as many a parameter."""
    runs = [trained(f"s{i}", nnz=n, layers=2**i) for i, n in enumerate(nnz)]
    for run, layers in zip(runs, (1, 2, 4), strict=True):  # all logs end at 30,720 tokens: equal sizes, another each
        manifests.update(run.path, model={**run.manifest.model, "parameters": 30_720 * 10 + layers})
    runs = [open_run(run.path) for run in runs]
    assert answer(across.scale, *runs).verdict == verdict
    with pytest.raises(Missing, match="3 sizes"):
        answer(across.scale, *runs[:2])
    rising = trained("rising", nnz=nnz[2], layers=4, l1=0.05)  # its log ends at 0.01
    with pytest.raises(Missing, match="risen in full, got 0,"):
        answer(across.scale, rising)
    manifests.update(runs[2].path, model={**runs[2].manifest.model, "parameters": 10**7})
    with pytest.raises(Missing, match="3 sizes"):
        answer(across.scale, *runs[:2], open_run(runs[2].path))


def test_captures_of_several_sizes_count_one_thing(made: ModuleType, tmp_path: Path) -> None:
    """What is above a threshold in one of them is not fewer, or more, of what fires in the others."""
    gate, accumulator = "gate pre-activation > 0", " in the gate product's float32 accumulator (gated FFN, ReLU)"
    runs = {}
    for size, counted in enumerate((gate + accumulator, gate, "|hidden| > 0.01, hidden: …", gate), 1):
        path = made.make(tmp_path / f"r{size}", layers=2, d_ff=1000 - 200 * size, sequences=10, parts=1).path
        model = {**manifests.read(path).model, "parameters": 10**8 * size}
        manifests.update(path, model=model, nnz_definition=counted)
        runs[size] = open_run(path)
    result = answer(across.scale, *runs.values())
    assert (result.verdict, result.of) == (HOLDS, ("r1", "r2", "r4"))
    with pytest.raises(Missing, match="captures of one text of as many sizes, got 2"):
        answer(across.scale, runs[1], runs[2], runs[3])
    squared = gate + accumulator.replace("ReLU", "ReLU squared")
    for other in ({"nnz_definition": squared}, {"text": [{**runs[4].manifest.text[0], "sha256": "1"}]}):
        kept = {name: getattr(runs[4].manifest, name) for name in other}
        manifests.update(runs[4].path, **other)
        with pytest.raises(Missing, match="of as many sizes, got 2"):
            answer(across.scale, runs[1], runs[2], open_run(runs[4].path))
        manifests.update(runs[4].path, **kept)
    again = made.make(tmp_path / "again", layers=2, d_ff=4000, sequences=10, parts=1)
    manifests.update(again.path, model=runs[4].manifest.model, nnz_definition=gate)
    result = answer(across.scale, *runs.values(), open_run(again.path))
    assert result.of == ("r1", "r2", "r4") and result.statistic.endswith("of one text, the first of each size")


@pytest.mark.parametrize(
    ("gated", "plain", "verdict"),
    [
        ((1.3, 1.2), (1.1, 1.1), HOLDS),
        ((1.3, 1.0), (1.1, 1.1), IN_PART),
        ((1.0, 1.0), (1.1, 1.1), REVERSED),
        ((0.8, 0.9), (0.7, 0.7), UNTOLD),
    ],
)
def test_gated_against_plain(trained: Trained, gated: Any, plain: Any, verdict: str) -> None:
    runs = [trained(f"g{seed}", speed=gated[seed], seed=seed) for seed in range(2)]
    runs += [trained(f"p{seed}", speed=plain[seed], seed=seed, gated=False, d_ff=768) for seed in range(2)]
    result = answer(across.gated_gains_more, *runs)
    assert result.verdict == verdict and "2 pairs" in result.interval and "as many weights" in result.statistic


def test_restarts_and_noise(trained: Trained) -> None:
    """A difference of a thousandth is no gain, and no loss."""
    plain, anew = trained("plain", speed=1.2, dead=0.3), trained("anew", speed=1.201, dead=0.1, restart_every=100)
    result = answer(across.restarts_pay, plain, anew)
    assert result.verdict == FAILS and "10.0 % dead with restarts, 30.0 % without" in result.says
    assert answer(across.restarts_pay, plain, trained("more", speed=1.3, restart_every=100)).verdict == HOLDS


def test_activation_and_little_l1(trained: Trained) -> None:
    relu, silu = trained("relu", loss=4.04, l1=0.0), trained("silu", loss=4.0, l1=0.0, activation="silu")
    result = answer(across.relu_costs, relu, silu)
    assert result.verdict == UNTOLD and "+1.00 %" in result.says
    assert answer(across.little_l1_is_free, relu, trained("little", loss=4.06, l1=3e-5)).verdict == IN_PART
    assert answer(across.little_l1_is_free, relu, trained("dear", loss=4.2, l1=3e-5)).verdict == FAILS
    little, lost = trained("least", loss=4.05, l1=1e-5), trained("lost", loss=np.nan, l1=3e-5)
    for runs in ((little, lost), (lost, little)):  # a training that diverged is not passed over, wherever it stands
        assert answer(across.little_l1_is_free, relu, *runs).verdict == FAILS
    with pytest.raises(Missing, match="l1 = 0"):
        answer(across.little_l1_is_free, trained("much", l1=1e-3), relu)
    with pytest.raises(Missing, match="l1 = 0"):
        answer(across.little_l1_is_free, trained("other", loss=np.nan, l1=0.0), little)


def test_a_training_without_held_out_text_is_compared_by_its_training_loss(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is said, and is not compared with the loss on held-out text."""
    runs = [trained("relu", l1=0.0), trained("silu", l1=0.0, activation="silu"), trained("little", l1=3e-5)]
    results = training_outcomes(runs)
    for module in (across, pairs):
        monkeypatch.setattr(module, "training_outcomes", lambda _: [replace(one, heldout=False) for one in results])
    assert answer(across.relu_costs).says.startswith("training loss 4.000 nats with ReLU")
    assert answer(across.little_l1_is_free).statistic.startswith("training loss 4.000 nats without L1")
    monkeypatch.undo()
    assert answer(across.relu_costs, *runs).says.startswith("held-out loss 4.000 nats with ReLU")
    assert answer(across.little_l1_is_free, *runs).statistic.startswith("held-out loss 4.000 nats without L1")
    mixed = [replace(one, heldout=one.name != "relu") for one in results]
    for module in (across, pairs):
        monkeypatch.setattr(module, "training_outcomes", lambda _: mixed)
    assert answer(across.relu_costs).says.startswith("held-out or training loss")
    with pytest.raises(Missing, match="l1 = 0"):
        answer(across.little_l1_is_free)


def test_a_training_that_was_stopped_is_not_compared_with_a_whole_one(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one whose L1 still rose."""
    whole, stopped = trained("whole", l1=0.0), trained("stopped", loss=5.0, l1=3e-5, rows=3, minutes=1)
    assert training_results([whole, stopped])["rise"].isna().all()
    with pytest.raises(Missing, match="l1 = 0"):
        answer(across.little_l1_is_free, whole, stopped)
    with pytest.raises(Missing, match="differ in activation"):
        answer(across.relu_costs, whole, trained("silu", loss=5.0, l1=0.0, activation="silu", rows=3))
    rising = replace(training_outcomes([trained("little", l1=3e-5)])[0], l1_end=1e-5)
    monkeypatch.setattr(across, "training_outcomes", lambda _: [*training_outcomes([whole]), rising])
    with pytest.raises(Missing, match="l1 = 0"):
        answer(across.little_l1_is_free)


@pytest.mark.parametrize(
    ("sparse", "verdict", "says"),
    [(7.0, HOLDS, "30 % less"), (9.0, IN_PART, "10 % less"), (10.0, FAILS, "0 % less"), (12.0, REVERSED, "20 % more")],
)
def test_memory_of_training(sparse: float, verdict: str, says: str) -> None:
    """As much is not more: what takes the most may be no FFN at all."""
    result = across._saved(sparse, 10.0, "", "", ())
    assert result.verdict == verdict and result.says.endswith(says)


def test_memory_of_two_trainings_is_that_of_the_sparse_one_against_the_dense(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = training_outcomes([trained("one")])[0]
    dense, sparse = (replace(one, name=f"{gib}", sparse=gib < 10, peak=gib * 2.0**30) for gib in (10, 7))
    for both in ([dense, sparse], [sparse, dense]):
        monkeypatch.setattr(across, "training_outcomes", lambda _, both=both: both)
        result = answer(across.memory_falls)
        assert result.says == "7.00 GiB with sparse kernels, 10.00 with dense ones, 30 % less"
        assert (result.verdict, result.of) == (HOLDS, ("7", "10"))


def test_studies_and_their_figure(trained: Trained, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stands last, with its own sparsity; the figure draws every training and no speed that is not there."""
    runs = [trained(f"l{i}", loss=4 + 0.1 * i, nnz=200 / 4**i, l1=0.01 * i, speed=1 + i) for i in range(3)]
    monkeypatch.setattr("twell.analysis.shipped.study_runs", lambda: runs)
    table = studies(run)
    assert table["this_run"].tolist() == [False] * 3 + [True] and table["name"].iloc[-1] == run.name
    figure = cost_and_gain(table)
    dots = [trace for trace in figure.data if trace.customdata is not None and trace.marker.symbol != "x"]
    assert [len(trace.x) for trace in dots] == [3, 3, 3]  # the loss, steps as the logs have them, the forward pass
    assert np.allclose(dots[0].y, [0, 0.025, 0.05]) and np.allclose(dots[-1].y, [3, 2, 1])
    axis = cost_and_gain(table.assign(sparsity=1 - np.geomspace(1.5e-4, 0.2, len(table)))).layout.xaxis
    assert axis.ticktext == tuple(f"{100 * tick:.6g}{SPACE}%" for tick in axis.tickvals), "no digit too many on a phone"
    notebook = json.loads((Path(str(resources.files("twell.data"))) / "studies" / "studies.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(names["figure"].data) > 2 and set(names["costs"].index) == {0.0, 0.01, 0.02}
    monkeypatch.setattr("twell.analysis.shipped.study_runs", list)
    with pytest.raises(Missing, match="data/studies"):
        studies()


def test_each_cross_of_this_run_has_a_name(trained: Trained, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two speeds of a run are two crosses of one color: each says what it is, and of no GPU that did not run it."""
    runs = [trained(f"l{i}", loss=4 + 0.1 * i, nnz=200 / 4**i, l1=0.01 * i, speed=1 + i) for i in range(3)]
    monkeypatch.setattr("twell.analysis.shipped.study_runs", lambda: runs)
    table = studies(run)
    table.loc[table["this_run"], ["ffn_speedup", "model_speedup"]] = [1.6, 1.3]
    crosses = [trace for trace in cost_and_gain(table).data if trace.marker.symbol == "x"]
    assert [trace.text[0] for trace in crosses] == ["this run, FFN", "this run, forward pass"]
    assert not any("GPU" in text for trace in crosses for text in trace.customdata)


def test_findings_over_trainings(trained: Trained, run: Run) -> None:
    """Claims over several runs take those that they can compare, the first run's own kind aside."""
    relu, little = trained("relu", loss=4.0, l1=0.0), trained("little", loss=4.01, l1=3e-5)
    table = findings(run, relu, little).set_index("claim").filter(like="Up to an L1", axis=0)
    assert table["verdict"].tolist() == [IN_PART] and table["scope"].iloc[0] == "relu, little"
