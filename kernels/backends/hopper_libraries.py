"""The libraries of the `hopper` kernel: one for each activation, built and loaded when a call first needs it.

ReLU's is needed by nearly everyone, the others by few, and each takes nvcc about ten seconds. Sources that no flag
changes are compiled once for all of them.

    getattr(torch.ops.twell, loaded_op(relu2=True, up_relu=False))
"""

from __future__ import annotations

from functools import cache

from twell.kernels import build
from twell.kernels.build import Library, Source

ARCH = "-gencode=arch=compute_90a,code=sm_90a"
RELU2, UP_RELU = "-DTWELL_RELU2", "-DTWELL_UP_RELU"  # flags of csrc/hopper/activation.cuh
SOURCES = {  # and the flags that each depends on
    "many_rows/gate": (RELU2, UP_RELU),
    "many_rows/plan": (),
    "many_rows/up": (UP_RELU,),
    "many_rows/down": (),
    "few_rows/launch": (RELU2, UP_RELU),
    "mid_rows/launch": (RELU2, UP_RELU),
    "probes/probes": (),
}


@cache
def library(relu2: bool = False, up_relu: bool = False) -> Library:
    """Return the sources for an activation, whose op is named like the library; those that no flag changes are shared.

    relu2: ReLU squared; up_relu: a ReLU on the up branch too
    """
    flags = [flag for flag, used in ((RELU2, relu2), (UP_RELU, up_relu)) if used]
    name = "hopper" + "_relu2" * relu2 + "_up_relu" * up_relu
    return Library(
        name,
        (
            *(
                Source(f"hopper/{path}.cu", (ARCH, f"-DTWELL_T={value}", *(flag for flag in flags if flag in taken)))
                for path, taken in SOURCES.items()
                for value in ("__nv_bfloat16", "__half")
            ),
            Source("hopper/bindings.cpp", tuple(flags)),
        ),
        headers=("common/*", "hopper/**/*.cuh", "hopper/**/*.h"),
        seconds=15,
        cuda=True,
        fakes=((f"twell::{name}_ffn", lambda *_: None),),
    )


@build.constant
def loaded_op(relu2: bool, up_relu: bool) -> str:
    """Return the name of an activation's op in torch.ops.twell, and load its library if no call has yet.

    Raise BuildError with the reason if it cannot be built.
    """
    chosen = library(relu2, up_relu)
    if (reason := build.failure(chosen)) is not None:
        raise build.BuildError(reason)
    return f"{chosen.name}_ffn"
