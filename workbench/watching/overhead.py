"""Measure what a watch costs, on a model and this machine: `python -m twell.workbench.watching.overhead [MODEL]`.

The same forward passes in turns: unwatched by the model's own code; with our FFNs and no counts; watched, with counts,
and with the sums of neurons; and with plain hooks of PyTorch that count the same. A watch with counts may cost a
fiftieth more than our FFNs without (issue 28). Prints medians over rounds, and writes nothing.

    python -m twell.workbench.watching.overhead builtin:demo --rows 8192 --rounds 5
    python -m twell.workbench.watching.overhead path/to/model --rows 131072 --seq-len 2048
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from twell.kernels.benchmark.timing import time_in_turns
from twell.workbench.devices import pick_device
from twell.workbench.doctor import device_name
from twell.workbench.models.attach import attached
from twell.workbench.models.checkpoint import find
from twell.workbench.models.find_ffns import of_family
from twell.workbench.watching.session import watch


def measure(model: Any, rows: int, seq_len: int, rounds: int, passes: int) -> dict[str, list[float]]:
    """Return the microseconds of each way of running `passes` forward passes, one for each round."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (max(1, rows // seq_len), seq_len), device=model.device)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(passes):
                model.get_decoder()(input_ids=ids, use_cache=False)

    def inside(make: Callable[[], Any]) -> None:
        with make():
            run()

    ways: dict[str, Callable[[], Any]] = {
        "own": run,
        "ours": partial(inside, lambda: attached(model)),
        "counts": partial(inside, lambda: watch(model, probes="counts")),
        "neurons": partial(inside, lambda: watch(model)),
        "metrics": partial(inside, lambda: watch(model, rows=False)),
        "hooks": partial(inside, lambda: _Hooks(model)),
    }
    return time_in_turns(ways, model.device, rounds)


class _Hooks(ExitStack):
    """Counts gate pre-activations above 0 by plain hooks, beside the model's own code."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []
        for ffn in of_family("the model", model):
            self.callback(ffn.maps[0].register_forward_hook(self._count).remove)

    def _count(self, _module: Any, _args: Any, gate: torch.Tensor) -> None:
        self.counts.append((gate > 0).sum(-1).to("cpu", non_blocking=True))


def main(
    model: Annotated[str, typer.Argument(help="a local folder, a hub id, or builtin:demo")] = "builtin:demo",
    rows: int = 8192,
    seq_len: int = 512,
    rounds: int = 5,
    passes: int = 8,
    device: str = "auto",
) -> None:
    """Print what each way of running costs, over our FFNs without counts."""
    place = pick_device(device)
    folder, name, _ = find(model, None)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(place)  # type: ignore[arg-type]
    took = measure(loaded, rows, seq_len, rounds, passes)
    print(f"{name} on {device_name(place)}, {rows:,} rows a pass, {passes} passes a turn, {rounds} rounds")
    for way, times in took.items():
        ratios = [one / base for one, base in zip(times, took["ours"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(
            f"{way:8} {statistics.median(times) / passes:12,.0f} µs a pass  {statistics.median(ratios):.3f} ({spread})"
        )


if __name__ == "__main__":
    typer.run(main)
