"""The folder that a training run leaves behind, and what it keeps there while it runs.

    config.json, model.safetensors, tokenizer.json, …   the model, for plain transformers
    training.json       recipe, corpus, and once complete what was measured; `status` says which
    train-log.parquet   a row every `log_every` steps: COLUMNS says what each column holds
    README.md           the model card, written from the two
    work/               checkpoint and token ids; gone when the run is complete

A checkpoint is one safetensors file (weights, both moments of AdamW, the place as metadata), renamed into place. No
generator state belongs to it: after initialisation nothing is drawn but the order of the rows, which follows from
seed and step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from twell.workbench.errors import UserError, first_line, utf8
from twell.workbench.run import locks
from twell.workbench.training.model_card import model_card

if TYPE_CHECKING:
    from twell.workbench.training.loop import Training

Row = dict[str, Any]

# Name: (type, meaning). Every mean is over the steps since the previous row.
COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "optimizer steps done"),
    "tokens": (pa.int64(), "tokens trained on so far"),
    "seconds": (pa.float64(), "seconds of the loop so far, evaluations and checkpoints included, compilation not"),
    "tokens_per_second": (pa.float64(), "training tokens a second since the previous row"),
    "total_steps": (pa.int64(), "steps the run was planned to take at this row; null before a time limit is planned"),
    "loss": (pa.float64(), "mean training cross-entropy, nats a token"),
    "heldout_loss": (pa.float64(), "cross-entropy on the first 131 072 held-out tokens, nats a token; null between"),
    "l1": (pa.float64(), "mean of the L1 term: mean over layers of the mean over tokens of sum |h|"),
    "l1_coefficient": (pa.float64(), "its coefficient at this step"),
    "rate": (pa.float64(), "learning rate at this step"),
    "gradient_norm": (pa.float64(), "mean gradient norm before clipping"),
    "nnz_LL": (pa.float64(), "layer LL: mean number of neurons a token fires (gate > 0)"),
    "dead_LL": (pa.float64(), "layer LL: share of neurons that fired on none of the tokens since the previous row"),
}


def log_schema(layers: int) -> pa.Schema:
    names = {
        name.replace("LL", f"{layer:02}"): column
        for name, column in COLUMNS.items()
        for layer in (range(layers) if name.endswith("LL") else [0])
    }
    return pa.schema([pa.field(name, kind, metadata={"meaning": meaning}) for name, (kind, meaning) in names.items()])


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """A full or forbidden disk, in a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} could not be written ({error}); make room and give the same command again.") from error


class TrainingFolder:
    """`training.json` is the claim: it is written before the first step and decides what may continue here."""

    def __init__(self, out: Path) -> None:
        self.out, self.work = Path(out), Path(out) / "work"
        self.console = Console()
        self.log: list[Row] = []
        self._lock: Callable[[], object] | None = None
        path = self.out / "training.json"
        utf8(self.out)
        if path.exists():
            self.record: dict[str, Any] = _read_json(path)
        elif self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(
                f"Expected --out to be new, empty or a training's folder, got {self.out}, which is none: name another."
            )
        else:
            self.record = {}

    @property
    def complete(self) -> bool:
        return self.record.get("status") == "complete"

    @property
    def evaluations(self) -> int:
        """Held-out losses in the log."""
        return sum(row.get("heldout_loss") is not None for row in self.log)

    def claim(self, **parts: Any) -> None:
        """Record what this run is made of; refuses, naming the difference, where the folder belongs to another run, and
        where another process is at this one."""
        for name, part in parts.items():
            if name in self.record and self.record[name] != part:
                raise UserError(
                    f"{self.out} holds a run with another {difference(name, self.record[name], part)}; "
                    "continue it with the same settings, or name another folder."
                )
        if not parts.keys() <= self.record.keys():
            self.record = {"status": "training", **self.record, **parts}
            self._write_json()
        self._lock = self._lock or locks.claim(self.out, self)
        if self._lock is None:
            raise UserError(
                f"Expected a folder that no other training writes to, one is at {self.out}: wait for its end, or stop "
                "it first."
            )

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    # ---- checkpoints

    def save(self, training: Training) -> None:
        """The log so far, then the checkpoint: whole or not at all."""
        self.write_log(training.recipe.layers)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in training.model.named_parameters():
            state = training.optimizer.state[parameter]
            tensors |= {f"weight {name}": parameter.detach(), **{f"{m} {name}": state[m] for m in MOMENTS}}
        place = {"step": training.step, "seconds": training.seconds, "total": training.total}
        temporary = self.work / "checkpoint.tmp"
        self.work.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"place": json.dumps(place)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.work / "checkpoint.safetensors")

    def restore(self, training: Training) -> None:
        """Take up the checkpoint, where there is one, and the log up to it."""
        path = self.work / "checkpoint.safetensors"
        if not path.exists():
            return
        with safe_open(path, framework="pt", device=str(training.device)) as file:
            place = json.loads(file.metadata()["place"])
            names = {id(parameter): name for name, parameter in training.model.named_parameters()}
            for name, parameter in training.model.named_parameters():
                parameter.data.copy_(file.get_tensor(f"weight {name}"))
            groups, ordered = training.optimizer.state_dict()["param_groups"], training.optimizer.param_groups
            parameters = [parameter for group in ordered for parameter in group["params"]]
            state = {
                index: {m: file.get_tensor(f"{m} {names[id(parameter)]}") for m in MOMENTS}
                for index, parameter in enumerate(parameters)
            }
        training.optimizer.load_state_dict({"state": state, "param_groups": groups})
        training.step, training.seconds, training.total = place["step"], place["seconds"], place["total"]
        rows = pq.read_table(self.out / "train-log.parquet").to_pylist()
        self.log = [row for row in rows if row["step"] <= training.step]
        self.say(f"Continuing {self.out} from step {training.step}.")

    # ---- log

    def append(self, row: Row) -> None:
        self.log.append(row)

    def write_log(self, layers: int) -> None:
        temporary = self.out / "train-log.parquet.tmp"
        pq.write_table(pa.Table.from_pylist(self.log, schema=log_schema(layers)), temporary, compression="zstd")
        os.replace(temporary, self.out / "train-log.parquet")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[Row], None]]:
        """A progress bar, and a line for every row with a held-out loss; yields the function that shows a row."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("first steps", total=None)

            def show(row: Row) -> None:
                nnz = mean(row, "nnz_")
                text = f"step {row['step']} · loss {row['loss']:.3f} · nnz {nnz:.1f} · rate {row['rate']:.1e}"
                text += f" · {row['tokens_per_second']:,.0f} tokens/s"
                progress.update(task, description=text, completed=row["step"], total=row["total_steps"])
                if row.get("heldout_loss") is not None:
                    text = f"{text} · held-out {row['heldout_loss']:.3f} · {row['seconds']:.0f} s"
                    self.say(f"{text} · of {row['total_steps']} steps")

            yield show

    # ---- the end

    def finish(self, training: Training, results: dict[str, Any]) -> None:
        """Model, tokenizer, log and card; `training.json` last, which makes the run complete."""
        self.write_log(training.recipe.layers)
        disable_progress_bar()
        training.model.save_pretrained(self.out, max_shard_size="100GB")
        (self.out / "model.safetensors").chmod(0o644)  # written for the owner alone
        training.corpus.tokenizer.save_pretrained(self.out)
        self.record = {**self.record, **results}
        (self.out / "README.md").write_text(model_card(self.record, self.log), encoding="utf-8")
        self._write_json()
        shutil.rmtree(self.work, ignore_errors=True)
        size = (self.out / "model.safetensors").stat().st_size
        heldout = self.record["heldout"]
        self.say(
            f"{self.out}: {size:,} bytes, held-out loss {heldout['loss']:.4f} nats "
            f"(unigram {self.record['unigram_loss']:.4f}), nnz {' '.join(f'{n:.1f}' for n in heldout['nnz'])}."
        )

    def _write_json(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        temporary = self.out / "training.json.tmp"
        temporary.write_text(json.dumps(self.record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, self.out / "training.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"Expected a training's record at {path}, got a file that cannot be read ({first_line(error)}): name "
            "another folder, or remove this one."
        ) from None


MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def mean(row: Row, prefix: str) -> float:
    """Mean over layers of a per-layer column."""
    values = [value for name, value in row.items() if name.startswith(prefix)]
    return sum(values) / len(values)


def difference(name: str, held: Any, given: Any) -> str:
    """The first place where two records differ, in words."""
    if isinstance(held, dict) and isinstance(given, dict):
        for key in given:
            if held.get(key) != given[key]:
                return difference(f"{name} {key}", held.get(key), given[key])
    return f"{name} ({held!r} there, {given!r} given)"
