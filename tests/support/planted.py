"""Runs whose truth is known, to count how often a stated interval holds it.

    PYTHONPATH=tests python -m support.planted 200    so many runs of each kind: twenty minutes on one core

nnz is Poisson around mood · (A + B·exp(-p/λ)) · (1 + effect of the token) · exp(0.2 u). The mood is shared by a
sequence (it alone makes a correlation of 0.6 within), and a share of its variance by the sequences of one document
(KINDS); u is a token's own and moves its loss too. Effects of tokens differ by class; LOUD is always loud. Two sources
and two phases, from the middle of a sequence on, are alike but for their positions. Beside each run stand two that fire
GAIN as much: one over the same text, one over another. `planted_more` has what needs other tables.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from scipy import stats
from support import planted_more, synthetic_runs
from support.planted_truths import (
    KINDS,
    LENGTH,
    LOUD,
    VOCAB,
    Kind,
    Truth,
    counts,
    effects,
    entropies,
    losses,
    population,
    token_chances,
    truths,
)
from support.rewritten import edit_manifest

from twell import analysis
from twell.analysis import ensure
from twell.analysis.summaries.token_class import classify
from twell.workbench.run.store import Run, open_run

SEQUENCES, DOCUMENTS = 80, 48  # at least, so that sources are not cut into blocks
GAIN = 1.1  # of the runs that are compared with
CLASS = "word-initial piece"


def classes(made: ModuleType) -> np.ndarray:
    """Return which tokens are of the louder class."""
    return np.array([classify(text) == CLASS for text in made.vocabulary(VOCAB)["text"]])


def planted(
    made: ModuleType, path: Path, seed: int, kind: Kind, effect: np.ndarray | None = None, gain: float = 1.0
) -> tuple[Run, np.ndarray]:
    """Make a run; return it with the effects of its tokens. gain: how much more fires."""
    rng, each = np.random.default_rng(seed), kind[0]
    drawn = effects(rng, classes(made))
    effect = drawn if effect is None else effect

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        columns["token_id"] = rng.choice(VOCAB, len(columns["flags"]), p=token_chances()).astype(np.int32)
        for name in ("nnz_01", "nnz_00"):  # layer 1 first: its moods are those of a run of the same seed
            nnz, mood, u = counts(
                rng, columns["sequence"], columns["position"], effect[columns["token_id"]], kind, gain
            )
            columns[name] = np.minimum(nnz, 511).astype(np.uint16)
            if name == "nnz_01":
                columns["loss"] = np.ma.masked_array(losses(rng, mood, u).astype(np.float16), columns["loss"].mask)
                made_with = mood, u
        entropy = entropies(rng, *made_with).astype(np.float32)
        columns["entropy"] = np.ma.masked_array(entropy, columns["loss"].mask)
        columns["phase"] = (columns["position"] >= LENGTH // 2).astype(np.uint8)
        columns["flags"] = np.where(columns["position"] == 0, 2, 0).astype(np.uint8)
        return columns

    several = {"vocab": VOCAB, "sequences": max(SEQUENCES, DOCUMENTS * each), "length": LENGTH, "of_document": each}
    shape = made.Shape(layers=2, parts=1, neurons=False, tiles=False, timings=6, sources=2, seed=seed, **several)
    run = made.make(path, shape, change=change, change_timings=planted_more.timings(seed))
    return run, effect


def intervals(run: Run) -> dict[str, Any]:
    """Return the intervals that the API states of layer 1, or of the whole: low and high, or arrays of them."""
    layer = analysis.by_layer(run).iloc[1]
    positions = analysis.by_position(run).query("layer == 1 and position == 20").iloc[0]
    fit = analysis.position_fit(run).query("layer == 1").iloc[0]
    source = analysis.by_source(run).query("layer == 1").iloc[0]
    phase = analysis.by_phase(run).query("layer == 1 and phase == 'decode'").iloc[0]
    start = analysis.first_positions(run).query("layer == 1 and start == 'all'").iloc[0]
    of_class = analysis.token_classes(run).set_index("class").loc[CLASS]
    bins = analysis.surprisal(run, bins=5).query("layer == 1").iloc[2]
    by_class = analysis.surprisal_classes(run).set_index(["class", "layer"]).loc[(CLASS, 1)]
    within, own = (table(run).iloc[1] for table in (analysis.surprisal_within, analysis.surprisal_own))
    entropy = analysis.entropy_correlation(run).set_index(["of", "layer"])
    speed = analysis.ffn_speedup(run)
    bounds = {
        "layer mean": layer,
        "position mean": positions,
        "loss bin": bins,
        "spearman": analysis.surprisal_correlation(run).iloc[1],
        "spearman, own loss": own,
        "spearman in a class": by_class,
        "within tokens": within,
        **{of: entropy.loc[(of, 1)] for of in ("entropy given loss", "loss given entropy")},
        "next layer": analysis.across_layers(run).iloc[0],
        "source mean": source,
        "first position": start,
        "class mean": of_class,
        "FFN speedup": speed,
    }
    stated = {name: (row["low"], row["high"]) for name, row in bounds.items()}
    for name, row, column in (
        ("decay", fit, "decay"),
        ("drop", fit, "drop"),
        ("source ratio", source, "ratio"),
        ("phase ratio", phase, "ratio"),
        ("class difference", of_class, "difference"),
        ("class effect", of_class, "effect"),
    ):
        stated[name] = (row[f"{column}_low"], row[f"{column}_high"])
    return {**stated, **of_tokens(run), "edges": (bins["loss_low"], bins["loss_high"])}


def of_tokens(run: Run) -> dict[str, Any]:
    """Return the intervals of tokens and words."""
    tokens, words = analysis.by_token(run), analysis.by_word(run, min_count=5).set_index("word")
    profile = analysis.token_profile(run, LOUD).iloc[1]
    stated = {}
    for name, score, degrees in (
        ("token z", "z", tokens["degrees"]),
        ("token z by position", "z_position", tokens["degrees"]),
        ("token mean", "mean", tokens["effective"] - 1),
        ("token shrunk", "shrunk", np.inf),
    ):
        half = stats.t.ppf(0.975, degrees) * tokens[f"{score}_se"]
        ends = (tokens[score] - half, tokens[score] + half)
        stated[name] = tuple(end.set_axis(tokens["token_id"]) for end in ends)
    for name, token in (("loud token", LOUD), ("quiet token", LOUD + 1)):
        stated[name] = tuple(end[token] for end in stated["token z"])
    word = words.loc["formaldehyde"]
    for name, row, degrees in (
        ("token in a layer", profile, profile["effective"] - 1),
        ("word", word, word["degrees"]),
    ):
        half = stats.t.ppf(0.975, degrees) * row["z_se"]
        stated[name] = (row["z"] - half, row["z"] + half)
    return stated


def compared(run: Run, others: list[Run]) -> dict[str, Any]:
    """Return the intervals of differences to a run over the same text, and to one over another."""
    stated = {}
    for name, other in zip(("", ", other text"), others, strict=True):
        layer = analysis.compare_layers([run, other]).iloc[1]
        band = analysis.compare_positions([run, other]).query("layer == 1 and band == 12").iloc[0]
        token = analysis.compare_tokens([run, other]).set_index("token_id")
        assert layer["paired"] == (not name)
        stated[f"runs, layer{name}"] = (layer["low"], layer["high"])
        stated[f"runs, positions{name}"] = (band["low"], band["high"])
        stated[f"runs, token{name}"] = (token.loc[LOUD, "low"], token.loc[LOUD, "high"])
    return stated


def of_another_text(run: Run) -> Run:
    """Say in a run's manifest that its text is another one."""
    edit_manifest(run.path, lambda manifest: manifest["text"][0].update(sha256="1"))
    return open_run(run.path)


def held_by(stated: dict[str, Any], truth: Truth) -> dict[str, float]:
    """Return the share of each quantity's intervals that hold the truth: 0 or 1, but of all tokens of a run."""
    held = {}
    for name, (low, high) in stated.items():
        value = truth[name]
        if isinstance(value, np.ndarray):
            value = value[low.index]
        held[name] = float(np.mean((low <= value) & (value <= high)))
    return held


def one_run(made: ModuleType, folder: Path, seed: int, kind: Kind) -> dict[str, float]:
    """Return `held_by` of all that is stated of one planted run, and of the two that it is compared with."""
    rng = np.random.default_rng((seed, 1))
    run, effect = planted(made, folder / "run", seed, kind)
    others = [
        planted(made, folder / f"other{index}", each, kind, effect, GAIN)[0]
        for index, each in enumerate((seed, seed + 500_000))
    ]
    others[1] = of_another_text(others[1])
    for each in (run, *others):
        ensure(each)
    louder, stated = classes(made), intervals(run)
    truth = truths(effect, louder, GAIN) | population(effect, rng, kind, louder, stated.pop("edges"))
    stated |= compared(run, others)
    more, more_truth = planted_more.stated(folder, rng, kind, run, effect, louder)
    return held_by(stated | more, truth | more_truth)


def coverage(made: ModuleType, repeats: int, first: int = 0, kind: str = "documents of five, half") -> dict[str, float]:
    """Return in how many runs the interval of each quantity held the true value; of tokens, the mean share a run."""
    held: Counter[str] = Counter()
    for seed in range(first, first + repeats):
        with tempfile.TemporaryDirectory() as folder:
            held.update(one_run(made, Path(folder), seed, KINDS[kind]))
    return dict(held)


if __name__ == "__main__":
    number, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    tables = {kind: coverage(synthetic_runs, number, start, kind) for kind in KINDS}
    print("| interval | " + " | ".join(KINDS) + " |")
    for name in tables["independent sequences"]:
        shares = [f"{100 * table.get(name, 0) / number:.1f} %" for table in tables.values()]
        print(f"| {name} | {' | '.join(shares)} |")
