"""Claims that no single run of a finished model can settle, each with the reason why.

They are listed with the others, so that a reader sees what was claimed and what it would take to find out.
"""

from __future__ import annotations

ONE_MODEL = "A run is of one finished model: record others and compare them."
TRAINING = "A run records forward passes, no training."
TASKS = "A run holds the loss on its text, and no downstream task."

BEYOND = (  # topic, claim, why a run cannot tell
    ("scale", "Mean nnz falls with the model's size, from 39 at 0.5 B to 24 at 2 B.", ONE_MODEL),
    ("scale", "A gated FFN gains more than a plain one at the same L1: 17.9 % against 11.2 %.", ONE_MODEL),
    ("quality", "The sparse model loses 0.2 points downstream: 46.4 to 46.2 %.", TASKS),
    ("quality", "Up to an L1 of 3e-5, downstream scores stay and the loss rises by less than 2 %.", ONE_MODEL),
    ("quality", "ReLU costs 0.7 points downstream against SiLU: 46.4 against 47.1 %.", TASKS),
    ("training", "Sparsity settles within about 1 000 steps.", TRAINING),
    ("training", "A training step gains from -1.5 % at 0.5 B to 21.9 % at 2 B.", TRAINING),
    ("training", "Peak training memory falls by 19 to 28 %, up to 1.5 B.", TRAINING),
    ("training", "At 2 B it rises by 22 %, with a larger micro-batch.", TRAINING),
    ("training", "Training gains more on a GPU of more multiprocessors (188 against 114).", TRAINING),
    ("training", "Starting dead neurons anew in training adds a point of speed (19.1 against 17.9 %).", TRAINING),
    ("method", "Speed measured on uniform random token ids is that of text.", "The run timed its own text alone."),
)
