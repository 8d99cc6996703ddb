"""Modules that count what fires in the FFN of one layer, in place of a model's own.

SparseFFN runs a gated or plain FFN through the sparse op. It shares the weights it is made from (no copy), and computes
what they computed. One may lie differently: where the kernel reads w_down by neuron, the module holds that order alone,
still as [d_model, d_ff], and `module.w_down.contiguous()` gives the original back.

CountedMap counts an FFN of any kind. Whatever an FFN computes, its hidden values go through one last linear map; the
model's own map runs as it is, and those of its inputs whose size is above a threshold are counted. This gains no time:
it tells how sparse a model nearly is.

All layers of a model share one Probe: whoever runs the model sets the probe's row information before a forward pass and
gets each layer's input and Stats from its callback, in the order the layers run. A probe that counts nothing costs
nothing.

    probe = Probe(probes="counts", on_stats=lambda layer, x, stats: counts.append(stats.nnz))
    block.mlp = SparseFFN.gated(mlp.gate_proj, mlp.up_proj, mlp.down_proj, layer=3, probe=probe)
    compiled = torch.compile(model, backend="twell")  # for a model that reports to no callback; see calls/compiling.py
    block.mlp.down_proj = CountedMap(block.mlp.down_proj, d_model, d_ff, threshold=0.01, layer=3, probe=probe)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twell.kernels.backends.reference import ACTIVATION, count, count_dense
from twell.kernels.calls.prepared import Prepared
from twell.kernels.dispatch import KERNELS, Choice, choose, prepare, run
from twell.kernels.layout import Layout
from twell.kernels.params import FFNParams, Requirements
from twell.kernels.stats import Stats

LinearLike = nn.Module | Tensor  # a module with `weight` and perhaps `bias`, or the weight alone
PREPARED = 4  # shapes whose later calls need no checks: a generation has prompts and steps


@dataclass
class Probe:
    """The counting that the layers of a model do, the rows they do it for, and the callback that gets the counts.

    probes, layout, want_packed: as in `gated_ffn`
    rows uint8 [n], tokens int32 [n], sequences int32 [n]: of the n rows of the coming forward pass
    before(layer): called by each layer right before its kernel runs; or None
    on_stats(layer, x, stats): called by each layer right after, x [n, d_model] its input; or None
    """

    probes: str = "none"
    layout: Layout | None = None
    want_packed: bool = False
    rows: Tensor | None = None
    tokens: Tensor | None = None
    sequences: Tensor | None = None
    before: Callable[[int], None] | None = None
    on_stats: Callable[[int, Tensor, Stats], None] | None = None


class SparseFFN(nn.Module):
    """A gated (`w_up` given) or plain FFN that runs through the sparse op.

    runs_dense: while True, a call runs `dense` instead, and counts nothing
    """

    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None

    def __init__(
        self,
        w_gate: Tensor,
        w_up: Tensor | None,
        w_down: Tensor,
        b_gate: Tensor | None = None,
        b_up: Tensor | None = None,
        b_down: Tensor | None = None,
        *,
        layer: int = 0,
        activation: str = "relu",
        up_relu: bool = False,
        threshold: float | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> None:
        """Weights as nn.Linear holds them: w_gate, w_up [d_ff, d_model], w_down [d_model, d_ff].

        Raises ValueError for a weight with inf or nan in it, and for a kernel that this build does not have.
        """
        super().__init__()
        tensors = {
            "w_gate": w_gate,
            "w_up": w_up,
            "w_down": w_down,
            "b_gate": b_gate,
            "b_up": b_up,
            "b_down": b_down,
        }
        for name, tensor in tensors.items():
            if tensor is not None and not bool(tensor.isfinite().all()):
                bad = int(tensor.numel() - tensor.isfinite().sum())
                raise ValueError(f"{name}: expected finite weights, got {bad} inf or nan in layer {layer}")
            shared = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(name, shared)
        self.layer = layer
        self.activation = activation
        self.up_relu = up_relu
        self.threshold = threshold
        self.kernel = kernel
        self.probe = Probe() if probe is None else probe
        self.runs_dense = False
        self._prepared: dict[torch.Size, Prepared] = {}  # by the shape of x
        chosen = self.choice(1).kernel  # an unknown kernel is refused here, not in the first forward pass
        if KERNELS[chosen].down_by_neuron:
            by_neuron = self.w_down.t().contiguous().t()  # strides (1, d_model); moves and casts keep them
            self.w_down = nn.Parameter(by_neuron, requires_grad=False)

    @classmethod
    def gated(cls, gate: LinearLike, up: LinearLike, down: LinearLike, **options: Any) -> SparseFFN:
        """Make one from three linear modules with their biases, or three weights; options as in the constructor."""
        (w_gate, b_gate), (w_up, b_up), (w_down, b_down) = map(_weight_and_bias, (gate, up, down))
        return cls(w_gate, w_up, w_down, b_gate, b_up, b_down, **options)

    @classmethod
    def plain(cls, inner: LinearLike, outer: LinearLike, **options: Any) -> SparseFFN:
        """Make one from two linear modules with their biases, or two weights; options as in the constructor."""
        (w_in, b_in), (w_out, b_out) = map(_weight_and_bias, (inner, outer))
        return cls(w_in, None, w_out, b_in, None, b_out, **options)

    @property
    def d_model(self) -> int:
        return self.w_gate.shape[1]

    @property
    def d_ff(self) -> int:
        return self.w_gate.shape[0]

    def choice(self, n: int) -> Choice:
        """Return the kernel that n rows of this layer take, and why."""
        weight = self.w_gate
        shape = (weight.device, weight.dtype, self.d_model, self.d_ff, n)
        probe = self.probe
        options = (self.activation, self.up_relu, self.threshold, probe.layout, probe.want_packed)
        return choose(*shape, self.kernel, Requirements(*options, gated=self.w_up is not None))

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., d_model] for x [..., d_model]; the probe's callback gets the Stats."""
        if self.runs_dense:
            return self.dense(x)
        x, probe = x.contiguous(), self.probe
        if probe.before is not None:
            probe.before(self.layer)
        prepared = None if torch.compiler.is_compiling() else self._prepared.get(x.shape)
        if prepared is not None and prepared.fits(self, x):
            y, nnz, finite = prepared.run(x)
            if probe.on_stats is None:
                return y
            stats = Stats(nnz, finite)
        else:
            y, stats = self._run(self._params(x))
        if probe.on_stats is not None:
            probe.on_stats(self.layer, x if x.dim() == 2 else x.view(-1, x.shape[-1]), stats)
        return y

    def _run(self, params: FFNParams) -> tuple[Tensor, Stats]:
        """Run a call, and prepare the next one like it."""
        results = run(params, self.kernel)
        if type(params.x) is Tensor and not torch.compiler.is_compiling():
            run_again = prepare(params, self.kernel)
            self._prepared.pop(params.x.shape, None)
            if run_again is not None:
                latest = Prepared.of(self, params.x, run_again)
                like = [(shape, one) for shape, one in self._prepared.items() if one.is_of_weights_of(latest)]
                self._prepared = dict([*like[1 - PREPARED :], (params.x.shape, latest)])
        return results

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made from: without what is prepared, which holds this module's weights."""
        return self.__dict__ | {"_prepared": {}}

    def report_dense(self, x: Tensor, gate: Tensor, hidden: Tensor, up: Tensor | None = None) -> None:
        """Count a pass that other code ran densely, and report it to the probe. gate, hidden, up: as in `count_dense`;
        x [n, d_model]: what the probe is told of as the layer's input."""
        if self.probe.on_stats is not None:
            self.probe.on_stats(self.layer, x, count_dense(self._params(x), gate, hidden, up))

    def _params(self, x: Tensor) -> FFNParams:
        """Return the parameters of a call on x with what the probe asks for."""
        probe = self.probe
        return FFNParams(
            x=x, w_gate=self.w_gate, w_up=self.w_up, w_down=self.w_down,
            b_gate=self.b_gate, b_up=self.b_up, b_down=self.b_down,
            rows=probe.rows, tokens=probe.tokens, sequences=probe.sequences,
            activation=self.activation, up_relu=self.up_relu, threshold=self.threshold,
            probes=probe.probes, layout=probe.layout, want_packed=probe.want_packed,
        )  # fmt: skip

    def dense(self, x: Tensor) -> Tensor:
        """Compute the same FFN as a model does, through F.linear: the baseline of timings. It counts nothing."""
        linear = nn.functional.linear
        hidden = ACTIVATION[self.activation](linear(x, self.w_gate, self.b_gate))
        if self.w_up is not None:
            up = linear(x, self.w_up, self.b_up)
            hidden = hidden * (up.relu() if self.up_relu else up)
        return linear(hidden, self.w_down, self.b_down)

    def extra_repr(self) -> str:
        kind = "plain" if self.w_up is None else "gated"
        return f"layer {self.layer}, {kind}, {self.activation}, d_model {self.d_model}, d_ff {self.d_ff}"


class CountedMap(nn.Module):
    """A linear map that reports the values |hidden| > threshold of its input, as SparseFFN reports to a Probe.

    down: the map, called with [..., d_ff]. The probe's callback gets the hidden values [n, d_ff] as the layer's input.
    """

    def __init__(self, down: nn.Module, d_model: int, d_ff: int, *, threshold: float, layer: int, probe: Probe) -> None:
        super().__init__()
        self.down = down
        self.d_model, self.d_ff = d_model, d_ff
        self.threshold, self.layer, self.probe = threshold, layer, probe

    def choice(self, n: int) -> Choice:
        """Return the kernel that counts n rows, and why."""
        return Choice("reference", "it counts hidden values above a threshold; the FFN runs densely, as it is")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the map's output for hidden [..., d_ff]; the probe's callback gets the Stats."""
        self.report(hidden)
        return self.down(hidden)

    def report(self, hidden: Tensor) -> None:
        """Count hidden values [..., d_ff], and report them to the probe."""
        probe = self.probe
        if probe.on_stats is None and probe.probes == "none":
            return
        flat = hidden.reshape(-1, self.d_ff)
        no_weight = hidden.new_empty(0)
        params = FFNParams(
            x=flat, w_gate=no_weight, w_up=None, w_down=no_weight, threshold=self.threshold,
            rows=probe.rows, tokens=probe.tokens, sequences=probe.sequences,
            probes=probe.probes, layout=probe.layout, want_packed=probe.want_packed,
        )  # fmt: skip
        stats = count(params)
        if probe.on_stats is not None:
            probe.on_stats(self.layer, flat, stats)


def _weight_and_bias(linear: LinearLike) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias, if it has one, of a linear module or of a weight alone."""
    if isinstance(linear, Tensor):
        return linear, None
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected a linear module or its weight, got {type(linear).__name__}")
    return weight, getattr(linear, "bias", None)
