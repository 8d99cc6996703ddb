"""Capture from Python: a model by its path or as an object, and texts as strings, paths or sources.

    run = capture(model, ["a text", "another"])
    run = capture("builtin:demo", ["book.txt"], out="runs/book", examples=8)

It does what `twell capture` does, by the same functions; the options are those of `CaptureOptions`.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from twell.workbench.capturing import command
from twell.workbench.capturing.firings import layers_text
from twell.workbench.errors import UserError, path_of
from twell.workbench.models.attach import attached, attribute_of, name_of, path_inside, unwrapped
from twell.workbench.models.load import refuse_other_tokenizer
from twell.workbench.option_fields import check_bounds, plain_values, python_names
from twell.workbench.options import CaptureOptions, Device, KernelName
from twell.workbench.run.store import Run, refuse_existing
from twell.workbench.text.given import sources_of
from twell.workbench.text.sources import TextSource
from twell.workbench.watching.session import OUT, Layers, fast, remove_temporary

OF_A_PATH = ("revision", "device", "resume")  # options that an object has decided already
P = ParamSpec("P")
Result = TypeVar("Result")


class CaptureArguments(TypedDict, total=False):
    """The fields of `CaptureOptions` that `capture` takes beside its own arguments, as editors know them."""

    tokens: int | None
    seq_len: int | None
    batch_tokens: int | None
    device: Device
    kernel: KernelName
    timings: int
    timings_share: float
    loss: bool
    probes: Literal["counts", "neurons", "all"]
    generate: int
    temperature: float
    seed: int
    threshold: float | None
    examples: int
    fired: Layers | None
    revision: str | None
    resume: bool


def _listed(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return a function whose help lists the options of a capture, with their defaults, in place of **options."""
    own = signature(function)
    kinds, defaults = CaptureArguments.__annotations__, {item.name: item.default for item in fields(CaptureOptions)}
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind.__forward_arg__)
        for name, kind in kinds.items()
    ]
    named = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@_listed
@python_names(CaptureOptions, text="texts")
def capture(
    model: nn.Module | str | Path,
    texts: str | Path | TextSource | Sequence[str | Path | TextSource],
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    **options: Unpack[CaptureArguments],
) -> Run:
    """Run a model over texts, record which FFN neurons fire, and return the run.

    model: a folder, a hub id, builtin:demo, or a causal language model of transformers, which is afterwards as it was
    texts: strings, each a document; or names and paths of sources, as `--text` takes them
    tokenizer: of a model object; default: the one that lies where the model came from
    out: the run's folder; default: a temporary one, which is removed when Python ends
    progress: whether to print what the command prints; options: the fields of `CaptureOptions`

    Raises UserError for a model, a text or an option that cannot be used; the model is then as it was.
    """
    for name in options:
        if name not in CaptureArguments.__annotations__ or (name in OF_A_PATH and isinstance(model, nn.Module)):
            raise UserError(f"Expected options of a capture, such as tokens or examples, got {name}.")
    sources = sources_of(texts)
    given = {"text": tuple(source.name for source in sources), **plain_values(dict(options))}
    given["fired"] = layers_text(given.get("fired"), "fired=")
    folder = _temporary() if out is None else path_of(out, OUT)
    check_bounds(CaptureOptions(model="", out=folder, **given), from_python=True)
    if not isinstance(model, nn.Module):
        if attribute_of(model, nn.Module):
            unwrapped(model)  # refuses it, and says where its model is
        path_of(model, "a model, or its folder or hub id")
        if tokenizer is not None:
            raise UserError(f"Expected no tokenizer= beside {model}, got one: its folder has its own.")
        return command.capture(CaptureOptions(model=str(model), out=folder, **given), sources, not progress)
    refuse_existing(folder)
    inner = language_model(model)
    tokenizer = _tokenizer_of(inner) if tokenizer is None else fast(tokenizer)
    embedding: Any = inner.get_input_embeddings()
    refuse_other_tokenizer(name_of(inner), tokenizer, len(embedding.weight))
    threshold, kernel = given.get("threshold"), given.get("kernel", "auto")
    with attached(model, tokenizer, threshold=threshold, kernel=kernel) as loaded:
        if loaded.runs_own_code:  # there is no sparse FFN to time
            given["timings"] = 0
        chosen = CaptureOptions(model=loaded.name, out=folder, **given)
        return command.record(loaded, chosen, sources, quiet=not progress)


def language_model(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers that is given, unwrapped. Raises UserError for a module of another kind."""
    inner = unwrapped(model)
    if isinstance(inner, PreTrainedModel):
        return inner
    name, inside = type(inner).__name__, path_inside(inner)
    way = f"give what it holds as .{inside}" if inside else "count it with `watch`, ffns= and calls of your own"
    raise UserError(f"Expected a causal language model of transformers, which takes texts, got a {name}: {way}.")


def _temporary() -> Path:
    """Return a folder for a run that is removed when Python ends."""
    above = Path(tempfile.mkdtemp(prefix="twell-capture-"))
    atexit.register(remove_temporary, above, os.getpid())
    return above / "capture"


def _tokenizer_of(model: Any) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer that lies where a model came from."""
    place = str(getattr(model, "name_or_path", ""))
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True) if place else None
    except Exception:  # each tokenizer fails in its own ways
        tokenizer = None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"Expected a fast tokenizer for {type(model).__name__}, found none where the model came from: give one as "
            "tokenizer=."
        )
    return tokenizer
