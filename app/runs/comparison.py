"""The choice of runs that the Compare page compares, and what two runs have in common."""

from __future__ import annotations

from twell.analysis.compare import of_one_text
from twell.analysis.speed.speedup import sizes
from twell.app.ui.formatting import layer_width, whole
from twell.app.ui.query import fetch
from twell.workbench.run.store import Run

MAX_RUNS = 24  # in one figure
ORDER = ("weights", "vocabulary", "text", "family", "number of layers", "d_ff", "kernel", "device")  # of likeness
MIN_TOKENS = 1000  # a shorter run is not proposed for its weights


def same_text(run: Run, runs: list[Run]) -> list[Run]:
    """Return those of `runs` whose losses can be compared with this run's: the same text and vocabulary.

    The run and its copies, runs without a loss and runs that are being recorded are left out; at most MAX_RUNS - 1.
    """
    if not run.manifest.loss_tokens:
        return []
    candidates = [other for other in runs if not is_copy(run, other) and of_one_text([run, other])]
    candidates = [other for other in candidates if other.manifest.loss_tokens and other.manifest.status != "recording"]
    return candidates[: MAX_RUNS - 1]


def is_copy(run: Run, other: Run) -> bool:
    """Return whether two runs are one: the same folder, or copies with the same parts, such as one that ships and its
    copy in the folder."""
    ours, theirs = (
        (one.manifest.created, {(part.table, part.sha256) for part in one.manifest.parts}) for one in (run, other)
    )
    return run.path == other.path or (bool(ours[1]) and ours == theirs)


def likeness(run: Run, other: Run) -> dict[str, bool]:
    """Return in which respects two runs are the same, by the name of each, the one that matters most first."""
    ours, theirs = run.manifest, other.manifest
    weights = ours.model.get("weights")
    vocabularies = {one.tokenizer.get("vocab_size") for one in (ours, theirs)}
    tokens = [{part.sha256 for part in one.parts if part.table == "vocab"} for one in (ours, theirs)]
    alike = {
        "weights": weights is not None and weights == theirs.model.get("weights"),
        "vocabulary": len(vocabularies) == 1 and (tokens[0] == tokens[1] or not all(tokens)),
        "text": of_one_text([run, other]),
    }
    return alike | {name: ours == theirs for name, (ours, theirs) in _facts(run, other).items()}


def _facts(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Return what two runs ran, and how it was timed, in words and by name; what neither run tells is left out."""
    each = []
    for one in (run, other):
        device, _, threads = one.manifest.device.partition(", ")  # as a capture on processors has it
        rows = fetch(one, sizes).get("ffn_sparse") if one.has("timings") else None
        facts = {
            "family": str(one.manifest.model.get("family") or ""),
            "number of layers": str(one.layers),
            "d_ff": layer_width(one),
            "kernel": str(one.manifest.kernel["name"]),
            "number format": one.manifest.dtype,
            "device": device,
            "threads": threads.removesuffix("threads").removesuffix("thread").strip(),
            "rows of a timed batch": whole(round(rows)) if rows else "",
        }
        each.append(facts)
    ours, theirs = each
    told = {name: (ours[name], theirs[name]) for name in ours if ours[name] or theirs[name]}
    return {name: pair for name, pair in told.items() if name != "threads" or all(pair)}  # a GPU has none to compare


def similarity(run: Run, other: Run) -> tuple[bool | int, ...]:
    """Return a key that orders runs by how much of them can be compared with `run`: what `likeness` has, in its order,
    then more tokens. The same weights count from MIN_TOKENS tokens on."""
    alike = likeness(run, other)
    alike["weights"] = alike["weights"] and other.manifest.tokens >= MIN_TOKENS
    return (*(alike.get(name, False) for name in ORDER), other.manifest.tokens)


def likeness_sentence(run: Run, other: Run) -> str:
    """Return in words what two runs have in common and what not, with both values where a few words tell them."""
    alike, facts = likeness(run, other), _facts(run, other)
    same = [name for name, value in alike.items() if value]
    different = [
        f"{name} ({' against '.join(value or 'not known' for value in facts[name])})" if name in facts else name
        for name, value in alike.items()
        if not value
    ]
    sentences = [("The same", same), ("Different", different)]
    return " ".join(f"{words}: {', '.join(names)}." for words, names in sentences if names)
