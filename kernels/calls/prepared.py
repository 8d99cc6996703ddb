"""Tell whether a call of a module is one that was checked before, so that it can run without checks.

The checks of a call, the choice of its kernel and the making of its results take the host longer than few rows take the
GPU. So a module keeps what its last calls were, by shape, and functions of the kernel's that run the like of them.

    prepared = Prepared.of(module, x, run_again)
    if prepared.fits(module, x):
        y, stats = prepared.run(x)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twell.kernels.stats import Stats


@dataclass(slots=True)
class Prepared:
    """A call of a module that was checked, and what makes another call the same.

    weights: tensors by name, as the module holds them, and the addresses of their values
    options: what the module and its probe asked for
    """

    run: Callable[[Tensor], tuple[Tensor, Stats]]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    weights: tuple[tuple[str, Tensor | None, int], ...]
    options: tuple[Any, ...]

    @classmethod
    def of(cls, module: Any, x: Tensor, run: Callable[[Tensor], tuple[Tensor, Stats]]) -> Prepared:
        """Return what a call of the module on x was."""
        weights = tuple((name, w, 0 if w is None else w.data_ptr()) for name, w in module._parameters.items())
        return cls(run, x.shape, x.dtype, x.device, weights, _options(module))

    def fits(self, module: Any, x: Tensor) -> bool:
        """Return whether a call on x needs no other check: it is like the one before, and follows no gradient.

        The probe's rows are not looked at, as nnz alone does not read them.
        """
        if x.shape != self.shape or x.dtype is not self.dtype or x.device != self.device or x.requires_grad:
            return False
        parameters = module._parameters
        for name, weight, address in self.weights:
            if parameters[name] is not weight:
                return False
            if weight is not None and (weight.requires_grad or weight.data_ptr() != address):
                return False
        return _options(module) == self.options

    def is_of_weights_of(self, other: Prepared) -> bool:
        """Return whether both calls read the same tensors, which each keeps in memory."""
        pairs = zip(self.weights, other.weights, strict=True)
        return all(mine is its and address == at for (_, mine, address), (_, its, at) in pairs)


def _options(module: Any) -> tuple[Any, ...]:
    """Return what a module and its probe ask of a call, beside its tensors."""
    probe = module.probe
    asked = module.activation, module.up_relu, module.threshold, module.kernel
    return *asked, probe.probes, probe.layout, probe.want_packed
