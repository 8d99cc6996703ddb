"""Models: a checkpoint folder or a hub id, loaded with each layer's FFN replaced by the instrumented one.

The idea: the model runs as transformers runs it; only `layer.mlp` is exchanged for a `SparseFFN` that shares the same
weights, computes the same outputs and counts on the way. With a threshold the FFN stays as it is, whatever it is, and
its map back is watched: it is the layer's only linear map outside attention from another width to d_model.

Cost: reading the weights, and one pass over the FFN's to see that they are finite.

    loaded = load("builtin:demo", device="cpu")
    with loaded.probing(Probe(on_stats=lambda layer, x, stats: counts.append(stats.nnz))):
        hidden = loaded.body(input_ids=ids, use_cache=False).last_hidden_state
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from twell.kernels.dispatch import Choice
from twell.kernels.layout import Layout
from twell.kernels.modules import CountedMap, Probe, SparseFFN
from twell.workbench.devices import pick_device
from twell.workbench.errors import UserError, first_line
from twell.workbench.models import threshold_ffn, weights
from twell.workbench.models.checkpoint import Checkpoint, find, fingerprint, refuse_unreadable_generation, understood
from twell.workbench.models.families import ACTIVATIONS, FAMILIES
from twell.workbench.models.sizes import decoder_layers, own_sizes

TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")  # how their names begin
CONTEXT = 2048  # tokens: the longest sequence unless told otherwise


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be captured. Its FFNs count; `model` is otherwise what transformers made."""

    name: str  # the folder's name, or the hub id
    revision: str | None  # the hub's commit
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    family: str  # model_type, as the checkpoint says
    ffns: tuple[SparseFFN, ...]  # none with a threshold
    watched: tuple[CountedMap, ...]  # maps back from FFNs that run as they are, with a threshold
    kernel: str
    weights: str  # sha256 of the checkpoint's files: sizes, first and last MiB
    head_is_all: bool = True  # whether logits are the head's product with the last hidden state

    @property
    def body(self) -> nn.Module:
        """The network below the language model's head."""
        return self.model.get_decoder()

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return decoder_layers(self.model)

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def _counting(self) -> tuple[SparseFFN, ...] | tuple[CountedMap, ...]:
        return self.ffns or self.watched

    @property
    def layers(self) -> int:
        return len(self._counting)

    @property
    def d_model(self) -> int:
        return self._counting[0].d_model

    @property
    def d_ff(self) -> int:
        return self._counting[0].d_ff

    @property
    def widths(self) -> list[int]:
        """How many neurons each layer has, without those of zeros that fill it up."""
        own = own_sizes(self.model)[0]
        return own if len(own) == self.layers else [self.d_ff] * self.layers

    @property
    def context(self) -> int:
        """Longest sequence that the model was made for, in tokens; CONTEXT where its configuration knows of none."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def layout(self) -> Layout:
        """The TwELL layout that kernels pack into."""
        return Layout()

    def set_probe(self, probe: Probe) -> None:
        """Have every layer count as `probe` requests, and report to its callback."""
        for ffn in self._counting:
            ffn.probe = probe

    @contextmanager
    def probing(self, probe: Probe) -> Iterator[None]:
        """Have every layer count as `probe` requests, and afterwards as it did before."""
        before = self._counting[0].probe
        self.set_probe(probe)
        try:
            yield
        finally:
            self.set_probe(before)

    @property
    def nnz_definition(self) -> str:
        if self.watched:
            above = f"{self.watched[0].threshold:g}"
            return f"|hidden| > {above}, hidden: what goes into the FFN's last map (counting only; it runs densely)"
        layers: dict[str, list[str]] = {}  # by what fires there: a module of one's own may have FFNs of several kinds
        for layer, ffn in enumerate(self.ffns):
            layers.setdefault(_fires(ffn, self.dtype), []).append(str(layer))
        if len(layers) == 1:
            return next(iter(layers))
        return "; ".join(f"in layer {', '.join(numbers)} {fires}" for fires, numbers in layers.items())

    @property
    def counts_used(self) -> bool:
        """Return whether the up branch of any layer has a ReLU too, so that a neuron can fire without being used."""
        return any(ffn.up_relu for ffn in self.ffns)

    def choice(self, rows: int) -> Choice:
        """Return the kernel that runs batches of `rows` rows, and the reason."""
        return self._counting[0].choice(rows)

    def describe(self) -> dict[str, Any]:
        """Return the manifest's field `model`; a value that most models have is left out."""
        own, parameters = self.widths, own_sizes(self.model)[1]
        widths = own if min(own) < self.d_ff else []
        model: dict[str, Any] = {
            "name": self.name,
            "revision": self.revision,
            "weights": self.weights,
            "family": self.family,
            "layers": self.layers,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "vocab_size": self.vocab_size,
            "parameters": parameters,
        }
        model |= {"up_relu": True} if self.counts_used else {}
        if self.watched and self.blocks:  # of other FFNs the definition of nnz tells how many matrices they have
            filled = threshold_ffn.ffn_parameters(self.blocks)
            model["ffn_parameters"] = filled * sum(widths) // (self.d_ff * self.layers) if widths else filled
        model |= {"widths": widths} if widths else {}
        return model | ({"norm": FAMILIES[self.family].norm} if self.family in FAMILIES else {})


def _fires(ffn: SparseFFN, dtype: str) -> str:
    """Return what fires in an FFN, as the manifest says it."""
    accumulator = "float64 product" if dtype == "float64" else "float32 accumulator"
    kind = "ReLU squared" if ffn.activation == "relu2" else "ReLU"
    if ffn.w_up is None:
        return f"hidden pre-activation > 0 in the first product's {accumulator} (plain FFN, {kind})"
    gate = f"gate pre-activation > 0 in the gate product's {accumulator} (gated FFN, {kind}"
    if ffn.up_relu:
        both = "on the gate and on the up branch" if kind == "ReLU" else "on the gate, ReLU on the up branch"
        return f"{gate} {both}); used_LL: of these, with an up pre-activation > 0 too"
    return f"{gate})"


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
    transformers.logging.set_verbosity_error()  # what matters is refused, in a sentence
    torch_device = pick_device(device)
    folder, name, revision = find(model, revision, threshold)
    checkpoint = understood(folder, name, threshold)
    if dtype is None:
        stored = checkpoint.config.dtype
        dtype = stored if torch_device.type == "cuda" and isinstance(stored, torch.dtype) else torch.float32
    refuse_unreadable_generation(folder, name)
    tokenizer = _tokenizer(folder, name)
    loaded = weights.read(checkpoint, dtype)
    loaded.to(torch_device)  # type: ignore[arg-type]  # transformers wraps it without its types
    embedding: Any = loaded.get_input_embeddings()
    refuse_other_tokenizer(name, tokenizer, len(embedding.weight))
    _refuse_overflow(name, embedding.weight)
    probe = Probe()
    ffns: tuple[SparseFFN, ...] = ()
    watched: tuple[CountedMap, ...] = ()
    if threshold is None:
        ffns = tuple(
            _replace(checkpoint, block, layer, kernel, probe) for layer, block in enumerate(decoder_layers(loaded))
        )
    else:
        threshold_ffn.refuse_unless_causal(name, loaded)
        watched = threshold_ffn.watch(name, loaded, decoder_layers(loaded), threshold, probe)
    head_is_all = threshold is None or threshold_ffn.head_is_all(loaded)
    sha256, family = fingerprint(folder), str(checkpoint.fields["model_type"])
    return LoadedModel(
        name, revision, loaded, tokenizer, family, ffns, watched, kernel, sha256, head_is_all
    )  # fmt: skip


def refuse_other_tokenizer(name: str, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    """Raise UserError for a tokenizer with ids that an embedding of so many rows lacks. An id for padding alone may be
    one: no text has it."""
    padding = {tokenizer.pad_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    greatest = max(set(tokenizer.get_vocab().values()) - padding)
    if greatest >= rows:
        raise UserError(
            f"Expected token ids below {rows} from the tokenizer of {name}, as its embedding has rows (vocab_size), "
            f"got {greatest}: use the tokenizer that the model was trained with."
        )


def _refuse_overflow(name: str, embedding: Tensor) -> None:
    """Raise UserError for embeddings [token, d_model] whose squares overflow: a norm makes zeros of them.

    Values that are not finite are left to the tokens that they belong to.
    """
    least, greatest = (float(end) for end in torch.aminmax(embedding.detach()))
    largest = max(-least, greatest)
    if math.isfinite(largest) and largest**2 * embedding.shape[1] > torch.finfo(torch.float32).max:
        raise UserError(
            f"Expected embeddings in {name} whose squares add up in float32, got values up to {largest:.1e}, of which "
            "a norm makes zeros: check the checkpoint that they come from."
        )


def _tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    wanted = f"Expected a tokenizer.json beside the weights of {name}"
    if not any(one.name.startswith(TOKENIZER_FILES) for one in folder.iterdir()):
        save = f"tokenizer.save_pretrained({str(folder)!r})"
        raise UserError(f"{wanted}, got no file of a tokenizer: {save} puts it there.")
    try:
        with warnings.catch_warnings():  # of the configuration that lies beside it
            warnings.simplefilter("ignore", FutureWarning)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        why = first_line(error)
        raise UserError(f"{wanted}, got none that loads ({why}): save the model's tokenizer there.") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{wanted}, got a {type(tokenizer).__name__}: save the fast form of the tokenizer there.")
    return tokenizer


def _replace(checkpoint: Checkpoint, block: Any, layer: int, kernel: str, probe: Probe) -> SparseFFN:
    """Put an instrumented FFN in a decoder layer in place of its own, and return it."""
    family = checkpoint.family
    assert family is not None
    holder = getattr(block, family.holder) if family.holder else block
    maps = [getattr(holder, name) for name in checkpoint.maps]
    options: dict[str, Any] = {"layer": layer, "kernel": kernel, "probe": probe}
    options["activation"] = ACTIVATIONS[getattr(checkpoint.config, family.act)]
    try:
        if len(maps) == 3:
            ffn = SparseFFN.gated(*maps, up_relu=family.up_relu, **options)
        else:
            ffn = SparseFFN.plain(*maps, **options)
    except ValueError as error:
        raise UserError(f"{checkpoint.name} cannot run: {error}.") from None
    if family.holder:
        setattr(block, family.holder, ffn)
    else:  # the layer calls one after the other: the first does all, the rest nothing
        setattr(block, family.maps[0], ffn)
        setattr(block, family.maps[1], nn.Identity())
        block.activation_fn = nn.Identity()
    return ffn
