"""What ablations do to the loss: sums and intervals from rows that were made, and a run without any."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.planted_effects import coverage, rows_of

from twell.analysis import allocation, by_layer, effects
from twell.analysis.ablations.allocation import HALF, _bytes, allocate, allocated, summary
from twell.analysis.ablations.by_condition import KEPT, SUMS, clustered, lines, lines_of, paired_change
from twell.workbench.ablations.appended import append
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run, open_run

ENTRY = {"study": 0, "tokens": 1, "seconds": 0.0, "complete": True, "unread_table_rows": 10**6}


def added(run: Run, study: int, harm: float | None = None, **given: Any) -> Run:
    """Append a study of one condition. harm: its change in nats a token, in every document; None: a planted one"""
    rows = rows_of(np.random.default_rng(study), study=study, **given)[0]
    if harm is not None:
        rows["loss_sum"] = rows["base_sum"] + harm * rows["tokens"]
    append(run.path, "effects", rows, effects=[ENTRY])
    return open_run(run.path)


def test_changes_are_sums_by_document(small: Run) -> None:
    run = added(small, 0, condition="dead", kind="dead")
    run = added(run, 1, documents=45)
    run = added(run, 2, documents=45, condition="weakest:0.5", share=0.5)
    table = effects(run).set_index("condition")
    rows = run.frame("effects")
    assert list(table.index) == ["dead", "weakest:0.5"]  # in the order of kinds; the later of two studies of one
    assert table.loc["weakest:0.5", "study"] == 2
    last = rows[rows["study"] == 2]
    n, y = last["tokens"].to_numpy(), (last["loss_sum"] - last["base_sum"]).to_numpy()
    mean = y.sum() / n.sum()
    assert table.loc["weakest:0.5", "change"] == pytest.approx(mean, rel=1e-12)
    kish = n.sum() ** 2 / (n**2).sum()
    error = np.sqrt(kish / (kish - 1) * ((y - mean * n) ** 2).sum()) / n.sum()
    assert 1.6 * error < table.loc["weakest:0.5", "high"] - mean < 4 * error
    assert 1.2 * error < mean - table.loc["weakest:0.5", "low"] < 2.5 * error
    assert table.loc["weakest:0.5", "kept"] == pytest.approx(last["firings"].sum() / last["base_firings"].sum())
    assert set(effects(run, study=1)["study"]) == {1}
    shown = "\n".join(lines(effects(run)))
    assert "weakest:0.5" in shown and KEPT in shown, "a share over 100 % is no mistake"
    tiny = effects(run).assign(change=-1e-5, low=-2e-5, high=1e-5)
    assert "-0.0000" not in "\n".join(lines(tiny)), "what rounds to 0 has no sign of its own"
    with pytest.raises(UserError, match="a study of"):
        effects(run, study=7)


def test_a_study_is_shown_without_what_others_measured(small: Run) -> None:
    """A condition of both counts as shown, with the numbers of the study that is asked for."""
    for study, (condition, documents) in enumerate((("ffn@0", 5), ("weakest:0.5", 8), ("weakest:0.5", 5))):
        run = added(small, study, condition=condition, documents=documents)
    for studies, names, others in (([2], ["weakest:0.5"], 1), ([1], ["weakest:0.5"], 1), ([0, 2, 0], ["ffn", "we"], 0)):
        shown = lines_of(run, studies)
        told = [f"  {others} condition measured earlier: on page What matters, `twell app {run.path.parent}`"][:others]
        table = pd.concat([effects(run, study) for study in sorted(set(studies))], ignore_index=True)
        assert shown == [*lines(table), *told] and len(table) == len(names)
        assert all(line.startswith(f"  {name}") for name, line in zip(names, shown[1:], strict=False))


def test_each_study_is_beside_the_loss_of_its_own_tokens(small: Run) -> None:
    """Conditions that were measured on other tokens have another untouched loss, which the list says of each."""
    for study, documents in enumerate((5, 8)):
        columns, _ = rows_of(np.random.default_rng(study), study=study, documents=documents)
        columns["condition"] = [f"weakest:0.{5 + study}"] * documents
        append(small.path, "effects", columns)
    table = effects(open_run(small.path))
    notes = [line for line in lines(table) if "untouched" in line]
    assert len(notes) == len(table) == 2
    for row in table.itertuples():
        tokens = f"{row.tokens:,} predicted tokens of {row.documents} documents or blocks of long ones"
        of = f"untouched {row.base:.4f} nats on {tokens}, for {row.condition}"
        assert sum(of in note for note in notes) == 1, (of, notes)


def test_blocks_of_one_document_are_not_called_documents(small: Run) -> None:
    columns, _ = rows_of(np.random.default_rng(0), documents=5)
    append(small.path, "effects", {**columns, "document": [0] * 5, "piece": list(range(5))})
    assert "tokens of 5 documents or blocks of long ones" in lines(effects(open_run(small.path)))[-1]
    columns = {name: values[:1] for name, values in columns.items()}
    append(small.path, "effects", {**columns, "study": [1]})
    assert lines(effects(open_run(small.path), 1))[-1].endswith("tokens of one document")


def test_one_document_has_no_interval_and_losses_that_are_not_finite_are_left_out(small: Run) -> None:
    columns, _ = rows_of(np.random.default_rng(0), documents=5)
    columns["loss_sum"][1] = np.nan
    columns["document"][1] = columns["document"][0]  # whose other rows are left out with that one
    columns["piece"] = np.zeros(5, int)
    append(small.path, "effects", columns)
    row = effects(open_run(small.path)).iloc[0]
    assert (row["documents"], row["left_out"]) == (3, 1) and np.isfinite(row["change"])
    columns, _ = rows_of(np.random.default_rng(0), study=1, documents=1)
    append(small.path, "effects", columns)
    assert np.isnan(effects(open_run(small.path), study=1).iloc[0]["low"])


@pytest.mark.parametrize(("documents", "clusters"), [(3, 6), (45, 45)])
def test_long_documents_count_in_pieces_where_there_are_few(documents: int, clusters: int) -> None:
    numbers = np.arange(2 * documents)
    rows = pd.DataFrame(dict.fromkeys(SUMS, numbers) | {"source": "a", "document": numbers // 2, "piece": numbers % 2})
    assert len(clustered(rows)) == clusters


def test_a_run_without_ablations_says_so(small: Run) -> None:
    with pytest.raises(Missing, match="twell ablate"):
        effects(small)
    spaced = small.path.rename(small.path.with_name("a run"))
    with pytest.raises(Missing, match=r"`twell ablate '.*/a run'`"):
        effects(open_run(spaced))


@pytest.mark.parametrize("documents", [20, 60])
def test_intervals_hold_planted_changes(documents: int) -> None:
    """At a coverage of 95 %, under 23 of 30 once in 20 000 times; more: `python -m support.planted_effects 1000`."""
    assert coverage(30, documents) >= 23 / 30


def test_intervals_of_few_documents_are_wider() -> None:
    """Than those of many of the same mean and spread: 1.43 times here, and 1.23 times by the bootstrap's own tails."""
    rng = np.random.default_rng(4)
    tokens, change = np.full(10, 500.0), rng.normal(20, 5, 10)
    widths = []
    for times in (1, 30):
        _, low, high = paired_change(np.tile(tokens, times), np.tile(change, times))
        widths.append((high - low) * np.sqrt(times))
    assert widths[0] > 1.33 * widths[1]


def test_three_documents_have_no_interval() -> None:
    """Student's held planted changes in 85 % of 95."""
    mean, *ends = paired_change(np.full(3, 500.0), [10.0, 20.0, 36.0])
    assert mean == pytest.approx(22 / 500) and np.isnan(ends).all()
    assert np.isnan(paired_change([500.0] * 3, [0.0] * 3)[1:]).all() and paired_change([500] * 4, [0] * 4) == (0, 0, 0)


def test_four_documents_have_an_interval_of_the_size_of_their_spread() -> None:
    """Draws of one document alone have no spread: divided by what rounding leaves of it, they made it millions wide."""
    change = np.array([7.1, 11.3, 12.9, 19.7])
    _, low, high = paired_change(np.full(4, 100.0), change)
    students = 2 * stats.t.ppf(0.975, 3) * change.std(ddof=1) / np.sqrt(4) / 100
    assert students < high - low < 4 * students


def test_documents_without_a_predicted_token_are_none(small: Run) -> None:
    """One document of some and two of one token each had an interval, of no width at all."""
    assert np.isnan(paired_change([100, 0, 0], [5.0, 0.0, 0.0])[1:]).all()
    assert paired_change([100, 0, 90, 80], [5.0, 0.0, 3.0, 6.0]) == paired_change([100, 90, 80], [5.0, 3.0, 6.0])
    columns, _ = rows_of(np.random.default_rng(0), documents=5)
    for name in ("tokens", "base_sum", "loss_sum"):
        columns[name][2:4] = 0
    append(small.path, "effects", columns)
    row = effects(open_run(small.path)).iloc[0]
    assert (row["documents"], row["left_out"]) == (3, 0)


SHARES = (0.25, 0.5, 0.75)
CURVES = {  # of rising cost, and one layer that is better off without half of its values
    0: [(0.25, 0.001), (0.5, 0.004), (0.75, 0.02)],
    1: [(0.25, 0.01), (0.5, 0.03), (0.75, 0.09)],
    2: [(0.25, 0.003), (0.5, -0.002), (0.75, 0.006)],
}


@pytest.mark.parametrize("budget", [0.0, 0.002, 0.012, 0.02, 0.038, 0.2])
def test_a_budget_goes_to_the_cheapest_layers(budget: float) -> None:
    """Within one step of the best of all mixtures, and within the budget."""
    costs = [{0.0: 0.0, **dict(curve)} for curve in CURVES.values()]
    mixtures = [shares for shares in product(*costs) if sum(c[s] for c, s in zip(costs, shares, strict=True)) <= budget]
    chosen = allocate(CURVES, budget)
    assert tuple(chosen.values()) in mixtures
    assert sum(chosen.values()) >= max(map(sum, mixtures)) - 0.25
    assert chosen[2] >= 0.5  # what lowers the loss goes first
    assert allocate({0: [(0.25, 0.25), (0.5, 0.5)]}, 0.5) == {0: 0.5}, (
        "a step counts with what it adds; up to the budget"
    )
    if budget == 0.2:
        assert set(chosen.values()) == {0.75}
    if budget == 0.012:
        assert chosen == {0: 0.5, 1: 0.0, 2: 0.75}


def test_an_allocation_says_what_it_costs_together(small: Run) -> None:
    assert small.layers == 4
    shares = {0: 0.5, 1: 0.25, 2: 0.25, 3: 0.5}
    added(small, 7, condition="smallest:0.5", kind="smallest", share=0.5)  # of all layers at once: none of a single one
    for number, (layer, share) in enumerate(shares.items()):
        run = added(small, number, condition=f"smallest:{share}@{layer}", kind="smallest", share=share, layer=layer)
    with pytest.raises(Missing, match="run together: measure them with `twell ablate"):
        allocation(run)
    with pytest.raises(UserError, match=r"some layer's share fits, got 0 nats: the least is 0.0"):
        allocated(run, 0)
    choosing, single = (effects(run, half=half).set_index("layer")["change"].drop(-1) for half in (0, 1))
    both = sorted(choosing.index, key=lambda layer: choosing[layer] / shares[layer])[:2]
    condition = allocated(run, float(choosing[both].sum()) + 1e-9)
    assert condition == "shares:" + ",".join(f"{shares[layer] if layer in both else 0:g}" for layer in range(4))
    run = added(run, 9, condition=condition, kind="shares")
    table = allocation(run)
    assert table["share"].tolist() == [shares[layer] if layer in both else 0 for layer in range(4)]
    assert table.attrs["singles"] == pytest.approx(single[both].sum())
    assert table.attrs["joint"] == effects(run).set_index("condition").loc[condition, "change"]
    gone = table["share"].sum()
    run.manifest.model.update(parameters=10**7, d_model=64)
    sparse = allocation(run).attrs
    run.manifest.options["threshold"] = 0.0  # a model without zeros reads every weight before
    dense = allocation(run).attrs
    assert dense["unread"] == pytest.approx(gone * 64 * run.d_ff / 9e6), "a table of embeddings is not read"
    assert dense["speedup"] == pytest.approx(1 / (1 - dense["unread"]))
    density = by_layer(run)["mean"].max() / run.d_ff
    assert 0 < sparse["unread"] < 1.1 * density * dense["unread"]
    counted, run.manifest.effects = run.manifest.effects, [{"study": 9}]
    assert np.isnan(allocation(run).attrs["unread"]), "no study knows whether the head is tied to the embeddings"
    run.manifest.effects = [*counted, {"has_zeros": True}]  # of which a count above a threshold does not tell
    assert np.isnan(allocation(run).attrs["unread"])
    run.manifest.model["parameters"] = None
    assert np.isnan(allocation(run).attrs["unread"]) and "batch 1" not in summary(allocation(run))


def test_a_mixture_that_breaks_the_budget_gives_way_to_a_smaller_one(small: Run) -> None:
    for number, (layer, share) in enumerate((layer, share) for layer in range(4) for share in (0.25, 0.5)):
        name = f"smallest:{share}@{layer}"
        run = added(small, number, condition=name, kind="smallest", share=share, layer=layer)
    alone = effects(run).set_index(["layer", "share"])["change"]
    budget = float(alone[[(layer, 0.5) for layer in range(4)]].clip(lower=0).sum())
    first = allocated(run, budget)
    run = broken = added(run, 8, condition=first, kind="shares", harm=2 * budget)
    second = allocated(run, budget, [first])
    assert gone(second) < gone(first)
    broken.manifest.effects = [{"study": 8, "conditions": [first], "budget": budget}]
    over = allocation(broken)
    assert over.attrs["condition"] == first and f", over the budget of {budget:g}." in summary(over)
    run = added(broken, 9, condition=second, kind="shares", harm=0.0)
    assert allocated(run, budget, [first, second]) == "", "kept: nothing more to run"
    run.manifest.effects = [*broken.manifest.effects, {"study": 9, "conditions": [second], "budget": budget}]
    within = allocation(run)
    assert within.attrs["condition"] == second and f", within the budget of {budget:g}" in summary(within)
    assert allocation(run, budget).attrs["budget"] == budget


@pytest.mark.parametrize("documents", [2 * HALF - 1, 2 * HALF, 60])
def test_a_mixture_costs_more_on_other_text_than_on_that_it_was_chosen_by(small: Run, documents: int) -> None:
    """Of shares that cost as much, those are chosen that cost little by chance, so what they cost is told of the other
    half of the documents; of few documents it is said which it is."""
    rng, run, halved = np.random.default_rng(documents), small, documents >= 2 * HALF

    def studied(run: Run, number: int, base: float, **about: Any) -> Run:
        """Add a study of documents that lose 0.02 nats on average, each its own."""
        columns, _ = rows_of(rng, number, documents, **about)
        columns["tokens"], columns["base_sum"] = np.full(documents, 500), np.full(documents, 500 * base)
        columns["loss_sum"] = columns["base_sum"] + 500 * rng.normal(0.02, 0.15, documents)
        append(run.path, "effects", columns, effects=[ENTRY])
        return open_run(run.path)

    for number, (layer, share) in enumerate((layer, share) for layer in range(4) for share in SHARES):
        run = studied(
            run, number, 3.0, condition=f"smallest:{share}@{layer}", kind="smallest", share=share, layer=layer
        )
    condition, table = allocated(run, 0.01), allocation(run, 0.01)
    assert 0.02 * np.count_nonzero(table["share"]) > 0.01 and (table.attrs["singles"] < 0.01) == (not halved)
    measured = effects(run, half=1 if halved else None).set_index(["layer", "share"])["change"]
    assert [row.change for row in table.itertuples()] == [
        measured.get((row.layer, row.share), 0.0) for row in table.itertuples()
    ]
    for number, base, own in ((20, 3.0, True), (21, 4.0, False)):
        run = studied(run, number, base, condition=condition, kind="shares")
        table, whole = allocation(run), effects(run).set_index("condition").loc[condition]
        assert table.attrs["halved"] is halved and table.attrs["chosen_by"] is (own and not halved)
        said = summary(table)
        assert ("That is on the tokens by which the shares were chosen" in said) == (own and not halved)
        assert ("every other document, and changes are those of the others" in said) == halved
        assert (table.attrs["joint"] == whole["change"]) == (not (halved and own)), "other text is all other"


def gone(condition: str) -> float:
    return sum(map(float, condition.partition(":")[2].split(",")))


def test_columns_are_read_where_a_product_is_used(made: ModuleType, tmp_path: Path) -> None:
    """With a ReLU on both branches: up rows of what fires, columns of the map back of what is used."""
    run = made.make(tmp_path / "both", layers=4, sequences=20, up_relu=True)
    run.manifest.effects = [ENTRY]
    run.manifest.model.update(parameters=10**7, d_model=64)
    layers, matrix = by_layer(run), 64 * run.d_ff
    fired, used = layers["mean"] / run.d_ff, layers["used"] / run.d_ff
    read = 9 * 10**6 - matrix * (3 * 4 - (1 + fired + used).sum())
    unread = _bytes(run, np.full(4, 0.5))["unread"]
    assert unread == pytest.approx(matrix * 0.5 * used.sum() / read)
