"""Training recipes: every number that determines the result of `twell train`, as data.

A recipe is one frozen dataclass. Some are named here; any other is a TOML or JSON file with the same field names:

    twell train --config demo --text corpus.txt.zst --out models/demo
    twell train --config my-recipe.toml --text corpus.txt.zst --out models/mine
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import UserError

if TYPE_CHECKING:
    from twell.workbench.options import TrainOptions

# What numbers may be, in words, and the fields of which it holds; a length that is not given is None.
BOUNDS: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "of at least 0": (
        lambda n: 0 <= n < math.inf,
        ("warmup", "l1_warmup", "seed", "l1", "weight_decay", "restart_every"),
    ),
    "of at least 1": (lambda n: n >= 1, ("layers", "kv_heads", "rows", "micro_batches", "log_every", "evaluations")),
    "of at least 2": (lambda n: n >= 2, ("seq_len",)),
    "of at least 257, every byte and the end of a text": (lambda n: n >= 257, ("vocab",)),
    "above 0": (lambda n: 0 < n < math.inf, ("tokens", "steps", "minutes", "rate", "clip", "bpe_megabytes")),
    "from 0 to 1, a share of the steps": (lambda n: 0 <= n <= 1, ("decay", "warmup_share")),
    "in multiples of 2, as positions turn its pairs": (lambda n: n > 0 == n % 2, ("head_size",)),
    "in multiples of 8, as the FFN kernels take them": (lambda n: n > 0 == n % 8, ("d_model", "d_ff")),
}


CURVE = (6, 20)  # rows of the log: where log_every leaves fewer than the first, there are about the second
CPU_STEP = (2048, 10)  # on a CPU: tokens that a step takes some seconds for, and steps a row of the log, at most
CPU_WARMUP = 0.2  # on a CPU: share of the steps over which the rate rises, at most

LENGTHS = ("tokens", "steps", "minutes")  # of which a recipe has one
REPLACED = (*LENGTHS, "l1", "rate", "rows", "seed")  # fields that options of the same names replace

CHOICES = {"activation": ("relu", "relu2", "silu"), "schedule": ("wsd", "cosine")}


@dataclass(frozen=True)
class Recipe:
    """A language model, its batch of a step, and the schedules of its rates."""

    name: str = "custom"
    # model
    layers: int = 8
    d_model: int = 256
    d_ff: int = 768
    gated: bool = True  # the FFN: a Llama's, down(act(gate) * up); else a Nemotron's, down(act(up))
    activation: str = "relu"  # "relu", "relu2" (its square), or "silu", which is the dense baseline
    head_size: int = 64
    kv_heads: int = 2
    vocab: int = 6144
    seq_len: int = 512  # tokens a row; also the longest context the model is told of
    # length: exactly one of the three is set
    tokens: int | None = None
    steps: int | None = None
    minutes: float | None = None  # of the loop, after compilation; turned into steps by the measured pace
    # optimisation
    rows: int = 64  # rows of seq_len tokens a step
    rate: float = 3e-3  # peak learning rate
    warmup: int = 100  # steps of linear rise to it
    warmup_share: float | None = None  # of the steps, warmup at most; none: all of it
    schedule: str = "wsd"  # "wsd": constant, then linear to zero over the last `decay` of the steps; or "cosine"
    decay: float = 0.4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # on matrices, not on norms
    clip: float = 1.0  # greatest gradient norm
    l1: float = 1e-4  # coefficient of: mean over layers of the mean over tokens of sum |h|
    l1_warmup: int = 200  # steps of linear rise to it
    l1_weights: tuple[float, ...] | None = None  # a factor for each layer's share of the L1 term; none: 1 each
    restart_every: int = 0  # steps after which neurons that fired on none of their tokens start anew; 0: never
    micro_batches: int = 1  # parts of a step's rows that run one after another, for less memory
    checkpointing: bool = False  # keep a layer's input alone and compute it again, for less memory
    # bookkeeping
    seed: int = 0
    log_every: int = 20  # steps a row of the log; fewer in a training that is short
    evaluations: int = 12  # held-out losses over the run
    bpe_megabytes: float = 20.0  # text that the tokenizer is trained on, spread over the training text

    def __post_init__(self) -> None:
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) != 1:
            got = " and ".join(lengths) or "none of them"
            raise UserError(f"Expected one of tokens, steps and minutes in a recipe, got {got}: give one length.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"Expected {name} to be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        for words, (fits, names) in BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise UserError(f"Expected {name} {words}, got {value}.")
        if len(self.betas) != 2 or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in self.betas):
            raise UserError(f"Expected betas of two numbers from 0 to below 1, got {list(self.betas)}.")
        heads, remainder = divmod(self.d_model, self.head_size)
        if remainder or heads % self.kv_heads:
            raise UserError(
                f"d_model must be whole heads and those a multiple of kv_heads, but d_model is {self.d_model}, "
                f"head_size {self.head_size} and kv_heads {self.kv_heads}; change one of them."
            )
        if self.rows % self.micro_batches:
            raise UserError(
                f"Expected rows that divide into micro_batches of equal size, got {self.rows} rows and "
                f"{self.micro_batches} micro-batches: change one of them."
            )
        weights = self.l1_weights
        if weights is not None and (
            len(weights) != self.layers
            or not all(isinstance(factor, float | int) and 0 <= factor < math.inf for factor in weights)
        ):
            raise UserError(
                f"Expected l1_weights of {self.layers} factors of at least 0, one a layer, got {list(weights)}."
            )
        if self.restart_every and self.restart_every % self.log_every:
            raise UserError(
                f"Expected restart_every to be a multiple of log_every, {self.log_every}, got {self.restart_every}."
            )

    @property
    def step_tokens(self) -> int:
        return self.rows * self.seq_len

    def row_every(self, total: int | None) -> int:
        """Return how many steps a row of the log has: log_every, or fewer where a short training had no curve by it.

        total: steps of the run, None if not yet known
        """
        if total is None or self.restart_every or total >= CURVE[0] * self.log_every:
            return self.log_every
        return max(1, total // CURVE[1])

    def warmup_of(self, total: int | None) -> int:
        """Return how many steps the rate rises over. total: steps of the run, None if not yet known"""
        if self.warmup_share is None or total is None:
            return self.warmup
        return min(self.warmup, round(self.warmup_share * total))

    def on_cpu(self, world: int) -> Recipe:
        """Return the recipe with steps and rows of the log that a CPU gets through in seconds, and a rate that comes to
        its peak in a short training. world: processes"""
        tokens, log_every = CPU_STEP
        unit = world * self.micro_batches
        rows = max(1, tokens // self.seq_len // unit) * unit
        changes = {
            "rows": min(self.rows, rows),
            "log_every": min(self.log_every, log_every),
            "warmup_share": CPU_WARMUP,
        }
        return self.override(**changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as checkpoints and model cards store it, in types that JSON has."""
        weights = None if self.l1_weights is None else list(self.l1_weights)
        return {**dataclasses.asdict(self), "betas": list(self.betas), "l1_weights": weights}

    def override(self, **changes: Any) -> Recipe:
        """Return the recipe with every change that is not None; a new length replaces the old one."""
        replaced = {name: value for name, value in changes.items() if value is not None}
        if replaced.keys() & set(LENGTHS):
            replaced = {**dict.fromkeys(LENGTHS), **replaced}
        return dataclasses.replace(self, **replaced)


# The paper's FFN, 2048 x 5632, at its four depths, on the text and the tokenizer of this project.
DEPTHS = (8, 18, 28, 38)
PAPER_SHAPE = Recipe(
    d_model=2048,
    d_ff=5632,
    kv_heads=32,
    vocab=16_384,
    seq_len=2048,
    rows=8,
    rate=6e-4,
    tokens=50_000_000,
)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="demo", tokens=330_000_000, l1=0.012, l1_warmup=1000, warmup=200, log_every=100),
        dataclasses.replace(PAPER_SHAPE, name="h200-8x2048", seq_len=1024, rows=48, rate=1e-3),
        *(dataclasses.replace(PAPER_SHAPE, name=f"paper-{depth}x2048", layers=depth) for depth in DEPTHS),
    )
}


def load_recipe(name_or_file: str) -> Recipe:
    """Return a recipe by its name, or the one in a .toml or .json file. Raises UserError for anything else."""
    if name_or_file in RECIPES:
        return RECIPES[name_or_file]
    path = Path(name_or_file)
    if path.suffix not in (".toml", ".json"):
        names = ", ".join(RECIPES)
        raise UserError(f"Expected a recipe, one of {names}, or a .toml or .json file of one, got {name_or_file!r}.")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"The recipe {path} could not be read ({error}); correct the file.") from error
    return from_dict({"name": path.stem, **values}, str(path))


def recipe_of(options: TrainOptions) -> Recipe:
    """Return the recipe that options name and change. Raises UserError for options that no training would take."""
    recipe = load_recipe(options.config).override(**{name: getattr(options, name) for name in REPLACED})
    if not 0 < options.holdout < 1:
        raise UserError(f"Expected --holdout between 0 and 1, a share of the text, got {options.holdout}.")
    if options.teacher is not None and options.from_ is None:
        raise UserError(f"Expected --from beside --teacher {options.teacher}, got none: name the model to go on from.")
    return recipe


def spelled(recipe: dict[str, Any], field: str) -> str:
    """Return a field of a recipe's record as the command line gives it; for any length, the one that is set."""
    if field in LENGTHS:
        field = next(name for name in LENGTHS if recipe[name] is not None)
    if field in REPLACED:
        return f"--{field} {recipe[field]}"
    return f"--config {recipe[field]}" if field == "name" else f"--config with {field} {recipe[field]}"


# The types that Recipe's fields are declared with, and what JSON and TOML give for them.
KINDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "tuple[float, float]": (list, tuple),
    "tuple[float, ...]": (list, tuple),
    "None": type(None),
}


def from_dict(values: dict[str, Any], origin: str) -> Recipe:
    """Return the recipe with these values, as `as_dict` or a file gives them.

    origin: the source of the values, for messages. Raises UserError, with the field, for unknown names and wrong types.
    """
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"{origin}: a recipe has no field {name!r}; it has {', '.join(fields)}.")
        expected = str(fields[name].type).split(" | ")
        if isinstance(value, bool) != ("bool" in expected) or not any(isinstance(value, KINDS[k]) for k in expected):
            raise UserError(f"{origin}: {name} must be {fields[name].type}, but is {value!r}.")
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Recipe(**fixed)
