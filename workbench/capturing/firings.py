"""Keep single firings: `examples`, some of every neuron, and `fired`, all firings of a sample of tokens.

The idea: both are read from the packed hidden state of each layer, before the next layer overwrites it. What is kept of
a batch's firings is selected there (`selection.py` of the kernels) and merged into the examples once the batch is
accepted. `fired` takes the tokens whose own draw, a number that depends on sequence and position alone, is below the
share.

Cost: that of the selection; for `fired` a pass over the sampled rows, for which a GPU's host waits in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.kernels.backends.selection import RowMetadata, Selection, draw_of, mixed
from twell.kernels.backends.selection_native import select
from twell.kernels.layout import TwELL, entries
from twell.workbench.capturing.examples import DRAWS, Examples, lists
from twell.workbench.capturing.forward import Inputs
from twell.workbench.errors import UserError
from twell.workbench.run.schema import nnz_type
from twell.workbench.text.batches import Batch


def uniform_draws(*numbers: Tensor | int) -> Tensor:
    """Return a number in [0, 1) for each row of int64 tensors: the same for the same numbers, on any device."""
    state: Tensor = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = mixed(state, number)
    return draw_of(state).double() / DRAWS


class FiringCollector:
    """The single firings that a run has kept so far.

    k: examples of each neuron and kind, 0 for none; fired: the text of the option --fired, or None
    Raises UserError for a `fired` that is not understood.
    """

    def __init__(self, layers: int, d_ff: int, k: int, fired: str | None) -> None:
        self.d_ff, self.layers = d_ff, layers
        self.fired, self.share = parse_fired(fired, layers) if fired else (frozenset(), 0.0)
        self.examples = Examples(layers, d_ff, k) if k else None

    @property
    def is_active(self) -> bool:
        """Return whether any firing is to be kept."""
        return self.examples is not None or bool(self.fired)

    def collect_from(self, batch: Batch, inputs: Inputs) -> BatchFirings | None:
        """Return the object that a batch's layers report to; None if nothing is to be kept."""
        return BatchFirings(self, batch, inputs) if self.is_active else None


class BatchFirings:
    """The firings of one batch that may be kept; none of them is until `commit`."""

    def __init__(self, collector: FiringCollector, batch: Batch, inputs: Inputs) -> None:
        self.collector = collector
        self._selection: Selection | None = None
        if collector.examples is not None:
            self._row_metadata = row_metadata(batch, inputs)
        sampled = np.zeros(0, dtype=bool)
        if collector.fired:
            numbers = (
                torch.from_numpy(batch.sequence.astype(np.int64)),
                torch.from_numpy(batch.position.astype(np.int64)),
            )
            sampled = (uniform_draws(*numbers) < collector.share).numpy()
        self._sampled = np.flatnonzero(sampled)
        self._rows = torch.from_numpy(batch.row_of[self._sampled].astype(np.int64)).to(inputs.ids.device)
        self._keys = batch.sequence[self._sampled], batch.position[self._sampled]
        self._fired: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def on_packed(self, layer: int, packed: TwELL) -> None:
        """Read a layer's packed hidden state, which need not outlive the call."""
        if (examples := self.collector.examples) is not None:
            if self._selection is None:
                dtype = torch.float32 if packed.dtype == torch.float64 else packed.dtype
                shape = (examples.layers, examples.d_ff, examples.k)
                self._selection = Selection.empty(*shape, dtype, packed.device)
            bounds, out = examples.bounds(layer, packed.device), self._selection.of_layer(layer)
            select(packed, self._row_metadata, layer, bounds, out)
        if layer in self.collector.fired and len(self._rows):
            self._fired.append((layer, *entries(packed.take_rows(self._rows))))

    @property
    def fires(self) -> Tensor | None:
        """Firings by neuron and value, int64 [layers, d_ff, BINS]; None where no examples are kept."""
        return None if self._selection is None else self._selection.fires.long()

    def commit(self) -> Iterator[dict[str, Any]]:
        """Merge the batch's firings into the collector; yield the rows of the `fired` table, a dict for each layer."""
        if self.collector.examples is not None and self._selection is not None:
            self.collector.examples.merge(self._selection, self._row_metadata)
        sequence, position = self._keys
        kind, most = nnz_type(self.collector.d_ff), torch.finfo(torch.float16).max
        for layer, row, neuron, value in self._fired:
            lengths = row.bincount(minlength=len(sequence)).cpu().numpy()
            yield {
                "sequence": sequence,
                "position": position,
                "layer": np.full(len(sequence), layer),
                "neuron": lists(neuron.cpu().numpy().astype(kind), lengths),
                "value": lists(value.float().clamp(max=most).cpu().numpy().astype(np.float16), lengths),
            }


def layers_text(asked: Any, name: str) -> str | None:
    """Return layers that are given in Python as --fired names them; None for none.

    asked: numbers, such a text, or True for all; name: of the argument
    """
    if asked is None or isinstance(asked, str):
        return asked
    if isinstance(asked, bool):
        return "all" if asked else None
    try:
        return ",".join(map(str, asked))
    except TypeError:
        raise UserError(f'Expected {name} as layers, such as [3, 4], "0,3-5" or True for all, got {asked!r}.') from None


def parse_fired(text: str, layers: int, name: str = "--fired") -> tuple[frozenset[int], float]:
    """Read a --fired `LAYERS[:SHARE]`: the layers, as in 0,3-5 or all, and the share of tokens, 1 if it is left out.

    name: what an error calls it
    """
    named, _, share = text.partition(":")
    chosen: set[int] = set()
    try:
        part = float(share) if share else 1.0
        for item in named.split(","):
            first, _, last = (f"0-{layers - 1}" if item == "all" else item).partition("-")
            low, high = int(first), int(last or first)
            chosen |= {*range(low, high + 1)} if low <= high < layers else {layers}  # one that is not there
    except ValueError:
        chosen, part = set(), 0.0
    if not (chosen and max(chosen) < layers and 0 < part <= 1):
        raise UserError(
            f"Expected {name} as LAYERS[:SHARE], layers from 0 to {layers - 1} as in 0,3-5 or all, and a share of "
            f"tokens above 0 and up to 1, got {text!r}."
        )
    return frozenset(chosen), part


def row_metadata(batch: Batch, inputs: Inputs) -> RowMetadata:
    """Return what selecting examples needs to know of a batch's rows, on its way to the device in one copy."""
    device, longest = inputs.ids.device, batch.longest
    position = np.arange(batch.padded) % longest - np.repeat(batch.begins, longest)
    length, fresh = np.repeat(batch.lengths, longest), np.zeros(batch.padded, dtype=np.int32)
    fresh[batch.row_of] = ~batch.repeated
    joined = torch.from_numpy(np.stack([position, length, fresh]).astype(np.int32))
    if device.type == "cuda":
        joined = joined.pin_memory()  # so that the copy does not wait
    position_, length_, fresh_ = joined.to(device, non_blocking=True)
    return RowMetadata(inputs.rows, inputs.rows * fresh_.to(torch.uint8), inputs.sequence, position_, length_)
