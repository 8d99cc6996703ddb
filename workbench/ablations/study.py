"""A study: conditions over the same batches, and rows of the table `effects` for each batch, document and condition.

The idea: the text is cut into the same batches each time. Each batch runs untouched and under every condition, and its
losses are summed by document; rows of whole batches go to the run every PART_SECONDS. A study that was stopped or
killed goes on with the batches that are not in the run yet.

Cost: see `passes.py`; text and losses are small beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twell.workbench.ablations.actions import Shrink
from twell.workbench.ablations.appended import append, appending
from twell.workbench.ablations.conditions import Facts, Intervention, TakesNothing, intervention_of
from twell.workbench.ablations.passes import EVERY, AblationRunner
from twell.workbench.ablations.spelled import Condition
from twell.workbench.capturing.forward import Inputs
from twell.workbench.devices import memory_for
from twell.workbench.models.own_code import OwnModel, unread_table_rows
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import PART_SECONDS
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.sequences import Sequence as TokenSequence

OF_VALUES = ("smallest", "shares")  # kinds that go by quantiles of a layer's values
QUANTILES = 1001  # of a layer's values, evenly spaced
SAMPLED = 2**21  # values of a layer that these are taken from, at most
BLOCK = 16  # sequences of a long document whose tokens stand in one row
# Equal where a study goes on. The name of a text is not enough: standard input has one, and a file may be edited.
RESUMED_BY = ("conditions", "text", "tokens", "token_ids", "batch_tokens", "seed", "dtype", "model")


@dataclass(frozen=True)
class Study:
    """A measurement: conditions on sequences. text: names of the sources; tokens: in all sequences"""

    conditions: Sequence[Condition]
    sequences: Sequence[TokenSequence]
    text: Sequence[str]
    batch_tokens: int
    seed: int = 0
    special: frozenset[int] = frozenset()

    def record(self, own: OwnModel, number: int) -> dict[str, Any]:
        """Return the manifest's entry of the study."""
        return {
            "study": number,
            "conditions": [condition.name for condition in self.conditions],
            "text": list(self.text),
            "tokens": sum(len(sequence.ids) for sequence in self.sequences),
            "token_ids": self._digest(),
            "batch_tokens": self.batch_tokens,
            "seed": self.seed,
            "dtype": str(own.model.dtype).removeprefix("torch."),
            "model": own.weights,
            "device": own.device.type,
            "has_zeros": own.has_zeros,
            "unread_table_rows": unread_table_rows(own.model),
            "seconds": 0.0,
            "complete": False,
        }

    def _digest(self) -> str:
        """Return a sha256 of the sequences' tokens, and of where each begins."""
        digest = sha256()
        for sequence in self.sequences:
            digest.update(f"{len(sequence.ids)} ".encode() + sequence.ids.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass
class _Pending:
    """Rows that are not written yet."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    def add(self, rows: dict[str, Any]) -> None:
        for name, values in rows.items():
            self.columns.setdefault(name, []).extend(values)

    @property
    def is_due(self) -> bool:
        return bool(self.columns) and time.monotonic() - self.since >= PART_SECONDS


def run_study(
    run: Run, own: OwnModel, study: Study, done: Callable[[int, int], object] = lambda *_: None
) -> tuple[Run, int]:
    """Measure a study and write it into the run; return the run, and the study's number there.

    done: called after each batch with its number and how many there are. Raises UserError for a condition that takes
    nothing away, and where the run cannot be written to.
    """
    cut = list(batches(study.sequences, study.batch_tokens, study.special))
    with appending(run.path), AblationRunner(own, _threshold(run)) as runner:
        entry, recorded = _entry(open_run(run.path), study.record(own, 0))
        if entry["complete"]:
            return open_run(run.path), entry["study"]
        interventions = interventions_of(run, own, study, cut, runner)
        entry["thresholds"] = {
            each.condition.name: _values(each, own.layers) for each in interventions if each.condition.shares
        }
        longest = max(len(sequence.ids) for sequence in study.sequences)
        pending, began = _Pending(), time.monotonic() - entry["seconds"]

        def write(complete: bool) -> None:
            entry.update(seconds=round(time.monotonic() - began, 3), complete=complete)
            if pending.columns:
                others = [one for one in manifests.read(run.path).effects if one["study"] != entry["study"]]
                append(run.path, "effects", pending.columns, effects=[*others, entry])
            pending.columns, pending.since = {}, time.monotonic()

        try:
            for index, batch in enumerate(cut):
                if batch.number not in recorded and batch.predicts.any():
                    pending.add(_rows(runner, interventions, batch, entry["study"], longest))
                if pending.is_due and index + 1 < len(cut):
                    write(False)
                done(index + 1, len(cut))
        except BaseException:
            write(False)  # of whole batches
            raise
        write(True)
    return open_run(run.path), entry["study"]


def note_budget(run: Run, study: int, budget: float) -> Run:
    """Write the budget that a study was for into its entry, as the last of all entries; return the run."""
    with appending(run.path):
        manifest = manifests.read(run.path)
        entry = next(one for one in manifest.effects if one["study"] == study)
        manifest.effects = [*(one for one in manifest.effects if one is not entry), {**entry, "budget": budget}]
        manifests.write(run.path, manifest)
    return open_run(run.path)


def effective(run: Run, own: OwnModel, study: Study) -> tuple[Study, list[str]]:
    """Return the study without the conditions that take nothing away, and a sentence on each of these.

    Raises TakesNothing where no condition is left, and UserError for one that takes all of a layer.
    """
    facts = Facts(own.widths, own.d_ff, neuron_fires(run))
    kept, left_out = [], list[str]()
    for condition in study.conditions:
        try:
            if condition.kind not in OF_VALUES:
                intervention_of(condition, facts, study.seed)
            kept.append(condition)
        except TakesNothing as error:
            left_out.append(f"Left out {condition.name!r}: there are no neurons {error.why}.")
            if len(left_out) == len(study.conditions):
                raise
    return replace(study, conditions=kept), left_out


def interventions_of(
    run: Run, own: OwnModel, study: Study, cut: Sequence[Batch], runner: AblationRunner
) -> list[Intervention]:
    """Return the study's conditions as actions on this model, by the run's counts and values of the first batch."""
    values = None
    if any(condition.kind in OF_VALUES for condition in study.conditions):
        values = hidden_quantiles(own, cut[0], runner)
    facts = Facts(own.widths, own.d_ff, neuron_fires(run), values, _threshold(run))
    return [intervention_of(condition, facts, study.seed) for condition in study.conditions]


def _values(intervention: Intervention, layers: int) -> list[float]:
    """Return the value in each layer up to which an intervention sets hidden values to 0; 0 where it does nothing."""
    actions = [intervention.actions.get(layer) for layer in range(layers)]
    return [action.threshold if isinstance(action, Shrink) else 0.0 for action in actions]


def neuron_fires(run: Run) -> NDArray | None:
    """Return how often each neuron fired in a run, int64 [layers, d_ff]; None where it did not count that."""
    if run.none_fired:
        return np.zeros((run.layers, run.d_ff), dtype=np.int64)
    if not run.has("neurons"):
        return None
    rows = run.arrow("neurons", ["layer", "neuron", "fires"]).to_pydict()
    fires = np.zeros((run.layers, run.d_ff), dtype=np.int64)
    np.add.at(fires, (np.array(rows["layer"], int), np.array(rows["neuron"], int)), np.array(rows["fires"], np.int64))
    return fires


def hidden_quantiles(own: OwnModel, batch: Batch, runner: AblationRunner) -> NDArray:
    """Return the values |hidden| that are not 0 in each layer on a batch: QUANTILES of them, ascending."""
    inputs = Inputs.of(batch, own.device)
    quantiles = np.zeros((own.layers, QUANTILES))

    def take(layer: int, hidden: Tensor) -> None:
        values = hidden.reshape(-1, hidden.shape[-1])[inputs.row_of.long()].abs().flatten()
        values = values[values > 0]
        values = values[:: max(1, len(values) // SAMPLED)].double().sort().values
        if len(values):
            at = torch.linspace(0, len(values) - 1, QUANTILES, dtype=torch.float64).round().long()
            quantiles[layer] = values[at.to(values.device)].cpu().numpy()

    runner.on_hidden = take
    try:
        runner.run(inputs, [])
    finally:
        runner.on_hidden = None
    return quantiles


def _threshold(run: Run) -> float:
    return float(run.manifest.options.get("threshold") or 0.0)


def _entry(run: Run, planned: dict[str, Any]) -> tuple[dict[str, Any], set[int]]:
    """Return the manifest's entry of a study that was begun, or a new one, and the batches that it has already."""
    entries = run.manifest.effects
    for entry in entries:
        if all(entry.get(name) == planned[name] for name in RESUMED_BY):
            rows = run.rows("effects", [("study", "==", entry["study"])], ["batch"]) if run.has("effects") else None
            return dict(entry), set() if rows is None else set(rows["batch"].to_pylist())
    return {**planned, "study": 1 + max((entry["study"] for entry in entries), default=-1)}, set()


def _rows(
    runner: AblationRunner, interventions: Sequence[Intervention], batch: Batch, study: int, longest: int
) -> dict[str, Any]:
    """Return the rows of one batch: a row a condition and document. longest: of all sequences, in tokens"""
    with memory_for(f"batches of {batch.padded:,} tokens", "lower --batch-tokens"):
        losses, firings = runner.run(Inputs.of(batch, runner.own.device), interventions, batch.number)
    names = [(one.source, one.document, one.start // (BLOCK * longest)) for one in batch.sequences]
    documents = sorted(set(names))
    index = np.array([documents.index(name) for name in names])
    of_loss = np.repeat(index, batch.lengths - 1)  # a sequence of n tokens has n - 1 losses
    of_counted = np.repeat(index, batch.lengths)[::EVERY]

    def sums(values: Tensor, groups: NDArray) -> NDArray:  # [1 + interventions, documents]
        return np.stack([np.bincount(groups, row, len(documents)) for row in values.double().cpu().numpy()])

    loss, fired, tokens = (
        sums(losses, of_loss),
        sums(firings, of_counted),
        np.bincount(of_loss, minlength=len(documents)),
    )
    rows: dict[str, list[Any]] = {}
    for number, each in enumerate(interventions, start=1):
        condition, count = each.condition, len(documents)
        about = {
            "study": study, "condition": condition.name, "kind": condition.kind, "layer": condition.layer,
            "share": condition.share, "silenced": each.silenced, "batch": batch.number,
        }  # fmt: skip
        by_document = {
            "source": [one[0] for one in documents], "document": [one[1] for one in documents],
            "piece": [one[2] for one in documents], "tokens": tokens, "loss_sum": loss[number], "base_sum": loss[0],
            "firings": fired[number].astype(int), "base_firings": fired[0].astype(int),
        }  # fmt: skip
        for name, value in about.items():
            rows.setdefault(name, []).extend([value] * count)
        for name, values in by_document.items():
            rows.setdefault(name, []).extend(list(values))
    return rows
