"""Compare an FFN that was found with ours on its weights: what it computes, not what its names suggest.

Hooks are left out of it: what they change in a call, the model's own code runs and is counted, see `slots`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from twell.kernels.modules import Probe, SparseFFN
from twell.workbench.errors import UserError
from twell.workbench.models.find_ffns import COUNT, FoundFFN, evaluating

ROWS = 8  # random inputs that an FFN is compared on
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a row, by its greatest; of 16-bit types 3e-2
LOUD = 8  # times as great are half of these; in float16 none, where squares would overflow


@contextmanager
def _unhooked(one: FoundFFN) -> Iterator[None]:
    """Run an FFN's parts without their hooks inside this context."""
    parts = dict.fromkeys([*one.entry.modules(), *one.maps, *one.idle])
    hooks = [each for part in parts for each in (part._forward_pre_hooks, part._forward_hooks)]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def ours(name: str, one: FoundFFN, layer: int, kernel: str, probe: Probe, advice: str = COUNT) -> SparseFFN:
    """Make our FFN on the weights of one that was found, or return it if it is ours.

    Raises UserError where the two compute different outputs on a few random inputs, or the model's own lets something
    of what does not fire through. advice: what to do then
    """
    if isinstance(one.entry, SparseFFN):
        return one.entry
    make = SparseFFN.gated if len(one.maps) == 3 else SparseFFN.plain
    x, own, leaks = _own_outputs(one)
    got = "other outputs on the same inputs"
    for up_relu in (False, True) if one.up_relu is None and len(one.maps) == 3 else (bool(one.up_relu),):
        given: dict[str, Any] = {"up_relu": up_relu} if len(one.maps) == 3 else {}
        ffn = make(*one.maps, layer=layer, kernel=kernel, probe=probe, activation=one.activation, **given)
        if _agrees(ffn(x), own):
            if not leaks:
                return ffn
            got = "hidden values other than 0 of negative ones"
    formula = "down(act(gate) * up)" if len(one.maps) == 3 else "out(act(in))"
    raise UserError(
        f"Expected the FFN at {one.path} of {name} to compute {formula} with {one.activation}, got {got}: name what it "
        f"computes with ffns=, or {advice}."
    )


def _own_outputs(one: FoundFFN) -> tuple[Tensor, Tensor, bool]:
    """Return random inputs, what the model's own FFN makes of them, and whether it lets something of what does not
    fire through, as a leaky ReLU: too little for outputs in 16 bits to tell. No generator of torch is moved on."""
    weight = one.maps[0].weight
    x = torch.randn(1, ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    if weight.dtype != torch.float16:
        x[:, ROWS // 2 :] *= LOUD  # of an activation with a ceiling
    x = x.to(weight.device, weight.dtype)
    seen: dict[str, Tensor] = {}
    with (
        evaluating(one.entry),
        _unhooked(one),
        torch.autocast(weight.device.type, enabled=False),
        one.maps[0].register_forward_hook(lambda _map, _x, z: seen.update(gate=z)),
        one.maps[-1].register_forward_pre_hook(lambda _map, given: seen.update(hidden=given[0]) if given else None),
    ):
        y = one.entry.forward(x)
        if one.idle:
            seen["gate"] = y
        for module in one.idle:
            seen["hidden"], y = y, module.forward(y)
    gate, hidden = seen.get("gate"), seen.get("hidden")
    if gate is None or hidden is None or gate.shape != hidden.shape:  # of code that does not call its maps one by one
        return x, y, False
    return x, y, bool(hidden[gate <= 0].any())


def _agrees(ours: Tensor, own: Any) -> bool:
    if not isinstance(own, Tensor) or own.shape != ours.shape:
        return False
    most = TOLERANCE.get(own.dtype, 3e-2) * own.double().abs().amax(-1, keepdim=True)
    return bool(((ours.double() - own.double()).abs() <= most).all())
