"""Find a checkpoint, here or on the hub, and refuse one that would be misread before a weight is loaded.

The idea: the kernels run a short list of families. Any other model is refused by the field of its config.json that says
it is another one, and so is a field that names the FFN and that its family does not have; with a threshold, which only
counts, every family of transformers is accepted. From the hub the configuration is fetched first, so that a refusal
costs a few kilobytes. No code of a checkpoint is run, and no pickle is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from twell.workbench.errors import UserError, first_line, usable, utf8
from twell.workbench.models.families import ACTIVATIONS, FAMILIES, PLAIN, Family
from twell.workbench.models.sizes import WIDTHS, check_widths, refuse_too_many_layers

SUPPORTED = f"a model of model_type {', '.join([*FAMILIES][:-1])} or {[*FAMILIES][-1]} with ReLU"
OTHERS = "; what the FFN of other families holds can be counted above a --threshold, such as 0.01"
# A field that a family's configuration class does not have, and whose name speaks of the FFN, is another FFN.
ABOUT_FFN = re.compile(r"spars|expert|moe|mlp|ffn|activation|hidden_act|threshold")
ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation")
DEMO = "builtin:demo"  # the model that ships in the package
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MIB = 2**20
MOST_CONFIG = 64 * MIB  # bytes
READ = (".json", ".safetensors", ".txt", ".model", ".jinja")  # kinds of files of a checkpoint
HUB_FILES = [f"*{kind}" for kind in READ]


def find(model: str, revision: str | None, threshold: float | None = None) -> tuple[Path, str, str | None]:
    """Return the checkpoint's folder, a name without paths of this machine, and its commit if it is from the hub."""
    folder = Path(str(files("twell.data") / "demo-model")) if model == DEMO else _path(model)
    if folder.is_dir():
        if revision is not None:
            raise UserError(
                f"Expected --revision with a hub id only, got {model}, a folder here: leave --revision out."
            )
        return folder, utf8(folder.resolve().name), None
    if folder.is_file() or not HUB_ID.fullmatch(model):
        got = "a file" if folder.is_file() else "nothing there"
        raise UserError(
            f"Expected a model folder at {model}, got {got}: give the folder that holds its config.json, or {DEMO}."
        )
    config = _download(model, revision, ["config.json"])
    understood(config, model, threshold)  # before gigabytes of weights are fetched
    folder = _download(model, config.name, HUB_FILES)
    return folder, model, folder.name


def _path(model: str) -> Path:
    """Return the path that a model's name would be. Raises UserError for one that the system cannot hold."""
    try:
        return usable(Path(model).expanduser())
    except RuntimeError:  # ~ of somebody who is not known here
        return usable(model)


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    """Download files of a model from the hub; return their folder, which is named by the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    fetch = partial(snapshot_download, model, revision=revision, allow_patterns=files)
    try:
        return Path(fetch())
    except GatedRepoError:
        why, todo = "the hub asks for permission first", "ask for access and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why, todo = "there is no such folder here and no such model on the hub", "check the name"
    except RevisionNotFoundError:
        why, todo = f"the hub has no revision {revision!r} of it", "check --revision"
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # without a network some versions do not look for a commit in the cache
            return Path(fetch(local_files_only=True))
        why, todo = "there is no such folder here, and the hub cannot be reached", "check the path, or connect"
    raise UserError(f"Expected a local folder or a hub id, got {model}: {why}; {todo}.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration this module understands."""

    folder: Path
    name: str
    fields: dict[str, Any]  # config.json
    config: PreTrainedConfig  # of the class of transformers that runs it
    family: Family | None  # None: one that a threshold alone can count

    @property
    def maps(self) -> tuple[str, ...]:
        """The names of the FFN's maps: gate, up, down; or in, out; none for an unknown family."""
        if self.family is None:
            return ()
        return PLAIN if self.fields.get("sparsity_gated_mlp") is False else self.family.maps


def understood(folder: Path, name: str, threshold: float | None = None) -> Checkpoint:
    """Read a checkpoint's config.json. Raises UserError that names the first field that is not understood."""
    _refuse_other_than_files(folder, name)
    fields = _fields(folder, name)
    refuse_too_many_layers(fields, name)
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None and threshold is None:
        raise _refusal(fields, name, "model_type", OTHERS)
    for field in ("auto_map", "quantization_config"):
        if fields.get(field) is not None and not (field == "auto_map" and family is not None and family.base):
            why = "; checkpoints with code of their own or quantised weights are not supported"
            raise _refusal(fields, name, field, why)
    for field in ACTIVATION_FIELDS:
        if isinstance(fields.get(field), str) and fields[field] not in ACT2FN:
            raise _refusal(fields, name, field, ", an activation that transformers does not have")
    if family is not None and fields.get(family.act, "") is None:
        raise _refusal(fields, name, family.act, ", where an activation should stand")
    config = _config(folder, name, family, fields)
    if family is not None and not family.base and WIDTHS in fields:
        check_widths(fields[WIDTHS], config.num_hidden_layers, getattr(config, family.d_ff), name)
    if family is not None and threshold is None:
        known = set(type(config)().to_dict()) | family.own_fields | (set() if family.base else {WIDTHS})
        for field in fields:
            if field not in known and ABOUT_FFN.search(field):
                raise _refusal(fields, name, field, ", a field that this family does not have")
        activation = getattr(config, family.act)
        if activation not in ACTIVATIONS:
            why = ", which has no zeros to count; `twell capture` and `twell text` count above --threshold 0.01"
            raise _refusal(fields | {family.act: activation}, name, family.act, why)
        for field in ("hidden_size", family.d_ff):
            size = getattr(config, field)
            if size <= 0 or size % 8:
                raise _refusal(fields, name, field, ", which the FFN kernels take in multiples of 8 only")
    return Checkpoint(folder, name, fields, config, family)


def _refusal(fields: dict[str, Any], name: str, field: str, why: str) -> UserError:
    got = json.dumps(fields.get(field))
    return UserError(f"Expected {SUPPORTED}, got {field}: {got[:80]} in the config.json of {name}{why}.")


def _config(folder: Path, name: str, family: Family | None, fields: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of the class that runs the checkpoint."""
    try:
        if family is None or not family.base:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        left_out = {"model_type", "auto_map", "architectures", "transformers_version", *family.own_fields}
        if fields.get("rope_scaling") is None:  # which transformers renamed, and warns of
            left_out.add("rope_scaling")
        given = {field: value for field, value in family.as_base(fields).items() if field not in left_out}
        return AutoConfig.for_model(family.base, **given)
    except Exception as error:  # each configuration class checks itself in its own ways
        got = f"a config.json in {name} that transformers refuses ({first_line(error)})"
        raise UserError(f"Expected {SUPPORTED}, got {got}: correct it.") from None


def _fields(folder: Path, name: str) -> dict[str, Any]:
    wanted = f"Expected a config.json in the model folder {name}"
    try:
        fields = json.loads(_text(folder / "config.json"))
    except FileNotFoundError:
        raise UserError(f"{wanted}, found none: give the folder that save_pretrained wrote.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{wanted} that can be read, got {first_line(error)}: copy the model again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{wanted} with an object in it, got a {type(fields).__name__}: copy the model again.")
    return fields


def _refuse_other_than_files(folder: Path, name: str) -> None:
    """Raise UserError for a pipe, a folder or a broken link in place of a file of a checkpoint: some wait for ever."""
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and not path.is_file():
            raise UserError(f"Expected a file at {path.name} in {name}, got something else: copy the model again.")


def _text(path: Path) -> str:
    """Return a small file's text. Raises OSError for what is no file, as a pipe is, and for a file of many MiB."""
    if path.exists() and not path.is_file():
        raise OSError("no file")
    with path.open("rb") as file:
        data = file.read(MOST_CONFIG + 1)
    if len(data) > MOST_CONFIG:
        raise OSError(f"more than {MOST_CONFIG // MIB} MiB")
    return data.decode()


def refuse_unreadable_generation(folder: Path, name: str) -> None:
    """Raise UserError for a generation_config.json that transformers would ignore, or stumble over."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    try:
        if not isinstance(given := json.loads(_text(path)), dict):
            raise ValueError(f"a {type(given).__name__}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            GenerationConfig(**given)
    except Exception as error:  # the class checks itself in its own ways
        raise UserError(
            f"Expected a generation_config.json in {name} that can be read, got {first_line(error)}: correct it, or "
            "remove it."
        ) from None


def fingerprint(folder: Path) -> str:
    """Return a sha256 over each weight file's size, first and last MiB: it identifies a checkpoint in milliseconds."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(MIB))
            file.seek(max(0, size - MIB))
            digest.update(file.read(MIB))
    return digest.hexdigest()
