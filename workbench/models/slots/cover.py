"""Lay code of ours over modules of someone else's model, and keep it out of the model's copies.

The idea: what is ours stands among a module's own attributes, as `forward`, and among its hooks. A copy would carry it
along, run the original's weights and be counted with it. So while a module has anything of ours, it also has a
`__deepcopy__`, which sets that aside for as long as the copy takes. Pickling is refused.

    cover = Cover()
    beneath = cover.put(module, forward)  # what module.forward was
    cover.remove()
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from twell.workbench.errors import UserError

Forward = Callable[..., Any]
Settle = Callable[[], None]  # brings a module's weights into the state that a copy is to have
COPYING = ("__deepcopy__", "__reduce_ex__")
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
# What of a module is ours: names of attributes and numbers of hooks, each with what a copy needs first.
_OURS: WeakKeyDictionary[nn.Module, dict[str | int, Settle | None]] = WeakKeyDictionary()


class Cover:
    """The modules whose `forward` is covered; `remove` uncovers them for good, `lift` until they are laid on again."""

    def __init__(self, settle: Settle | None = None) -> None:
        """settle: called before one of the modules is copied"""
        self._settle = settle
        self._forwards: dict[nn.Module, Forward] = {}

    def put(self, module: nn.Module, forward: Forward) -> Forward:
        """Cover a module's forward; return the one beneath."""
        beneath = module.forward
        self._lay(module, forward)
        self._forwards[module] = forward
        return beneath

    def lay(self) -> None:
        """Cover every module again."""
        for module, forward in self._forwards.items():
            self._lay(module, forward)

    def _lay(self, module: nn.Module, forward: Forward) -> None:
        if "forward" in vars(module):
            raise UserError(
                f"Expected an FFN whose forward is its class's, got a {type(module).__name__} that has one of its own: "
                "it is watched already, or another library has wrapped it."
            )
        set_attribute(module, "forward", forward, self._settle)

    def lift(self) -> None:
        """Uncover every module."""
        for module in self._forwards:
            remove_attribute(module, "forward")

    def remove(self) -> None:
        """Uncover every module, and forget them."""
        self.lift()
        self._forwards.clear()


def set_attribute(module: nn.Module, name: str, value: Any, settle: Settle | None = None) -> None:
    """Give a module an attribute that its copies do not have. settle: as in `Cover`"""
    vars(module)[name] = value
    _keep_from_copies(module, name, settle)


def remove_attribute(module: nn.Module, name: str) -> None:
    """Remove such an attribute, if it is there."""
    vars(module).pop(name, None)
    _forget(module, name)


def own_hook(module: nn.Module, handle: RemovableHandle) -> Callable[[], None]:
    """Keep a module's hook from its copies; return what removes it."""
    _keep_from_copies(module, handle.id, None)

    def remove() -> None:
        handle.remove()
        _forget(module, handle.id)

    return remove


def _keep_from_copies(module: nn.Module, what: str | int, settle: Settle | None) -> None:
    _OURS.setdefault(module, {})[what] = settle
    vars(module).update(dict(zip(COPYING, (partial(_copied, module), _refuse_pickling), strict=True)))


def _forget(module: nn.Module, what: str | int) -> None:
    ours = _OURS.get(module, {})
    ours.pop(what, None)
    if not ours:
        _OURS.pop(module, None)
        for name in COPYING:
            vars(module).pop(name, None)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module as it is without what is ours."""
    ours, attributes = _OURS[module], vars(module)
    for settle in ours.values():
        if settle is not None:
            settle()
    aside = {name: attributes.pop(name) for name in (*COPYING, *ours) if name in attributes}
    for name in HOOKS:
        aside[name] = attributes[name]
        attributes[name] = type(aside[name])(
            (number, hook) for number, hook in aside[name].items() if number not in ours
        )
    try:
        return copy.deepcopy(module, memo)
    finally:
        attributes.update(aside)


def _refuse_pickling(*_: Any) -> None:
    raise UserError(
        "Expected a model that is not watched to pickle, got one that is: leave the watch first, or save its "
        "state_dict()."
    )
