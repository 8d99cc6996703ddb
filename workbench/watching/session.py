"""Watch a model in code of your own: every call is counted as a capture would count it.

The idea: the model's FFNs run ours (`models/attach.py`), hooks hear each call (`hooks.py`), what it is called with says
which rows are tokens of which sequences (`tracker.py`), and what sequences read is put together once they have ended
(`reads.py`). From there on it is a capture: the capture's own recorder writes a run, in the folder that was asked for
or in a temporary one, from which every answer comes. So memory does not grow with tokens.

A sequence ends with the cache that holds it, with `generate`, with a call that has no cache, or where rows are asked
for. A value that is not finite in a layer is left out of that layer's sums, and the token is flagged.

Cost: that of counting (see the log), some 50 µs of the host a call, and a byte a token and layer on disk.

    with watch(model, tokenizer) as w:
        model.generate(**inputs)
    w.by_layer()
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from twell.workbench.capturing.firings import layers_text, parse_fired
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import new_manifest
from twell.workbench.errors import Missing, UserError, path_of
from twell.workbench.models.attach import OWN_CODE, AttachedModel, FFNs, attached
from twell.workbench.option_fields import check_type
from twell.workbench.options import CaptureOptions, KernelName
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED
from twell.workbench.run.rank_share import own_folders
from twell.workbench.run.store import Run, open_run, refuse_existing
from twell.workbench.run.writer import RunWriter
from twell.workbench.text.vocabulary import special_ids
from twell.workbench.watching.answers import Answers, nothing_seen
from twell.workbench.watching.call_inputs import refuse_names
from twell.workbench.watching.hooks import CallHooks
from twell.workbench.watching.reads import SOURCE, Group
from twell.workbench.watching.totals import Totals
from twell.workbench.watching.tracker import Tracker

Layers = bool | str | Sequence[int]

OUT = "a folder for out="  # what that argument names, in a sentence on it
KERNEL = {"name": OWN_CODE.kernel, "reason": OWN_CODE.reason}  # of a manifest, where `dense` is asked for


class watch(Answers):  # called like a function, in a with statement
    """Count what a model's FFNs fire while code of yours runs it; a context manager.

    model: a causal language model of transformers, or with `ffns` any torch module
    tokenizer: for text, and for which ids are special; fast
    ffns: the FFNs of a module of yours: their paths in it, and the names of their maps, as in
    {"blocks.0.mlp": ("gate", "up", "down")}; where maps have usual names or are two, a list of paths or of the modules
    inputs: names of that module's arguments: "ids", [sequences, columns] (default: input_ids, or the first tensor of
    whole numbers that is no mask), and "mask", which is 0 at padding (default: attention_mask); FFNs that see other
    rows than there are ids are counted without
    threshold: count neurons with |hidden| above this, and run the model as it is; for FFNs without zeros
    probes: counts | neurons (sums of each neuron too); kernel: as in `twell capture`
    dense: run the model's own code in place of the sparse kernels, so that outputs are its own to the bit; where
    gradients are followed it runs anyway, as the watch has no backward pass of its own
    rows: whether to keep a row a token; without, metrics alone are left
    fired: layers whose firings are kept for every token, as [3, 4], "0,3-5:0.01" with a share, or True for all
    hidden: layers whose hidden values of the last call are kept
    loss: take the loss of the next token from the model's logits, at each token whose next one the same call reads, or
    the next call that goes on from its cache; an output that is a tensor or a tuple names no logits, so it has none
    out: a folder for the run, which the dashboard shows while it grows, another for each rank; default: a temporary one
    name: what the model is called in the run; default: its folder's or its class's name

    Raises UserError for a model that cannot be counted. Afterwards the model is what it was, whatever happened.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        ffns: FFNs | None = None,
        inputs: Mapping[str, str] | None = None,
        threshold: float | None = None,
        probes: Literal["counts", "neurons"] = "neurons",
        kernel: KernelName = "auto",
        dense: bool = False,
        rows: bool = True,
        fired: Layers = False,
        hidden: Layers = False,
        loss: bool = False,
        out: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        limit = float(threshold) if isinstance(threshold, Real) else None  # of numpy's types too, none of which is JSON
        self.model, self.tokenizer, self.rows, self._dense = model, tokenizer, rows, dense
        self._given: dict[str, Any] = {"ffns": ffns, "threshold": limit, "kernel": kernel, "name": name}
        self._names = None if ffns is None else inputs or {}
        self._probes, self._asks_fired, self._asks_hidden, self._loss = probes, fired, hidden, loss
        self._out = None if out is None else path_of(out, OUT)
        self._recorder: Recorder | None = None
        self._folder: Path | None = None
        self._batches = 0
        self._entered = self._ended = False
        if threshold is not None and not (isinstance(threshold, Real) and 0 <= threshold < math.inf):
            raise UserError(f"Expected a threshold of at least 0, got {threshold!r}.")
        refuse_names(inputs, ffns is not None)
        check_type("probes", probes, Literal["counts", "neurons"])
        check_type("kernel", kernel, KernelName)
        if tokenizer is not None:
            fast(tokenizer)

    @own_folders()
    def __enter__(self) -> watch:
        if self._entered:
            raise UserError("Expected a watch that has not begun, got one that has: make another.")
        if self._out is not None:
            refuse_existing(self._out)
        with ExitStack() as stack:
            self.loaded: AttachedModel = stack.enter_context(attached(self.model, self.tokenizer, **self._given))
            loaded = self.loaded
            fired = _layers(self._asks_fired, loaded.layers, "fired=")
            hidden = _layers(self._asks_hidden, loaded.layers, "hidden=")
            self._special = np.array(sorted(self._special_ids()), dtype=np.int32)
            fires_alone = not self.rows and bool(self._dense or loaded.watched)
            self.totals = Totals(loaded, self._probes == "neurons" or fires_alone)
            for slot in loaded.slots if self._dense else ():
                slot.stays_dense = True
            self.tracker = Tracker(
                loaded,
                self._probes,
                self._special.tolist(),
                self.totals.add,
                self._record if self.rows else None,
                parse_fired(fired, loaded.layers)[0] if fired else frozenset(),
                parse_fired(hidden, loaded.layers)[0] if hidden else frozenset(),
                self.totals.add_fires if fires_alone else None,
                self.totals.add_losses if self._loss else None,
                self._names,
            )
            self._fired, self._share = fired, parse_fired(fired, loaded.layers)[1] if fired else 1.0
            self._hooks = CallHooks(loaded.model, loaded.body, self.tracker)
            stack.callback(self._hooks.remove)
            self._hooks.put()
            self._stack = stack.pop_all()
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        self._ended = True
        try:
            self.tracker.hand_on(all_of_them=True)
            if self._recorder is not None:
                self._recorder.finish(COMPLETE if kind is None else INTERRUPTED, [_WatchedText()])
        except BaseException:
            if self._recorder is not None:
                self._recorder.rescue()
            raise

    def __repr__(self) -> str:
        if not self._entered:
            return f"watch({type(self.model).__name__}, not begun)"
        state = "ended" if self._ended else "on"
        return f"watch({self.loaded.name}, {state}: {self.totals.tokens_read():,} tokens, {self.loaded.layers} layers)"

    @property
    def run(self) -> Run:
        """The run of everything that was read until now. Sequences that go on afterwards are new ones."""
        if not self.rows:
            raise Missing("This watch keeps no rows: begin it with rows=True, the default, or ask for metrics().")
        if self._entered and not self._ended:
            self.tracker.hand_on(all_of_them=True)
            if self._recorder is not None:
                self._recorder.flush()
        if self._folder is None:
            raise Missing(nothing_seen(self.tracker.idle_calls if self._entered else 0))
        return open_run(self._folder)

    def save(self, path: str | Path) -> Run:
        """Write what was read until now as a run, which `twell app` and every command take.

        path: of its folder, which is empty or not there yet, else UserError
        """
        folder = path_of(path, "a folder to save the run in")
        run = self.run
        refuse_existing(folder)
        try:
            shutil.copytree(run.path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tmp"))
            manifests.update(folder, name=folder.name, status=COMPLETE if self._ended else INTERRUPTED)
        except OSError as error:
            raise UserError(
                f"Expected to copy the run to {folder}, got {error.strerror or error}: choose a folder that can be "
                "written to."
            ) from None
        return open_run(folder)

    def hidden(self, layer: int) -> Tensor:
        """Return a layer's hidden values of the last call, what w_down multiplies: [sequences, columns, d_ff].

        Where the call followed gradients, the tensor is the graph's own.
        """
        self._check_layer(layer)
        if layer not in self.tracker.hidden_layers:
            raise Missing(f"This watch keeps no hidden values of layer {layer}: begin it with hidden=[{layer}].")
        if layer not in self.tracker.hidden:
            raise Missing(nothing_seen(self.tracker.idle_calls if self._entered else 0))
        return self.tracker.hidden[layer]

    def metrics(self) -> dict[str, float]:
        """Return mean nnz, sparsity and share of dead neurons, by layer and over all, and the mean loss if it is asked
        for, of the tokens read since the last time; flat, for a logger. Waits for the device."""
        if not self._entered:
            raise Missing("This watch has not begun: call the model inside the with block.")
        return self.totals.take()

    def _special_ids(self) -> set[int]:
        """Return the ids of special tokens: the tokenizer's, or what the model's configuration names."""
        if self.tokenizer is not None:
            return special_ids(self.tokenizer)
        config = getattr(self.loaded.model, "config", None)
        named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        return {one for given in named for one in (given if isinstance(given, list) else [given]) if one is not None}

    def _record(self, group: Group) -> dict[int, int]:
        """Write sequences; return how far each went, in positions."""
        result = group.batch(self._batches, self._special, self.loaded.d_ff, self._share)
        if result is None:
            return {}
        if self._recorder is None:
            self._recorder = self._begin()
        batch, counted, fired = result
        self._batches += 1
        self._recorder.accept(batch, counted, fired if self._fired else None)
        return {int(n): one.start + len(one.ids) for n, one in zip(batch.numbers, batch.sequences, strict=True)}

    @own_folders()
    def _begin(self) -> Recorder:
        """Begin the run."""
        folder = self._out
        if folder is None:
            above = Path(tempfile.mkdtemp(prefix="twell-watch-"))
            weakref.finalize(self, remove_temporary, above, os.getpid())
            folder = above / "watch"
        self._folder = folder
        options = CaptureOptions(
            model=self.loaded.name,
            text=(SOURCE,),
            out=folder,
            timings=0,
            loss=self._loss,
            probes=self._probes,
            fired=self._fired,
            threshold=self._given["threshold"],
            kernel=self._given["kernel"],
        )
        manifest = new_manifest(self.loaded, options, [SOURCE])
        if self._dense:
            manifest.kernel = dict(KERNEL)
        return Recorder(self.loaded, RunWriter(folder, manifest), options)


class _WatchedText:
    """The text of a watch, as a manifest lists it."""

    name = SOURCE

    def manifest(self) -> dict[str, Any]:
        return {"source": SOURCE}


def fast(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is fast. Raises UserError for another."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"Expected a fast tokenizer, got a {type(tokenizer).__name__}: load its fast form.")
    return tokenizer


def _layers(asked: Layers, layers: int, name: str) -> str | None:
    """Return layers as the option --fired names them; None for none. name: of the argument"""
    text = layers_text(asked, name)
    if text is not None:
        parse_fired(text, layers, name)
    return text


def remove_temporary(folder: Path, process: int) -> None:
    """Remove a temporary run of a process; a fork of it, which ends too, leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
