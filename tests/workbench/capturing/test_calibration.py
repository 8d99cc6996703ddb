"""Which batches run layers densely: all of them soon, and later no more than a share of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.clock import Clock

from twell.workbench.capturing.timing import calibration
from twell.workbench.capturing.timing.calibration import ROUNDS, Calibrations
from twell.workbench.options import CaptureOptions

SHARE = CaptureOptions.timings_share  # unless asked for otherwise
LAYERS = 28
BATCH, LAYER, MODEL = 0.265, 0.0097, 0.12  # seconds, of one H200 and a model of 28 layers of 2048 x 5632


def planned(plan: Calibrations, clock: Clock, many: int) -> Iterator[tuple[frozenset[int], bool]]:
    """Return the layers, and the model's turn, of each batch; marks are read one batch later, as a capture does."""
    waiting: list[tuple[int, bool]] = []
    for number in range(many):
        plan.begin_batch(number, 131_072)
        layers, model = plan.layers, plan.model_is_due()
        clock.now += BATCH + LAYER * len(layers) + MODEL * model
        waiting.append((len(layers), model))
        if len(waiting) > 1:
            done, turn = waiting.pop(0)
            took: dict[Any, Any] = {"layer": (done, LAYER * done)} if done else {}
            plan.book(took | ({"model": (1, MODEL)} if turn else {}))
        yield layers, model


def test_ten_batches_have_every_layer_and_the_model(clock: Clock) -> None:
    often, models = Counter[int](), 0
    for layers, model in planned(Calibrations(LAYERS, 1, SHARE, "cuda"), clock, 10):
        often.update(layers)
        models += model
    assert often == dict.fromkeys(range(LAYERS), ROUNDS)
    assert models == 1


@pytest.mark.parametrize("share", [SHARE, 0.1])
def test_samples_keep_to_their_share(share: float, clock: Clock) -> None:
    """Of the capture's time, not of that since the machine was started."""
    clock.now = began = 5_000.0
    plan, often, models = Calibrations(LAYERS, 1, share, "cuda"), Counter[int](), 0
    first = LAYER * LAYERS * ROUNDS + MODEL
    for number, (layers, model) in enumerate(planned(plan, clock, 3000)):
        often.update(layers)
        models += model
        if number > 10:
            assert plan.spent <= max(first, share * (clock.now - began)) + 1e-9
    assert plan.spent > 0.9 * share * (clock.now - began), "what may be spent is spent"
    assert max(often.values()) - min(often[layer] for layer in range(LAYERS)) <= 1, "layers take turns"
    rounds = often[0] - 1
    assert models == pytest.approx(1 + rounds / calibration.MODEL_EVERY, abs=1)


def test_a_model_too_slow_for_the_allowance_is_calibrated_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibration.ALLOWANCE, "cuda", 0.1)
    often = Counter[int]()
    for layers, _ in planned(Calibrations(LAYERS, 1, 0.0, "cuda"), clock, 30):
        often.update(layers)
    assert often == dict.fromkeys(range(LAYERS), 1)


def test_a_share_of_one_takes_every_batch_that_is_due(clock: Clock) -> None:
    plan = Calibrations(LAYERS, 2, 1.0, "cuda")
    due = [number for number, (layers, _) in enumerate(planned(plan, clock, 8)) if len(layers) == LAYERS]
    assert due == [2, 4, 6]


def test_the_rest_of_a_text_is_not_calibrated(clock: Clock) -> None:
    plan = Calibrations(LAYERS, 1, 1.0, "cpu")
    for rows, layers in ((1000, 0), (1000, LAYERS), (400, 0), (600, LAYERS)):
        plan.begin_batch(0, rows)
        assert len(plan.layers) == layers
