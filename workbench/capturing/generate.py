"""Generation, captured as it runs: a batch of prompts, then a token of each sequence at a time, with a cache.

The idea: transformers' own `generate` runs the model; before each of its forward passes the layers are told which rows
are tokens, after it they have told what fired. Prompts are padded on the left, so that all sequences go on in one
column. A sequence ends with its end-of-sequence token, or after as many tokens as asked for. `generate` leaves the last
token it makes unread; so it is asked for one more, and a sequence ends when its last token has been read. What is
padded before a prompt, or after an end, is computed and counted nowhere; an end-of-sequence token within a prompt
ends nothing. What all passes counted is put together as if the sequences had gone through the model at once.

Cost: that of `generate`, and the packed hidden state of the batch in memory, where unions or single firings are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from twell.kernels.layout import TwELL
from twell.kernels.params import Stats
from twell.workbench.capturing.firings import Seen, Watch
from twell.workbench.capturing.forward import Counted, Inputs, OnLayer, asked, gather, next_token_loss, probing
from twell.workbench.capturing.layer_sums import Sums, union_counts
from twell.workbench.models.load import LoadedModel
from twell.workbench.run.schema import DECODE, PREFILL
from twell.workbench.text.batches import Batch


@dataclass(frozen=True)
class Going:
    """How prompts are continued: by so many tokens, the likeliest each time, or drawn at a temperature above 0."""

    tokens: int
    temperature: float = 0.0
    seed: int = 0


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    batch: Batch,
    going: Going,
    *,
    probes: str = "none",
    loss: bool = True,
    watch: Watch | None = None,
    flags: np.ndarray | None = None,
    on_layer: OnLayer | None = None,
) -> tuple[Batch, Counted, Seen | None]:
    """Continue a batch of prompts; the batch with what was generated, and what that counted.

    batch: prompts; or a batch that was generated from them, to be generated once more, with `flags` uint8 [its tokens]:
    what is flagged is left out of every sum
    on_layer(layer, x, stats, phase): told of the prompts' pass, and of the next one
    """
    known = None if flags is None else Inputs.of(batch, loaded.device, flags).rows.view(len(batch.sequences), -1)
    prompts = batch.given()
    keeps = watch is not None and watch.keeps
    passes = Passes(loaded, prompts, going.tokens, probes, keeps, known, on_layer)
    ids = passes.inputs.ids.view(len(prompts.sequences), -1).long()
    real = torch.zeros_like(ids).view(-1).index_fill_(0, passes.inputs.place.long(), 1).view_as(ids)
    with _seeded(loaded, going.seed + batch.number), passes.listening():
        _run(loaded, ids, real, going, passes.ends)
    return passes.joined(loss, watch, flags)


def _run(loaded: LoadedModel, ids: Tensor, real: Tensor, going: Going, ends: Tensor) -> None:
    """`generate`, with no setting but ours."""
    model: Any = loaded.model
    draws: dict[str, Any] = {"do_sample": True, "temperature": going.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=going.tokens + 1, pad_token_id=0, use_cache=True, **(draws if going.temperature else {})
    )
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        criteria = StoppingCriteriaList([_Read(ends, ids.shape[1])])
        model.generate(ids, attention_mask=real, generation_config=config, stopping_criteria=criteria)
    finally:
        model.generation_config = before


class _Read(StoppingCriteria):
    """Sequences are done when their end has been read, as the token before the last one made."""

    def __init__(self, ends: Tensor, prompt: int) -> None:
        self.eos_token_id, self._prompt = ends, prompt  # by its name `generate` knows that done sequences are padded

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        made = input_ids[:, self._prompt : -1]
        if not made.shape[1]:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.isin(made, self.eos_token_id).any(1)


@dataclass
class Pass:
    """One forward pass: what was read, which of it are tokens, what each layer counted, what came out."""

    ids: Tensor  # [sequences, positions]
    real: Tensor  # bool, the same
    stats: list[Stats] = field(default_factory=list)
    packed: list[TwELL] = field(default_factory=list)
    hidden: Tensor | None = None  # [sequences, positions, d_model]


class Passes:
    """The forward passes of one `generate`, as they come."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Batch,
        tokens: int,
        probes: str,
        keeps: bool,
        known: Tensor | None,
        on_layer: OnLayer | None,
    ) -> None:
        """tokens: how many are made at most; keeps: whether single firings are; known: rows that sums are over"""
        self.loaded, self.prompts, self.tokens, self.probes, self.known = loaded, prompts, tokens, probes, known
        self.keeps, self.on_layer = keeps, on_layer
        self.inputs = Inputs.of(prompts, loaded.device)
        self.ends = torch.tensor(sorted(_ends(loaded)), dtype=torch.long, device=loaded.device)
        self._special = torch.from_numpy(prompts.special).to(loaded.device)
        self._numbers = torch.from_numpy(prompts.numbers).to(loaded.device)
        self._over = torch.zeros(len(prompts.sequences), dtype=torch.bool, device=loaded.device)
        self.passes: list[Pass] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around `generate`."""
        with ExitStack() as stack:
            stack.enter_context(probing(self.loaded.probe, self.loaded.probe))
            body = self.loaded.body
            stack.callback(body.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(body.register_forward_hook(self._after).remove)
            yield

    def _before(self, _module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        ids = given["input_ids"] if given.get("input_ids") is not None else args[0]
        if self.passes:
            real = ~self._over[:, None]
            plain = real & ~torch.isin(ids, self._special)
            self._over = self._over | torch.isin(ids[:, 0], self.ends)
        else:
            real = torch.zeros_like(ids, dtype=torch.bool).view(-1).index_fill_(0, self.inputs.place.long(), True)
            real, plain = real.view_as(ids), self.inputs.rows.view_as(ids)
        column = sum(one.ids.shape[1] for one in self.passes)
        if self.known is not None:
            rows = self.known[:, column : column + ids.shape[1]]
            plain = torch.zeros_like(plain) if rows.shape != plain.shape else rows
        self.passes.append(Pass(ids, real))
        about = {
            "rows": plain.to(torch.uint8).reshape(-1).contiguous(),
            "tokens": ids.to(torch.int32).reshape(-1).contiguous(),
            "sequences": self._numbers.repeat_interleave(ids.shape[1]),
        }
        wanted = asked(self.loaded, self.probes, self._hear, self.keeps, **about)
        self.loaded.probe.__dict__.update(vars(wanted))

    def _hear(self, layer: int, x: Tensor, stats: Stats) -> None:
        now = self.passes[-1]
        if stats.packed is not None:
            now.packed.append(_kept(stats.packed))
            stats.packed = None
        now.stats.append(stats)
        if self.on_layer is not None and len(self.passes) <= 2:
            self.on_layer(layer, x, stats, DECODE if len(self.passes) == 2 else PREFILL)

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.passes[-1].hidden = output.last_hidden_state

    def joined(self, loss: bool, watch: Watch | None, flags: np.ndarray | None) -> tuple[Batch, Counted, Seen | None]:
        """The batch with what was generated, and what all passes counted of it."""
        first, *later = self.passes[: self.tokens + 1]  # a stop may be seen a pass late
        made = torch.cat([one.ids for one in later], 1).cpu().numpy()
        lengths = torch.cat([one.real for one in later], 1).sum(1).cpu().numpy()
        sequences = [
            replace(one, ids=np.concatenate([one.ids, ids[:length].astype(np.int32)]))
            for one, ids, length in zip(self.prompts.sequences, made, lengths, strict=True)
        ]
        batch = replace(self.prompts, sequences=tuple(sequences))
        passes = [first, *later[: int(lengths.max())]]
        inputs = Inputs.of(batch, self.loaded.device, flags)
        order = self._order(passes)
        seen = watch.look(batch, inputs) if watch is not None else None
        stats, unions = [], []
        for layer in range(len(first.stats)):
            stats.append(_as_one([one.stats[layer] for one in passes], order))
            if first.packed:
                packed = _rows(TwELL.cat([one.packed[layer] for one in passes]), order)
                if self.probes == "all":
                    unions.append(union_counts(packed, inputs.blocks))
                if seen is not None:
                    seen.hear(layer, packed)
        losses = None
        if loss:
            hidden = torch.cat([one.hidden for one in passes if one.hidden is not None], 1).flatten(0, 1)
            losses = next_token_loss(self.loaded, hidden, inputs)
        return batch, gather(stats, Sums.stack(stats, unions), inputs.place, losses), seen

    def _order(self, passes: list[Pass]) -> Tensor:
        """int64 [rows of the batch]: where each stands among the rows of all passes, one after the other."""
        begin, places = 0, []
        for one in passes:
            places.append(torch.arange(begin, begin + one.ids.numel(), device=one.ids.device).view_as(one.ids))
            begin += one.ids.numel()
        return torch.cat(places, 1).flatten()


def _ends(loaded: LoadedModel) -> set[int]:
    """The tokens that end a sequence: as the checkpoint says, or else the tokenizer."""
    model: Any = loaded.model
    found = model.generation_config.eos_token_id
    if found is None:
        found = loaded.tokenizer.eos_token_id
    return set(found) if isinstance(found, list) else set() if found is None else {int(found)}


def _kept(packed: TwELL) -> TwELL:
    """A copy that lasts, of the tiles that are used."""
    over = packed.spill_index >= 0
    index = torch.where(over, over.flatten().cumsum(0).view_as(over) - 1, -1).to(packed.spill_index.dtype)
    values = None if packed.values is None else packed.values.clone()
    spill = packed.spill[packed.spill_index[over].long()]
    return TwELL(packed.layout, packed.d_ff, packed.dtype, packed.words.clone(), values, index, spill)


def _rows(packed: TwELL, order: Tensor) -> TwELL:
    values = None if packed.values is None else packed.values[order]
    return replace(packed, words=packed.words[order], values=values, spill_index=packed.spill_index[order])


def _as_one(passes: list[Stats], order: Tensor) -> Stats:
    """The Stats of a layer's passes as those of one."""
    first, *later = passes
    for other in later:
        if first.neurons is not None and other.neurons is not None:
            first.neurons.merge(other.neurons)
        if first.tiles is not None and other.tiles is not None:
            first.tiles.merge(other.tiles)

    def joined(take: Callable[[Stats], Tensor | None]) -> Any:
        rows = [found for one in passes if (found := take(one)) is not None]
        return torch.cat(rows)[order] if rows else None

    return replace(
        first,
        nnz=joined(lambda one: one.nnz),
        finite=joined(lambda one: one.finite),
        nnz_used=joined(lambda one: one.nnz_used),
    )


@contextmanager
def _seeded(loaded: LoadedModel, seed: int) -> Iterator[None]:
    """torch's own draws from a seed, and as they were afterwards."""
    with torch.random.fork_rng([loaded.device] if loaded.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
