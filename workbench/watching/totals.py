"""Add up what a watch counts, on the device, for metrics.

A token with a value that is not finite fires nothing that could be counted, so it is no token here: means would fall,
and a training that has diverged would look sparse.

Cost: one sum over the counts of each layer a call; the host waits only where metrics are asked for, and then once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.kernels.stats import Stats
from twell.workbench.models.load import LoadedModel


class Totals:
    """Sums over the unflagged tokens read since metrics were last taken; one that is not finite has a flag.

    neurons: whether firings are counted by neuron, so that metrics have the dead also before the first token
    """

    def __init__(self, loaded: LoadedModel, neurons: bool = False) -> None:
        self.loaded, self._neurons = loaded, neurons
        self._taken = 0  # tokens of the metrics taken before
        self._clear()

    def _clear(self) -> None:
        layers, device = self.loaded.layers, self.loaded.device
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._nnz = torch.zeros(layers, dtype=torch.int64, device=device)
        size = (layers, self.loaded.d_ff)
        self._fires = torch.zeros(size, dtype=torch.int64, device=device) if self._neurons else None
        self._loss: Tensor | None = None  # float64 [2]: sum and number of losses

    def add_losses(self, losses: Tensor) -> None:
        """Add the losses of a call, NaN where there is none. losses: float32 [n]"""
        known = torch.stack([losses.double().nansum(), (~losses.isnan()).sum().double()])
        self._loss = known if self._loss is None else self._loss + known

    def add(self, stats: list[Stats], rows: Tensor) -> None:
        """Add a call. stats: by layer; rows: uint8 [n], which of its rows count."""
        with torch.inference_mode():
            counted = torch.stack([layer.finite for layer in stats]).all(0) * rows
            self._tokens += counted.sum(dtype=torch.int64)
            self._nnz += (torch.stack([layer.nnz for layer in stats]) * counted).sum(1, dtype=torch.int64)
            fires = [layer.neurons.fires for layer in stats if layer.neurons is not None]
            if fires:
                stacked = torch.stack(fires)
                self._fires = stacked if self._fires is None else self._fires.add_(stacked)

    def add_fires(self, fires: Tensor, nnz: Tensor, rows: Tensor) -> None:
        """Add a call of which firings alone were counted.

        fires, nnz: whole numbers, [layers, d_ff] and [layers, n]; rows: uint8 [n], which of its rows count, without
        those that are not finite
        """
        with torch.inference_mode():
            whole = fires.long()
            self._tokens += rows.sum(dtype=torch.int64)
            self._nnz += torch.where(rows > 0, nnz, 0).sum(1, dtype=torch.int64)
            self._fires = whole if self._fires is None else self._fires.add_(whole)

    def tokens_read(self) -> int:
        """Return how many unflagged tokens were read in all; waits for the device."""
        return self._taken + int(self._tokens)

    def take(self) -> dict[str, float]:
        """Return the metrics of the tokens since the last time, and begin anew; NaN where there were none."""
        widths, layers = self.loaded.widths, self.loaded.layers
        with torch.inference_mode():
            none = self._nnz.new_zeros(0, dtype=torch.float64)
            dead = none if self._fires is None else (self._fires == 0).sum(1).double()
            sums = none if self._loss is None else self._loss
            fetched = torch.cat([self._tokens.double()[None], self._nnz.double(), dead, sums]).tolist()
        tokens, nnz, silent, loss = fetched[0], fetched[1 : 1 + layers], fetched[1 + layers :][:layers], fetched[-2:]
        self._taken += int(tokens)
        nnz = [one / tokens if tokens else float("nan") for one in nnz]
        metrics = {"tokens": tokens, "nnz": sum(nnz) / len(nnz), "sparsity": 1 - sum(nnz) / sum(widths)}
        if self._fires is not None:
            filled = [self.loaded.d_ff - width for width in widths]  # neurons of zeros, which are none of the model's
            silent = [count - more for count, more in zip(silent, filled, strict=True)]
            shares = [count / width if tokens else float("nan") for count, width in zip(silent, widths, strict=True)]
            metrics["dead"] = sum(silent) / sum(widths) if tokens else float("nan")
            metrics |= {f"dead/layer_{layer:02}": share for layer, share in enumerate(shares)}
        if self._loss is not None:
            metrics["loss"] = loss[0] / loss[1] if loss[1] else float("nan")
        metrics |= {f"nnz/layer_{layer:02}": one for layer, one in enumerate(nnz)}
        metrics |= {f"sparsity/layer_{layer:02}": 1 - one / widths[layer] for layer, one in enumerate(nnz)}
        self._clear()
        return metrics
