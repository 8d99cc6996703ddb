"""Time the Hopper kernel beside dense and compiled dense where it is young: ReLU squared, a ReLU on both branches, and
gated ReLU of which much fires and rows differ much.

python tests/support/activation_cost.py [--seconds 0.5] [--kernel hopper cuda] [squares narrow both uneven]

One line a case: mean nnz, its deviation over its mean, microseconds of dense and of compiled dense; of each kernel the
microseconds, the ratios to both, its error relative to float64 (mean over rows) and dense's. narrow: the squares of
narrow models, with fewer rows too. Cost: about a minute, half is compiling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from twell.kernels.benchmark import synthetic
from twell.kernels.benchmark.operations import COMPILED, DENSE, BenchRequest, Operation
from twell.kernels.benchmark.runner import bench
from twell.kernels.modules import SparseFFN

UNEVEN = 1.3  # deviation of the logarithm of a row's size, of which nnz 980 has a p99 of 2 660, as a young layer's
Case = tuple[str, str, int, int, int, float, float]  # group, kind of input, d_model, d_ff, rows, nnz, spread of rows


def cases(groups: list[str]) -> Iterator[Case]:
    """Yield the cases, those of one shape one after another, as each shape is compiled anew."""
    usual = synthetic.ROW_SPREAD
    for d_model, d_ff in ((2048, 8192), (768, 3072)):
        for rows in (8192, 131_072):
            for kind in ("heavy", "even"):
                for share in (0.1, 0.03):
                    if "squares" in groups:
                        yield "squares", kind, d_model, d_ff, rows, share * d_ff, usual
    for d_model, d_ff in ((768, 3072), (1024, 4096), (1280, 5120)):
        for rows in (512, 2048, 8192, 131_072):
            for share in (0.1, 0.03):
                if "narrow" in groups:
                    yield "narrow", "heavy", d_model, d_ff, rows, share * d_ff, usual
    for rows in (8192, 1):
        if "both" in groups:
            yield "both", "heavy", 2048, 5632, rows, 120, usual
    for rows in (2304, 2560, 4096, 8192, 16_384):
        for nnz, spread in ((980, UNEVEN), (1000, usual), (700, usual), (600, usual), (500, usual)):
            if "uneven" in groups:
                yield "uneven", "heavy", 2048, 5632, rows, nnz, spread


def made(case: Case) -> tuple[SparseFFN, Tensor]:
    """Return the FFN and the input of a case."""
    group, kind, d_model, d_ff, rows, nnz, spread = case
    synthetic.ROW_SPREAD = spread
    ffn, x = synthetic.synthetic_ffn(
        kind, rows, d_model, d_ff, nnz=nnz, dtype=torch.bfloat16, device="cuda", plain=group in ("squares", "narrow")
    )
    weights = ffn.w_gate, ffn.w_up, ffn.w_down
    activation = "relu2" if ffn.w_up is None else "relu"
    return SparseFFN(*weights, activation=activation, up_relu=group == "both", kernel="reference"), x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", default=["squares", "both", "uneven"])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--kernel", nargs="+", default=["hopper"])
    options = parser.parse_args()
    began = time.perf_counter()
    print("group kind d_model d_ff rows nnz dev/mean | dense compiled us | kernel: us, x dense, x compiled, errors")
    for case in cases(options.groups):
        ffn, x = made(case)
        result = bench(ffn, x, BenchRequest(kernels=options.kernel, seconds=options.seconds))
        sparse = {name: Operation("ffn_sparse", name, 8) for name in options.kernel}
        if result.left_out or COMPILED not in result.times:
            print(*case, result.left_out, flush=True)
        if COMPILED in result.times:
            counts = (x[:8192] @ ffn.w_gate.t() > 0).sum(1).float()
            dense, compiled = result.median(DENSE), result.median(COMPILED)
            spread = f"{counts.std() / counts.mean():.2f}" if len(x) > 1 else "-"
            line = f"{counts.mean():.0f} {spread} | {dense:.1f} {compiled:.1f}"
            for name, operation in sparse.items():
                if operation in result.times:
                    ours, errors = result.median(operation), (result.errors[operation][0], result.errors[DENSE][0])
                    line += f" | {name}: {ours:.1f} {dense / ours:.3f} {compiled / ours:.3f} "
                    line += f"{errors[0]:.5f} {errors[1]:.5f}"
            print(*case[:5], line, flush=True)
        del ffn, x, result
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
