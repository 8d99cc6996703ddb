"""What each command can be told: one dataclass a command, which is its Python API too.

    from twell.workbench.options import CaptureOptions
    from twell.workbench.capturing.command import capture
    run = capture(CaptureOptions(model="path/to/model", text=("book.txt",), out=Path("runs/book")))

The command line builds its signatures from these fields, and its help from these docstrings: a first line short enough
for the list of commands, and examples (see `cli.py`). Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

Device = Literal["auto", "cpu", "cuda"]
Kernel = Literal["auto", "reference", "cpu", "cuda", "hopper"]
Format = Literal["parquet", "csv", "json", "npz", "notebook", "html"]


def option(default: Any = MISSING, *, help: str, unit: str = "", value: str = "", argument: bool = False) -> Any:
    """A dataclass field that is also a command-line option, or an argument by position.

    value: what stands for the option's value in the help; default: by its type (N, X, PATH, TEXT)
    """
    return field(default=default, metadata={"help": help, "unit": unit, "value": value, "argument": argument})


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Run a model over text and record which FFN neurons fire.

    twell capture path/to/model --text book.txt --text chats.jsonl --out runs/mine --examples 8
    twell capture builtin:demo --text notes.jsonl --out runs/notes
    twell capture path/to/model --text 'shards/*.jsonl.zst' --tokens 1000000 --out runs/sample
    twell capture path/to/model --text prompts.jsonl --generate 64 --out runs/made
    """

    model: str = option(help="a local folder, a hub id, or builtin:demo", value="MODEL", argument=True)
    text: tuple[str, ...] = option(
        help="a .txt or .jsonl file, plain, .zst, .gz or .xz; FILE.parquet:COLUMN; a pattern of such files; - for "
        "standard input; hf:DATASET:COLUMN; builtin:passages, builtin:python-docs; may be given again",
        value="SOURCE",
    )
    out: Path = option(help="the run's folder; it must not hold a run already")
    tokens: int | None = option(None, help="stop after this many", unit="tokens")
    seq_len: int | None = option(
        None, help="longest sequence; default: the model's context, at most 2048", unit="tokens"
    )
    batch_tokens: int = option(8192, help="padded size of a batch", unit="tokens")
    device: Device = option("auto", help="where to run")
    kernel: Kernel = option("auto", help="which FFN kernel; auto picks one and records why")
    timings: int = option(
        1, help="time layers, sparse and dense, at most each so many batches; 0: never", unit="batches"
    )
    timings_share: float = option(
        0.005,
        help="share of the time that timings may take, beside 4 s on a CPU and 0.05 s on a GPU; more of it times each "
        "layer in more batches; 1: every layer in each batch that is due",
    )
    loss: bool = option(True, help="record the next token's loss")
    probes: Literal["counts", "neurons", "all"] = option(
        "all", help="counts per token alone; with sums a neuron and tile as well; or with unions of blocks too"
    )
    generate: int = option(
        0,
        help="continue each sequence by so many tokens, or to its end-of-sequence token; documents are then cut into "
        "sequences of --seq-len less these, and every one is a prompt; 0: none",
        unit="tokens",
    )
    temperature: float = option(0.0, help="draw what is generated at this temperature; 0: take the likeliest token")
    seed: int = option(0, help="of these draws")
    threshold: float | None = option(
        None, help="count |hidden| above this, and run the model as it is; for SiLU, GELU and any FFN without zeros"
    )
    examples: int = option(0, help="keep so many of each neuron's largest values, and as many drawn at random")
    fired: str | None = option(
        None, help="keep the activations themselves, of these tokens: as in 0,3-5:0.01 or all", value="LAYERS[:SHARE]"
    )
    revision: str | None = option(None, help="branch, tag or commit of a hub model", value="REV")
    resume: bool = option(False, help="go on with the run in --out where it ends; it begins if there is none")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Capture the bundled model on bundled text; open the dashboard.

    twell demo
    twell demo --out /tmp/demo --no-app
    """

    out: Path = option(Path("runs/demo"), help="the run's folder; a complete demo run there is used again")
    app: bool = option(True, help="open the dashboard afterwards")
    port: int = option(8501, help="the dashboard's port")


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """Build the summaries that tables and pages are read from.

    twell summarize runs/mine
    twell summarize runs/mine --summary-only runs/to-share
    """

    runs: tuple[Path, ...] = option(help="run folders", value="RUN", argument=True)
    summary_only: Path | None = option(None, help="write a copy there that keeps no row of single tokens (one run)")
    engine: str = option(
        "duckdb", help="where queries run: duckdb, on this machine, or spark://HOST:PORT", value="ENGINE"
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a run's tables to files that other tools read.

    twell export runs/mine --out tables
    twell export runs/mine --table by_token --out by_token.csv
    twell export runs/mine --out mine.ipynb
    """

    run: Path = option(help="a run's folder", value="RUN", argument=True)
    table: tuple[str, ...] = option(
        (),
        help="by_layer, by_token, …, or a table of the run; may be given again; default: every analysis table",
        value="TABLE",
    )
    format: Format | None = option(
        None,
        help="tables as parquet, csv or json; fired or dead_neurons as npz; the whole run as notebook or html page; "
        "default: what --out ends in (.csv, .ipynb, …), else parquet",
    )
    out: Path = option(help="a file for one table, a folder for several")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Set runs side by side: loss, nnz, speed, and what differs.

    twell compare runs/mine runs/demo
    """

    runs: tuple[Path, ...] = option(help="run folders; differences are to the first", value="RUN", argument=True)


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Open the dashboard over a folder of runs.

    twell app
    twell app runs/mine --port 8600 --no-browser
    """

    runs: Path = option(Path("runs"), help="a folder of runs, or one run", value="RUNS", argument=True)
    port: int = option(8501, help="port")
    host: str = option(
        "127.0.0.1", help="address to listen on; the default is reachable from this machine only", value="ADDRESS"
    )
    browser: bool = option(True, help="open a browser window")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Hold a run to the checkpoint's own code; time its probes.

    Logits and counts are compared on tokens of the run, and what was found goes into the run's manifest.

    twell verify runs/mine
    twell verify runs/mine --tokens 20000 --model path/to/model
    """

    run: Path = option(help="a run's folder", value="RUN", argument=True)
    tokens: int = option(8_000, help="compare so many of the run's, from its beginning", unit="tokens")
    model: str | None = option(
        None, help="the model's folder, where the name in the manifest does not lead to it", value="PATH"
    )
    device: Device = option("auto", help="where to run")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time the FFN dense and sparse side by side, errors included.

    On a model's layers, on a shape with made-up weights and inputs, or on recorded firing patterns.

    twell bench path/to/model --out runs/mine
    twell bench --shape 2048,5632 --nnz 29,120 --rows 8192
    twell bench --patterns patterns_d2048_f5632.npz --rows 1,8,64
    """

    model: str | None = option(
        None, help="a local folder or a hub id; default: builtin:demo, the bundled model", value="MODEL", argument=True
    )
    shape: str | None = option(None, help="made-up weights and inputs instead of a model's", value="D_MODEL,D_FF")
    patterns: Path | None = option(None, help="an .npz of recorded firing patterns, for up and down alone")
    text: tuple[str, ...] = option(
        (), help="text for a model, as for `twell capture`; default: the built-in ones", value="SOURCE"
    )
    rows: str | None = option(
        None, help="rows of a case; default: 131072 on a GPU, 1024 on a CPU", unit="tokens", value="N[,N…]"
    )
    layers: str | None = option(None, help="the layers to time; default: all", value="L[,L…]")
    inputs: str | None = option(
        None, help="text,uniform for a model, heavy,even,dense for a shape; default: all", value="KIND[,KIND…]"
    )
    nnz: str = option("15,29,60,120,250", help="mean nnz of made-up inputs", unit="neurons", value="N[,N…]")
    compression: str = option("8", help="of the TwELL that kernels emit: 2, 4, 8 or 16", value="C[,C…]")
    kernel: tuple[str, ...] = option(
        (),
        help="time this kernel alone; may be given again; default: all that can run, on a GPU without the reference",
        value="KERNEL",
    )
    plain: bool = option(False, help="a plain FFN instead of a gated one, for a shape")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option("auto", help="of weights and inputs")
    device: Device = option("auto", help="where to run")
    weights: Literal["auto", "warm", "cold"] = option(
        "auto", help="cold: rotated through more than the cache holds; auto: for up to 1024 rows on a GPU"
    )
    compile: bool = option(True, help="time torch.compile's dense FFN too")
    probes: bool = option(False, help="time the kernels with each probe on, too")
    energy: bool = option(False, help="power and energy too, by 6 s of each dense and sparse operation alone")
    seconds: float | None = option(
        None, help="about what the turns of a case take; default: 0.3, on a GPU 1", unit="seconds"
    )
    out: Path | None = option(None, help="a .parquet file, or a run's folder: figures of other cases there are kept")
    revision: str | None = option(None, help="branch, tag or commit of a hub model", value="REV")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say what this machine has, and which kernel would run and why.

    twell doctor
    """


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a sparse model: ReLU gate, a little L1 on activations.

    twell train --config demo --text corpus.txt.zst --out models/mine --minutes 5
    """

    config: str = option(help="a named recipe (demo, h200-8x2048) or a .toml/.json file of one", value="NAME|FILE")
    text: tuple[str, ...] = option(
        help="what to train on: the sources of `twell capture`; may be given again", value="SOURCE"
    )
    out: Path = option(help="the model's folder; a checkpoint of the same recipe there is continued")
    valid: tuple[str, ...] = option((), help="other text to measure the finished model on", value="SOURCE")
    holdout: float = option(0.02, help="share at the end of each text that is never trained on", unit="share")
    licences: str = option("", help="licences of the text, for the model card")
    tokens: int | None = option(None, help="train on this many instead of the recipe's length", unit="tokens")
    steps: int | None = option(None, help="train this long instead", unit="steps")
    minutes: float | None = option(None, help="train this long instead, compilation not counted", unit="minutes")
    l1: float | None = option(None, help="the recipe's L1 coefficient, replaced")
    rate: float | None = option(None, help="the recipe's peak learning rate, replaced")
    rows: int | None = option(None, help="the recipe's rows a step, replaced", unit="rows")
    seed: int | None = option(None, help="the recipe's seed, replaced")
    device: Device = option("auto", help="where to train")
    compile: bool = option(True, help="compile the model (on CUDA)")
    prepared: Path | None = option(None, help="keep tokenizer and token ids here, for further runs on the same text")
    checkpoint_minutes: float = option(5.0, help="time between checkpoints", unit="minutes")
