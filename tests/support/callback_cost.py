"""What TwellCallback costs a training step of Hugging Face's Trainer: with it and without, in turns of one training.

    PYTHONPATH=tests python -m support.callback_cost                   a small model on the CPU: by processor time
    PYTHONPATH=tests python -m support.callback_cost --device cuda     138 M parameters on a GPU: by the clock

A turn is BLOCK steps with the callback and as many without, in one training, as two trainings differ by more than the
callback costs. Steps are timed between the ends of two of them, so that all that the callback does falls in: what it
does at a log falls into the step after it. Its beginning and its end, between turns, are left out. The share is the
mean of turns, each with over without, with an interval; beside it are medians of the steps that are not counted and of
those that are. The first turn warms up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from twell.workbench import TwellCallback

SIZES = {"cpu": (4, 256, 1024, 2048, 8, 128), "cuda": (12, 768, 3072, 16384, 16, 1024)}
# layers, columns, neurons, vocabulary, sequences a step, tokens of each
EVERY, BLOCK = 10, 20  # steps


class Texts(IterableDataset):
    """Random ids without end."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        draw = torch.Generator().manual_seed(0)
        while True:
            ids = torch.randint(self.vocabulary, (self.length,), generator=draw)
            yield {"input_ids": ids, "labels": ids}


class Turns(TrainerCallback):
    """Give a training the callback for BLOCK steps and take it away for as many, and time its steps in seconds.

    device: whose clock counts: processor time on a CPU
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.callback: TwellCallback | None = None
        self.seconds: list[float] = []  # of each step
        self._from = 0.0

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if self.device == "cuda" else time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._from = self._now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.callback is not None:
            self.callback.on_step_begin(args, state, control, **given)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.callback is not None:
            self.callback.on_log(args, state, control, **given)
        # the log of a turn is the last that falls into it; the trainer's summary at the end has no loss
        if state.global_step % BLOCK == 0 and "loss" in given["logs"]:
            self._end_step()
            self._switch(args, state, control, **given)
            self._from = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.callback is not None:
            self.callback.on_step_end(args, state, control, **given)
        if state.global_step % BLOCK:
            self._end_step()

    def _end_step(self) -> None:
        now = self._now()
        self.seconds.append(now - self._from)
        self._from = now

    def _switch(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.callback is not None:
            self.callback.close()
            self.callback = None
        else:
            self.callback = TwellCallback(EVERY)
            self.callback.on_train_begin(args, state, control, **given)


def step_seconds(model: Any, device: str, turns: int) -> list[float]:
    """Return the seconds of each step of a training: BLOCK without the callback, as many with it, and so on."""
    _, _, _, vocabulary, sequences, length = SIZES[device]
    clock = Turns(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=2 * BLOCK * turns,
            per_device_train_batch_size=sequences,
            logging_steps=EVERY,
            save_strategy="no",
            report_to=[],
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Texts(vocabulary, length), callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds


def report(seconds: list[float]) -> None:
    """Print what steps took with the callback and without. seconds: of each step"""
    blocks = np.array(seconds).reshape(-1, 2, BLOCK)[1:]  # turn, with it, step
    ratios = blocks[:, 1].mean(-1) / blocks[:, 0].mean(-1)
    error = 2 * ratios.std(ddof=1) / len(ratios) ** 0.5
    print(f"with over without, {len(ratios)} turns: {ratios.mean():.4f} ± {error:.4f}, median {np.median(ratios):.4f}")
    steps = blocks.reshape(len(blocks), 2, -1, EVERY)
    for name, some in (("counted", steps[..., :1]), ("others", steps[..., 1:])):
        without, with_callback = (1e3 * np.median(some[:, has]) for has in (0, 1))
        print(f"steps {name}: median {without:.2f} ms without, {with_callback:.2f} with")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--turns", type=int, default=12)
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
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    report(step_seconds(model, options.device, options.turns))


if __name__ == "__main__":
    main()
