"""Add up what a watch counts, on the device, for metrics.

Cost: one sum over the counts of each layer a call; the host waits only where metrics are asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.kernels.stats import Stats
from twell.workbench.models.load import LoadedModel


class Totals:
    """Sums over the unflagged tokens read since metrics were last taken."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._all_tokens = torch.zeros((), dtype=torch.int64, device=loaded.device)
        self._clear()

    def _clear(self) -> None:
        layers, device = self.loaded.layers, self.loaded.device
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._nnz = torch.zeros(layers, dtype=torch.int64, device=device)
        self._fires: Tensor | None = None
        self._loss: Tensor | None = None  # float64 [2]: sum and number of losses

    def add_losses(self, losses: Tensor) -> None:
        """Add the losses of a call, NaN where there is none. losses: float32 [n]"""
        known = torch.stack([losses.double().nansum(), (~losses.isnan()).sum().double()])
        self._loss = known if self._loss is None else self._loss + known

    def add(self, stats: list[Stats], rows: Tensor) -> None:
        """Add a call. stats: by layer; rows: uint8 [n], which of its rows count."""
        with torch.inference_mode():
            tokens = rows.sum(dtype=torch.int64)
            self._tokens += tokens
            self._all_tokens += tokens
            fires = [layer.neurons.fires for layer in stats if layer.neurons is not None]
            if fires:
                stacked = torch.stack(fires)
                self._nnz += stacked.sum(1)
                self._fires = stacked if self._fires is None else self._fires.add_(stacked)
            else:
                self._nnz += torch.stack([(layer.nnz * rows).sum(dtype=torch.int64) for layer in stats])

    def add_fires(self, fires: Tensor, rows: Tensor) -> None:
        """Add a call of which firings alone were counted. fires: int64 [layers, d_ff]; rows: uint8 [n]"""
        with torch.inference_mode():
            tokens = rows.sum(dtype=torch.int64)
            self._tokens += tokens
            self._all_tokens += tokens
            self._nnz += fires.sum(1)
            self._fires = fires if self._fires is None else self._fires.add_(fires)

    def tokens_read(self) -> int:
        """Return how many unflagged tokens were read in all; waits for the device."""
        return int(self._all_tokens)

    def take(self) -> dict[str, float]:
        """Return the metrics of the tokens since the last time, and begin anew; NaN where there were none."""
        tokens, d_ff = int(self._tokens), self.loaded.d_ff
        nnz = (self._nnz.double() / tokens if tokens else self._nnz.double() * torch.nan).tolist()
        metrics = {"tokens": float(tokens), "nnz": sum(nnz) / len(nnz), "sparsity": 1 - sum(nnz) / len(nnz) / d_ff}
        if self._fires is not None:
            dead = (self._fires == 0).double().mean(1).tolist()
            metrics["dead"] = sum(dead) / len(dead)
            metrics |= {f"dead/layer_{layer:02}": share for layer, share in enumerate(dead)}
        if self._loss is not None:
            total, count = self._loss.tolist()
            metrics["loss"] = total / count if count else float("nan")
        metrics |= {f"nnz/layer_{layer:02}": one for layer, one in enumerate(nnz)}
        metrics |= {f"sparsity/layer_{layer:02}": 1 - one / d_ff for layer, one in enumerate(nnz)}
        self._clear()
        return metrics
