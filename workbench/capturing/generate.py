"""Capture generation as it runs: a batch of prompts, then one token of each sequence at a time, with a cache.

The idea: transformers' own `generate` runs the model; before each of its forward passes the layers get a probe that
says which rows are tokens, and during the pass they report what fired. Prompts are padded on the left, so that all
sequences continue in one column. A sequence ends with its end-of-sequence token, or after `tokens` tokens. `generate`
never reads the last token that it generates; so it generates one more, and a sequence ends when its last token has been
read. Padding before a prompt and after an end is computed, but counted nowhere; an end-of-sequence token inside a
prompt ends nothing. The counts of all passes are joined as if the sequences had gone through the model at once.

Cost: that of `generate`, and the packed hidden state of the batch in memory, where unions or single firings are
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from twell.kernels.layout import TwELL
from twell.kernels.modules import Probe
from twell.kernels.stats import Stats
from twell.workbench.capturing.firings import BatchFirings, FiringCollector
from twell.workbench.capturing.forward import Counted, Inputs, counting_probe, gather, next_tokens
from twell.workbench.capturing.layer_sums import LayerSums, union_counts
from twell.workbench.capturing.timing.call_times import BatchTimes
from twell.workbench.models.load import LoadedModel
from twell.workbench.run.schema import DECODE, PREFILL
from twell.workbench.text.batches import Batch


@dataclass(frozen=True)
class GenerationConfig:
    """Settings by which prompts are continued.

    tokens: how many, at most; temperature: 0 takes the likeliest token, above 0 draws; seed: of these draws
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    batch: Batch,
    config: GenerationConfig,
    *,
    probes: str = "none",
    loss: bool = True,
    collector: FiringCollector | None = None,
    flags: np.ndarray | None = None,
    times: BatchTimes | None = None,
) -> tuple[Batch, Counted, BatchFirings | None]:
    """Continue a batch of prompts; return the batch with the generated tokens, the counts of both, and their firings.

    batch: prompts; or a batch that this function returned, to be generated once more with `flags`, uint8 [its tokens]:
    flagged tokens are left out of every sum
    times: takes the time of each sparse call and of all passes together
    """
    known = None if flags is None else Inputs.of(batch, loaded.device, flags).rows.view(len(batch.sequences), -1)
    prompts = batch.given()
    keeps_firings = collector is not None and collector.is_active
    recorder = GenerationRecorder(loaded, prompts, config.tokens, probes, keeps_firings, known, times)
    ids = recorder.inputs.ids.view(len(prompts.sequences), -1).long()
    real = torch.zeros_like(ids).view(-1).index_fill_(0, recorder.inputs.row_of.long(), 1).view_as(ids)
    whole = nullcontext() if times is None else times.whole_pass()
    with _seeded(loaded, config.seed + batch.number), recorder.recording(), whole:
        _run(loaded, ids, real, config, recorder.ends)
    return recorder.joined(loss, collector, flags)


def _run(loaded: LoadedModel, ids: Tensor, real: Tensor, config: GenerationConfig, ends: Tensor) -> None:
    """Call transformers' `generate` with the settings of `config` alone, not those of the checkpoint."""
    model: Any = loaded.model
    draws: dict[str, Any] = {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    settings = transformers.GenerationConfig(
        max_new_tokens=config.tokens + 1, pad_token_id=0, use_cache=True, **(draws if config.temperature else {})
    )
    before, model.generation_config = model.generation_config, transformers.GenerationConfig()
    try:
        criteria = StoppingCriteriaList([_ReadToTheEnd(ends, ids.shape[1])])
        model.generate(ids, attention_mask=real, generation_config=settings, stopping_criteria=criteria)
    finally:
        model.generation_config = before


class _ReadToTheEnd(StoppingCriteria):
    """Stop a sequence once the model has read its end-of-sequence token: the token before the last generated one."""

    def __init__(self, ends: Tensor, prompt: int) -> None:
        self.eos_token_id, self._prompt = (
            ends,
            prompt,
        )  # `generate` looks for the name eos_token_id to pad sequences that are done

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        read = input_ids[:, self._prompt : -1]
        if not read.shape[1]:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.isin(read, self.eos_token_id).any(1)


@dataclass
class ForwardPass:
    """One forward pass: its input ids, which of them are tokens, and what each layer counted."""

    ids: Tensor  # [sequences, positions]
    real: Tensor  # bool, the same
    stats: list[Stats] = field(default_factory=list)
    packed: list[TwELL] = field(default_factory=list)
    hidden: Tensor | None = None  # [sequences, positions, d_model], after the last layer


class GenerationRecorder:
    """Records the forward passes of one call of `generate` as they run."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Batch,
        tokens: int,
        probes: str,
        keeps_firings: bool,
        known: Tensor | None,
        times: BatchTimes | None,
    ) -> None:
        """tokens: how many are generated at most; keeps_firings: whether single firings are read from the passes
        known: bool [sequences, positions], the rows that sums cover; None: as ids and ends say
        """
        self.loaded, self.prompts, self.tokens, self.probes, self.known = loaded, prompts, tokens, probes, known
        self.keeps_firings, self.times = keeps_firings, times
        self.inputs = Inputs.of(prompts, loaded.device)
        self.ends = torch.tensor(sorted(_ends(loaded)), dtype=torch.long, device=loaded.device)
        self._special = torch.from_numpy(prompts.special).to(loaded.device)
        self._numbers = torch.from_numpy(prompts.numbers).to(loaded.device)
        self._over = torch.zeros(len(prompts.sequences), dtype=torch.bool, device=loaded.device)
        self.passes: list[ForwardPass] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every forward pass that runs inside this context."""
        with ExitStack() as stack:
            stack.enter_context(self.loaded.probing(Probe()))
            body = self.loaded.body
            stack.callback(body.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(body.register_forward_hook(self._after).remove)
            yield

    def _before(self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"] if keywords.get("input_ids") is not None else args[0]
        if self.passes:
            real = ~self._over[:, None]
            plain = real & ~torch.isin(ids, self._special)
            self._over = self._over | torch.isin(ids[:, 0], self.ends)
        else:
            real = torch.zeros_like(ids, dtype=torch.bool).view(-1).index_fill_(0, self.inputs.row_of.long(), True)
            real, plain = real.view_as(ids), self.inputs.rows.view_as(ids)
        column = sum(one.ids.shape[1] for one in self.passes)
        if self.known is not None:
            rows = self.known[:, column : column + ids.shape[1]]
            plain = torch.zeros_like(plain) if rows.shape != plain.shape else rows
        self.passes.append(ForwardPass(ids, real))
        about: dict[str, Any] = {} if self.times is None else {"before": self.times.begin}
        about |= {
            "rows": plain.to(torch.uint8).reshape(-1).contiguous(),
            "tokens": ids.to(torch.int32).reshape(-1).contiguous(),
            "sequences": self._numbers.repeat_interleave(ids.shape[1]),
        }
        probe = counting_probe(self.loaded, self.probes, self._on_stats, self.keeps_firings, **about)
        self.loaded.set_probe(probe)

    def _on_stats(self, layer: int, x: Tensor, stats: Stats) -> None:
        now, phase = self.passes[-1], PREFILL if len(self.passes) == 1 else DECODE
        if self.times is not None:
            self.times.end(layer, stats.nnz, phase)
        if stats.packed is not None:
            now.packed.append(stats.packed.compact())
            stats.packed = None
        now.stats.append(stats)
        if self.times is not None and len(self.passes) <= 2:
            self.times.calibrate(layer, x, phase)

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.passes[-1].hidden = output.last_hidden_state

    def joined(
        self, loss: bool, collector: FiringCollector | None, flags: np.ndarray | None
    ) -> tuple[Batch, Counted, BatchFirings | None]:
        """Return the batch with the generated tokens, its counts and its firings, as those of one forward pass."""
        first, *later = self.passes[: self.tokens + 1]  # `generate` may run a pass more before it stops
        generated = torch.cat([one.ids for one in later], 1).cpu().numpy()
        lengths = torch.cat([one.real for one in later], 1).sum(1).cpu().numpy()
        sequences = [
            replace(one, ids=np.concatenate([one.ids, ids[:length].astype(np.int32)]))
            for one, ids, length in zip(self.prompts.sequences, generated, lengths, strict=True)
        ]
        batch = replace(self.prompts, sequences=tuple(sequences))
        passes = [first, *later[: int(lengths.max())]]
        inputs = Inputs.of(batch, self.loaded.device, flags)
        order = self._order(passes)
        firings = collector.collect_from(batch, inputs) if collector is not None else None
        stats, unions = [], []
        for layer in range(len(first.stats)):
            stats.append(Stats.cat([one.stats[layer] for one in passes]).take_rows(order))
            if first.packed:
                packed = TwELL.cat([one.packed[layer] for one in passes]).take_rows(order)
                if self.probes == "all":
                    unions.append(union_counts(packed, inputs.blocks))
                if firings is not None:
                    firings.on_packed(layer, packed)
        predicted = None
        if loss:
            hidden = torch.cat([one.hidden for one in passes if one.hidden is not None], 1).flatten(0, 1)
            predicted = next_tokens(self.loaded, hidden, inputs)
        return batch, gather(stats, LayerSums.stack(stats, unions), inputs.row_of, predicted), firings

    def _order(self, passes: list[ForwardPass]) -> Tensor:
        """Return int64 [rows of the batch]: each row's index among the rows of all passes, one pass after the other."""
        begin, indices = 0, []
        for one in passes:
            indices.append(torch.arange(begin, begin + one.ids.numel(), device=one.ids.device).view_as(one.ids))
            begin += one.ids.numel()
        return torch.cat(indices, 1).flatten()


def _ends(loaded: LoadedModel) -> set[int]:
    """Return the token ids that end a sequence, from the checkpoint or, if it names none, from the tokenizer."""
    model: Any = loaded.model
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = loaded.tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else set() if ends is None else {int(ends)}


@contextmanager
def _seeded(loaded: LoadedModel, seed: int) -> Iterator[None]:
    """Seed torch's generators, and restore their state afterwards."""
    with torch.random.fork_rng([loaded.device] if loaded.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
