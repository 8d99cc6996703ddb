"""Run our FFN in the place of a model's own, without replacing a module or a parameter.

The idea: the `forward` of a few modules is covered by one of ours on the instance, and uncovered afterwards; hooks,
parameters, their names and their order are the model's own all the while. Where gradients are to be followed, under
autocast, or where someone has put a hook, another module or a forward into the FFN, the model's own code runs, densely,
and its gate pre-activations and hidden values are counted as they come by; else the sparse op runs on the model's own
weights.
A kernel that reads w_down by neuron gets it in that order: the parameter then has other storage, with the same values,
until the FFN runs densely again or is given back.

torch.compile sees one opaque op for each FFN, so that a model stays one graph, and recompiles when `forward` is covered
and uncovered.

Cost: a few µs a call; a copy of w_down for each layer, where the kernel wants it by neuron.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as numbers
from typing import Any

import torch
from torch import Tensor, nn

from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.workbench.errors import UserError
from twell.workbench.models.slots.cover import Cover, Forward, is_wrapped, refuse_covered

OnFired = Callable[[int, Tensor, float], None]  # gets a layer, values [n, d_ff], and above what they fire
RowsInOrder = Callable[[Tensor], Tensor]  # returns a matrix of an FFN's rows [..., size] with rows in the call's order
SLOTS: dict[int, Slot | MapSlot] = {}  # by key, for the ops below; only while they are in a model
_KEYS = numbers()


class Slot:
    """One layer's FFN, whose firings our op decides.

    ffn: ours, on the same weights; entry: the module that is called with [..., d_model]; maps: gate, up, down, or in,
    out; idle: modules that come after an entry that does all, in layers that call them one by one
    """

    def __init__(
        self,
        ffn: SparseFFN,
        entry: nn.Module,
        maps: tuple[nn.Module, ...],
        idle: tuple[nn.Module, ...],
        probe: Probe,
    ) -> None:
        refuse_covered(entry, *maps, *idle)  # before anything is covered
        self.ffn, self.entry, self.maps = ffn, entry, maps
        self._probe_before, ffn.probe = ffn.probe, probe
        self.key, self.cover = next(_KEYS), Cover(self.own_storage, over_others=True)
        self.touched = torch.zeros(1, dtype=torch.int32)  # written by an op that must not be optimised away
        self.on_hidden: Callable[[int, Tensor], None] | None = None  # gets the hidden values of a dense pass
        self.on_fired: OnFired | None = None  # where it is set, nothing else of a dense pass is counted
        self.in_order: RowsInOrder | None = None
        self.stays_dense = False  # whether the model's own code runs always
        self._gate: Tensor | None = None
        self._up: Tensor | None = None
        self._original: Tensor | None = None  # w_down's own storage, while the parameter has it by neuron
        SLOTS[self.key] = self
        parts = dict.fromkeys([*entry.modules(), *maps, *idle])
        heard = [one for one in parts if one is not entry or one in maps]  # of one on the whole FFN nothing is lost
        self._hooks = [hooks for one in heard for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._is_wrapped = any(map(is_wrapped, parts))
        self._began_altered = self._is_wrapped or any(self._hooks)
        own: dict[nn.Module, Any] = {module: module.forward for module in (entry, *maps, *idle)}
        if maps:
            gate, down = maps[0], maps[-1]
            self._cover_maps(own, gate, maps[1] if ffn.up_relu else None, down)
        self._cover_entry(own, entry, idle)
        self._parts = [(vars(one), vars(one).get("forward"), dict(one._modules)) for one in parts]

    def _cover_maps(self, own: dict[nn.Module, Any], gate: nn.Module, up: nn.Module | None, down: nn.Module) -> None:
        """Have the maps keep what a dense pass is counted by."""

        def keep_gate(x: Tensor) -> Tensor:
            self._gate = own[gate](x)
            return self._gate

        def keep_up(x: Tensor) -> Tensor:
            self._up = own[up](x) if up is not None else None
            return self._up  # type: ignore[return-value]

        def count_down(hidden: Tensor) -> Tensor:
            z, self._gate = self._gate, None
            u, self._up = self._up, None
            if self.is_altered():  # then what w_down gets is all that is known to be what fires
                z, u = hidden.abs().sqrt() if self.ffn.activation == "relu2" else hidden.abs(), None
            if z is not None:
                self.count(z, hidden, u)
            return own[down](hidden)

        self._own_gate = keep_gate
        if self.entry is not gate:
            self.cover.put(gate, keep_gate)
        if up is not None:
            self.cover.put(up, keep_up)
        self._count_down = count_down

    def _cover_entry(self, own: dict[nn.Module, Any], entry: nn.Module, idle: tuple[nn.Module, ...]) -> None:
        dense = self._own_gate if self.maps and entry is self.maps[0] else own[entry]

        def forward(*args: Any, **keywords: Any) -> Tensor:
            given = (*args, *keywords.values())
            if len(given) != 1 or self.is_dense(given[0]):  # what more than x is for, the FFN's own code knows alone
                if not torch.compiler.is_compiling():
                    self.own_storage()
                return dense(*args, **keywords)
            if torch.compiler.is_compiling():
                return torch.ops.twell.covered_ffn(given[0], self.key)
            return self.run(given[0])

        self.cover.put(entry, forward)
        for module in {*idle, *self.maps[-1:]}:
            self.cover.put(module, self._after(module, own[module], module in idle))

    def _after(self, module: nn.Module, own: Forward, idle: bool) -> Forward:
        """Return the forward of a module that runs after the gate: nothing, where the entry has done it all."""
        beneath = self._count_down if self.maps and module is self.maps[-1] else own

        def forward(x: Tensor) -> Tensor:
            return x if idle and not self.is_dense(x) else beneath(x)

        return forward

    def is_dense(self, x: Tensor) -> bool:
        """Return whether the model's own code is to run: to follow gradients, under autocast, or in another dtype."""
        if not self.maps:
            return False
        if self.stays_dense or self.is_altered():
            return True
        weight: Any = self.maps[0].weight
        if torch.is_grad_enabled() and (x.requires_grad or any(one.weight.requires_grad for one in self.maps)):
            return True
        return torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype  # type: ignore[arg-type]

    def is_altered(self) -> bool:
        """Return whether hooks, modules or code of others are in the FFN. Compiled code has those from before the
        watch: as everywhere, what comes after compiling is not in it."""
        if torch.compiler.is_compiling():
            return self._began_altered
        return (
            self._is_wrapped
            or any(self._hooks)
            or any(
                attributes.get("forward") is not forward or attributes["_modules"] != modules
                for attributes, forward, modules in self._parts
            )
        )

    def run(self, x: Tensor) -> Tensor:
        """Run the sparse op on x [..., d_model], and report to the probe."""
        ffn = self.ffn
        if self.maps:
            self.by_neuron()
            weight: Any = self.maps[0].weight
            if weight.data_ptr() != ffn.w_gate.data_ptr():
                raise UserError(
                    f"Expected the weights of layer {ffn.layer} where they were, got them moved, cast or replaced: "
                    "leave the watch before that, and begin another."
                )
        rows = x if self.in_order is None else self.in_order(x)
        y = SparseFFN.forward(ffn, rows)
        return y if rows is x else y.transpose(0, 1).contiguous()

    def count(self, gate: Tensor, hidden: Tensor, up: Tensor | None) -> None:
        """Count a dense pass: its gate pre-activations and hidden values, [..., d_ff]."""
        if torch.compiler.is_compiling():
            up = None if up is None else up.detach()
            torch.ops.twell.covered_count(gate.detach(), hidden.detach(), up, self.touched, self.key)
            return
        if self.on_hidden is not None:
            self.on_hidden(self.ffn.layer, hidden)
        self.report(gate.detach(), hidden.detach(), None if up is None else up.detach())

    def report(self, gate: Tensor, hidden: Tensor, up: Tensor | None) -> None:
        if self.in_order is not None:
            gate, hidden = self.in_order(gate), self.in_order(hidden)
            up = None if up is None else self.in_order(up)
        if self.on_fired is not None:
            self.on_fired(self.ffn.layer, gate.reshape(-1, self.ffn.d_ff), 0.0)
            return
        with torch.no_grad():
            z, h = (matrix.reshape(-1, self.ffn.d_ff) for matrix in (gate, hidden))
            self.ffn.report_dense(h, z, h, None if up is None else up.reshape(-1, self.ffn.d_ff))

    def by_neuron(self) -> None:
        """Hold w_down in the order that the kernel reads, in the parameter itself, so that there is one truth."""
        down: Any = self.maps[-1]
        wanted = self.ffn.w_down
        if self._original is not None or down.weight.data_ptr() == wanted.data_ptr():
            return
        with torch.inference_mode(False), torch.no_grad():
            self._original = down.weight.data
            wanted.data.copy_(self._original)
            down.weight.data = wanted.data

    def own_storage(self) -> None:
        """Hold w_down in its own storage again, with what was written to it meanwhile."""
        if self._original is None:
            return
        down: Any = self.maps[-1]
        original, self._original = self._original, None
        if down.weight.data_ptr() == self.ffn.w_down.data_ptr():
            with torch.inference_mode(False), torch.no_grad():
                original.copy_(down.weight.data)
                down.weight.data = original

    def remove(self) -> None:
        """Give the FFN back as it was."""
        self.cover.remove()
        self.ffn.probe = self._probe_before
        self.own_storage()
        SLOTS.pop(self.key, None)


class MapSlot:
    """One layer's map back to d_model, whose inputs above a threshold are counted; the FFN runs as it is."""

    def __init__(self, counted: CountedMap, down: nn.Module) -> None:
        refuse_covered(down)
        self.counted, self.key, self.cover = counted, next(_KEYS), Cover(over_others=True)
        self.touched = torch.zeros(1, dtype=torch.int32)
        self.on_hidden: Callable[[int, Tensor], None] | None = None
        self.on_fired: OnFired | None = None
        self.in_order: RowsInOrder | None = None
        self.stays_dense = True
        SLOTS[self.key] = self

        def forward(hidden: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                torch.ops.twell.covered_count(hidden.detach(), hidden.detach(), None, self.touched, self.key)
            else:
                if self.on_hidden is not None:
                    self.on_hidden(counted.layer, hidden)
                self.report(hidden.detach(), hidden.detach(), None)
            return own(hidden)

        own = self.cover.put(down, forward)

    def report(self, gate: Tensor, hidden: Tensor, up: Tensor | None) -> None:
        hidden = hidden if self.in_order is None else self.in_order(hidden)
        if self.on_fired is not None:
            self.on_fired(self.counted.layer, hidden.reshape(-1, self.counted.d_ff).abs(), self.counted.threshold)
            return
        with torch.no_grad():
            self.counted.report(hidden)

    def own_storage(self) -> None:
        """Do nothing: no weight is moved."""

    def remove(self) -> None:
        """Give the map back as it was."""
        self.cover.remove()
        SLOTS.pop(self.key, None)


@torch.library.custom_op("twell::covered_ffn", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def covered_ffn(x: Tensor, key: int) -> Tensor:
    """Run the FFN of a slot inside compiled code, and report to its probe."""
    slot = SLOTS[key]
    assert isinstance(slot, Slot)
    return slot.run(x)


@covered_ffn.register_fake
def _(x, key):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("twell::covered_count", mutates_args=("touched",), tags=(torch.Tag.cudagraph_unsafe,))
def covered_count(gate: Tensor, hidden: Tensor, up: Tensor | None, touched: Tensor, key: int) -> None:
    """Count a dense pass inside compiled code; touched: written so that the call is not optimised away."""
    touched.add_(1)
    SLOTS[key].report(gate, hidden, up)


@covered_count.register_fake
def _(gate, hidden, up, touched, key):  # type: ignore[no-untyped-def]
    return None
