"""Checkpoints: finding one, here or on the hub, and refusing what would be misread, before a weight is loaded.

The idea: what the workbench understands is a short list of families. Any other model is refused by the field of its
config.json that says it is another one, and so is a field that speaks of the FFN and that its family does not have.
From the hub the configuration is fetched first, so that a refusal costs a few kilobytes. No code of a checkpoint is
run, and no pickle is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from twell.kernels.call import SPARSE_ACTIVATIONS
from twell.workbench.errors import UserError


@dataclass(frozen=True)
class Family:
    """Where a decoder layer of a family has its FFN, and which fields of the configuration decide about it."""

    maps: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # gate, up, down; or of a plain FFN: in, out
    holder: str = "mlp"  # the layer's module that has them; "": the layer itself
    act: str = "hidden_act"
    default: str = "silu"  # activation, where the field is left out
    d_ff: str = "intermediate_size"


FAMILIES = {  # by model_type
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "nemotron": Family(("up_proj", "down_proj"), default="relu2"),
    "opt": Family(("fc1", "fc2"), holder="", act="activation_function", default="relu", d_ff="ffn_dim"),
}
# What the FFN op calls the activations of configurations. The first two have zeros, the others need a threshold.
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SUPPORTED = f"a model of model_type {', '.join([*FAMILIES][:-1])} or {[*FAMILIES][-1]} with ReLU"
# A field that a family's configuration class does not have, and whose name speaks of the FFN, is another FFN.
ABOUT_FFN = re.compile(r"spars|expert|moe|mlp|ffn|activation|hidden_act|threshold")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MIB = 2**20
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def find(model: str, revision: str | None, threshold: float | None = None) -> tuple[Path, str, str | None]:
    """The checkpoint's folder, a name for it that tells nothing of this machine, and its commit if it is the hub's."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"Expected --revision with a hub id only, got the folder {model}: leave --revision out.")
        return folder, folder.resolve().name, None
    if folder.is_file() or not HUB_ID.fullmatch(model):
        got = "a file" if folder.is_file() else "nothing there"
        raise UserError(f"Expected a model folder at {model}, got {got}: give the folder that holds its config.json.")
    config = _download(model, revision, ["config.json"])
    understood(config, model, threshold)  # before gigabytes of weights are fetched
    folder = _download(model, config.name, HUB_FILES)
    return folder, model, folder.name


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    """The hub's snapshot of a model; its folder is named by the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except GatedRepoError:
        why, todo = "the hub asks for permission first", "ask for access and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why, todo = "there is no such folder here and no such model on the hub", "check the name"
    except RevisionNotFoundError:
        why, todo = f"the hub has no revision {revision!r} of it", "check --revision"
    except (OSError, ValueError):
        why, todo = "there is no such folder here, and the hub cannot be reached", "check the path, or connect"
    raise UserError(f"Expected a local folder or a hub id, got {model}: {why}; {todo}.")


def understood(folder: Path, name: str, threshold: float | None = None) -> PreTrainedConfig:
    """The model's configuration, if every field that decides about the FFN is one that this module understands."""
    fields = _fields(folder, name)

    def refuse(field: str, why: str = "") -> UserError:
        got = json.dumps(fields.get(field))
        return UserError(f"Expected {SUPPORTED}, got {field}: {got[:80]} in the config.json of {name}{why}.")

    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        raise refuse("model_type", "; other families are not supported yet")
    activation = fields.setdefault(family.act, family.default)
    if activation not in ACTIVATIONS:
        raise refuse(family.act, f"; of others {', '.join([*ACTIVATIONS][2:])} are known, by a --threshold")
    if threshold is None and ACTIVATIONS[activation] not in SPARSE_ACTIVATIONS:
        raise refuse(family.act, ", which has no zeros to count; count what is above a --threshold, such as 0.01")
    for field in ("auto_map", "quantization_config"):
        if fields.get(field) is not None:
            raise refuse(field, "; checkpoints with code of their own or quantised weights are not supported")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration class checks itself in its own ways
        got = f"a config.json in {name} that transformers refuses ({first_line(error)})"
        raise UserError(f"Expected {SUPPORTED}, got {got}: correct it.") from None
    known = set(type(config)().to_dict())
    for field in fields:
        if field not in known and ABOUT_FFN.search(field):
            raise refuse(field, ", a field that this family does not have")
    for field in ("hidden_size", family.d_ff):
        size = getattr(config, field)
        if size <= 0 or size % 8:
            raise refuse(field, ", which the FFN kernels take in multiples of 8 only")
    return config


def _fields(folder: Path, name: str) -> dict[str, Any]:
    wanted = f"Expected a config.json in the model folder {name}"
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{wanted}, found none: give the folder that save_pretrained wrote.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{wanted} that can be read, got {error}: copy the model again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{wanted} with an object in it, got a {type(fields).__name__}: copy the model again.")
    return fields


def fingerprint(folder: Path) -> str:
    """What tells checkpoints apart without reading gigabytes: a sha256 over each file's size, first and last MiB."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(MIB))
            file.seek(max(0, size - MIB))
            digest.update(file.read(MIB))
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """The first line of an error's message, to go into a sentence."""
    return str(error).strip().split("\n")[0].rstrip(".:")
