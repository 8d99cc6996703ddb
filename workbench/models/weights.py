"""Read a checkpoint's network as it was trained: every weight comes from the checkpoint, and none is left over.

Weights come from safetensors alone; one that is missing, left over or of another shape is named and refused, because
transformers would draw it at random. So is one of whole, boolean or complex numbers, which transformers would convert
without their scale or their imaginary part. The families with code of their own are read here: their FFN is a module of
ours, and their FFN's weights are turned the way that one holds them. llama_sparse_relu has been saved in several
layouts:

    gate_proj.weight [d_ff, d_model]   up_proj.weight [d_ff, d_model]   down_proj.weight [d_model, d_ff]
    gate_weight [d_model, d_ff]        up_weight [d_ff, d_model]        down_weight [d_ff, d_model]
    -                                  up_weight [d_model, d_ff]        down_weight [d_ff, d_model]      (plain)
    GATE [d_ff, d_model]               UP [d_ff, d_model]               DOWN [d_ff, d_model]

and with down_proj.weight as [d_ff, d_model] where `sparsity_use_hybrid_kernel` is set. The shape says which it is; the
table above decides where d_ff equals d_model.

Cost: reading the weights.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from twell.workbench.errors import UserError, first_line
from twell.workbench.models.checkpoint import Checkpoint
from twell.workbench.models.families import PLAIN
from twell.workbench.models.sizes import WIDTHS, narrow, refuse_other_sizes, widen

# How a weight's name ends: the map's name, and whether it lies transposed in a gated FFN and in a plain one.
STORED = {
    "gate_weight": ("gate_proj.weight", True, True),
    "up_weight": ("up_proj.weight", False, True),
    "down_weight": ("down_proj.weight", True, True),
    "GATE": ("gate_proj.weight", False, False),
    "UP": ("up_proj.weight", False, False),
    "DOWN": ("down_proj.weight", True, True),
}
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors names them; narrower ones mean nothing without their scales
NOT_THE_MODEL = ("tracker.", "metrics_accumulator.", ".mlp.predictor.")  # what training, or a predictor, left there


class ReLUFFN(nn.Module):
    """down(relu(gate) * relu(up)); without a gate, down(relu(up)). Its maps are named as in checkpoints."""

    def __init__(self, config: LlamaConfig | MistralConfig, gated: bool) -> None:
        super().__init__()
        wide, bias = (config.hidden_size, config.intermediate_size), bool(getattr(config, "mlp_bias", False))
        if gated:
            self.gate_proj = nn.Linear(*wide, bias=bias)
        self.up_proj = nn.Linear(*wide, bias=bias)
        self.down_proj = nn.Linear(*wide[::-1], bias=bias)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up_proj(x))
        return self.down_proj(torch.relu(self.gate_proj(x)) * hidden if self.gated else hidden)


def _give_ffns(network: LlamaForCausalLM | MistralForCausalLM, gated: bool) -> None:
    """Replace the FFN of each layer by a ReLUFFN."""
    for layer in network.model.layers:
        layer.mlp = ReLUFFN(network.config, gated)
    network.post_init()


class PlainLlama(LlamaForCausalLM):
    """A Llama whose FFN has no gate."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        _give_ffns(self, gated=False)


class TwoReLUMistral(MistralForCausalLM):
    """A Mistral with a ReLU on the gate and on the up branch."""

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        _give_ffns(self, gated=True)


def read(checkpoint: Checkpoint, dtype: torch.dtype, widened: bool = True) -> PreTrainedModel:
    """Load the network on the CPU. Raises UserError that names the weight which differs from the configuration.

    widened: whether layers of a narrower FFN than the widest are filled up with neurons of zeros
    """
    folder, name, family = checkpoint.folder, checkpoint.name, checkpoint.family
    if not list(folder.glob("*.safetensors")):
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        got = f"only {others[0]}, a pickle, which is never opened" if others else "none"
        raise UserError(f"Expected weights in safetensors in {name}, got {got}: save it with save_pretrained.")
    _refuse_other_numbers(checkpoint)
    refuse_other_sizes(folder, name, checkpoint.config, partial(_network, checkpoint))
    transformers.logging.disable_progress_bar()
    # Of another size: to name them below.
    given: dict[str, Any] = {"config": checkpoint.config, "dtype": dtype, "ignore_mismatched_sizes": True}
    given |= {"output_loading_info": True, "use_safetensors": True, "local_files_only": True}
    loaded: Any
    try:
        if family is not None and family.base:
            loaded = _class(checkpoint).from_pretrained(None, state_dict=_weights(checkpoint), **given)
        else:
            loader = _of_widths(checkpoint) if WIDTHS in checkpoint.fields else AutoModelForCausalLM
            loaded = loader.from_pretrained(folder, trust_remote_code=False, **given)
    except UserError:
        raise
    except Exception as error:
        why = first_line(error)
        raise UserError(f"Expected weights that load in {name}, got an error ({why}): copy them again.") from None
    network, report = loaded
    for what in ("missing", "unexpected", "mismatched"):
        names = sorted(key if isinstance(key, str) else key[0] for key in report[f"{what}_keys"])
        if names:
            raise _wrong(name, what, names)
    if widened:
        widen(network)
    return network.eval()


def _of_widths(checkpoint: Checkpoint) -> Any:
    """Return the class that runs a checkpoint whose layers have FFNs of their own widths."""
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]

    def make(self: Any, config: Any, *given: Any, **named: Any) -> None:
        base.__init__(self, config, *given, **named)
        narrow(self)

    return type(base.__name__, (base,), {"__init__": make})


def _network(checkpoint: Checkpoint) -> nn.Module:
    """Make a checkpoint's network with random weights."""
    if checkpoint.family is not None and checkpoint.family.base:
        return _class(checkpoint)(checkpoint.config)
    if WIDTHS in checkpoint.fields:
        return _of_widths(checkpoint)(checkpoint.config)
    return AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=False)


def _refuse_other_numbers(checkpoint: Checkpoint) -> None:
    """Raise UserError for a weight that is not of a floating-point type, read from the files' headers alone.

    Masks and positions that some families store beside their weights may be of whole numbers: transformers makes its
    own. A file that cannot be read is refused later, where its weights are read.
    """
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                last = key.rpartition(".")[2]
                stored = file.get_slice(key)
                is_weight = last == "weight" or last in STORED or (last == "bias" and len(stored.get_shape()) == 1)
                if not is_weight or any(mark in key for mark in NOT_THE_MODEL):
                    continue
                if (dtype := stored.get_dtype()) not in FLOATS:
                    raise UserError(
                        f"Expected weights in floating point of 16 bits or more in {checkpoint.name}, got {dtype} in "
                        f"{key}: quantised weights are not supported, so save the model in bfloat16, float16 or "
                        "float32."
                    )


def _wrong(name: str, what: str, values: list[str]) -> UserError:
    more = f" and {len(values) - 1} more" if len(values) > 1 else ""
    return UserError(
        f"Expected in {name} the weights that its config.json asks for, got {what} {values[0]}{more}: "
        "copy the checkpoint again, or correct its config.json."
    )


def _class(checkpoint: Checkpoint) -> Any:
    """Return the class that runs a family with code of its own."""
    if checkpoint.family is not None and checkpoint.family.up_relu:
        return TwoReLUMistral
    return PlainLlama if checkpoint.maps == PLAIN else LlamaForCausalLM


def _weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights with the names and orientation that the network's class has."""
    weights: dict[str, Tensor] = {}
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                if any(mark in key for mark in NOT_THE_MODEL):
                    continue
                name, tensor = _turned(checkpoint, key, file.get_tensor(key))
                if name in weights:
                    raise _wrong(checkpoint.name, "unexpected", [key])
                weights[name] = tensor
    return weights


def _turned(checkpoint: Checkpoint, key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return a stored weight's name in the network, and the weight in the network's orientation."""
    config, fields = checkpoint.config, checkpoint.fields
    layer, _, last = key.rpartition(".")
    name, transposed = key, False
    if last in STORED:
        ends, gated, plain = STORED[last]
        name, transposed = f"{layer}.{ends}", plain if checkpoint.maps == PLAIN else gated
    if not name.endswith(tuple(f".{ends}" for ends, *_ in STORED.values())):
        return name, tensor
    down = name.endswith(".down_proj.weight")
    if down and last == "weight":
        transposed = bool(fields.get("sparsity_use_hybrid_kernel"))
    shape = (config.hidden_size, config.intermediate_size)[:: 1 if down else -1]
    if shape[0] != shape[1]:
        transposed = tuple(tensor.shape) == shape[::-1]
    return name, tensor.t().contiguous() if transposed else tensor
