"""List the cases of `twell bench`: a model's layers, a shape with synthetic inputs, or recorded patterns.

The idea: a case holds a function that builds its inputs, called when the case is run, so that the inputs of one case
are in memory at a time. A model's layers get inputs from real forward passes, over text and over random token ids in
sequences of the same lengths. A recorded pattern of at most d_model / 2 rows runs the whole FFN, with synthetic gate
weights under which exactly the recorded neurons fire; one of more rows runs up and down alone.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twell.kernels.benchmark.synthetic import Pattern, ffn_firing, max_nnz, packed_pattern, synthetic_ffn
from twell.kernels.layout import Layout, TwELL
from twell.kernels.modules import SparseFFN
from twell.workbench.bench.options import BenchOptions, inputs_of, whole_numbers
from twell.workbench.devices import pick_device
from twell.workbench.errors import UserError, first_line
from twell.workbench.run.manifest import spelled

if TYPE_CHECKING:
    from twell.workbench.models.load import LoadedModel

ROWS = {"cpu": 1024, "cuda": 131_072}  # rows of a case without --rows
COLD_ROWS = 1024  # with --weights auto on a GPU, cases of at most this many rows run on cold weights
TEXT = ("builtin:passages", "builtin:python-docs")
NAMES = {
    "text": "on text",
    "uniform": "on uniform ids",
    "heavy": "heavy-tailed",
    "even": "even",
    "dense": "fully dense",
}

CaseInputs = tuple[SparseFFN, Tensor, TwELL | None]  # the FFN, x, and the gate values if up and down run alone


@dataclass(frozen=True)
class Case:
    """One input of one FFN.

    input: text, uniform, patterns, or the kind of synthetic input; layer: -1 if there is none
    cold: whether each call finds its weights outside the cache; make: builds the inputs
    """

    name: str
    input: str
    layer: int
    rows: int
    cold: bool
    make: Callable[[], CaseInputs]


def cases(options: BenchOptions) -> tuple[list[Case], dict[str, Any]]:
    """Return the cases, and what they share by name: device, dtype, d_model, d_ff, and a name for all of them."""
    if options.patterns is not None:
        return _recorded(options, options.patterns)
    return _synthetic(options, options.shape) if options.shape is not None else _of_model(options)


def _device_and_dtype(options: BenchOptions) -> tuple[torch.device, torch.dtype]:
    """Return the options' device and dtype; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    device = pick_device(options.device)
    if options.dtype != "auto":
        return device, getattr(torch, options.dtype)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def _rows(options: BenchOptions, device: torch.device) -> list[int]:
    return [ROWS[device.type]] if options.rows is None else whole_numbers("--rows", options.rows)


def _case(options: BenchOptions, device: torch.device, name: str, input: str, layer: int, rows: int, make: Any) -> Case:
    """Return a case. Its name states the rows if they are not the device's default.

    make: called as make() when the case is run; whether weights are cold follows from the options, device and rows
    """
    if rows != ROWS[device.type]:
        name += f", {rows:,} row" + "s" * (rows > 1)
    cold = options.weights == "cold" or (options.weights == "auto" and device.type == "cuda" and rows <= COLD_ROWS)
    return Case(name, input, layer, rows, cold, make)


# ---- a shape, with synthetic inputs


def _shape(text: str) -> tuple[int, int]:
    """Parse d_model and d_ff from text such as 2048,5632. Raises UserError for others than two multiples of 8."""
    sizes = whole_numbers("--shape", text, least=8)
    if len(sizes) != 2 or any(size % 8 for size in sizes):
        raise UserError(f"Expected --shape D_MODEL,D_FF, two multiples of 8 such as 2048,5632, got {text!r}.")
    return sizes[0], sizes[1]


def _synthetic(options: BenchOptions, shape: str) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each number of rows, each kind of synthetic input and each nnz, and what they share."""
    (d_model, d_ff), (device, dtype) = _shape(shape), _device_and_dtype(options)
    most = max_nnz(d_ff)
    requested = whole_numbers("--nnz", options.nnz)
    possible = [nnz for nnz in requested if nnz <= most]
    if not possible:
        raise UserError(f"Expected --nnz of at most {most:.0f} for {d_ff} neurons, got {min(requested)}.")

    def make(kind: str, rows: int, nnz: int | None) -> CaseInputs:
        settings: dict[str, Any] = {"nnz": nnz, "dtype": dtype, "device": device, "plain": options.plain}
        return (*synthetic_ffn(kind, rows, d_model, d_ff, **settings), None)

    listed = []
    for rows in _rows(options, device):
        for kind in inputs_of(options):
            for nnz in possible if kind != "dense" else [None]:
                name = ("plain, " if options.plain else "") + NAMES[kind] + (f" nnz {nnz}" if nnz else "")
                listed.append(_case(options, device, name, kind, -1, rows, partial(make, kind, rows, nnz)))
    return listed, {"device": device, "dtype": dtype, "d_model": d_model, "d_ff": d_ff, "name": "synthetic inputs"}


# ---- a model's layers


def _of_model(options: BenchOptions) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each input, each number of rows and each layer of the model, and what they share."""
    from twell.workbench.bench.layer_inputs import layer_inputs, text_ids, uniform_ids
    from twell.workbench.models.checkpoint import DEMO
    from twell.workbench.models.load import load

    inputs, device = inputs_of(options), pick_device(options.device)
    rows_of_cases = _rows(options, device)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    name = options.model or DEMO
    loaded = load(name, options.revision, options.device, dtype)
    layers = (
        list(range(loaded.layers)) if options.layers is None else whole_numbers("--layers", options.layers, least=0)
    )
    if max(layers) >= loaded.layers:
        raise UserError(f"Expected --layers from 0 to {loaded.layers - 1}, got {max(layers)}.")
    texts = text_ids(loaded, options.text or TEXT, max(rows_of_cases))
    tokens, most = sum(map(len, texts)), max(rows_of_cases)
    if tokens < most:
        if options.rows is not None:
            raise UserError(f"Expected {most:,} tokens of text, got {tokens:,}: give more --text or fewer --rows.")
        rows_of_cases = [tokens]
    recorded: dict[str, dict[int, Tensor]] = {}  # the layers' inputs of one kind: those that the last case ran on

    def make(input: str, layer: int, rows: int) -> CaseInputs:
        if input not in recorded:
            recorded.clear()  # before the next pass, so that one kind is in memory at a time
            ids = texts if input == "text" else uniform_ids(loaded, texts)
            recorded[input] = layer_inputs(loaded, ids, set(layers))
        return loaded.ffns[layer], recorded[input][layer][-rows:], None

    listed = [
        _case(options, device, f"layer {layer} {NAMES[input]}", input, layer, rows, partial(make, input, layer, rows))
        for input in inputs
        for rows in rows_of_cases
        for layer in layers
    ]
    shared = {"device": device, "dtype": loaded.model.dtype, "d_model": loaded.d_model, "d_ff": loaded.d_ff}
    return listed, {**shared, "name": loaded.name + filled_up(loaded)}


def filled_up(loaded: LoadedModel) -> str:
    """Return, after a space, that both sides run layers at more neurons than they have; "" where none does."""
    if min(loaded.widths) == loaded.d_ff:
        return ""
    return f" (layers of {spelled(loaded.widths)} neurons, dense and sparse filled up to the widest)"


# ---- recorded patterns


def _recorded(options: BenchOptions, path: Path) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each number of rows and each layer that the file has patterns of, and what they share."""
    device, dtype = _device_and_dtype(options)
    patterns = read_patterns(path)
    named = re.search(r"_d(\d+)_f(\d+)", path.stem)
    if options.shape is None and named is None:
        raise UserError(f"Expected --shape D_MODEL,D_FF beside --patterns {path}: its name has no _d2048_f5632 or so.")
    d_model, d_ff = _shape(options.shape or f"{named[1]},{named[2]}" if named else options.shape or "")
    greatest = max(int(pattern.neurons.max()) for pattern in patterns.values())
    if greatest >= d_ff:
        raise UserError(f"Expected neurons below {d_ff} in {path}, got {greatest}: give their --shape.")
    layers = list(patterns) if options.layers is None else whole_numbers("--layers", options.layers, least=0)
    unknown = [layer for layer in layers if layer not in patterns]
    if unknown:
        raise UserError(f"Expected --layers of {', '.join(map(str, patterns))} in {path}, got {unknown[0]}.")

    def make(layer: int, rows: int) -> CaseInputs:
        pattern = patterns[layer].rows(rows)
        if rows <= d_model // 2:
            return (*ffn_firing(pattern, d_model, d_ff, dtype=dtype, device=device), None)
        nnz = min(float(pattern.nnz.double().mean()), max_nnz(d_ff))
        gate = packed_pattern(pattern, d_ff, Layout(), dtype=dtype, device=device)
        return (*synthetic_ffn("even", rows, d_model, d_ff, nnz=nnz, dtype=dtype, device=device), gate)

    listed = [
        _case(options, device, f"recorded layer {layer}", "patterns", layer, rows, partial(make, layer, rows))
        for rows in _rows(options, device)
        for layer in layers
    ]
    return listed, {"device": device, "dtype": dtype, "d_model": d_model, "d_ff": d_ff, "name": path.name}


def read_patterns(path: Path) -> dict[int, Pattern]:
    """Read patterns by layer from an npz. Raises UserError for a file without them.

    For each layer L it holds `nnz_L`, the neurons that each row fires, and `idx_L`, their indices row after row.
    """
    expected = f"Expected an npz of nnz_L and idx_L for each layer L at {path}"
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("it is no npz, or cut short")
        with np.load(path) as file:
            arrays = {name: torch.from_numpy(file[name].astype(np.int64)) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fault = getattr(error, "strerror", None) or first_line(error)
        if isinstance(error, ValueError):  # numpy advises to load what may run code
            fault = "it has other things than numbers"
        raise UserError(f"{expected}, got a file that cannot be read ({fault}): give the recorded patterns.") from None
    layers = sorted(int(name[4:]) for name in arrays if re.fullmatch(r"nnz_\d+", name))
    if not layers:
        raise UserError(f"{expected}, got {', '.join(arrays) or 'nothing'}: give the recorded patterns.")
    patterns = {}
    for layer in layers:
        nnz, neurons = arrays[f"nnz_{layer}"], arrays.get(f"idx_{layer}")
        if neurons is None or int(nnz.sum()) != len(neurons) or not len(neurons) or int(neurons.min()) < 0:
            raise UserError(
                f"{expected}, got another number of neurons than nnz_{layer} adds up to: record them again."
            )
        patterns[layer] = Pattern(nnz, neurons)
    return patterns
