"""The choice of runs that the Compare page compares, and what two runs have in common."""

from __future__ import annotations

from twell.analysis.compare import of_one_text
from twell.workbench.run.store import Run

MAX_RUNS = 24  # in one figure
MIN_TOKENS = 1000  # a shorter run is not proposed for its weights


def same_text(run: Run, runs: list[Run]) -> list[Run]:
    """Return those of `runs` whose losses can be compared with this run's: the same text and vocabulary.

    The run itself, runs without a loss and runs that are being recorded are left out; at most MAX_RUNS - 1.
    """
    if not run.manifest.loss_tokens:
        return []
    candidates = [other for other in runs if other.path != run.path and of_one_text([run, other])]
    candidates = [other for other in candidates if other.manifest.loss_tokens and other.manifest.status != "recording"]
    return candidates[: MAX_RUNS - 1]


def likeness(run: Run, other: Run) -> dict[str, bool]:
    """Return in which respects two runs are the same, by the name of each, the one that matters most first."""
    ours, theirs = run.manifest, other.manifest
    weights = ours.model.get("weights")
    sizes = {one.tokenizer.get("vocab_size") for one in (ours, theirs)}
    tokens = [{part.sha256 for part in one.parts if part.table == "vocab"} for one in (ours, theirs)]
    return {
        "weights": weights is not None and weights == theirs.model.get("weights"),
        "vocabulary": len(sizes) == 1 and (tokens[0] == tokens[1] or not all(tokens)),
        "text": of_one_text([run, other]),
        "family": ours.model.get("family") == theirs.model.get("family"),
        "number of layers": run.layers == other.layers,
    }


def similarity(run: Run, other: Run) -> tuple[bool | int, ...]:
    """Return a key that orders runs by how much of them can be compared with `run`: what `likeness` has, in its order,
    then more tokens. The same weights count from MIN_TOKENS tokens on."""
    alike = likeness(run, other)
    alike["weights"] = alike["weights"] and other.manifest.tokens >= MIN_TOKENS
    return (*alike.values(), other.manifest.tokens)


def likeness_sentence(run: Run, other: Run) -> str:
    """Return in words what two runs have in common and what not."""
    alike = likeness(run, other)
    same, different = ([name for name, value in alike.items() if value is wanted] for wanted in (True, False))
    sentences = [("The same", same), ("Different", different)]
    return " ".join(f"{words}: {', '.join(names)}." for words, names in sentences if names)
