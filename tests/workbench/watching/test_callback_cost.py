"""What TwellCallback asks of a device: nothing in a step that is not counted; three launches a layer, and no wait, in
one that is. Held by counting operations, as a clock on a busy machine could not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.step_calls import StepCalls
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from twell.workbench import TwellCallback, watch

pytest.importorskip("accelerate")

STEPS, EVERY, LAYERS, D_FF = 7, 3, 3, 96
ROWS = 2 * 12
MATRIX = ROWS * D_FF * 4  # bytes of a layer's pre-activations
SMALL = 40  # launches over rows alone, and over sums, that a counted step may add to those of its layers


class Steps(TrainerCallback):
    """Has each step begin another in what is noted."""

    def __init__(self, calls: StepCalls) -> None:
        self.calls = calls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.next_step()


def small_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": D_FF, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64, hidden_act="relu"))


def trained(folder: Path, packed: bool, *callbacks: TrainerCallback) -> StepCalls:
    """Return what each step of a training asked for; the log before a step, if there is one, belongs to it."""
    rows = torch.randint(3, 64, (STEPS * 2, 12), generator=torch.Generator().manual_seed(0))
    more = {"position_ids": torch.arange(12) % 7} if packed else {}
    data = [{"input_ids": row, "labels": row, **more} for row in rows]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=5, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    calls = StepCalls()
    trainer = Trainer(small_model(), args, train_dataset=data, callbacks=[*callbacks, Steps(calls)])
    with calls:
        trainer.train()
    return calls


@pytest.mark.parametrize("packed", [False, True], ids=["one text a row", "packed"])
def test_what_a_step_asks_for(tmp_path: Path, packed: bool) -> None:
    plain = trained(tmp_path / "plain", packed).steps
    ours = trained(tmp_path / "ours", packed, TwellCallback(every=EVERY)).steps
    for number in range(1, STEPS):  # the first holds what comes before a training
        before, after = plain[number], ours[number]
        more = len(after.operations) - len(before.operations)
        if number % EVERY:
            is_logged = number == 5
            assert is_logged or after.operations == before.operations, number
            assert len(after.waits) == len(before.waits) + is_logged, "one fetch for a log"
            continue
        assert after.waits == before.waits, number
        assert 3 * LAYERS < more <= 3 * LAYERS + SMALL, sorted(set(after.operations) - set(before.operations))
        large, large_before = after.large(MATRIX), before.large(MATRIX)
        assert len(large) == len(large_before) + 3 * LAYERS
        assert sum(large) - sum(large_before) < LAYERS * 4.2 * MATRIX, "values read, a mask written and read twice"


def test_a_compiled_model_is_uncovered_too(
    load_object: Callable[..., Any], tiny: Path, batch: Any, compiler: Callable[..., Any]
) -> None:
    """Calls that are not counted run the model's own graph, and later ones are counted again."""
    model = load_object(tiny)
    compiled = compiler(model, backend="eager", fullgraph=True)
    with torch.no_grad(), watch(model, rows=False, dense=True) as w:
        tokens = []
        for on in (True, False, True, False):
            w.tracker.count_calls(on)
            assert any("forward" in vars(module) for module in model.modules()) is on
            compiled(**batch)
            tokens.append(w.metrics()["tokens"])
    assert tokens[0] == tokens[2] > 0 == tokens[1] == tokens[3]
