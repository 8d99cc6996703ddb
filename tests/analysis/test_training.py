"""How a model gets sparse: the log's means, the layers' rows, and the step from which each layer is sparse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.synthetic_training import DENSE, ROWS, SPARSE, make_training

from twell.analysis import compare_trainings, sparse_since, training_layers, training_steps
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

LAYERS, D_FF = 4, 512


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_training(tmp_path_factory.mktemp("training") / "made", LAYERS, D_FF)


def test_steps_have_means_over_layers_and_the_speedup_of_a_step(trained: Run) -> None:
    steps = training_steps(trained)
    assert steps["step"].tolist() == list(range(10, 10 * ROWS + 1, 10))
    assert not [name for name in steps if name[:4] in ("nnz_", "dead") and name != "dead"]
    assert steps["nnz"].iloc[0] == D_FF * DENSE
    assert steps["nnz"].iloc[-1] == pytest.approx(D_FF * (3 * SPARSE + DENSE) / 4)
    assert steps["sparsity"].to_numpy() == pytest.approx(1 - steps["nnz"].to_numpy() / D_FF)
    assert steps["dead"].iloc[-1] == pytest.approx(3 * 0.25 / 4)
    assert steps["step_speedup"].isna().tolist() == [True] * 6 + [False] * 6
    assert steps["step_speedup"].dropna().to_numpy() == pytest.approx(1.5)


def test_a_layer_is_sparse_from_the_row_on_from_which_it_stays_so(trained: Run) -> None:
    since = sparse_since(trained)
    assert since["layer"].tolist() == [0, 1, 2, 3]
    assert since["step"].tolist()[:3] == [20, 40, 60]
    assert since["step"].isna().tolist() == [False, False, False, True]
    assert since["tokens"].tolist()[:3] == [256 * step for step in (20, 40, 60)]
    assert since["nnz_least"].tolist() == pytest.approx([D_FF * SPARSE] * 3 + [D_FF * DENSE])
    assert sparse_since(trained, share=0.6)["step"].tolist() == [10] * 4
    assert sparse_since(trained, share=0.001)["step"].isna().all()


def test_layers_agree_with_the_table(trained: Run) -> None:
    layers, table = training_layers(trained), trained.frame("training")
    assert len(layers) == ROWS * LAYERS
    for layer in range(LAYERS):
        rows = layers[layers["layer"] == layer]
        np.testing.assert_array_equal(rows["nnz"], table[f"nnz_{layer:02}"])
        np.testing.assert_array_equal(rows["dead"], table[f"dead_{layer:02}"])
        np.testing.assert_array_equal(rows["tokens"], table["tokens"])


def test_trainings_side_by_side(trained: Run, tmp_path: Path) -> None:
    other = make_training(tmp_path / "other", LAYERS, D_FF, rows=3, seed=7)
    logs = compare_trainings([trained, other])
    assert logs["run"].value_counts().to_dict() == {"made": ROWS, "other": 3}
    pd.testing.assert_frame_equal(
        logs[logs["run"] == "other"].drop(columns="run").reset_index(drop=True),
        training_steps(other),
        check_dtype=False,
    )
    assert logs.attrs["recipes"].loc["seed"].tolist() == [0, 7] and list(logs.attrs["recipes"].index) == ["seed"]


def test_a_run_without_a_training_says_what_makes_one(small: Run) -> None:
    for function in (training_steps, training_layers, sparse_since):
        with pytest.raises(Missing, match="holds no training: `twell train` records how a model gets sparse"):
            function(small)


def test_what_a_training_lacks_is_said(trained: Run) -> None:
    with pytest.raises(Missing, match="no rows of single tokens: it is a training, whose model `twell capture`"):
        trained.frame("activity")


def test_a_copy_without_activity_keeps_it(trained: Run, tmp_path: Path) -> None:
    from twell.workbench.run.store import open_run
    from twell.workbench.run.summary_only import copy_without_activity

    copy_without_activity(trained.path, tmp_path / "copy")
    pd.testing.assert_frame_equal(training_steps(open_run(tmp_path / "copy")), training_steps(trained))
