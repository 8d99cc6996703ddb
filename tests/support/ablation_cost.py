"""What ablations cost on a device, in untouched forward passes: a study of ten conditions, all neurons at once.

    python -m support.ablation_cost --device cuda --firing 0.016              28 layers of 2048 × 5632, random weights
    python -m support.ablation_cost --device cuda --model path/to/model --tokens 500000
    python -m support.ablation_cost --device cpu --layers 2 --d-model 64 --d-ff 192 --tokens 2048    a smoke test

Prints the time of an untouched pass with its loss, of each condition, of the study and of the first-order estimates.
Random weights fire half of the neurons, or with --firing another share.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import ndtri
from transformers import LlamaConfig, LlamaForCausalLM

from twell.workbench.ablations.conditions import Facts, intervention_of
from twell.workbench.ablations.first_order import first_order
from twell.workbench.ablations.passes import AblationRunner
from twell.workbench.ablations.spelled import Condition, parse
from twell.workbench.ablations.study import hidden_quantiles
from twell.workbench.capturing.forward import Inputs
from twell.workbench.models.own_code import OwnModel, open_own, own_of
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.sequences import Sequence

CONDITIONS = (
    "dead", "rarest:0.25,0.5", "busiest:0.01", "random:0.5", "weakest:0.5,0.75", "scattered:0.5", "smallest:0.5",
    "below:0.01",
)  # fmt: skip


def model(given: argparse.Namespace) -> OwnModel:
    """Return the model of a folder, or one with random weights, in bf16 on a GPU."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    if given.model:
        return open_own(given.model, None, given.device, dtype)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=given.d_model, intermediate_size=given.d_ff, num_hidden_layers=given.layers,
        num_attention_heads=given.d_model // 64, num_key_value_heads=given.d_model // 64, hidden_act="relu",
        max_position_embeddings=2048, mlp_bias=True,
    )  # fmt: skip
    with torch.device(given.device):
        network = LlamaForCausalLM(config).to(dtype).eval()
    for layer in network.model.layers:
        gate = layer.mlp.gate_proj
        torch.nn.init.constant_(
            gate.bias, float(ndtri(given.firing)) * float(gate.weight.detach().std()) * given.d_model**0.5
        )
    return own_of("random", network)


def seconds(device: str, run: Callable[[], object]) -> float:
    """Return how long a function takes, with what it left to the device."""
    for _ in range(2):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - started
    return took


def plain_passes(own: OwnModel, cut: list[Batch]) -> None:
    """Run every batch through the model's own code with its loss, without anything of ours covered."""
    runner = AblationRunner(own, count=False)
    for batch in cut:
        runner.run(Inputs.of(batch, own.device), [])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 28), ("d-model", 2048), ("d-ff", 5632), ("tokens", 131_072), ("batch", 32_768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--firing", type=float, default=0.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="")
    given = parser.parse_args()
    own = model(given)
    rng, vocab = np.random.default_rng(0), own.head.weight.shape[0]
    texts = [
        Sequence(number, "random", 0, rng.integers(0, vocab, 1024).astype(np.int32))
        for number in range(given.tokens // 1024)
    ]
    cut = list(batches(texts, given.batch, []))
    tokens = sum(len(text.ids) for text in texts)
    plain = seconds(given.device, lambda: plain_passes(own, cut))
    print(f"{own.name}, {own.layers} layers of {own.d_ff:,}; {tokens:,} tokens in {len(cut)} batches")
    print(f"  untouched pass with its loss           {plain:8.3f} s")
    fires = rng.integers(1, 1000, (own.layers, own.d_ff))
    fires[:, ::10] = 0
    with AblationRunner(own) as runner:
        facts = Facts(own.widths, own.d_ff, fires, hidden_quantiles(own, cut[0], runner))
        conditions: list[Condition] = parse(CONDITIONS, own.layers)
        interventions = [intervention_of(condition, facts) for condition in conditions]

        def study(chosen: list[int]) -> None:
            for batch in cut:
                runner.run(Inputs.of(batch, own.device), [interventions[index] for index in chosen], batch.number)

        base = seconds(given.device, lambda: study([]))
        print(f"  the same, firings counted              {base:8.3f} s  {base / plain:6.2f} passes")
        for index, condition in enumerate(conditions):
            one = seconds(given.device, lambda index=index: study([index])) - base  # type: ignore[misc]
            print(f"  {condition.name:<38} {one:8.3f} s  {one / plain:6.2f} passes")
        whole = seconds(given.device, lambda: study(list(range(len(interventions)))))
    count = len(conditions)
    print(f"  study of {count} conditions                {whole:8.3f} s  {whole / plain:6.2f} passes (at most 12)")
    few = [part for part in batches(texts, min(given.batch, 8192), [])]
    first = seconds(given.device, lambda: first_order(own, few))
    neurons = own.layers * own.d_ff
    print(f"  first order, {neurons:,} neurons          {first:8.3f} s  {first / plain:6.2f} passes (at most 4)")
    if given.device == "cuda":
        print(f"  greatest memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
