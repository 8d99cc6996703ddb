"""Time a training step of one FFN, forward and backward with the L1 term, sparse beside dense, in turns.

Every operation computes y, l1 and the gradients of x and of all weights, for one fixed direction of dy. Dense is what
autograd makes of torch's own layers; compiled is the same by torch.compile; sparse is `train_gated_ffn` or
`train_plain_ffn` by the kernel that takes the call, with the room that `capacity_for` tells a trainer to give it.

    ffn, x = synthetic_ffn("heavy", 16384, 2048, 5632, nnz=17, dtype=torch.bfloat16, device="cuda")
    result = bench_training(ffn, x)
    result.median(TRAIN_DENSE) / result.median(result.sparse)

Cost: compiling, some seconds a shape; the time given; one step in float64 on EXACT_ROWS rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.benchmark.operations import Operation
from twell.kernels.benchmark.timing import SECONDS, time_in_turns
from twell.kernels.modules import SparseFFN
from twell.kernels.training import capacity_for, choose, train_gated_ffn, train_plain_ffn

TRAIN_DENSE, TRAIN_COMPILED = Operation("train_dense"), Operation("train_compiled")
MIN_TURNS, MAX_TURNS = 5, 30
EXACT_ROWS = {"cpu": 128, "cuda": 2048}  # rows of the step that is compared with float64
COEFFICIENT = 1e-4  # of l1 in the loss
Outputs = tuple[Tensor, Tensor]  # y and l1
TrainingForward = Callable[..., Outputs]  # of x and the weights


@dataclass(frozen=True)
class TrainingResult:
    """Figures of one case.

    times: microseconds of a step, turn by turn; errors: of each operation's gradients relative to float64, the mean and
    the largest over rows of all of them; peak_bytes: memory in use at most, beyond what was in use before (CUDA alone)
    sparse: the operation of the sparse kernel; reason: why it is that kernel; left_out: operations that did not run
    """

    times: dict[Operation, list[float]]
    errors: dict[Operation, tuple[float, float]]
    peak_bytes: dict[Operation, int]
    nnz_mean: float
    sparse: Operation
    reason: str
    left_out: dict[str, str]

    def median(self, operation: Operation) -> float:
        """Return the median time of a step in microseconds."""
        return statistics.median(self.times[operation])


def bench_training(ffn: SparseFFN, x: Tensor, compiled: bool = True, seconds: float | None = None) -> TrainingResult:
    """Time a step on x [rows, d_model]. Raises ValueError for an FFN that has no backward pass here.

    compiled: torch.compile's step too; seconds: of turns, default as in SECONDS
    """
    if ffn.activation not in ("relu", "relu2") or ffn.up_relu or ffn.threshold is not None:
        raise ValueError("expected a ReLU or ReLU² FFN with one ReLU and no threshold")
    weights = [w for w in (ffn.w_gate, ffn.w_up, ffn.w_down) if w is not None]
    tensors = [t.detach().contiguous().requires_grad_() for t in (x, *weights)]
    choice = choose(
        x.device, x.dtype, ffn.d_model, ffn.d_ff, len(x), gated=ffn.w_up is not None, activation=ffn.activation
    )
    sparse = Operation("train_sparse", choice.kernel, 8)
    forwards: dict[Operation, TrainingForward] = {TRAIN_DENSE: partial(dense_forward, ffn.activation)}
    if compiled:
        torch.compiler.reset()
        forwards[TRAIN_COMPILED] = torch.compile(partial(dense_forward, ffn.activation), dynamic=False)
    with torch.no_grad():
        nnz = float((linear(x, ffn.w_gate, ffn.b_gate) > 0).sum()) / len(x)
    forwards[sparse] = partial(_sparse_forward, ffn.activation, capacity_for(nnz, ffn.d_ff))
    left_out = _left_out(forwards, tensors)
    runs = {operation: partial(step, forward, tensors) for operation, forward in forwards.items()}
    peaks = {operation: peak for operation, run in runs.items() if (peak := _peak_bytes(run, x.device)) is not None}
    errors = _errors(forwards, tensors, ffn.activation)
    first_turn = sum(sum(times) for times in time_in_turns(runs, x.device, 1).values())
    repeats = max(MIN_TURNS, min(MAX_TURNS, int((seconds or SECONDS[x.device.type]) * 1e6 / first_turn)))
    times = time_in_turns(runs, x.device, repeats)
    return TrainingResult(times, errors, peaks, nnz, sparse, choice.reason, left_out)


def dense_forward(activation: str, x: Tensor, *weights: Tensor) -> Outputs:
    """Return y and l1 by torch's own operations. weights: gate, up and down; or in and out"""
    hidden = linear(x, weights[0]).relu()
    hidden = hidden.square() if activation == "relu2" else hidden
    hidden = hidden * linear(x, weights[1]) if len(weights) == 3 else hidden
    total = hidden.abs().sum(dtype=torch.float32 if hidden.dtype != torch.float64 else torch.float64)
    return linear(hidden, weights[-1]), total / len(x)


def step(forward: TrainingForward, tensors: list[Tensor], dy: Tensor | None = None) -> list[Tensor]:
    """Run forward and backward; return the gradients of x and of the weights. dy: default y itself

    Nothing here waits for the device: a number that is copied to it would, between the two passes.
    """
    y, l1 = forward(*tensors)
    along = y.detach() if dy is None else dy, torch.full_like(l1, COEFFICIENT)
    return list(torch.autograd.grad((y, l1), tensors, along))


def _sparse_forward(activation: str, capacity: int, x: Tensor, *weights: Tensor) -> Outputs:
    train = train_gated_ffn if len(weights) == 3 else train_plain_ffn
    trained = train(x, *weights, activation=activation, capacity=capacity)
    return trained.y, trained.l1


def _left_out(forwards: dict[Operation, TrainingForward], tensors: list[Tensor]) -> dict[str, str]:
    """Run the compiled step once; where it cannot be compiled, remove it and return the reason."""
    if TRAIN_COMPILED not in forwards:
        return {}
    try:
        step(forwards[TRAIN_COMPILED], tensors)
    except Exception as error:  # whatever torch's compiler met: no C++ compiler, say
        del forwards[TRAIN_COMPILED]
        return {TRAIN_COMPILED.op: (str(error).strip() or type(error).__name__).splitlines()[0]}
    return {}


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the memory that a step needs beyond what is in use, in bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _errors(
    forwards: dict[Operation, TrainingForward], tensors: list[Tensor], activation: str
) -> dict[Operation, tuple[float, float]]:
    """Return each operation's gradient errors on the first rows: mean and largest over rows, relative to float64."""
    x, *weights = tensors
    rows = x.detach()[: EXACT_ROWS[x.device.type]].clone().requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (rows, *weights)]
    y, _ = dense_forward(activation, *wide)
    dy = y.detach().to(x.dtype)
    exact = step(partial(dense_forward, activation), wide, dy.double())
    errors = {}
    for operation, forward in forwards.items():
        if operation == TRAIN_COMPILED:  # another shape would be compiled anew
            continue
        each = [_relative(one, other) for one, other in zip(step(forward, [rows, *weights], dy), exact, strict=True)]
        by_row = torch.cat(each)
        errors[operation] = float(by_row.mean()), float(by_row.max())
    return errors


def _relative(gradient: Tensor, exact: Tensor) -> Tensor:
    """Return |gradient - exact| / |exact| of each row; 0 in rows where both are 0."""
    size, off = exact.norm(dim=1), (gradient.double() - exact).norm(dim=1)
    return torch.where((size == 0) & (off == 0), 0.0, off / size)
