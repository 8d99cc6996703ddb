"""Check that a run's model computes what the checkpoint's own code does, and measure what counting costs.

The idea: tokens of the run go once more through the instrumented model and through the checkpoint's own code, in the
same dtype. Logits are compared; and for each layer, on the very input that it had, the counts are compared with a count
in float64; with a ReLU on the up branch too, those of what is used as well. A neuron may be counted differently where a
pre-activation is within rounding of zero, and only there: |z| <= d_model * 2^-23 * sum |x * w| (2^-52 for float64). The
cost is the time of the same forward passes with each probe on over that with none, in turns. Both go into the manifest.

    twell verify runs/mine --tokens 20000
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from twell.kernels.benchmark.timing import time_in_turns
from twell.kernels.stats import Stats
from twell.workbench.capturing.forward import LOGITS, Inputs, forward
from twell.workbench.capturing.progress import Batches
from twell.workbench.capturing.timing.timings import dense
from twell.workbench.errors import UserError
from twell.workbench.models import weights
from twell.workbench.models.checkpoint import Checkpoint, find, understood
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.models.own_code import refuse_other_weights, where_of
from twell.workbench.option_fields import check_bounds
from twell.workbench.options import VerifyOptions
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.recorded import recorded_sequences
from twell.workbench.text.vocabulary import special_ids

ROUNDS = 3
ROUGH = 1.2  # from which ratio of a way's greatest turn to its least its figures are called rough
PROBES = ("counts", "neurons", "all")
WAYS = 2 + len(PROBES)  # kinds of passes that are timed: without probes, with each kind of probe, dense
ROUNDING = {"float64": 2.0**-52}  # of a product's accumulator; of every other dtype 2^-23
CHUNK = 2**24  # elements of a float64 matrix at a time


def verify(options: VerifyOptions) -> Run:
    """Verify a run, print the results, and write them into the run's manifest.

    Raises UserError for a run that cannot be verified, and, once all is written, where a count is off by more than
    rounding.
    """
    check_bounds(options)
    run = open_run(options.run)
    manifest = run.manifest
    if manifest.status == manifests.RECORDING:
        raise UserError(f"Expected a run that has ended, {run.path} is still being recorded: wait for it.")
    sequences = recorded_sequences(run, options.tokens)
    loaded, checkpoint = _model(run, options)
    texts = list(batches(sequences, int(manifest.options.get("batch_tokens", 8192)), special_ids(loaded.tokenizer)))
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with Batches(console) as progress:
        done = partial(progress.advance, len(texts) * (1 + (1 + ROUNDS) * WAYS))
        outputs = parity(loaded, checkpoint, texts, done)
        times = overhead(loaded, texts, bool(manifest.options.get("loss", True)), done)
    with locks.locked(run.path):  # others may have written to it meanwhile
        run = Run(run.path, manifests.update(run.path, parity=outputs, overhead=times))
    console.print("\n".join([f"{run.path}: verified", *report(outputs, times)]))
    if wrong := outputs["beyond_rounding"]:
        raise UserError(
            f"Expected counts that differ by no more than rounding, got {wrong:,} of {outputs['counts']:,} off by more "
            f"with the {outputs['kernel']} kernel: capture with --kernel reference."
        )
    return run


def report(parity: dict[str, Any], overhead: dict[str, Any]) -> list[str]:
    """Return the results, a line for each question."""
    ways = (*PROBES, "dense")
    ranges = {way: overhead[f"{way}_over_none_range"] for way in ways}
    times = ", ".join(
        f"{way} {overhead[f'{way}_over_none']:.2f} ({low:.2f}–{high:.2f})" for way, (low, high) in ranges.items()
    )
    widest = max(high / low for low, high in ranges.values())
    rough = f"; rough, as turns differ up to {widest:.1f} ×: a busy machine, or too few --tokens" * (widest >= ROUGH)
    counts = (
        f"{parity['counts']:,} compared, {parity['differing']:,} differ, {parity['beyond_rounding']:,} beyond rounding"
    )
    return [
        f"  input   {parity['tokens']:,} of its tokens, {parity['dtype']}, kernel {parity['kernel']}",
        f"  logits  at most {parity['logit_error']:.1e} of the greatest off the checkpoint's own code; "
        f"{parity['same_choice']:.2%} the same first choice",
        f"  counts  {counts if parity['counts'] else 'above a threshold: not compared'}",
        f"  time    {times} × a pass that watches nothing, medians of {overhead['rounds']} turns "
        f"(least–greatest){rough}",
    ]


def parity(
    loaded: LoadedModel, checkpoint: Checkpoint, texts: list[Batch], done: Callable[[], object]
) -> dict[str, Any]:
    """Compare logits and counts with the checkpoint's own code; return the manifest's `parity`.

    logit_error: greatest difference over the greatest logit; same_choice: share of rows with the same first choice
    counts, differing, beyond_rounding: (token, layer) counts compared, unequal, and unequal by more than rounding; two
    of each with a ReLU on the up branch too, of what fires and of what is used
    done: called after each batch
    """
    own: Any = weights.read(checkpoint, loaded.model.dtype)
    own.to(loaded.device)
    counted = Counts(loaded)
    error = largest = same = rows = 0.0
    for batch in texts:
        inputs = Inputs.of(batch, loaded.device)
        row_of = inputs.row_of.long()
        forward(loaded, inputs, probes="counts", loss=False, on_layer=partial(counted.on_layer, row_of))
        ids = inputs.ids.view(-1, inputs.longest)
        with torch.inference_mode():
            ours, theirs = (
                body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[row_of]
                for body in (loaded.body, own.get_decoder())
            )
            step = max(1, LOGITS[loaded.device.type] // loaded.head.weight.shape[0])
            for some, other in zip(ours.split(step), theirs.split(step), strict=True):
                mine, right = loaded.head(some).float(), own.get_output_embeddings()(other).float()
                if not (mine.isfinite().all() and right.isfinite().all()):
                    raise UserError(
                        f"Expected finite logits from {loaded.name} to compare, got NaN or infinity in {loaded.dtype}: "
                        "check the model's weights."
                    )
                error, largest = max(error, float((mine - right).abs().max())), max(largest, float(right.abs().max()))
                same += float((mine.argmax(1) == right.argmax(1)).sum())
        rows += len(row_of)
        done()
    logits = {"logit_error": error / largest, "same_choice": same / rows}
    return logits | counted.result() | {"tokens": int(rows), "dtype": loaded.dtype, "kernel": _kernel(loaded, texts)}


class Counts:
    """Compares the counts of every layer with a count in float64 on the same input."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.compared = self.differing = self.beyond = 0

    def result(self) -> dict[str, int]:
        """Return how many counts were compared, unequal, and unequal by more than rounding."""
        return {"counts": self.compared, "differing": self.differing, "beyond_rounding": self.beyond}

    def on_layer(self, row_of: Tensor, layer: int, x: Tensor, stats: Stats) -> None:
        if self.loaded.watched:  # by a threshold, a choice of the reader's: nothing is exact about it
            return
        ffn = self.loaded.ffns[layer]
        rounding = ROUNDING.get(self.loaded.dtype, 2.0**-23) * x.shape[1]
        gate = _wide(ffn.w_gate, ffn.b_gate)
        up = _wide(ffn.w_up, ffn.b_up) if stats.nnz_used is not None and ffn.w_up is not None else None
        for rows in row_of.split(max(1, CHUNK // ffn.d_ff)):
            fired, near = _above_zero(x[rows].double(), *gate, rounding)
            self._compare(stats.nnz[rows], fired, near)
            if up is not None and stats.nnz_used is not None:
                positive, near_too = _above_zero(x[rows].double(), *up, rounding)
                either = (near & (positive | near_too)) | (near_too & (fired | near))
                self._compare(stats.nnz_used[rows], fired & positive, either)

    def _compare(self, counts: Tensor, right: Tensor, near: Tensor) -> None:
        """Compare counts [n] with what is to be counted, and where rounding decides it: right, near, bool [n, d_ff]."""
        off = (counts - right.sum(1)).abs()
        self.compared += len(counts)
        self.differing += int((off > 0).sum())
        self.beyond += int((off > near.sum(1)).sum())


def _wide(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a map's weight and bias in float64."""
    wide = weight.double()
    return wide, wide.new_zeros(len(wide)) if bias is None else bias.double()


def _above_zero(x: Tensor, weight: Tensor, bias: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Return where a map's outputs on x [n, d_model] are above 0, and where they are within rounding of it: bool [n,
    d_ff]. rounding: relative to the sum of what is added up"""
    z = nn.functional.linear(x, weight, bias)
    return z > 0, z.abs() <= rounding * nn.functional.linear(x.abs(), weight.abs(), bias.abs())


def overhead(loaded: LoadedModel, texts: list[Batch], loss: bool, done: Callable[[], object]) -> dict[str, Any]:
    """Time passes with each probe and dense, over passes with no probe; return the manifest's `overhead`.

    The ratios are medians over ROUNDS turns, and ranges their least and greatest. done: called after each batch
    """

    def passes(probes: str, run_dense: bool = False) -> None:
        for batch in texts:
            if run_dense:
                with dense(loaded):
                    forward(loaded, Inputs.of(batch, loaded.device), loss=loss).wait()
            else:
                forward(loaded, Inputs.of(batch, loaded.device), probes=probes, loss=loss).wait()
            done()

    operations: dict[str, Any] = {name: partial(passes, name) for name in ("none", *PROBES)}
    operations["dense"] = partial(passes, "none", True)
    took = time_in_turns(operations, loaded.device, ROUNDS)
    result: dict[str, Any] = {}
    for name in (*PROBES, "dense"):
        ratios = [one / none for one, none in zip(took[name], took["none"], strict=True)]
        result[f"{name}_over_none"] = round(statistics.median(ratios), 4)
        result[f"{name}_over_none_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return result | {"rounds": ROUNDS, "device": loaded.device.type, "kernel": _kernel(loaded, texts)}


def _kernel(loaded: LoadedModel, texts: list[Batch]) -> str:
    return loaded.choice(texts[0].padded).kernel


def _model(run: Run, options: VerifyOptions) -> tuple[LoadedModel, Checkpoint]:
    """Load the run's model as it was loaded for the capture, and its checkpoint. Raises UserError for other weights."""
    manifest = run.manifest
    name, revision = where_of(run, options.model)
    threshold = manifest.options.get("threshold")
    dtype = getattr(torch, manifest.dtype)
    kernel = str(manifest.options.get("kernel", "auto"))
    loaded = load(name, revision, options.device, dtype, kernel, threshold)
    refuse_other_weights(run, loaded.weights, name)
    return loaded, understood(find(name, revision, threshold)[0], loaded.name, threshold)
