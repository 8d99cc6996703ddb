"""Forward passes with something taken away, beside the untouched one, on the same batch.

The idea: the model runs by its own dense code. Each map back to d_model is covered by one that does an action to the
hidden values first. What decoder layers put out in the untouched pass is kept, so a condition that begins in layer L
runs from there on alone: the layers before it return what they returned then.

Cost of a condition: a pass from its first layer on, the head and the loss; of the untouched pass, the outputs of the
layers before the last one that any condition begins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from twell.workbench.ablations.actions import Action, Silence, apply
from twell.workbench.ablations.conditions import Intervention
from twell.workbench.capturing.forward import LOGITS, Inputs
from twell.workbench.models.own_code import OwnModel, masked_map
from twell.workbench.models.slots.cover import Cover

EVERY = 8  # firings that are left are counted on one of so many tokens


class AblationRunner:
    """Runs batches through a model, untouched and under each condition; a context, after which the model is as it was.

    threshold: firing is |hidden| > it; count: whether to count firings
    """

    def __init__(self, own: OwnModel, threshold: float = 0.0, count: bool = True) -> None:
        self.own, self.threshold, self.count = own, threshold, count
        self.actions: dict[int, Action] = {}
        self.on_hidden: Any = None  # gets a layer and its hidden values, before anything is done to them
        self._masks: dict[int, tuple[Silence, Tensor | None]] = {}
        self._first = self._last_kept = 0
        self._outputs: dict[int, Any] = {}
        self._batch = 0
        self._rows: Tensor | None = None
        self._untouched: dict[int, Tensor] = {}  # by layer, its firings in the untouched pass
        self._firings: dict[int, Tensor] = {}  # by layer, what is left in this pass on the counted tokens
        self._cover = Cover()

    def __enter__(self) -> AblationRunner:
        try:
            for layer, (block, down) in enumerate(zip(self.own.blocks, self.own.downs, strict=True)):
                self._cover_block(layer, block)
                self._cover_down(layer, down)
        except BaseException:
            self._cover.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cover.remove()
        self._outputs.clear()

    @torch.inference_mode()
    def run(self, inputs: Inputs, interventions: Sequence[Intervention], batch: int = 0) -> tuple[Tensor, Tensor]:
        """Return losses in nats [1 + k, m] of each token's next one and firings [1 + k, n]: untouched, then each of k
        interventions.

        batch: the batch's number. Firings are those left in all layers on one of EVERY tokens, int64.
        """
        self._batch, self._last_kept = batch, max((one.first for one in interventions), default=0)
        self._rows = inputs.row_of[::EVERY].long() if self.count else None
        none = inputs.row_of.new_zeros(-(-len(inputs.row_of) // EVERY), dtype=torch.int64)
        losses: list[Tensor] = []
        firings: list[Tensor] = []
        untouched: dict[int, Tensor] = {}
        for actions, first in [({}, 0), *((one.actions, one.first) for one in interventions)]:
            self.actions, self._first = dict(actions), first
            self._firings = {layer: fired for layer, fired in untouched.items() if layer < first}
            losses.append(self._loss(inputs))
            firings.append(sum(self._firings.values(), none))
            untouched = untouched or self._firings
        self._outputs.clear()
        self.actions, self._masks = {}, {}
        return torch.stack(losses), torch.stack(firings)

    def _loss(self, inputs: Inputs) -> Tensor:
        ids = inputs.ids.view(-1, inputs.longest)
        hidden = self.own.body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        head, targets = self.own.head, inputs.ids.long()
        step = max(1, LOGITS[hidden.device.type] // head.weight.shape[0])
        losses = [
            cross_entropy(at_least_float32(head(hidden[rows])), targets[rows + 1], reduction="none")
            for rows in inputs.predicts.long().split(step)
        ]
        return torch.cat(losses)

    def _cover_block(self, layer: int, block: nn.Module) -> None:
        def forward(*args: Any, **keywords: Any) -> Any:
            if layer < self._first:
                return self._outputs[layer]
            output = beneath(*args, **keywords)
            if not self.actions and layer < self._last_kept:
                self._outputs[layer] = output
            return output

        beneath = self._cover.put(block, forward)

    def _cover_down(self, layer: int, down: nn.Module) -> None:
        def forward(hidden: Tensor) -> Tensor:
            if self.on_hidden is not None:
                self.on_hidden(layer, hidden)
            action = self.actions.get(layer)
            if isinstance(action, Silence):
                keep = self._mask(layer, action, hidden)
                self._add_firings(layer, hidden, keep, action.keep is None)
                return masked_map(down, hidden, keep)
            if action is not None:
                hidden = apply(action, hidden, self._batch)
            self._add_firings(layer, hidden)
            return beneath(hidden)

        beneath = self._cover.put(down, forward)

    def _mask(self, layer: int, action: Silence, hidden: Tensor) -> Tensor | None:
        """Return the neurons that are kept, on the device."""
        if layer not in self._masks or self._masks[layer][0] is not action:
            keep = None if action.keep is None else torch.from_numpy(action.keep).to(hidden.device)
            self._masks[layer] = action, keep
        return self._masks[layer][1]

    def _add_firings(self, layer: int, hidden: Tensor, keep: Tensor | None = None, none: bool = False) -> None:
        """Count the firings that are left in a layer, on one of EVERY tokens; none: whether nothing is left."""
        if self._rows is None or none:
            return
        fired = hidden.reshape(-1, hidden.shape[-1])[self._rows].abs() > self.threshold
        self._firings[layer] = (fired if keep is None else fired & keep).sum(-1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 where they are."""
    return logits if logits.dtype is torch.float64 else logits.float()
