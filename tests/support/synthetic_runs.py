"""Runs made up with known truth, written by the real writer: what the analysis tests compare with.

`make` draws counts that are correlated within a sequence, fall off exponentially after its first position, rise with
the loss of the next token, and depend on the token: one is loud, one is quiet. Some neurons never fire, some answer to
one token only. `PYTHONPATH=tests python -m support.synthetic_runs FOLDER` writes two runs to look at in the dashboard.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from support import synthetic_probes

from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, Manifest
from twell.workbench.run.schema import FLAG_FIRST, FLAG_NOT_FINITE, FLAG_SPECIAL, nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter

SYLLABLES = [onset + vowel for onset in "bdfghklmnprstvz" for vowel in ("a", "el", "ing", "o")]
LOUD, QUIET, UNSURE = 40, 41, 42  # token ids with a planted effect; UNSURE ends in the middle of a character


Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """What to make. Lengths in tokens."""

    layers: int = 4
    d_ff: int = 512
    vocab: int = 200
    sequences: int = 120
    length: int = 64
    parts: int = 3
    kernel: str = "cpu"
    bos: bool = False
    up_relu: bool = False
    loss: bool = True
    entropy: bool = True  # where there is a loss
    neurons: bool = True
    tiles: bool = True
    fired: bool = False
    bench: bool = False
    timings: int = 5
    seed: int = 0
    of_document: int = 2  # sequences that are of one document
    sources: int = 1  # of which each has a share of the documents, one after another


def manifest(shape: Shape, name: str = "made") -> Manifest:
    """A manifest as a capture would write it."""
    return Manifest(
        name=name,
        model={
            "name": "made-up/sparse",
            "revision": "0",
            "family": "llama",
            "layers": shape.layers,
            "d_model": 64,
            "d_ff": shape.d_ff,
            "vocab_size": shape.vocab,
            "parameters": 1_000_000,
            "up_relu": shape.up_relu,
        },
        tokenizer={"name": "made-up", "vocab_size": shape.vocab},
        nnz_definition="gate pre-activation > 0",
        dtype="float32",
        device="cpu",
        driver="",
        kernel={"name": shape.kernel, "reason": "made up"},
        layout={"tile": 256, "compression": 8, "slots": 31},
        created="2026-11-20T00:00:00Z",
        text=[{"source": "made:text", "sha256": "0", "documents": 1, "sequences": shape.sequences, "tokens": 0}],
        seconds=12.5,
    )


def vocabulary(size: int) -> dict[str, Any]:
    """Token 0 is special; most begin with a space; UNSURE is the first byte of a two-byte character."""
    base = len(SYLLABLES)
    words = [
        (" " if i % 3 else "") + SYLLABLES[i % base] + SYLLABLES[i // base % base] * (i >= base) + "s" * (i // base**2)
        for i in range(size)
    ]
    data = [word.encode() for word in words]
    if size > UNSURE:
        data[LOUD], data[QUIET], data[UNSURE] = b" formaldehyde", b"doesn", b"\xc3"
    data[0] = b""
    return {
        "token_id": np.arange(size, dtype=np.int32),
        "bytes": data,
        "text": ["<s>"] + [piece.decode("utf-8", errors="replace") for piece in data[1:]],
        "special": np.arange(size) == 0,
    }


def draw(shape: Shape) -> dict[str, Any]:
    """The activity table of the whole run, as numpy arrays (loss masked where there is none)."""
    rng = np.random.default_rng(shape.seed)
    lengths = rng.integers(max(2, shape.length // 2), shape.length + 1, shape.sequences)
    sequence = np.repeat(np.arange(shape.sequences), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    rows = len(sequence)
    weights = 1.0 / np.arange(1, shape.vocab) ** 0.8
    token = 1 + rng.choice(shape.vocab - 1, rows, p=weights / weights.sum())
    first = position == 0
    flags = np.where(first, FLAG_FIRST, 0)
    if shape.bos:
        token[first] = 0
        flags[first] |= FLAG_SPECIAL
    flags[rng.random(rows) < 0.001] |= FLAG_NOT_FINITE
    flags[first & (sequence % 50 == 7)] |= FLAG_NOT_FINITE
    ends = np.append(first[1:], True)
    loss = rng.gamma(1.5, 2.0, rows).astype(np.float16)
    columns: dict[str, Any] = {
        "sequence": sequence.astype(np.int32),
        "position": position.astype(np.int32),
        "token_id": token.astype(np.int32),
        "phase": np.zeros(rows, np.uint8),
        "flags": flags.astype(np.uint8),
        "loss": np.ma.masked_array(loss, mask=ends | (not shape.loss)),
    }
    drawn = np.random.default_rng((shape.seed, 9)).lognormal(-0.2, 0.6, rows)  # of its own, as it came later
    expected = np.minimum(loss * drawn, np.log(shape.vocab))
    columns["entropy"] = np.ma.masked_array(
        expected.astype(np.float32), mask=columns["loss"].mask | (not shape.entropy)
    )
    effect = rng.normal(0, 0.3, shape.vocab)
    if shape.vocab > QUIET:
        effect[LOUD], effect[QUIET] = 1.2, -1.5
    mood = rng.normal(0, 0.4, shape.sequences)[sequence]
    for layer, name in enumerate(nnz_columns(shape.layers)):
        base = np.log(4 + 0.04 * shape.d_ff * (1 + np.sin(1 + layer)) / 2)
        rate = base + effect[token] + mood + 0.05 * loss.astype(float) + 1.3 * np.exp(-position / 6)
        counts = rng.poisson(np.exp(rate + rng.normal(0, 0.2, rows)))
        columns[name] = np.minimum(counts, shape.d_ff).astype(np.uint16)
    return columns


def neuron_sums(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A neurons table that agrees with the counts: fires of a layer add up to its unflagged nnz."""
    used = columns["flags"] == 0
    pieces = []
    for layer, name in enumerate(nnz_columns(shape.layers)):
        weights = 1.0 / np.arange(1, shape.d_ff + 1) ** 0.4
        weights[int(shape.d_ff * 0.7) :] = 0
        total = int(columns[name][used].astype(int).sum())
        fires = rng.multinomial(total, weights / weights.sum())
        alive = np.flatnonzero(fires)
        low = rng.integers(1, shape.vocab, len(alive))
        high = np.maximum(low, rng.integers(1, shape.vocab, len(alive)))
        one = alive % 7 == 3
        low[one] = high[one] = 1 + alive[one] % (shape.vocab - 1)
        pieces.append((np.full(len(alive), layer), alive, fires[alive], low, high))
    layer, neuron, fires, low, high = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return {
        "layer": layer.astype(np.int32),
        "neuron": neuron.astype(np.int32),
        "fires": fires.astype(np.int64),
        "value_sum": (fires * rng.integers(1 << 18, 1 << 20, len(fires))).astype(np.int64),
        "value_max": rng.gamma(2.0, 1.0, len(fires)).astype(np.float32),
        "token_min": low.astype(np.int32),
        "token_max": high.astype(np.int32),
        "first_sequence": rng.integers(0, shape.sequences, len(fires)).astype(np.int32),
        "tokens": np.full(len(fires), used.sum(), dtype=np.int64),
    }


def timings(shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Sparse takes 20 µs + 6 µs a mean non-zero, dense 400 µs, both give or take 2 %."""
    rows: dict[str, list[Any]] = {name: [] for name in ("batch", "layer", "op", "microseconds", "nnz_mean", "kernel")}
    for batch in range(shape.timings):
        picked = rng.random(len(columns["flags"])) < 0.3
        for layer, name in enumerate(nnz_columns(shape.layers)):
            mean = float(columns[name][picked].mean())
            for op, time in (("ffn_dense", 400.0), ("ffn_sparse", 20 + 6 * mean)):
                rows["batch"].append(batch)
                rows["layer"].append(layer)
                rows["op"].append(op)
                rows["microseconds"].append(time * rng.normal(1, 0.02))
                rows["nnz_mean"].append(mean)
                rows["kernel"].append("dense" if op == "ffn_dense" else shape.kernel)
    none = np.ma.masked_all(len(rows["batch"]), dtype=np.float32)
    return {
        **rows,
        "phase": [0] * len(rows["batch"]),
        "tokens": [2048] * len(rows["batch"]),
        **dict.fromkeys(("sm_mhz", "watts", "seconds", "load"), none),
    }


def more_timings(table: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A timings table with rows added: batch, layer, op, microseconds of each; kernel and watts where they matter."""
    plain = {"phase": 0, "tokens": 2048, "nnz_mean": None, "kernel": "dense"}
    plain |= dict.fromkeys(("sm_mhz", "watts", "seconds", "load"))
    columns = {}
    for name, values in table.items():
        every = [*np.ma.asarray(values).tolist(), *[{**plain, **row}[name] for row in rows]]
        empty = [value is None for value in every]
        dense = np.array([0.0 if value is None else value for value in every])
        columns[name] = np.ma.masked_array(dense, empty) if any(empty) else dense
    return columns


def add_part(writer: RunWriter, shape: Shape, columns: dict[str, Any], rng: np.random.Generator) -> None:
    """Write some whole sequences as one part."""
    writer.add("activity", columns)
    numbers, tokens = np.unique(columns["sequence"], return_counts=True)
    each = -(-shape.sequences // (shape.of_document * shape.sources))
    source = np.minimum(numbers // shape.of_document // each, shape.sources - 1)
    document = numbers // shape.of_document - source * each
    writer.add(
        "sequences",
        {
            "sequence": numbers,
            "document": document.astype(np.int32),
            "start": (numbers % shape.of_document * shape.length).astype(np.int64),
            "source": ["made:text" + f" {one}" * (one > 0) for one in source.tolist()],
            "tokens": tokens.astype(np.int32),
        },
    )
    neurons = neuron_sums(shape, columns, rng) if shape.neurons else None
    if neurons is not None:
        writer.add("neurons", neurons)
    if shape.tiles:
        writer.add("tiles", synthetic_probes.tile_counts(shape, columns, rng))
        writer.add("unions", synthetic_probes.union_counts(shape, columns, rng))
    if shape.fired:
        writer.add("fired", synthetic_probes.fired_rows(shape, columns, rng))
        writer.add("examples", synthetic_probes.examples(shape, columns, rng))
        if neurons is not None:
            writer.add("value_bins", synthetic_probes.value_counts(neurons, rng))
    writer.close_part()


def make(
    path: Path,
    shape: Shape | None = None,
    status: str = COMPLETE,
    change: Change | None = None,
    change_timings: Change | None = None,
    **changes: Any,
) -> Run:
    """Write a made run and open it. The two functions may change the tables before they are written."""
    shape = Shape(**changes) if shape is None else shape
    rng = np.random.default_rng(shape.seed + 1)
    columns = draw(shape)
    if shape.up_relu:
        columns |= {f"used_{layer:02}": columns[f"nnz_{layer:02}"] // 2 for layer in range(shape.layers)}
    columns = change(columns) if change else columns
    writer = RunWriter(path, manifest(shape, path.name))
    writer.add("vocab", vocabulary(shape.vocab))
    if shape.timings:
        times = {name: np.ma.asarray(values) for name, values in timings(shape, columns, rng).items()}
        writer.add("timings", change_timings(times) if change_timings else times)
    if shape.bench:
        writer.add("bench", synthetic_probes.bench(shape))
    bounds = np.linspace(0, columns["sequence"].max() + 1, shape.parts + 1).astype(int)
    for low, high in pairwise(bounds):
        rows = (columns["sequence"] >= low) & (columns["sequence"] < high)
        add_part(writer, shape, {name: values[rows] for name, values in columns.items()}, rng)
    loss = columns["loss"].astype(np.float64)
    writer.finish(status, loss_sum=float(loss.sum() or 0.0), loss_tokens=int(loss.count()))
    return open_run(path)


def bundled(folder: Path) -> Path:
    """Make a run, `tiny`, that says it is of the bundled model; return its folder."""
    run = make(folder / "tiny", layers=8, d_ff=768, sequences=10)
    manifests.update(run.path, model={**run.manifest.model, "name": "demo-model", "d_model": 256, "weights": None})
    return folder


def main(folder: str) -> None:
    """Write made-demo (a CPU capture) and made-recorded (8 layers of 5632) into a folder."""
    from twell.analysis import ensure

    for name, shape in {
        "made-demo": Shape(layers=8, d_ff=1024, vocab=2000, sequences=300, length=512, bos=True),
        "made-reference": Shape(layers=8, d_ff=5632, vocab=4000, sequences=100, length=512, kernel="reference"),
    }.items():
        shutil.rmtree(Path(folder) / name, ignore_errors=True)
        run = make(Path(folder) / name, shape)
        ensure(run)
        print(f"{run.path}: {run.manifest.tokens} tokens")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Expected one folder: python -m support.synthetic_runs FOLDER")
    main(sys.argv[1])
