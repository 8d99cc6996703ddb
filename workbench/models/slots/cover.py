"""Lay code of ours over modules of someone else's model, and keep it out of the model's copies.

The idea: what is ours stands among a module's own attributes, as `forward`, and among its hooks. A copy would carry it
along, run the original's weights and be counted with it. So while a module has anything of ours, it also has a
`__deepcopy__`, which sets that aside for as long as the copy takes. Pickling is refused. What another library has put
there before lies beneath ours, and is there again afterwards and in copies.

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
# What of a module is ours: names of attributes and numbers of hooks, each with what a copy needs first, and with what
# another library has as that attribute.
_OURS: WeakKeyDictionary[nn.Module, dict[str | int, tuple[Settle | None, dict[str, Any]]]] = WeakKeyDictionary()


class Cover:
    """The modules whose `forward` is covered; `remove` uncovers them for good, `lift` until they are laid on again."""

    def __init__(self, settle: Settle | None = None, over_others: bool = False) -> None:
        """settle: called before one of the modules is copied; over_others: whether a module may have a forward of
        another library beneath, which ours calls"""
        self._settle, self._over_others = settle, over_others
        self._forwards: dict[nn.Module, tuple[Forward, Any]] = {}  # ours, and the instance's own beneath
        self._lifts: list[Settle] = []

    def put(self, module: nn.Module, forward: Forward) -> Forward:
        """Cover a module's forward; return the one beneath."""
        refuse_covered(module)
        if is_wrapped(module) and not self._over_others:
            raise UserError(
                f"Expected modules whose forward is their class's, got a {type(module).__name__} that another library "
                "has wrapped: give the model as it was loaded."
            )
        beneath = module.forward
        self._forwards[module] = forward, vars(module).get("forward")
        self._lifts.append(set_attribute(module, "forward", forward, self._settle))
        return beneath

    def lay(self) -> None:
        """Cover every module again."""
        for module, (forward, beneath) in self._forwards.items():
            if vars(module).get("forward") is not beneath:
                raise UserError(
                    f"Expected a {type(module).__name__} as it was when the watch began, got one that another library "
                    "has wrapped since: begin the watch after that."
                )
            self._lifts.append(set_attribute(module, "forward", forward, self._settle))

    def lift(self) -> None:
        """Uncover every module."""
        while self._lifts:
            self._lifts.pop()()

    def remove(self) -> None:
        """Uncover every module, and forget them."""
        self.lift()
        self._forwards.clear()


def refuse_covered(*modules: nn.Module) -> None:
    """Raise UserError for a module whose forward is covered already."""
    for module in modules:
        if "forward" in _OURS.get(module, {}):
            raise UserError(
                f"Expected a model that is not watched yet, got a {type(module).__name__} that is: leave the first "
                "watch before the next."
            )


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own, as other libraries put there."""
    return "forward" in vars(module)


def set_attribute(module: nn.Module, name: str, value: Any, settle: Settle | None = None) -> Callable[[], None]:
    """Give a module an attribute that its copies do not have; return what takes it back. settle: as in `Cover`"""
    attributes = vars(module)
    before = {name: attributes[name]} if name in attributes else {}
    is_first = name not in _OURS.get(module, {})
    attributes[name] = value
    if is_first:
        _keep_from_copies(module, name, settle, before)

    def remove() -> None:
        attributes.pop(name, None)
        attributes.update(before)
        if is_first:
            _forget(module, name)

    return remove


def own_hook(module: nn.Module, handle: RemovableHandle) -> Callable[[], None]:
    """Keep a module's hook from its copies; return what removes it."""
    _keep_from_copies(module, handle.id, None, {})

    def remove() -> None:
        handle.remove()
        _forget(module, handle.id)

    return remove


def _keep_from_copies(module: nn.Module, what: str | int, settle: Settle | None, beneath: dict[str, Any]) -> None:
    _OURS.setdefault(module, {})[what] = settle, beneath
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
    for settle, _ in ours.values():
        if settle is not None:
            settle()
    aside = {name: attributes.pop(name) for name in (*COPYING, *ours) if name in attributes}
    for _, beneath in ours.values():
        attributes.update(beneath)
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
