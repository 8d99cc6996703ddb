"""What changes the weights: AdamW, its rates over the steps and how many those are, and dead neurons that start anew.

A limit in minutes becomes a number of steps by the pace so far, so that the rates fall until its end. Rates are common
practice: a linear rise, then constant and a linear fall to zero, or a cosine.

Restarts: a neuron that fired on none of the tokens since the log's last row gets a fresh random row in the gate and up
products, as at initialisation, and a column of zeros in the down product, so that the model computes what it computed
before; the optimizer forgets its moments. The idea is that of resampling in sparse autoencoders (Bricken et al.,
Towards Monosemanticity, 2023), where a dead feature is drawn towards inputs that are reconstructed badly; here the
loss itself decides what becomes of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.workbench.training.ffn import PenalizedFFN
from twell.workbench.training.ranks import divided
from twell.workbench.training.recipes import Recipe

PACE = (10, 30)  # steps: with a limit in minutes, a GPU's step time is measured from the first to the second
EARLY = 0.25  # of the limit: a GPU that has come to it before, by one of the steps below, is measured there
EARLY_STEPS = (2, 4, 8, 16)  # the first one may compile or load something


class Clock:
    """The seconds of a training's loop, and the steps that a limit in minutes comes to.

    agreed: returns the first process's value in every process
    """

    def __init__(self, recipe: Recipe, device: torch.device, agreed: Callable[[Any], Any]) -> None:
        self._recipe, self._agreed, self._on_cpu = recipe, agreed, device.type == "cpu"
        self.start(0, 0.0)

    def start(self, step: int, seconds: float) -> None:
        """Begin at a step of the training, seconds of whose loop went by in processes before."""
        now = time.monotonic()
        self._began, self._first, self._paced = now - seconds, step, (now, step)  # of the pace: time and step

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def plan(self, step: int, total: int | None, at_row: bool) -> int | None:
        """Return the number of steps in all, which a limit in minutes sets anew after some of them.

        On a CPU that is after every step. On a GPU it means to wait for the device, and ends where the decay begins.
        at_row: whether a row of the log ends here
        """
        recipe, ran = self._recipe, step - self._first
        if recipe.minutes is None:
            return total
        limit = 60 * recipe.minutes
        if ran == 1 and not self._on_cpu:
            self._paced = (time.monotonic(), step)
        early = total is None and not self._on_cpu and ran in EARLY_STEPS
        early = early and self._agreed(self.seconds >= EARLY * limit)
        if not (self._on_cpu or early or ran in PACE or (at_row and ran > PACE[1])):
            return total
        if not self._on_cpu:
            torch.cuda.synchronize()
        now, paced = time.monotonic(), ran == PACE[0] and not self._on_cpu
        if self._on_cpu or early or not (paced or self._is_fixed(step, total)):
            pace = (now - self._paced[0]) / (step - self._paced[1])
            left = (limit - self.seconds) / pace
            total = self._agreed(step + (max(0, round(left)) if self._on_cpu else max(1, int(left))))
        if paced:
            self._paced = (now, step)
        return total

    def _is_fixed(self, step: int, total: int | None) -> bool:
        """Return whether the rates follow the total number of steps by now, and would jump with another."""
        return total is not None and (self._recipe.schedule != "wsd" or step >= (1 - self._recipe.decay) * total)


def rate_factor(recipe: Recipe, step: int, total: int | None) -> float:
    """Return the share of the peak rate at a step. total: steps of the run, None if not yet known."""
    rise = min(1.0, (step + 1) / max(1, recipe.warmup_of(total)))
    if total is None:
        return rise
    if recipe.schedule == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * step / total))
    return rise * min(1.0, (total - step) / max(1.0, recipe.decay * total))


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices, and none on norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=fused)


@torch.no_grad()
def restart_dead(
    ffns: Sequence[PenalizedFFN], fires: Tensor, optimizer: torch.optim.Optimizer, spread: float, draw: torch.Generator
) -> int:
    """Start every neuron anew that did not fire; return how many there were.

    fires: int64 [layers, d_ff]; spread: standard deviation of fresh weights; draw: where they come from
    """
    restarted = 0
    for ffn, fired in zip(ffns, fires, strict=True):
        dead = fired == 0
        restarted += int(dead.sum())
        rows = [ffn.gate_proj.weight, ffn.up_proj.weight] if ffn.gated else [ffn.up_proj.weight]
        for weight in rows:
            fresh = torch.zeros_like(dead[:, None].expand(weight.shape), dtype=torch.float32)
            fresh[dead] = (torch.randn(int(dead.sum()), weight.shape[1], generator=draw) * spread).to(fresh)
            _restart(optimizer, weight, dead[:, None], fresh)
        down = ffn.down_proj.weight
        _restart(optimizer, down, dead[None], torch.zeros(down.shape, device=dead.device))
    return restarted


def _restart(optimizer: torch.optim.Optimizer, weight: Tensor, dead: Tensor, fresh: Tensor) -> None:
    """Set a weight to fresh values where it belongs to a dead neuron, and the optimizer's moments there to zero.

    dead: a bool for each row [d_ff, 1] or column [1, d_ff]; fresh: as large as the weight
    """
    mask, fresh = divided(dead.expand(weight.shape), weight), divided(fresh.to(weight.dtype), weight)
    weight.copy_(torch.where(mask, fresh, weight))
    for moment in optimizer.state[weight].values():
        if torch.is_tensor(moment) and moment.shape == weight.shape:
            moment.copy_(torch.where(mask, torch.zeros_like(moment), moment))
