"""Save and restore the state of a training run, so that a killed run continues where its last checkpoint was.

A checkpoint is one safetensors file (weights, both moments of AdamW, and how far the run is, as metadata), renamed into
place. It holds whole tensors, so it continues in any number of processes, with --shard or without. No state of a random
generator belongs to it: after initialisation nothing is drawn but the order of the rows and restarted neurons, which
follow from seed and step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from twell.workbench.run.manifest import sync_file
from twell.workbench.training.ranks import divided, gathered
from twell.workbench.training.sparse_llama import Model

FILE = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of a parameter


@dataclass
class TrainingState:
    """The state that a step changes: the model, the optimizer, and how far the run is."""

    model: Model
    optimizer: torch.optim.AdamW
    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of the loop so far
    total: int | None = None  # steps of the whole run; None until a time limit is planned


def save(folder: Path, state: TrainingState, writes: bool = True) -> None:
    """Write a checkpoint into a folder, whole or not at all.

    writes: whether this process does so; others have to call too, to give their shares of what is divided over ranks
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in state.model.named_parameters():
        moments = state.optimizer.state[parameter]
        for label, tensor in {"weight": parameter.detach(), **{m: moments[m] for m in MOMENTS}}.items():
            whole = gathered(tensor)
            if writes:
                tensors[f"{label} {name}"] = whole.cpu()
    if not writes:
        return
    progress = {"step": state.step, "seconds": state.seconds, "total": state.total}
    temporary = folder / "checkpoint.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, temporary, metadata={"place": json.dumps(progress)})
    sync_file(temporary)
    os.replace(temporary, folder / FILE)


def restore(folder: Path, state: TrainingState) -> bool:
    """Load a folder's checkpoint into `state`; return False if there is none."""
    path = folder / FILE
    if not path.exists():
        return False
    with safe_open(path, framework="pt", device=str(state.model.device)) as file:
        progress = json.loads(file.metadata()["place"])
        names = {id(parameter): name for name, parameter in state.model.named_parameters()}
        for name, parameter in state.model.named_parameters():
            parameter.detach().copy_(divided(file.get_tensor(f"weight {name}"), parameter))
        groups, ordered = state.optimizer.state_dict()["param_groups"], state.optimizer.param_groups
        parameters = [parameter for group in ordered for parameter in group["params"]]
        moments = {
            index: {m: divided(file.get_tensor(f"{m} {names[id(parameter)]}"), parameter) for m in MOMENTS}
            for index, parameter in enumerate(parameters)
        }
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state.step, state.seconds, state.total = progress["step"], progress["seconds"], progress["total"]
    return True
