"""Refuse a command's wrong options before torch is loaded, which takes seconds.

    refuse(options)    # of any command; what needs a model or a device to be told is left to the command

Everything that is asked here is asked again where the work is done, but for the GPU by the same functions: from Python
nobody comes by here. Cost: some milliseconds; where a run is named, reading its manifest.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twell.workbench.ablations.options import AblateOptions, PruneOptions, refuse_target
from twell.workbench.ablations.spelled import parse
from twell.workbench.bench.options import BenchOptions, refuse_options
from twell.workbench.errors import UserError
from twell.workbench.option_fields import check_bounds
from twell.workbench.options import NO_GPU, CaptureOptions, TrainOptions, VerifyOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.checks.unfinished import refuse_unfinished
from twell.workbench.run.store import open_run, refuse_existing
from twell.workbench.text.sources import open_sources
from twell.workbench.training.recipes import recipe_of

DRIVER = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")  # of it: on Linux, under WSL, on a Jetson
LIBRARY = "libcuda.so.1"  # the driver's, which PyTorch's looks for by this name


def refuse(options: Any) -> None:
    """Raise UserError for options that the command would refuse whatever the model and the device are."""
    check_bounds(options)
    check = CHECKS.get(type(options))
    if check is not None:
        check(options)
        open_sources(getattr(options, "text", ()))
        refuse_unwritable(options)
    if getattr(options, "device", None) == "cuda" and has_no_gpu():
        raise UserError(NO_GPU)


def refuse_unwritable(options: Any) -> None:
    """Raise UserError where the results could not be written: they come last, after minutes or hours."""
    folder: Path | None = getattr(options, "out", None)
    if isinstance(options, VerifyOptions):
        folder = options.run
    elif isinstance(options, AblateOptions) and (Path(options.target) / manifests.FILE).exists():
        folder = Path(options.target)
    if folder is None:
        return
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.access(path, os.F_OK))
    if not os.access(there, os.W_OK):
        what, instead = (
            ("--out in a folder", "choose another --out")
            if folder == getattr(options, "out", None)
            else ("a run", "copy it to a folder of yours")
        )
        raise UserError(f"Expected {what} that can be written to, got {folder}: {instead}.")


def has_no_gpu() -> bool:
    """Return whether PyTorch sees no GPU for certain: it is built for none, or nothing of NVIDIA's driver is here.

    What is in doubt, as a driver without a GPU, PyTorch is to say.
    """
    torch = importlib.util.find_spec("torch")  # without importing it
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    if version is None or not version.is_file():
        return False
    built = runpy.run_path(str(version))
    if built.get("hip"):  # of AMD, of whose driver nothing is known here
        return False
    return not built.get("cuda", True) or not (any(map(os.path.exists, DRIVER)) or _loads(LIBRARY))


def _loads(library: str) -> bool:
    """Return whether a library is where the machine's are looked for."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _capture(options: CaptureOptions) -> None:
    if not options.resume and os.environ.get("RANK", "0") == "0":  # other ranks may find the first one's run
        refuse_unfinished(options.out)
        refuse_existing(options.out)


def _ablate(options: AblateOptions) -> None:
    if not (Path(options.target) / manifests.FILE).exists():
        refuse_target(options)
    else:
        parse(options.condition, open_run(options.target).layers)


def _prune(options: PruneOptions) -> None:
    open_run(options.run)
    refuse_existing(options.out)


def _verify(options: VerifyOptions) -> None:
    open_run(options.run)


CHECKS: dict[type, Callable[[Any], object]] = {
    AblateOptions: _ablate,
    BenchOptions: refuse_options,
    CaptureOptions: _capture,
    PruneOptions: _prune,
    TrainOptions: recipe_of,
    VerifyOptions: _verify,
}
