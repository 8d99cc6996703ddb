"""One call of a watched model while it runs: its rows, and what each layer counted in it; and one of `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from twell.kernels.layout import entries, unpack
from twell.kernels.stats import Stats
from twell.workbench.capturing.forward import gather
from twell.workbench.capturing.layer_sums import LayerSums
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel
from twell.workbench.run.schema import DECODE, PREFILL
from twell.workbench.watching.call_inputs import logits_of, tensors_of
from twell.workbench.watching.reads import Ahead, Group, Read

IGNORED = -100  # a target that no loss is taken of


class Keeps(Protocol):
    """The layers of which calls keep more than counts.

    fired, hidden_layers: layers whose firings, and whose hidden values, are kept; hidden: by layer, of the last call
    """

    loaded: Any
    fired: frozenset[int]
    hidden_layers: frozenset[int]
    hidden: dict[int, Tensor]


@dataclass
class CallCounts:
    """The counts of a call while it runs, and the rows that they are of.

    numbers: int32 [sequences, columns], each row's sequence; real: bool of that shape, None: all are tokens
    phase: uint8 [columns]; tokens, rows: int32 and uint8 [n], as the probe has them; cache: what it was given, or None
    """

    keeps: Keeps
    group: Group
    numbers: np.ndarray
    real: Tensor | None
    phase: np.ndarray
    tokens: Tensor
    rows: Tensor
    cache: Any
    stats: dict[int, Stats] = field(default_factory=dict)
    fires: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # [d_ff], [n], where nothing else is counted
    limits: Tensor | None = None  # [n, 1]: above what values of a row that counts fire; infinity in others
    mask: Tensor | None = None  # [n, d_ff], of every layer in turn
    finite: Tensor | None = None  # bool [n], where firings alone are counted: by one value of the last layer and output
    fired: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def are_turned(self, leading: torch.Size) -> bool | None:
        """Return whether an FFN sees columns first; None where its rows do not tell.

        leading: dimensions of its rows. Raises UserError where there are others than the call's.
        """
        shape = self.numbers.shape
        if math.prod(leading) != math.prod(shape):
            raise UserError(
                f"Expected FFNs that see {' × '.join(map(str, shape))} rows in this call, got one that sees "
                f"{' × '.join(map(str, leading))}: watch those that see the same by ffns=, or name the call's ids by "
                "inputs=."
            )
        tells = len(leading) == 2 and leading[0] != leading[1] and 1 not in leading
        return leading == shape[::-1] if tells else None

    def on_stats(self, layer: int, x: Tensor, stats: Stats) -> None:
        """Take what a layer counted. x: its input"""
        if layer in self.stats:
            raise UserError(
                f"Expected each FFN once in a call, got that of layer {layer} twice: watch others with ffns=."
            )
        if stats.packed is not None:
            if layer in self.keeps.fired:
                row, neuron, value = entries(stats.packed)
                self.fired.append((layer, row.cpu(), neuron.cpu(), value.float().cpu()))
            if layer in self.keeps.hidden_layers and layer not in self.keeps.hidden:
                hidden = _hidden(self.keeps.loaded, layer, unpack(stats.packed), x)
                self.keeps.hidden[layer] = hidden.view(*self.numbers.shape, hidden.shape[-1])
            stats.packed = None
        self.stats[layer] = stats

    def on_fired(self, layer: int, values: Tensor, threshold: float) -> None:
        """Count a dense pass in three launches, by a mask in the values' own type: a sum of bools is one of an int64
        copy. values: [n, d_ff]; above the threshold they fire. Sums are exact below 2^24 rows."""
        with torch.no_grad():
            if self.limits is None or self.mask is None or self.mask.dtype != values.dtype:
                limits = torch.full_like(self.rows, rounded_down(threshold, values.dtype), dtype=values.dtype)
                self.limits = limits.masked_fill_(self.rows == 0, torch.inf)[:, None]
                self.mask = torch.empty_like(values)
            torch.gt(values, self.limits, out=self.mask)
            if layer == self.keeps.loaded.layers - 1:  # what is not finite makes all of its row NaN in later layers
                self.finite = _are_finite(values[:, 0])
            wide = torch.promote_types(values.dtype, torch.float32)
            self.fires[layer] = self.mask.sum(0, dtype=wide), self.mask.sum(1, dtype=wide)

    def countable(self, output: Any) -> Tensor:
        """Return which rows count, uint8 [n], without those that are not finite, where firings alone are counted.

        output: of the call; what the last layer makes of a row that is not finite shows in its first value, in logits
        as NaN, since a norm comes before: some models give tokens that they never say a logit of -inf
        """
        rows = self.rows if self.finite is None else self.rows * self.finite
        logits = logits_of(output)
        for one in tensors_of(output):
            if one.shape[-1] and one.numel() == one.shape[-1] * len(rows):
                first = one.detach()[..., 0].reshape(-1)
                return rows * (_are_finite(first) if logits is None else ~first.isnan()).to(rows.device)
        return rows

    def losses(self, logits: Any) -> Tensor | None:
        """Return the loss of the next token at each row, float32 [n]; NaN where this call does not read the next one.

        logits: what the model's output has under that name; None unless it has a row of them for each token
        """
        shape = self.numbers.shape
        if not isinstance(logits, Tensor) or logits.shape[:-1] != shape or shape[1] < 2:
            return None
        ids = self.tokens.view(shape).long()
        follows = torch.from_numpy(self.numbers[:, 1:] == self.numbers[:, :-1]).to(logits.device)
        if self.real is not None:
            real = self.real.to(logits.device)
            follows = follows & real[:, 1:] & real[:, :-1]
        follows = follows & (ids[:, 1:] < logits.shape[-1])  # vectors have no ids
        targets = torch.where(follows, ids[:, 1:], IGNORED)
        result = torch.full(shape, torch.nan, dtype=torch.float32, device=logits.device)
        for row in range(shape[0]):  # one sequence at a time in float32
            of_row = cross_entropy(logits[row, :-1].float(), targets[row], ignore_index=IGNORED, reduction="none")
            result[row, :-1] = torch.where(follows[row], of_row, torch.nan)
        return result.view(-1)

    def tell_losses(self, logits: Any, tell: Callable[[Tensor], None]) -> Tensor | None:
        """Return the losses of the call's rows; tell these, and those at the end of the call that it goes on from."""
        losses = self.losses(logits)
        for each in (self.losses_ahead(), losses):
            if each is not None:
                tell(each)
        return losses

    def keep(self, stats: list[Stats], losses: Tensor | None) -> None:
        """Start the counts on their way to the host, as a read of the group. stats: by layer"""
        ids = self.tokens.to("cpu", non_blocking=True)
        real = None if self.real is None else self.real.reshape(-1).to("cpu", non_blocking=True)
        all_rows = torch.arange(len(self.tokens), dtype=torch.int32, device=self.tokens.device)
        sums = LayerSums.stack(stats, [])
        counted = gather(stats, sums, all_rows, None)
        loss = None if losses is None else losses.to("cpu", non_blocking=True)
        read = Read(self.numbers, self.group.columns, ids, real, self.phase, counted, self.fired, loss)
        self.group.add(read, sums)

    def losses_ahead(self) -> Tensor | None:
        """Return the losses of the first tokens of sequences that go on, float32, and have the read before keep them;
        None where the call before predicted none of them."""
        ahead = self.group.ahead
        if ahead is None:
            return None
        row_before = {int(number): row for row, number in enumerate(ahead.numbers) if number >= 0}
        pairs = [(row_before[int(n)], row) for row, n in enumerate(self.numbers[:, 0]) if int(n) in row_before]
        if not pairs:
            return None
        before, rows = (torch.tensor(each, device=ahead.logits.device) for each in zip(*pairs, strict=True))
        ids = self.tokens.view(self.numbers.shape)[:, 0].long().to(rows.device)[rows]
        is_token = ids < ahead.logits.shape[-1]  # vectors have no ids
        if self.real is not None:
            is_token = is_token & self.real[:, 0].to(rows.device)[rows]
        targets = torch.where(is_token, ids, IGNORED)
        losses = cross_entropy(ahead.logits[before].float(), targets, ignore_index=IGNORED, reduction="none")
        losses = torch.where(is_token, losses, torch.nan)
        if ahead.read is not None:
            last = [(row + 1) * ahead.columns - 1 for row, _ in pairs]
            ahead.read.ahead.append((last, losses.to("cpu", non_blocking=True)))
        return losses

    def look_ahead(self, logits: Any) -> None:
        """Keep what this call predicts of the next one. logits: as for `losses`, or those of the last column alone"""
        rows, columns = self.numbers.shape
        self.group.ahead = None
        if isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[0] == rows:
            numbers = self.numbers[:, -1].copy()
            if self.real is not None:
                numbers[~self.real[:, -1].cpu().numpy()] = -1
            read = self.group.reads[-1] if self.group.reads else None
            self.group.ahead = Ahead(numbers, logits[:, -1].clone(), read, columns)


def _are_finite(values: Tensor) -> Tensor:
    """Return which values are finite, in two launches; torch.isfinite takes five."""
    return values - values == 0


def rounded_down(threshold: float, dtype: torch.dtype) -> float:
    """Return the greatest value of a type that is no greater than a threshold: values of it above either are the same.

    threshold: at least 0
    """
    about = torch.finfo(dtype)
    step = about.eps * max(2.0 ** (math.frexp(threshold)[1] - 1), about.tiny)  # between values of the type, around it
    return min(math.floor(threshold / step) * step, about.max)


def _hidden(loaded: LoadedModel, layer: int, value: Tensor, x: Tensor) -> Tensor:
    """Return what a sparse pass multiplied by w_down. value [n, d_ff]: what it packed; x: the layer's input"""
    if not loaded.ffns or loaded.ffns[layer].w_up is None:
        return value
    ffn = loaded.ffns[layer]
    up = nn.functional.linear(x, ffn.w_up, ffn.b_up)  # type: ignore[arg-type]
    return value * (up.relu() if ffn.up_relu else up)


@dataclass
class Generation:
    """A call of `generate`: columns of its prompt, ids that end a sequence, and the groups that it read."""

    prompt: int
    ends: Tensor
    groups: list[Group] = field(default_factory=list)

    def without_ended(self, group: Group, ids: Tensor | None, real: Tensor | None, phase: np.ndarray) -> Tensor | None:
        """Return which rows are tokens, without what is read of sequences that have ended.

        ids, real: int64 and bool [sequences, columns], or None; phase: uint8 [columns]
        """
        if group not in self.groups:
            self.groups.append(group)
        if phase[-1] == PREFILL or ids is None or not len(self.ends):
            return real
        ended = torch.isin(ids[:, -int((phase == DECODE).sum()) :], self.ends).any(1)
        over = group.over
        group.over = ended if over is None else over | ended
        if over is None:
            return real
        going = ~over[:, None].expand(ids.shape)
        return going if real is None else real & going


def phases(generation: Generation | None, past: int, columns: int) -> np.ndarray:
    """Return the phase of each column, uint8: within `generate`, decode is what comes after the prompt; else it is one
    token that goes on. past: columns that were read before"""
    if generation is not None:
        return np.where(past + np.arange(columns) < generation.prompt, PREFILL, DECODE).astype(np.uint8)
    return np.full(columns, DECODE if past and columns == 1 else PREFILL, np.uint8)
