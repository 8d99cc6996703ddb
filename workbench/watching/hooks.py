"""Hear when a model is called, by whatever way: `model(…)`, its decoder, `generate`, compiled or not.

The idea: hooks on the model and on its decoder, of which the outer one counts. Hooks on the model run outside of
compiled code, and are kept out of it; those on the decoder are nothing inside it. Calls of a cache's methods that move
or cut its sequences are heard on the class, for as long as any watch is on: caches are copied, and would carry a
wrapper of their own to the copy.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from twell.workbench.errors import UserError
from twell.workbench.models.slots.cover import own_hook, set_attribute

MOVES = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop", "reset")


class Listener(Protocol):
    """An object that is told of each call of a model."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None: ...

    def end(self, output: Any) -> None: ...

    def drop(self) -> None: ...

    def moved(self, cache: Any, method: str, given: Any) -> None: ...

    def generation_begins(self, prompt: int, ends: tuple[int, ...]) -> None: ...

    def generation_ends(self, keeps_cache: bool) -> None: ...


LISTENERS: list[Listener] = []
_BENEATH: dict[tuple[type, str], Any] = {}  # methods of caches while any watch is on


class CallHooks:
    """The hooks of one watch. Of a call within a call, as of the model's decoder, the outer one alone is heard."""

    def __init__(self, model: nn.Module, body: nn.Module, listener: Listener) -> None:
        self.listener, self.model, self.body = listener, model, body
        self._owner: nn.Module | None = None  # the module whose call is being heard
        self._process, self._thread = os.getpid(), 0
        self._handled: BaseException | None = None  # what the caller's code is handling, if anything
        self._stack = ExitStack()

    def put(self) -> None:
        """Begin to hear."""
        hooked = [self.model] if self.body is self.model else [self.model, self.body]
        for module in hooked:
            outer = module is self.model
            before, after = (torch.compiler.disable(f) if outer else f for f in (self._before, self._after))
            always = {"always_call": True} if outer else {}
            hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            self._stack.callback(own_hook(module, hook))
            self._stack.callback(own_hook(module, module.register_forward_hook(after, **always)))
        if hasattr(self.model, "generate"):
            whole: Any = self.model
            self._stack.callback(set_attribute(whole, "generate", self._generate(whole.generate)))
        _listen(self.listener)
        self._stack.callback(_unlisten, self.listener)

    def remove(self) -> None:
        """Hear no more."""
        self._stack.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or (self._owner is self.model and module is self.body):
            return
        if os.getpid() != self._process:
            raise UserError("Expected calls in the process that began the watch, got one in a fork of it: watch there.")
        if self._owner is not None and self._thread != threading.get_ident():
            raise UserError(
                "Expected one call of a watched model at a time, got one in another thread while the first ran: let "
                "one end before the next."
            )
        if self._owner is not None:  # a call that raised
            self.listener.drop()
        self._owner, self._thread, self._handled = module, threading.get_ident(), sys.exc_info()[1]
        try:
            self.listener.begin(module, args, keywords)
        except BaseException:
            self._owner = None
            raise

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._owner is not module or self._thread != threading.get_ident():
            return
        self._owner = None
        if output is None and sys.exc_info()[1] is not self._handled:  # it raised
            self.listener.drop()
        else:
            self.listener.end(output)

    def _generate(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def generate(*args: Any, **keywords: Any) -> Any:
            self.listener.generation_begins(_prompt(args, keywords), _ends(self.model, keywords))
            try:
                return own(*args, **keywords)
            finally:
                keeps = bool(keywords.get("return_dict_in_generate")) or keywords.get("past_key_values") is not None
                self.listener.generation_ends(keeps)

        return generate


def _prompt(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """Return how many columns the prompt of a call of `generate` has."""
    given = [*args[:1], *(keywords.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    return next((int(one.shape[1]) for one in given if isinstance(one, Tensor) and one.dim() > 1), 1)


def _ends(model: Any, keywords: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence in a call of `generate`."""
    config = keywords.get("generation_config") or model.generation_config
    ends = keywords.get("eos_token_id", getattr(config, "eos_token_id", None))
    if isinstance(ends, Tensor):
        ends = ends.tolist()
    return tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (int(ends),)


def _listen(listener: Listener) -> None:
    if not LISTENERS:
        for kind in (Cache, EncoderDecoderCache):
            for name in MOVES:
                if name in vars(kind):
                    _BENEATH[kind, name] = own = vars(kind)[name]
                    setattr(kind, name, _heard(name, own))
    LISTENERS.append(listener)


def _unlisten(listener: Listener) -> None:
    LISTENERS.remove(listener)
    if not LISTENERS:
        for (kind, name), own in _BENEATH.items():
            setattr(kind, name, own)
        _BENEATH.clear()


def _heard(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        result = own(self, *args, **keywords)
        given = next(iter([*args, *keywords.values()]), None)
        for listener in list(LISTENERS):
            listener.moved(self, name, given)
        return result

    return method
