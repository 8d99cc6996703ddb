"""Claims that no run can settle, each with the reason why.

They are listed with the others, so that a reader sees what was claimed and what it would take to find out.
"""

from __future__ import annotations

TASKS = "A run holds the loss on its text, and no downstream task."

BEYOND = (  # topic, claim, why a run cannot tell
    ("quality", "The sparse model loses 0.2 points downstream: 46.4 to 46.2 %.", TASKS),
    (
        "training",
        "At 2 B it rises by 22 %, with a larger micro-batch.",
        "No recipe of 2 B parameters has been trained: `twell train --config paper-38x2048` with micro_batches of both "
        "sizes.",
    ),
    (
        "training",
        "Training gains more on a GPU of more multiprocessors (188 against 114).",
        "It takes one training on each of two GPUs: `twell bench --training` on both.",
    ),
)
