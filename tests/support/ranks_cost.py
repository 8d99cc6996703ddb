"""Measure a training step of a trained model by one process or several: dense, and as `twell train` would run it.

    python tests/support/ranks_cost.py MODEL TEXT [STEPS]
    torchrun --nproc-per-node 2 tests/support/ranks_cost.py MODEL TEXT [STEPS]

MODEL: a folder that `twell train` made, best of 28 layers; TEXT: some megabytes; STEPS: of each kind that are
timed, in turns, default 10. A step sees ROWS rows a process, and changes the model by next to nothing. Prints tokens a
second of all processes for both kinds, with the peak of memory of a process. What several processes make of the sparse
step is its ratio to one process's, over that of the dense step; 0.95 is wanted. Cost: a minute a command, half of it to
compile.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from twell.workbench.models.pretrained import read_pretrained
from twell.workbench.training.corpus import prepare
from twell.workbench.training.ffn import ACTIVATIONS
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.ranks import TrainingRanks
from twell.workbench.training.recipes import Recipe

ROWS, SEQ_LEN, WARM = 8, 2048, 3


def timed(training: TrainingLoop, dense: bool) -> float:
    """Return the seconds of a step of all ranks."""
    training.ranks.total(torch.ones(1, device=training.device)).item()  # all have come here
    began = time.perf_counter()
    with training.layers.all_dense() if dense else nullcontext():
        training.one_step()
    training._synchronize()
    return time.perf_counter() - began


def main(model: str, text: str, steps: int = 10) -> None:
    ranks = TrainingRanks.from_environment("--shard" in sys.argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks.join(device)
    start = read_pretrained(model, SEQ_LEN, tuple(ACTIVATIONS))
    recipe = Recipe(rows=ROWS * ranks.world, seq_len=SEQ_LEN, steps=10**6, rate=1e-9, l1_warmup=0)
    recipe = recipe.override(**start.recipe_fields())
    with tempfile.TemporaryDirectory() as place:
        given = start.tokenizer, start.mark, start.sha256
        corpus = prepare((text,), Path(place), vocab=recipe.vocab, holdout=0.1, bpe_megabytes=1, given=given)
        where = torch.device(device)
        training = TrainingLoop(recipe, corpus, where, where.type == "cuda", "auto", ranks, start)
        for _ in range(WARM):
            training.one_step()
        row = training.log_row()
        nnz = [row[f"nnz_{layer:02}"] for layer in range(recipe.layers)]
        training.layers.update(nnz)
        times: dict[str, list[float]] = {"dense": [], "sparse": []}
        for number in range(WARM + steps):
            for kind, taken in times.items():
                seconds = timed(training, kind == "dense")
                taken += [seconds] if number >= WARM else []
        if ranks.first:
            print(f"{ranks.world} processes, nnz {statistics.mean(nnz):.1f}, {training.layers.count} layers sparse")
            for kind, taken in times.items():
                middle = statistics.median(taken)
                rate = recipe.step_tokens / middle
                print(f"  {kind}: {1e3 * middle:.1f} ms ({1e3 * min(taken):.1f} least), {rate:,.0f} tokens/s")
            if where.type == "cuda":
                print(f"  peak of rank 0: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main(*words[:2], *map(int, words[2:3]))
