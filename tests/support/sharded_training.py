"""Train two small FFNs with two processes over gloo, by FSDP2.

Each process takes its share of the rows. Rank 0 saves the losses of all steps and the weights at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from twell.kernels.training import train_gated_ffn

D_MODEL, D_FF, ROWS, STEPS = 16, 48, 24, 4
L1 = 0.05
WORLD = 2


class FFN(nn.Module):
    """A gated FFN with the training op, beside which its input passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(D_FF, D_MODEL) / 4) for _ in range(2))
        self.down = nn.Parameter(torch.randn(D_MODEL, D_FF) / 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trained = train_gated_ffn(x, self.gate, self.up, self.down)
        return x + trained.y, trained.l1


class Two(nn.Module):
    """Two of them, and the loss of a step: the mean square of what is left of the input, and the L1 terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ffns = nn.ModuleList(FFN() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = torch.zeros(())
        for ffn in self.ffns:
            x, l1 = ffn(x)
            total = total + L1 * l1
        return total + x.square().mean()


def train(model: Two, share: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run STEPS steps on a share of their rows; return the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    source, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        loss = model(share(torch.randn(ROWS, D_MODEL, generator=source)).requires_grad_())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main(path: str) -> None:
    """Train as one rank of WORLD; rank 0 writes {losses, weights} to path."""
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=int(os.environ["RANK"]), world_size=WORLD)
    model = Two()
    for ffn in model.ffns:
        fully_shard(ffn)
    fully_shard(model)
    losses = torch.stack(train(model, lambda x: x.chunk(WORLD)[dist.get_rank()]))
    dist.all_reduce(losses)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    if dist.get_rank() == 0:
        torch.save({"losses": losses / WORLD, "weights": [weight.detach() for weight in weights]}, path)
    dist.destroy_process_group()
