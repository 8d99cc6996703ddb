"""Models: a checkpoint folder or a hub id, loaded with each layer's FFN replaced by the instrumented one.

The idea: the model runs as transformers runs it; only `layer.mlp` is exchanged for a `SparseFFN` that shares the same
weights, computes the same outputs and counts on the way. What this module understands is a table (`FAMILIES`); every
other model is refused by the configuration field that says it is another one, before a weight is read. Weights come
from safetensors alone, and no code of a checkpoint is run.

Cost: reading the weights, and one pass over the FFN's to see that they are finite.

    loaded = load("data/demo-model", device="cpu")
    hidden = loaded.body(input_ids=ids, use_cache=False).last_hidden_state   # loaded.probe hears of every layer
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from twell.kernels.layout import Layout
from twell.kernels.module import Probe, SparseFFN
from twell.kernels.ops import Choice
from twell.workbench.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2")  # model_type; all have layers[i].mlp with gate_proj, up_proj, down_proj
SUPPORTED = f"a ReLU-gated model of model_type {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} (hidden_act: relu)"
# A field that a family's configuration class does not have, and whose name speaks of the FFN, is another FFN.
ABOUT_FFN = re.compile(r"spars|expert|moe|mlp|ffn|activation|hidden_act|threshold")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
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

    @property
    def body(self) -> nn.Module:
        """Everything below the language model's head."""
        return self.model.get_decoder()

    @property
    def head(self) -> nn.Module:
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
        accumulator = "float64 product" if self.dtype == "float64" else "float32 accumulator"
        return f"gate pre-activation > 0 in the gate product's {accumulator} (gated FFN, ReLU)"

    def choice(self, rows: int) -> Choice:
        """The kernel that batches of so many rows take, and the reason."""
        return self.ffns[0].choice(rows)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the model."""
        return {
            "name": self.name,
            "revision": self.revision,
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
) -> LoadedModel:
    """Load a model and put the instrumented FFN in each layer. Outputs are unchanged.

    model: a folder that `save_pretrained` wrote, or a hub id; revision: a hub model's branch, tag or commit
    device: auto | cpu | cuda; dtype: default the checkpoint's on a GPU, float32 on a CPU; kernel: as in `gated_ffn`

    Raises UserError for a model that is not there, not understood, not whole, or not finite.
    """
    place = pick_device(device)
    folder, name, revision = find(model, revision)
    config = understood(folder, name)
    if dtype is None:
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        dtype = stored if place.type == "cuda" else torch.float32
    tokenizer = _tokenizer(folder, name)
    network = _weights(folder, name, config, dtype).to(place).eval()
    rows = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"Expected a tokenizer of at most {rows} tokens for {name}, as its embedding has (vocab_size), "
            f"got one of {len(tokenizer)}: use the tokenizer that the model was trained with."
        )
    probe = Probe()
    ffns = tuple(
        _replace(layer, number, probe, kernel, name) for number, layer in enumerate(network.get_decoder().layers)
    )
    return LoadedModel(name, revision, network, tokenizer, probe, ffns, kernel)


def pick_device(device: str) -> torch.device:
    """The device of that name; auto is the GPU where there is one."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise UserError("Expected a CUDA device for --device cuda, PyTorch sees none: use --device cpu, or see `twell doctor`.")
    return torch.device("cuda", torch.cuda.current_device()) if present and device != "cpu" else torch.device("cpu")


# ---- finding it


def find(model: str, revision: str | None) -> tuple[Path, str, str | None]:
    """The checkpoint's folder, a name for it that tells nothing of this machine, and the hub's commit, if it has one."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"Expected --revision with a hub id only, got the folder {model}: leave --revision out.")
        return folder, folder.resolve().name, None
    if folder.is_file() or not HUB_ID.fullmatch(model):
        got = "a file" if folder.is_file() else "nothing there"
        raise UserError(f"Expected a model folder at {model}, got {got}: give the folder that holds its config.json.")
    config = _download(model, revision, ["config.json"])
    understood(config, model)  # before gigabytes of weights are fetched
    folder = _download(model, config.name, HUB_FILES)
    return folder, model, folder.name


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    """The hub's snapshot of a model; its folder is named by the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except GatedRepoError:
        why, todo = "the hub gives it only to accounts that asked for it", "ask for access and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why, todo = "there is no such folder here and no such model on the hub", "check the name"
    except RevisionNotFoundError:
        why, todo = f"the hub has no revision {revision!r} of it", "check --revision"
    except (OSError, ValueError):
        why, todo = "there is no such folder here, and the hub cannot be reached", "check the path, or connect"
    raise UserError(f"Expected a local folder or a hub id, got {model}: {why}; {todo}.")


# ---- understanding it


def understood(folder: Path, name: str) -> Any:
    """The model's configuration, if every field that decides about the FFN is one that this module understands."""
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"Expected a config.json in the model folder {name}, found none: is it a model's folder?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"Expected a readable config.json in {name}, got {error}: copy the model again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"Expected an object in config.json of {name}, got a {type(fields).__name__}: copy the model again.")

    def refuse(field: str, why: str = "") -> UserError:
        got = json.dumps(fields.get(field))
        return UserError(f"Expected {SUPPORTED}, got {field}: {got[:80]} in the config.json of {name}{why}.")

    if fields.get("model_type") not in FAMILIES:
        raise refuse("model_type", "; other families are not supported yet")
    activation = fields.get("hidden_act", "silu")  # the default of all three families
    if activation != "relu":
        fields["hidden_act"] = activation
        raise refuse("hidden_act", ", which has no zeros to count; counting by a threshold for such models is coming")
    for field in ("auto_map", "quantization_config"):
        if fields.get(field) is not None:
            raise refuse(field, "; checkpoints with code of their own or quantised weights are not supported")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration class checks itself in its own ways
        raise UserError(f"Expected {SUPPORTED}, got a config.json in {name} that it refuses: {_first_line(error)}") from None
    known = set(type(config)().to_dict())
    for field in fields:
        if field not in known and ABOUT_FFN.search(field):
            raise refuse(field, ", a field that this family does not have")
    for field in ("hidden_size", "intermediate_size"):
        size = getattr(config, field)
        if size <= 0 or size % 8:
            raise refuse(field, ", which the FFN kernels take in multiples of 8 only")
    return config


def _tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    wanted = f"Expected a tokenizer.json beside the weights of {name}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UserError(f"{wanted}, got none that loads ({_first_line(error)}): save the model's tokenizer there.") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{wanted}, got a {type(tokenizer).__name__}: save the fast form of the tokenizer there.")
    return tokenizer


def _weights(folder: Path, name: str, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers loads it, every weight of it found in the checkpoint and no other."""
    if not list(folder.glob("*.safetensors")):
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        got = f"only {others[0]}, a pickle, which is never opened" if others else "none"
        raise UserError(f"Expected weights in safetensors in the model folder {name}, got {got}: save it with save_pretrained.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
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
        raise UserError(f"Expected weights that load in {name}, got an error ({_first_line(error)}): copy them again.") from None
    for what in ("missing", "unexpected", "mismatched"):
        found = sorted(key if isinstance(key, str) else key[0] for key in report[f"{what}_keys"])
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise UserError(
                f"Expected the weights of {name} to be those that its config.json asks for, got {what} {found[0]}{more}: "
                "copy the checkpoint again, or correct its config.json."
            )
    return network


def _replace(layer: nn.Module, number: int, probe: Probe, kernel: str, name: str) -> SparseFFN:
    mlp = layer.mlp
    try:
        ffn = SparseFFN.gated(mlp.gate_proj, mlp.up_proj, mlp.down_proj, layer=number, probe=probe, kernel=kernel)
    except ValueError as error:
        raise UserError(f"{name} cannot run: {error}.") from None
    layer.mlp = ffn
    return ffn


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".:")
