"""Models: a checkpoint folder or a hub id, loaded with each layer's FFN replaced by the instrumented one.

The idea: the model runs as transformers runs it; only `layer.mlp` is exchanged for a `SparseFFN` that shares the same
weights, computes the same outputs and counts on the way. Weights come from safetensors alone; a weight that is missing,
left over or of another shape is named and refused, because transformers would make one up.

Cost: reading the weights, and one pass over the FFN's to see that they are finite.

    loaded = load("data/demo-model", device="cpu")
    hidden = loaded.body(input_ids=ids, use_cache=False).last_hidden_state   # loaded.probe hears of every layer
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from twell.kernels.layout import Layout
from twell.kernels.module import Probe, SparseFFN
from twell.kernels.ops import Choice
from twell.workbench.checkpoint import ACTIVATIONS, FAMILIES, Family, find, fingerprint, first_line, understood
from twell.workbench.errors import UserError

CONTEXT = 2048  # tokens: the longest sequence unless told otherwise


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be captured. Its FFNs report to `probe`; `model` is otherwise what transformers made."""

    name: str  # the folder's name, or the hub id
    revision: str | None  # the hub's commit
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    probe: Probe
    ffns: tuple[SparseFFN, ...]
    kernel: str
    weights: str  # sha256 of the checkpoint's files: sizes, first and last MiB

    @property
    def body(self) -> nn.Module:
        """Everything below the language model's head."""
        return self.model.get_decoder()

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.model.get_decoder().layers)

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def family(self) -> str:
        return str(self.model.config.model_type)

    @property
    def layers(self) -> int:
        return len(self.ffns)

    @property
    def d_model(self) -> int:
        return self.ffns[0].d_model

    @property
    def d_ff(self) -> int:
        return self.ffns[0].d_ff

    @property
    def context(self) -> int:
        """Longest sequence that the model was made for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def layout(self) -> Layout:
        """The TwELL layout that kernels pack into."""
        return self.probe.layout or Layout()

    @property
    def nnz_definition(self) -> str:
        ffn = self.ffns[0]
        if ffn.threshold is not None:
            return f"|hidden| > {ffn.threshold:g} (counting only, {ffn.activation}; the FFN runs densely)"
        accumulator = "float64 product" if self.dtype == "float64" else "float32 accumulator"
        kind = "ReLU squared" if ffn.activation == "relu2" else "ReLU"
        if ffn.w_up is None:
            return f"hidden pre-activation > 0 in the first product's {accumulator} (plain FFN, {kind})"
        return f"gate pre-activation > 0 in the gate product's {accumulator} (gated FFN, {kind})"

    def choice(self, rows: int) -> Choice:
        """The kernel that batches of so many rows take, and the reason."""
        return self.ffns[0].choice(rows)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the model."""
        return {
            "name": self.name,
            "revision": self.revision,
            "weights": self.weights,
            "family": self.family,
            "layers": self.layers,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "vocab_size": int(self.model.config.vocab_size),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def load(
    model: str,
    revision: str | None = None,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    kernel: str = "auto",
    threshold: float | None = None,
) -> LoadedModel:
    """Load a model and put the instrumented FFN in each layer. Outputs are unchanged.

    model: a folder that `save_pretrained` wrote, or a hub id; revision: a hub model's branch, tag or commit
    device: auto | cpu | cuda; dtype: default the checkpoint's on a GPU, float32 on a CPU; kernel: as in `gated_ffn`
    threshold: count a neuron where |hidden| is above it, and run the FFN densely; for activations without zeros

    Raises UserError for a model that is not there, not understood, not whole, or not finite.
    """
    place = pick_device(device)
    folder, name, revision = find(model, revision, threshold)
    config = understood(folder, name, threshold)
    if dtype is None:
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        dtype = stored if place.type == "cuda" else torch.float32
    tokenizer = _tokenizer(folder, name)
    network = _weights(folder, name, config, dtype).eval()
    network.to(place)  # type: ignore[arg-type]  # transformers wraps it without its types
    rows = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"Expected a tokenizer of at most {rows} tokens for {name}, as its embedding has (vocab_size), "
            f"got one of {len(tokenizer)}: use the tokenizer that the model was trained with."
        )
    probe = Probe()
    family = FAMILIES[config.model_type]
    given = {"probe": probe, "kernel": kernel, "threshold": threshold}
    given["activation"] = ACTIVATIONS[getattr(config, family.act)]
    blocks = enumerate(network.get_decoder().layers)
    ffns = tuple(_replace(block, family, name, {"layer": number, **given}) for number, block in blocks)
    return LoadedModel(name, revision, network, tokenizer, probe, ffns, kernel, fingerprint(folder))


def pick_device(device: str) -> torch.device:
    """The device of that name; auto is the GPU where there is one."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise UserError(
            "Expected a CUDA device for --device cuda, PyTorch sees none: use --device cpu, or `twell doctor`."
        )
    return torch.device("cuda", torch.cuda.current_device()) if present and device != "cpu" else torch.device("cpu")


def _tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    wanted = f"Expected a tokenizer.json beside the weights of {name}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        why = first_line(error)
        raise UserError(f"{wanted}, got none that loads ({why}): save the model's tokenizer there.") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{wanted}, got a {type(tokenizer).__name__}: save the fast form of the tokenizer there.")
    return tokenizer


def _weights(folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers loads it, every weight of it found in the checkpoint and no other."""
    if not list(folder.glob("*.safetensors")):
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        got = f"only {others[0]}, a pickle, which is never opened" if others else "none"
        raise UserError(f"Expected weights in safetensors in {name}, got {got}: save it with save_pretrained.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # to name them below
            output_loading_info=True,
        )
    except Exception as error:
        why = first_line(error)
        raise UserError(f"Expected weights that load in {name}, got an error ({why}): copy them again.") from None
    network, report = loaded
    for what in ("missing", "unexpected", "mismatched"):
        found = sorted(key if isinstance(key, str) else key[0] for key in report[f"{what}_keys"])
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise UserError(
                f"Expected in {name} the weights that its config.json asks for, got {what} {found[0]}{more}: "
                "copy the checkpoint again, or correct its config.json."
            )
    return network


def _replace(block: Any, family: Family, name: str, options: dict[str, Any]) -> SparseFFN:
    holder = getattr(block, family.holder) if family.holder else block
    maps = [getattr(holder, name) for name in family.maps]
    try:
        ffn = SparseFFN.gated(*maps, **options) if len(maps) == 3 else SparseFFN.plain(*maps, **options)
    except ValueError as error:
        raise UserError(f"{name} cannot run: {error}.") from None
    if family.holder:
        setattr(block, family.holder, ffn)
    else:  # the layer calls one after the other: the first does all, the rest nothing
        setattr(block, family.maps[0], ffn)
        setattr(block, family.maps[1], nn.Identity())
        block.activation_fn = nn.Identity()
    return ffn
