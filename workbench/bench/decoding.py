"""Decode greedily with a cache at fixed addresses, so that a step can be compiled by layer and replayed from a graph.

The idea: transformers' own model runs every step. Each decoder layer is wrapped, and the wrapper hands the layer keys
and values of its own in the place of a cache of all layers: then all layers are one function to torch.compile, which
traces it once, and no address changes from step to step. A step reads the positions that there are and no mask, as a
cache that grows has it, so each step is a graph of its own. Prompts go through the same layers, uncompiled.

    decoder = Decoder(loaded, prompts, tokens=64, compiled=True)
    decoder.generate()  # prompts, then 64 steps; on a GPU each is replayed from its CUDA graph
    decoder.ids  # int64 [sequences, 1], the last tokens

Cost: keys and values of prompts and tokens in memory, on first use the compiling of one layer, and a step and its
capture for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from twell.kernels.benchmark.timing import TimedCall, graphed, start_timer
from twell.workbench.bench.sides import DENSE, SPARSE, Sides, compiled_layer
from twell.workbench.models.load import LoadedModel


class LayerCache:
    """Keys and values of one layer, [sequences, heads, positions, head size]: of all positions that were read.

    capacity: more than any length, since a view of all the memory is contiguous, which torch.compile would trace anew
    positions: int64 [n], where `update` writes
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._memory = capacity, torch.empty(0)
        self.keys, self.values, self.positions = torch.empty(0), torch.empty(0), torch.empty(0)
        self._length = 0

    def extend(self, positions: Tensor, length: int) -> None:
        """Have the next update write to `positions`, which are the last of `length`."""
        self.positions, self._length = positions, length
        if self._memory.numel():
            self._show()

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values to `positions`, and return those of all. Called by the layer's attention."""
        if not self.keys.numel():
            sequences, heads, _positions, size = keys.shape
            self._memory = keys.new_zeros(2, sequences, heads, self._capacity, size)
            self._show()
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values

    def _show(self) -> None:
        self.keys, self.values = self._memory[..., : self._length, :]
        for kind in (self.keys, self.values):
            torch._dynamo.mark_dynamic(kind, 2)  # one trace for all lengths


class CachedBlock(nn.Module):
    """A decoder layer that reads and writes a cache of its own. compiled: how it runs for one position a sequence."""

    def __init__(self, block: nn.Module, cache: LayerCache, compiled: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.cache, self._compiled = block, cache, compiled

    def forward(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Return hidden [sequences, positions, d_model] after the layer."""
        keywords["past_key_values"] = self.cache
        if hidden.shape[1] > 1:
            return self.block(hidden, *arguments, **keywords)  # type: ignore[no-any-return]
        keywords["attention_mask"] = None  # the last position looks at all
        return self._compiled(hidden, *arguments, **keywords)


class Decoder:
    """Continues prompts of one length, with the FFNs that the model had when it was made if steps are replayed.

    ids: int64 [sequences, 1], the tokens that the next step reads
    """

    def __init__(self, loaded: LoadedModel, prompts: Tensor, tokens: int, *, compiled: bool) -> None:
        """Compile a layer, and on a GPU capture a step.

        prompts: int64 [sequences, positions]; tokens: steps of `generate`; compiled: whether layers are compiled
        """
        self._loaded, self._prompts = loaded, prompts
        device, (number, length) = loaded.device, prompts.shape
        self.ids = prompts.new_zeros(number, 1)
        self._first = torch.arange(length, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._blocks = [
            CachedBlock(block, LayerCache(length + tokens + 1), compiled_layer(block) if compiled else block)
            for block in loaded.blocks
        ]
        self._steps: list[TimedCall] = [partial(self._run_step, length + step) for step in range(1, tokens + 1)]
        with self._placed(), torch.inference_mode():
            self._prefill()
            if device.type == "cuda":
                pool = torch.cuda.graph_pool_handle()
                self._steps = [graphed(step, device, pool) for step in self._steps]
            else:
                self._steps[0]()

    @torch.inference_mode()
    def generate(self) -> None:
        """Read the prompts, then run `tokens` steps."""
        with self._placed():
            self._prefill()
            self._run_steps()

    @torch.inference_mode()
    def steps(self) -> None:
        """Run `tokens` steps at the positions after the prompts."""
        with self._placed():
            self._position.fill_(len(self._first))
            self._run_steps()

    def _prefill(self) -> None:
        self._read(self._prompts, self._first, len(self._first))
        self._position.fill_(len(self._first))

    def _run_steps(self) -> None:
        for step in self._steps:
            step()

    def _run_step(self, length: int) -> None:
        self._read(self.ids, self._position, length)
        self._position.add_(1)

    def _read(self, ids: Tensor, positions: Tensor, length: int) -> None:
        """Run the model on ids [sequences, n] at positions [n], the last of `length`, and put the likeliest next tokens
        in `ids`."""
        for block in self._blocks:
            block.cache.extend(positions, length)
        columns = torch.arange(length, device=ids.device)  # the body would make a mask of its own for a step, too
        mask = (columns <= positions[:, None])[None, None].expand(len(ids), -1, -1, -1)
        hidden = self._loaded.body(
            input_ids=ids, attention_mask=mask, position_ids=positions.expand(len(ids), -1), use_cache=False
        ).last_hidden_state
        self.ids.copy_(self._loaded.head(hidden[:, -1:]).argmax(-1))

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Have the model run the wrapped layers, all numbered 0, as torch.compile would trace each number anew."""
        layers: Any = self._loaded.body.layers
        numbered = [module for block in self._blocks for module in block.modules() if hasattr(module, "layer_idx")]
        numbers = [module.layer_idx for module in numbered]
        with replaced(layers, self._blocks):
            try:
                for module in numbered:
                    module.layer_idx = 0  # type: ignore[assignment]
                yield
            finally:
                for module, number in zip(numbered, numbers, strict=True):
                    module.layer_idx = number


@contextmanager
def replaced(layers: Any, others: Sequence[Any]) -> Iterator[None]:
    """Have other layers in a model's list of layers, and afterwards those that were there."""
    before = list(layers)
    for index, other in enumerate(others):
        layers[index] = other
    try:
        yield
    finally:
        for index, block in enumerate(before):
            layers[index] = block


def generator(loaded: LoadedModel, prompts: Tensor, tokens: int, **more: Any) -> TimedCall:
    """Return transformers' own greedy generation of exactly `tokens` tokens a sequence, with a cache that grows.

    more: further arguments of its `generate`
    """
    settings: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **more}
    mask = torch.ones_like(prompts)
    model: Any = loaded.model
    return partial(model.generate, prompts, attention_mask=mask, pad_token_id=0, use_cache=True, **settings)


def generation_times(sides: Sides, prompts: Tensor, tokens: int, turns: int) -> dict[str, list[float]]:
    """Return microseconds of a whole generation by side, turn by turn; a turn that is not timed comes first.

    prompts, tokens: as of `generator`
    A turn is two generations. In each the sides make tokens in turns, and in the second the other one begins: each side
    makes every token once. An eager generation is as fast as its host, which other work slows for a moment or for
    seconds; so that slows both sides.
    """
    times: dict[str, list[float]] = {DENSE: [], SPARSE: []}
    for turn in range(turns + 1):
        halves = [_generate_in_turns(sides, prompts, tokens, order) for order in ((DENSE, SPARSE), (SPARSE, DENSE))]
        for side, taken in times.items() if turn else ():
            taken.append(sum(half[side] for half in halves))
    return times


def _generate_in_turns(sides: Sides, prompts: Tensor, tokens: int, order: Sequence[str]) -> dict[str, float]:
    """Generate once, with the FFNs of each side in turns; return the microseconds that each took."""
    taken, device = dict.fromkeys(order, 0.0), sides.loaded.device

    def pieces() -> Generator[None, None, None]:
        for side in cycle(order):
            with sides.of(side):
                stop = start_timer(device)
                yield
                taken[side] += stop()()

    def after_token(ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        next(running)
        return ids.new_zeros(len(ids), dtype=torch.bool)  # no sequence has ended

    with closing(pieces()) as running:  # the sparse FFNs are back then, after an error too
        next(running)
        generator(sides.loaded, prompts, tokens, stopping_criteria=[after_token])()
    return taken
