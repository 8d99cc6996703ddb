"""A model before and after neurons were pruned: logits, losses, parameters, memory and time, side by side.

Both run by their own dense code on the same batches, in turns. Losses on text that the run did not see are kept by
document, so that their change has an interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from twell.workbench.ablations.passes import AblationRunner
from twell.workbench.capturing.forward import Inputs
from twell.workbench.models.own_code import OwnModel
from twell.workbench.models.sizes import MULTIPLE, own_sizes
from twell.workbench.models.threshold_ffn import sizes
from twell.workbench.run.manifest import spelled
from twell.workbench.text.batches import Batch

Interval = Callable[[NDArray, NDArray], tuple[float, float, float]]


@dataclass(frozen=True)
class Pruned:
    """The outcome of a pruning. Pairs are before and after.

    widths: of the layers' FFNs; kept: neurons that are needed, by layer; bytes: of the weights in memory; loss: nats a
    token of the run's text; seconds: of a pass over it; error: greatest difference of logits over the greatest logit;
    unseen: tokens and sums of losses by document of other text, [3, documents]
    """

    widths: list[int]
    kept: list[int]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    loss: tuple[float, float]
    seconds: tuple[float, float]
    error: float
    unseen: NDArray

    @property
    def width(self) -> int:
        """The widest layer's."""
        return max(self.widths)


@torch.inference_mode()
def compare(
    own: OwnModel, smaller: OwnModel, cut: Sequence[Batch], keep: NDArray, unseen: Sequence[Batch] = ()
) -> Pruned:
    """Compare a model and a smaller one. cut: the run's text; keep: neurons that are needed; unseen: other text"""
    losses, seconds, error, greatest, tokens = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0
    for number, batch in enumerate([cut[0], *cut]):  # the first one twice: what a first call costs is no pass's
        inputs = Inputs.of(batch, own.device)
        ids, outputs = inputs.ids.view(-1, inputs.longest), []
        for index, model in enumerate((own, smaller)):
            started = time.perf_counter()
            outputs.append(model.body(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1))
            if own.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[index] += (time.perf_counter() - started) * (number > 0)
        if number == 0:
            continue
        targets = inputs.ids.long()
        for rows in inputs.predicts.long().split(2048):
            ours, theirs = (model.head(out[rows]) for model, out in zip((own, smaller), outputs, strict=True))
            error, greatest = max(error, float((ours - theirs).abs().max())), max(greatest, float(ours.abs().max()))
            for index, logits in enumerate((ours, theirs)):
                summed = nn.functional.cross_entropy(logits.float(), targets[rows + 1], reduction="sum")
                losses[index] += float(summed)
            tokens += len(rows)
    before, after = (own_sizes(model.model)[1] for model in (own, smaller))
    sized = [_bytes(model.model) for model in (own, smaller)]
    return Pruned(
        widths=[sizes(down)[0] for down in smaller.downs],
        kept=keep.sum(1).tolist(),
        parameters=(before, after),
        bytes=(sized[0], sized[1]),
        loss=(losses[0] / max(1, tokens), losses[1] / max(1, tokens)),
        seconds=(seconds[0], seconds[1]),
        error=error / max(greatest, 1e-9),
        unseen=_by_document((own, smaller), unseen),
    )


def _bytes(model: nn.Module) -> int:
    """Return how many bytes a model's weights take, without neurons of zeros that fill it up."""
    held = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    filled = sum(numbers for numbers, _ in held) - own_sizes(model)[1]
    return sum(numbers * each for numbers, each in held) - filled * min(each for _, each in held)


def _by_document(models: tuple[OwnModel, OwnModel], cut: Sequence[Batch]) -> NDArray:
    """Return tokens that were predicted and each model's sum of losses, by document [3, documents]."""
    sums: dict[tuple[str, int], NDArray] = {}
    for batch in cut:
        losses = []
        for model in models:
            with AblationRunner(model, count=False) as runner:
                losses.append(runner.run(Inputs.of(batch, model.device), [])[0][0].double().cpu().numpy())
        ends = np.cumsum(batch.lengths - 1)[:-1]
        for one, ours, theirs in zip(batch.sequences, *(np.split(each, ends) for each in losses), strict=True):
            row = sums.setdefault((one.source, one.document), np.zeros(3))
            row += len(ours), ours.sum(), theirs.sum()
    return np.array(list(sums.values())).reshape(-1, 3).T


def report(result: Pruned, own: OwnModel, out: Path, interval: Interval | None) -> list[str]:
    """Return what a pruning saved, as lines of text. interval: as in `command`"""
    lines = [
        f"{out}: {spelled(result.widths)} of {spelled(own.widths)} neurons a layer",
        f"  needed      {', '.join(f'{count:,}' for count in result.kept)} neurons by layer",
        f"  logits      at most {result.error:.1e} of the greatest off, on the run's text",
        f"  {'':<32}{'before':>16}{'after':>16}",
    ]
    megabytes, passes = [number / 2**20 for number in result.bytes], "s, a dense pass over that text"
    for name, (before, after), form in (
        ("parameters", result.parameters, ",.0f"),
        ("MiB of weights", megabytes, ",.1f"),
        (passes, result.seconds, ",.2f"),
        ("nats a token, the run's text", result.loss, ".4f"),
    ):
        if name == passes and result.widths == own.widths:
            continue  # of a copy, it would tell of the machine
        lines.append(f"  {name:<32}{before:>16{form}}{after:>16{form}}{_rounded(after / before - 1, 3):>+9.1%}")
    if result.unseen.size:
        lines.append(_other_text(result.unseen, interval))
    if result.widths == own.widths:
        lines.append(f"  {_nothing_removed(result.kept, own.widths, out)}")
    return lines


def _nothing_removed(kept: Sequence[int], widths: Sequence[int], out: Path) -> str:
    """Return a sentence on a copy that lacks nothing: which layer needs its width, and what to do."""
    d_ff = max(widths)
    narrower = sum(count <= width - MULTIPLE for count, width in zip(kept, widths, strict=True))
    widest = max(range(len(kept)), key=kept.__getitem__)
    needs = f"layer {widest} needs {kept[widest]:,} of {d_ff:,} neurons, and all layers have one width"
    other = f"--per-layer for a width of its own in {narrower} of {len(kept)} layers, or"
    if not narrower:
        needs, other = f"every layer needs more than {d_ff - MULTIPLE:,} of {d_ff:,} neurons", "a higher"
    if not narrower and min(widths) < d_ff:
        needs = "no layer can have a narrower width"
    return (
        f"Nothing was removed, {out} is a copy of the model: {needs} (a multiple of {MULTIPLE}); prune with {other} "
        "--least, such as 0.0001 where none was given, which removes what seldom fires too."
    )


def _other_text(unseen: NDArray, interval: Interval | None) -> str:
    tokens, before, after = unseen
    total = tokens.sum()
    line = f"  {'nats a token, other text':<32}{before.sum() / total:>16.4f}{after.sum() / total:>16.4f}"
    line += f"{_rounded((after - before).sum() / total):>+9.4f}"
    if interval is not None:
        _, low, high = interval(tokens, after - before)
        line += f" [{_rounded(low):+.4f}, {_rounded(high):+.4f}]" if low == low else " [too few documents]"
    return f"{line} of {len(tokens):,} document{'s' * (len(tokens) != 1)}"


def _rounded(value: float, digits: int = 4) -> float:
    """Return a number to some digits, and 0 for what rounds to it, without a sign."""
    return round(float(value), digits) + 0.0
