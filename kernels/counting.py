"""Counting what an FFN of any kind holds: its map back, watched, in place of the model's own.

The idea: whatever an FFN computes, its hidden values go through one last linear map. That map runs as it is, and what
goes into it is counted on the way, where it is above a threshold by its size. Nothing is computed otherwise than by the
model's own code, so nothing is gained in time: this is for asking how sparse a model nearly is.

    mlp.down_proj = CountedMap(mlp.down_proj, d_model, d_ff, threshold=0.01, layer=3, probe=probe)
"""

from __future__ import annotations

from torch import Tensor, nn

from twell.kernels.backends.reference import count
from twell.kernels.modules import Probe
from twell.kernels.ops import Choice
from twell.kernels.params import FFNParams


class CountedMap(nn.Module):
    """A linear map that reports the values |hidden| > threshold of what goes into it, as SparseFFN reports to a Probe.

    down: the map, called with [..., d_ff]. The probe's callback gets the hidden values [n, d_ff] as the layer's input.
    """

    def __init__(self, down: nn.Module, d_model: int, d_ff: int, *, threshold: float, layer: int, probe: Probe) -> None:
        super().__init__()
        self.down = down
        self.d_model, self.d_ff = d_model, d_ff
        self.threshold, self.layer, self.probe = threshold, layer, probe

    def choice(self, n: int) -> Choice:
        """What counts n rows, and why."""
        return Choice("reference", "it counts hidden values above a threshold; the FFN runs densely, as it is")

    def forward(self, hidden: Tensor) -> Tensor:
        probe = self.probe
        if probe.on_stats is not None or probe.probes != "none":
            rows = hidden.reshape(-1, self.d_ff)
            nothing = hidden.new_empty(0)
            call = FFNParams(
                rows, nothing, None, nothing, None, None, None, probe.rows, probe.tokens, probe.sequences,
                "relu", False, self.threshold, probe.probes, probe.layout, probe.want_packed,
            )  # fmt: skip
            stats = count(call)
            if probe.on_stats is not None:
                probe.on_stats(self.layer, rows, stats)
        return self.down(hidden)
