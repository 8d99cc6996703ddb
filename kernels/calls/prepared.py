"""Tell whether a call of a module is one that was checked before, so that it can run without checks.

The checks of a call, the choice of its kernel and the making of its results take the host longer than few rows take the
GPU. So a module keeps what its last calls were, by shape, and functions of the kernel's that run the like of them.

    prepared = Prepared.of(module, x, run_again)  # for further x of this shape
    if prepared.fits(module, x):
        y, nnz, finite = prepared.run(x)
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from twell.kernels.stats import RunAgain

_OPTIONS = attrgetter("activation", "up_relu", "threshold", "kernel")  # what a module asks of a call
_COUNTS = attrgetter("probes", "layout", "want_packed")  # and its probe


@dataclass(slots=True)
class Prepared:
    """A call of a module that was checked, and what makes another call of its shape the same.

    parameters: all that the module has by name, in order, None among them; weights: those that are tensors
    addresses: of the weights' values
    options: what the module and its probe asked for
    """

    run: RunAgain
    dtype: torch.dtype
    device: torch.device
    parameters: tuple[Tensor | None, ...]
    weights: tuple[Tensor, ...]
    addresses: list[int]
    options: tuple[Any, ...]

    @classmethod
    def of(cls, module: Any, x: Tensor, run: RunAgain) -> Prepared:
        """Return what a call of the module on x was."""
        parameters = tuple(module._parameters.values())
        weights = tuple(weight for weight in parameters if weight is not None)
        options = _OPTIONS(module), _COUNTS(module.probe)
        return cls(run, x.dtype, x.device, parameters, weights, [*map(Tensor.data_ptr, weights)], options)

    def fits(self, module: Any, x: Tensor) -> bool:
        """Return whether a call on x, of the same shape, needs no other check: it is like the one before, and follows
        no gradient.

        The probe's rows are not looked at, as nnz alone does not read them.
        """
        if type(x) is not Tensor or x.dtype is not self.dtype or x.device != self.device:
            return False
        if torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in self.weights)):
            return False
        if not all(map(is_, module._parameters.values(), self.parameters)):
            return False
        if [*map(Tensor.data_ptr, self.weights)] != self.addresses:
            return False
        return (_OPTIONS(module), _COUNTS(module.probe)) == self.options

    def is_of_weights_of(self, other: Prepared) -> bool:
        """Return whether both calls read the same tensors, which each keeps in memory."""
        return self.addresses == other.addresses and all(map(is_, self.parameters, other.parameters))
