"""The options of `twell bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from twell.workbench.errors import UserError
from twell.workbench.option_fields import option
from twell.workbench.options import Device, KernelName

MODEL_INPUTS, SHAPE_INPUTS = ("text", "uniform"), ("heavy", "even", "dense")  # of --inputs


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time the FFN dense and sparse side by side; measure errors.

    The input is a model's layers, a shape with synthetic weights and inputs, or recorded firing patterns.

    twell bench path/to/model --out runs/mine
    twell bench --shape 2048,5632 --nnz 29,120 --rows 8192
    twell bench --patterns patterns_d2048_f5632.npz --rows 1,8,64
    twell bench path/to/model --whole --energy
    """

    model: str | None = option(
        None, help="a local folder or a hub id; default: builtin:demo, the bundled model", value="MODEL", argument=True
    )
    shape: str | None = option(None, help="synthetic weights and inputs instead of a model's", value="D_MODEL,D_FF")
    patterns: Path | None = option(None, help="an .npz of recorded firing patterns, for up and down alone")
    text: tuple[str, ...] = option(
        (), help="text for a model, as for `twell capture`; default: the built-in ones", value="SOURCE"
    )
    rows: str | None = option(
        None, help="rows of each case; default: 131072 on a GPU, 1024 on a CPU", unit="tokens", value="N[,N…]"
    )
    layers: str | None = option(None, help="the layers to time; default: all", value="L[,L…]")
    inputs: str | None = option(
        None, help="for a model text,uniform; for a shape heavy,even,dense; default: all", value="KIND[,KIND…]"
    )
    nnz: str = option("15,29,60,120,250", help="mean nnz of synthetic inputs", unit="neurons", value="N[,N…]")
    compression: str = option("8", help="compression of the TwELL that kernels emit: 2, 4, 8 or 16", value="C[,C…]")
    kernel: tuple[str, ...] = option(
        (),
        help="time only this kernel; may be repeated; default: all that can run, on a GPU without the reference",
        value="KERNEL",
    )
    plain: bool = option(False, help="time a plain FFN instead of a gated one, with --shape")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option("auto", help="data type of weights and inputs")
    device: Device = option("auto", help="where to run")
    weights: Literal["auto", "warm", "cold"] = option(
        "auto", help="cold: rotate through more weights than the cache holds; auto: cold for up to 1024 rows on a GPU"
    )
    compile: bool = option(True, help="also time the dense FFN compiled by torch.compile")
    probes: bool = option(False, help="also time the kernels with each probe on")
    training: bool = option(False, help="time a training step instead: forward and backward with the L1 term")
    whole: bool = option(
        False, help="time the whole model instead: forward passes of --rows tokens, generation, steps of decoding"
    )
    batches: str = option("1,8,64", help="sequences decoded at once, with --whole", unit="sequences", value="N[,N…]")
    energy: bool = option(False, help="also measure power and energy, by 6 s of each operation alone")
    seconds: float | None = option(None, help="about how long to time a case; default: 0.3, on a GPU 1", unit="seconds")
    out: Path | None = option(None, help="a .parquet file, or a run's folder; figures of other cases in it are kept")
    revision: str | None = option(None, help="branch, tag or commit of a hub model", value="REV")


def refuse_options(options: BenchOptions) -> None:
    """Raise UserError for options that no machine and no model would take, before anything is loaded."""
    named = {"MODEL": options.model, "--shape": options.shape, "--patterns": options.patterns}
    given = [name for name, value in named.items() if value is not None]
    if "MODEL" in given and len(given) > 1:
        raise UserError(f"Expected a model, --shape or --patterns, got {' and '.join(given)}: give one of them.")
    if options.plain and given != ["--shape"]:
        raise UserError("Expected --plain beside --shape alone: a model's FFN is plain or gated by itself.")
    names = [name for name in reversed(get_args(KernelName)) if name != "auto"]
    unknown = [name for name in options.kernel if name not in names]
    if unknown:
        raise UserError(f"Expected --kernel of {', '.join(names)}, got {unknown[0]!r}.")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise UserError(f"Expected --seconds above 0, got {options.seconds:g}.")
    for name, least in {"shape": 8, "rows": 1, "layers": 0, "nnz": 1, "compression": 1, "batches": 1}.items():
        if (text := getattr(options, name)) is not None:
            whole_numbers(f"--{name}", text, least)
    if options.patterns is None:
        inputs_of(options)


def inputs_of(options: BenchOptions) -> list[str]:
    """Return the inputs of --inputs, by default all that there are. Raises UserError for another name."""
    known = SHAPE_INPUTS if options.shape is not None else MODEL_INPUTS
    names = list(known) if options.inputs is None else options.inputs.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"Expected --inputs of {', '.join(known)}, got {unknown[0]!r}.")
    return names


def whole_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Parse a list of whole numbers such as 1,8,64. Raises UserError for other text, and for a number below `least`.

    option: the option's name, for the error
    """
    try:
        values = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise UserError(f"Expected whole numbers with commas between them for {option}, got {text!r}.") from None
    if min(values) < least:
        raise UserError(f"Expected numbers of at least {least} for {option}, got {min(values)}.")
    return values
