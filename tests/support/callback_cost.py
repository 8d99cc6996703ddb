"""What TwellCallback costs a training step of Hugging Face's Trainer: with it and without, in turns.

    PYTHONPATH=tests python -m support.callback_cost                   a small model on the CPU: by processor time
    PYTHONPATH=tests python -m support.callback_cost --device cuda     134 M parameters on a GPU: by the clock

Each turn trains one and the same model from its weights on random ids; steps are timed between the ends of two of them,
so that all that the callback does falls in: what it does at a log falls into the step after it. The share is the
geometric mean of turns, with its least and greatest; beside it are medians of the steps that are not counted and of
those that are, which noise in single steps does not move. The first twenty steps warm up: they hold the first count and
the first log.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from twell.workbench import TwellCallback

SIZES = {"cpu": (4, 256, 1024, 2048, 8, 128), "cuda": (12, 768, 3072, 16384, 8, 1024)}
# layers, columns, neurons, vocabulary, sequences a step, tokens of each
EVERY, WARM_UP = 10, 20  # steps


class Texts(IterableDataset):
    """Random ids without end."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        draw = torch.Generator().manual_seed(0)
        while True:
            ids = torch.randint(self.vocabulary, (self.length,), generator=draw)
            yield {"input_ids": ids, "labels": ids}


@dataclass
class Apart:
    """Times of steps that are not counted, and of those that are, in seconds."""

    plain: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)

    def add(self, seconds: list[float]) -> None:
        self.counted += seconds[::EVERY]
        self.plain += [second for number, second in enumerate(seconds) if number % EVERY]


class Clock(TrainerCallback):
    """Times of the ends of steps, in seconds: of processor time on a CPU, of the clock on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter() if self.device == "cuda" else time.process_time())


def step_seconds(model: Any, device: str, steps: int, callback: TrainerCallback | None) -> list[float]:
    """Return the time of each step after the warm-up, of which one in EVERY is counted, the first among them."""
    _, _, _, vocabulary, sequences, length = SIZES[device]
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps + WARM_UP,
            per_device_train_batch_size=sequences,
            logging_steps=EVERY,
            save_strategy="no",
            report_to=[],
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        callbacks = [*filter(None, [callback]), clock]
        Trainer(model, arguments, train_dataset=Texts(vocabulary, length), callbacks=callbacks).train()
    return [end - before for before, end in pairwise(clock.ends[WARM_UP - 1 :])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    layers, columns, neurons, vocabulary, _, length = SIZES[options.device]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=columns,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=columns // 64,
        max_position_embeddings=length,
        hidden_act="relu",
    )
    model = LlamaForCausalLM(config).to(options.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {options.steps} steps a turn", flush=True)
    ratios, apart = [], {True: Apart(), False: Apart()}
    for turn in range(options.turns):
        times = {}
        order = (True, False) if turn % 2 else (False, True)
        for has_callback in order:
            callback = TwellCallback(EVERY) if has_callback else None
            seconds = step_seconds(model, options.device, options.steps, callback)
            times[has_callback] = statistics.mean(seconds)
            apart[has_callback].add(seconds)
        ratios.append(times[True] / times[False])
        print(f"turn {turn}: {1e3 * times[False]:.2f} ms without, {1e3 * times[True]:.2f} with: {ratios[-1]:.4f}")
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"with over without: {mean:.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    for name in ("plain", "counted"):
        without, with_callback = (1e3 * statistics.median(getattr(apart[has], name)) for has in (False, True))
        print(f"steps {name}: median {without:.2f} ms without, {with_callback:.2f} with")


if __name__ == "__main__":
    main()
