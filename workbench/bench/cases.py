"""What `twell bench` runs, case by case: a model's layers, a shape with made-up inputs, or recorded patterns.

A case is made when it is its turn, so that no two made inputs stand in memory at once. The inputs of a model's layers
are taken from real forward passes, over text and, beside it, over random token ids in sequences of the same lengths.
Recorded patterns of few rows are brought about by made gate weights, and run the whole FFN; of many, up and down alone.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.kernels.benchmark.synthetic import KINDS, Pattern, ffn_firing, most_nnz, packed_pattern, synthetic_ffn
from twell.kernels.layout import Layout, TwELL
from twell.kernels.modules import SparseFFN
from twell.workbench.bench.layer_inputs import layer_inputs, text_ids, uniform_ids
from twell.workbench.errors import UserError, first_line
from twell.workbench.models.checkpoint import DEMO
from twell.workbench.models.load import load, pick_device
from twell.workbench.options import BenchOptions

ROWS = {"cpu": 1024, "cuda": 131_072}  # of a case, unless asked otherwise
COLD_ROWS = 1024  # up to so many on a GPU, weights are rotated unless asked otherwise
TEXT = ("builtin:passages", "builtin:python-docs")
MODEL_INPUTS = ("text", "uniform")
NAMES = {
    "text": "on text",
    "uniform": "on uniform ids",
    "heavy": "heavy-tailed",
    "even": "even",
    "dense": "fully dense",
}

Parts = tuple[SparseFFN, Tensor, TwELL | None]


@dataclass(frozen=True)
class Case:
    """One input of one FFN. `make` gives the FFN, x, and where up and down run alone the gate values they run on."""

    name: str
    input: str
    layer: int
    rows: int
    cold: bool
    make: Callable[[], Parts]


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """The whole numbers of a list like 1,8,64. UserError where it is none, or where one is too small."""
    try:
        found = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise UserError(f"Expected whole numbers with commas between them for {option}, got {text!r}.") from None
    if min(found) < least:
        raise UserError(f"Expected numbers of at least {least} for {option}, got {min(found)}.")
    return found


def cases(options: BenchOptions) -> tuple[list[Case], dict[str, Any]]:
    """The cases, and what they have in common: device, dtype, d_model, d_ff and a name for it all."""
    named = {"MODEL": options.model, "--shape": options.shape, "--patterns": options.patterns}
    given = [name for name, value in named.items() if value is not None]
    if "MODEL" in given and len(given) > 1:
        raise UserError(f"Expected a model, --shape or --patterns, got {' and '.join(given)}: give one of them.")
    if options.plain and given != ["--shape"]:
        raise UserError("Expected --plain beside --shape alone: a model's FFN is plain or gated by itself.")
    if options.patterns is not None:
        return _recorded(options, options.patterns)
    return _made(options, options.shape) if options.shape is not None else _of_model(options)


def _common(options: BenchOptions, dtype: torch.dtype | None = None) -> tuple[torch.device, torch.dtype]:
    device = pick_device(options.device)
    if options.dtype != "auto":
        return device, getattr(torch, options.dtype)
    return device, dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def _rows(options: BenchOptions, device: torch.device) -> list[int]:
    return [ROWS[device.type]] if options.rows is None else numbers("--rows", options.rows)


def _inputs(options: BenchOptions, known: tuple[str, ...]) -> list[str]:
    asked = list(known) if options.inputs is None else options.inputs.split(",")
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UserError(f"Expected --inputs of {', '.join(known)}, got {unknown[0]!r}.")
    return asked


def _case(options: BenchOptions, device: torch.device, name: str, input: str, layer: int, rows: int, make: Any) -> Case:
    """With the rows in its name, where they are not those that a case has by itself."""
    if rows != ROWS[device.type]:
        name += f", {rows:,} row" + "s" * (rows > 1)
    cold = options.weights == "cold" or (options.weights == "auto" and device.type == "cuda" and rows <= COLD_ROWS)
    return Case(name, input, layer, rows, cold, make)


# ---- a shape, with made-up inputs


def _shape(text: str) -> tuple[int, int]:
    found = numbers("--shape", text, least=8)
    if len(found) != 2 or any(number % 8 for number in found):
        raise UserError(f"Expected --shape D_MODEL,D_FF, two multiples of 8 such as 2048,5632, got {text!r}.")
    return found[0], found[1]


def _made(options: BenchOptions, shape: str) -> tuple[list[Case], dict[str, Any]]:
    (d_model, d_ff), (device, dtype) = _shape(shape), _common(options)
    most = most_nnz(d_ff)
    asked = numbers("--nnz", options.nnz)
    fits = [nnz for nnz in asked if nnz <= most]
    if not fits:
        raise UserError(f"Expected --nnz of at most {most:.0f} for {d_ff} neurons, got {min(asked)}.")

    def make(kind: str, rows: int, nnz: int | None) -> Parts:
        about: dict[str, Any] = {"nnz": nnz, "dtype": dtype, "device": device, "plain": options.plain}
        return (*synthetic_ffn(kind, rows, d_model, d_ff, **about), None)

    found = []
    for rows in _rows(options, device):
        for kind in _inputs(options, KINDS):
            for nnz in fits if kind != "dense" else [None]:
                name = ("plain, " if options.plain else "") + NAMES[kind] + (f" nnz {nnz}" if nnz else "")
                found.append(_case(options, device, name, kind, -1, rows, partial(make, kind, rows, nnz)))
    return found, {"device": device, "dtype": dtype, "d_model": d_model, "d_ff": d_ff, "name": "made-up inputs"}


# ---- a model's layers


def _of_model(options: BenchOptions) -> tuple[list[Case], dict[str, Any]]:
    inputs, device = _inputs(options, MODEL_INPUTS), _common(options)[0]
    wanted = _rows(options, device)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    name = options.model or DEMO
    loaded = load(name, options.revision, options.device, dtype)
    layers = list(range(loaded.layers)) if options.layers is None else numbers("--layers", options.layers, least=0)
    if max(layers) >= loaded.layers:
        raise UserError(f"Expected --layers from 0 to {loaded.layers - 1}, got {max(layers)}.")
    pieces = text_ids(loaded, options.text or TEXT, max(wanted))
    held = sum(map(len, pieces))
    if held < max(wanted):
        if options.rows is not None:
            raise UserError(f"Expected {max(wanted):,} tokens of text, got {held:,}: give more --text or fewer --rows.")
        wanted = [held]
    heard: dict[str, dict[int, Tensor]] = {}

    def make(input: str, layer: int, rows: int) -> Parts:
        if input not in heard:
            heard.clear()  # of the input before
            texts = pieces if input == "text" else uniform_ids(loaded, pieces)
            heard[input] = layer_inputs(loaded, texts, set(layers))
        return loaded.ffns[layer], heard[input][layer][-rows:], None

    found = [
        _case(options, device, f"layer {layer} {NAMES[input]}", input, layer, rows, partial(make, input, layer, rows))
        for input in inputs
        for rows in wanted
        for layer in layers
    ]
    about = {"device": device, "dtype": loaded.model.dtype, "d_model": loaded.d_model, "d_ff": loaded.d_ff}
    return found, {**about, "name": loaded.name}


# ---- recorded patterns


def _recorded(options: BenchOptions, path: Path) -> tuple[list[Case], dict[str, Any]]:
    device, dtype = _common(options)
    patterns = read_patterns(path)
    named = re.search(r"_d(\d+)_f(\d+)", path.stem)
    if options.shape is None and named is None:
        raise UserError(f"Expected --shape D_MODEL,D_FF beside --patterns {path}: its name has no _d2048_f5632 or so.")
    d_model, d_ff = _shape(options.shape or f"{named[1]},{named[2]}" if named else options.shape or "")
    greatest = max(int(pattern.neurons.max()) for pattern in patterns.values())
    if greatest >= d_ff:
        raise UserError(f"Expected neurons below {d_ff} in {path}, got {greatest}: give their --shape.")
    layers = list(patterns) if options.layers is None else numbers("--layers", options.layers, least=0)
    unknown = [layer for layer in layers if layer not in patterns]
    if unknown:
        raise UserError(f"Expected --layers of {', '.join(map(str, patterns))} in {path}, got {unknown[0]}.")

    def make(layer: int, rows: int) -> Parts:
        pattern = patterns[layer].rows(rows)
        if rows <= d_model // 2:
            return (*ffn_firing(pattern, d_model, d_ff, dtype=dtype, device=device), None)
        nnz = min(float(pattern.nnz.double().mean()), most_nnz(d_ff))
        gate = packed_pattern(pattern, d_ff, Layout(), dtype=dtype, device=device)
        return (*synthetic_ffn("even", rows, d_model, d_ff, nnz=nnz, dtype=dtype, device=device), gate)

    found = [
        _case(options, device, f"recorded layer {layer}", "patterns", layer, rows, partial(make, layer, rows))
        for rows in _rows(options, device)
        for layer in layers
    ]
    return found, {"device": device, "dtype": dtype, "d_model": d_model, "d_ff": d_ff, "name": path.name}


def read_patterns(path: Path) -> dict[int, Pattern]:
    """By layer, from an npz with `nnz_L` (neurons fired by each row) and `idx_L` (which, row after row)."""
    wanted = f"Expected an npz of nnz_L and idx_L for each layer L at {path}"
    try:
        with np.load(path) as held:
            arrays = {name: torch.from_numpy(held[name].astype(np.int64)) for name in held.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fault = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{wanted}, got a file that cannot be read ({fault}): give the recorded patterns.") from None
    layers = sorted(int(name[4:]) for name in arrays if re.fullmatch(r"nnz_\d+", name))
    if not layers:
        raise UserError(f"{wanted}, got {', '.join(arrays) or 'nothing'}: give the recorded patterns.")
    found = {}
    for layer in layers:
        nnz, neurons = arrays[f"nnz_{layer}"], arrays.get(f"idx_{layer}")
        if neurons is None or int(nnz.sum()) != len(neurons) or not len(neurons) or int(neurons.min()) < 0:
            raise UserError(f"{wanted}, got another number of neurons than nnz_{layer} adds up to: record them again.")
        found[layer] = Pattern(nnz, neurons)
    return found
