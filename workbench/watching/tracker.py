"""Follow a watched model's calls: which rows of each are tokens of which sequences, and what they fired.

The idea: before a call the layers get a probe that says which rows count; after it, their counts are on the way to the
host, and the call is one more read of the sequences that its cache holds. Numbers are given to sequences when they
begin; their rows are handed on when they have ended, in that order.

Cost: some ten small operations on the device a call, and none that waits for it, but where packed texts are kept row by
row.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twell.kernels.modules import Probe
from twell.kernels.stats import Stats
from twell.workbench.capturing.forward import counting_probe
from twell.workbench.errors import UserError
from twell.workbench.models.attach import AttachedModel
from twell.workbench.watching.call_counts import CallCounts, Generation, phases
from twell.workbench.watching.call_inputs import CallInputs, cache_of, cached_columns, logits_of, packed_numbers
from twell.workbench.watching.reads import Group

HELD = 2**18  # rows of sequences that have not ended, before the oldest are handed on as far as they were read


class Tracker:
    """Hears the calls of a watched model, counts them, and hands on sequences that have ended.

    on_counted(stats by layer, rows): called after each call, with device tensors
    on_ended(group): called with each group of sequences that has ended, in order; None: rows are not kept
    on_losses(losses): called with the losses of a call whose output has logits, float32 [rows]; None: not asked for
    on_fires(fires, rows): instead of on_counted, where firings of dense passes are all that is counted: fires, whole
    numbers in a floating type, [layers, d_ff]
    fired, hidden: the layers whose firings are kept for every token, and those whose hidden values of the last call are
    names: of the arguments `ids` and `mask`; None: of a model of transformers, whose FFNs see what `input_ids` says,
    else which rows there are is known from the first FFN that runs
    """

    def __init__(
        self,
        loaded: AttachedModel,
        probes: str,
        special: list[int],
        on_counted: Callable[[list[Stats], Tensor], None],
        on_ended: Callable[[Group], dict[int, int]] | None,
        fired: frozenset[int] = frozenset(),
        hidden: frozenset[int] = frozenset(),
        on_fires: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        on_losses: Callable[[Tensor], None] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.loaded, self.probes, self.fired, self.hidden_layers = loaded, probes, fired, hidden
        self.on_counted, self.on_ended, self.on_fires, self.on_losses = on_counted, on_ended, on_fires, on_losses
        self.hidden: dict[int, Tensor] = {}  # by layer: of the last call, [sequences, columns, d_ff]
        self._counting = True  # whether calls are counted at all
        self.adds_tokens = False  # whether calls add their tokens, counted or not, to those below
        self.tokens: int | Tensor = 0  # without padding; on the device where a mask tells of padding
        self._special = torch.tensor(special, dtype=torch.int64, device=loaded.device)
        self._no_id = loaded.vocab_size  # stands for the ids of vectors
        self._numbers, self._documents = count(), count()
        self._open: deque[Group] = deque()
        self._by_cache: dict[int, tuple[weakref.ref[Any], Group]] = {}
        self._generations: list[Generation] = []
        self._inputs: CallInputs | None = None  # of a call that runs
        self._running: CallCounts | None = None
        self._names, self._is_turned = names, False  # whether FFNs see columns first
        self.idle_calls = 0  # in which no FFN ran
        for slot in loaded.slots:
            slot.in_order = self.in_order
            slot.on_hidden = self._on_dense_hidden if hidden else None

    def count_calls(self, on: bool) -> None:
        """Count calls from here on, or leave the model's layers uncovered, so that it runs as it does unwatched."""
        if on != self._counting:
            self._counting = on
            for slot in self.loaded.slots:
                if on:
                    slot.cover.lay()
                else:
                    slot.own_storage()
                    slot.cover.lift()

    # ---- what the hooks call

    def begin(self, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Prepare the layers for a call that begins."""
        inputs = CallInputs.of(module, args, keywords, self._names or {})
        if self.adds_tokens and inputs.shape is not None:
            with torch.inference_mode():
                real = inputs.real(inputs.past)
                self.tokens = self.tokens + (inputs.shape[0] * inputs.shape[1] if real is None else real.sum())
        if not self._counting:
            return
        if torch.is_grad_enabled():
            for slot in self.loaded.slots:
                slot.own_storage()
        self.hidden.clear()
        self._inputs = inputs
        if self._names is None and inputs.shape is not None:
            self._begin_counts(inputs)

    def in_order(self, rows: Tensor) -> Tensor:
        """Return an FFN's rows [..., size] in the call's order: turned, where it has columns first. The first of a call
        may tell how many there are; raises UserError for another number."""
        if self._inputs is None:
            return rows
        leading = rows.shape[:-1]
        if self._running is None:
            self._begin_counts(self._inputs.fitted(leading))
        running: Any = self._running
        if leading == running.numbers.shape and not self._is_turned:
            return rows
        turned = running.are_turned(leading)
        self._is_turned = self._is_turned if turned is None else turned
        return rows.transpose(0, 1) if self._is_turned and len(leading) == 2 else rows

    def _begin_counts(self, inputs: CallInputs) -> None:
        """Have the layers count the rows of a call."""
        with torch.inference_mode():
            self._running = running = self._begin_call(inputs)
            if self.on_fires is not None:
                self._hear_firings(running)
                return
            sequences = torch.from_numpy(running.numbers.flatten()).to(self.loaded.device)
        about = {"rows": running.rows, "tokens": running.tokens, "sequences": sequences}
        packed = bool(self.fired or self.hidden_layers)
        self.loaded.set_probe(counting_probe(self.loaded, self.probes, running.on_stats, packed, **about))

    def drop(self) -> None:
        """Forget a call that raised."""
        self._inputs = self._running = None
        self._hear_firings(None)
        self.loaded.set_probe(Probe())

    def end(self, output: Any) -> None:
        """Take what a call counted."""
        running = self._running
        self.drop()
        if running is None or not (running.stats or running.fires):
            self.idle_calls += self._counting
            return
        ran, layers = running.stats or running.fires, range(self.loaded.layers)
        if len(ran) != len(layers):
            raise UserError(
                f"Expected every FFN to run in a call, got {len(ran)} of {len(layers)}: watch those that do with ffns=."
            )
        with torch.inference_mode():
            logits = logits_of(output) if self.on_losses is not None else None
            losses = None if self.on_losses is None else running.tell_losses(logits, self.on_losses)
            if self.on_fires is not None:
                fires, nnz = (torch.stack([running.fires[layer][kind] for layer in layers]) for kind in (0, 1))
                self.on_fires(fires, nnz, running.countable(output))
            else:
                stats = [running.stats[layer] for layer in layers]
                self.on_counted(stats, running.rows)
                if self.on_ended is not None:
                    running.keep(stats, losses)
            running.group.columns += running.numbers.shape[1]
        group, cache = running.group, running.cache
        cache = cache_of(output) if cache is None else cache
        if cache is None or not self._follow(cache, group):
            group.closed = True
        elif self.on_losses is not None:
            running.look_ahead(logits)
        self.hand_on()

    def moved(self, cache: Any, method: str, given: Any) -> None:
        """Follow a cache whose rows were put in another order, or cut."""
        group = self._group_of(cache)
        if group is None:
            return
        rows = list(range(len(group.numbers)))
        if method == "reset":
            group.closed = True
            self._by_cache.pop(id(cache), None)
        elif method == "crop":
            columns = cached_columns(cache)
            if columns < group.columns:  # drafts of which all were taken leave nothing to cut
                group.cut(columns, self._numbers)
        elif method == "batch_repeat_interleave":
            group.reorder([row for row in rows for _ in range(int(given))], self._numbers)
        elif isinstance(given, Tensor):
            group.reorder(given.tolist(), self._numbers)

    def generation_begins(self, prompt: int, ends: tuple[int, ...]) -> None:
        """Hear that `generate` begins: prompt: its columns; ends: ids that end a sequence."""
        self._generations.append(Generation(prompt, torch.tensor(ends, dtype=torch.int64, device=self.loaded.device)))

    def generation_ends(self, keeps_cache: bool) -> None:
        """Hear that `generate` has ended. keeps_cache: whether its sequences may go on"""
        for group in self._generations.pop().groups:
            group.over = None
            group.closed = group.closed or not keeps_cache
        self.hand_on()

    # ---- sequences

    def hand_on(self, all_of_them: bool = False) -> None:
        """Hand on the sequences that have ended, or all as far as they were read.

        The last group waits for the next one, so that the device has work while the host waits for counts.
        """
        while self._open:
            group = self._open[0]
            ended = group.closed and len(self._open) > 1
            if not (ended or all_of_them or sum(one.rows for one in self._open) > HELD):
                return
            self._open.popleft()
            if self.on_ended is None or not group.reads:
                lengths: dict[int, int] = {}
            else:
                lengths = self.on_ended(group)
            if not group.closed:
                group.restart(self._numbers, lengths)
                group.waits = False

    def _group_of(self, cache: Any) -> Group | None:
        """Return the group of the sequences that a cache holds, if it was read in this watch."""
        held = self._by_cache.get(id(cache))
        return held[1] if held is not None and held[0]() is cache and not held[1].closed else None

    def _follow(self, cache: Any, group: Group) -> bool:
        """Have a group end with its cache; return whether that can be told."""
        if self._group_of(cache) is group:
            return True
        key = id(cache)

        def gone(_: Any) -> None:
            group.closed = True
            self._by_cache.pop(key, None)

        try:
            self._by_cache[key] = weakref.ref(cache, gone), group
        except TypeError:
            return False
        return True

    def _begin_call(self, inputs: CallInputs) -> CallCounts:
        """Return the counts of the call that begins, with its rows and no counts yet."""
        assert inputs.shape is not None
        sequences, columns = inputs.shape
        group = None if inputs.cache is None else self._group_of(inputs.cache)
        if group is not None and len(group.numbers) != sequences:
            group = None
        past = inputs.past if group is None else group.columns
        numbers, begins, real = None, None, inputs.real(past)
        if group is None:
            begins = inputs.begins(real) if not (past or self._generations) else None
            packed = None if begins is None or self._are_numbers_idle else packed_numbers(begins)
            many = sequences if packed is None else int(packed.max()) + 1
            fresh = np.array([next(self._numbers) for _ in range(many)], dtype=np.int32)
            group = Group(fresh, np.array([next(self._documents) for _ in range(many)]), past)
            numbers = None if packed is None else fresh[packed]
            group.numbers = fresh if numbers is None else numbers[:, -1]
            is_first = not past
        else:
            is_first = False
        if not group.waits:
            self._open.append(group)
            group.waits = True
        generation = self._generations[-1] if self._generations else None
        phase = phases(generation, past, columns)
        if generation is not None:
            real = generation.without_ended(group, inputs.ids, real, phase)
        wide = np.broadcast_to(group.numbers[:, None], inputs.shape) if numbers is None else numbers
        device, special = self.loaded.device, self._special
        rows = inputs.countable(real, is_first, begins, special).to(device, torch.uint8).reshape(-1)
        ids = torch.full(inputs.shape, self._no_id) if inputs.ids is None else inputs.ids
        tokens = ids.to(device, torch.int32).reshape(-1).contiguous()
        return CallCounts(self, group, wide, real, phase, tokens, rows, inputs.cache)

    @property
    def _are_numbers_idle(self) -> bool:
        """Whether nothing asks which rows are of one sequence, so that the host need not know."""
        return self.on_fires is not None and self.on_losses is None

    def _hear_firings(self, running: CallCounts | None) -> None:
        """Have dense passes tell what fires, where that is all that is counted."""
        if self.on_fires is not None:
            for slot in self.loaded.slots:
                slot.on_fired = None if running is None else running.on_fired

    def _on_dense_hidden(self, layer: int, hidden: Tensor) -> None:
        if layer in self.hidden_layers and self._inputs is not None:
            rows: Any = self.in_order(hidden)
            if not hidden.requires_grad:  # else itself, so that gradients can be taken with regard to it
                rows = rows.reshape(*self._running.numbers.shape, hidden.shape[-1])  # type: ignore[union-attr]
            self.hidden[layer] = hidden if hidden.requires_grad else rows
