"""The options of each command: one dataclass per command. Those of a capture are arguments in Python too:

    from twell.workbench import capture
    run = capture("path/to/model", ["book.txt"], out="runs/book", examples=8)

`cli.py` takes signatures from these fields, and help from these docstrings: a short first line, and examples. The
options of `twell bench` stand in its room.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twell.workbench.option_fields import option

CPU_BATCH = 8192  # tokens of a batch on a CPU
Device = Literal["auto", "cpu", "cuda"]
NO_GPU = "Expected a CUDA device for --device cuda, PyTorch sees none: use --device cpu, or `twell doctor`."
KernelName = Literal["auto", "reference", "cpu", "cuda", "hopper"]
GPU_KERNELS = {"cuda", "hopper"}  # of these, those that run on a GPU alone
TrainingKernel = Literal["auto", "dense", "sparse"]
WITHOUT_DAMAGED = "leave damaged parts out, by name, and answer from the others"
Format = Literal["parquet", "csv", "json", "npz", "notebook", "html"]


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
        help="a .txt, .md or .jsonl file (a document a line: its field text, or the contents of its messages, joined "
        "by line breaks without a chat template), plain, .zst, .gz or .xz; FILE.parquet:COLUMN; a pattern of such "
        "files; - for standard input; hf:DATASET:COLUMN; builtin:passages, builtin:python-docs; may be repeated",
        value="SOURCE",
    )
    out: Path = option(help="the run's folder; it must not hold a run already")
    tokens: int | None = option(None, help="stop after this many tokens of text", unit="tokens", least=1)
    seq_len: int | None = option(
        None, help="longest sequence; default: the model's context, at most 2048", unit="tokens", least=2
    )
    batch_tokens: int | None = option(
        None,
        help="size of a batch, padding included; default: 8192, on a GPU what its memory holds, up to 131072",
        unit="tokens",
        least=1,
    )
    device: Device = option("auto", help="where to run")
    kernel: KernelName = option(
        "auto",
        help="which FFN kernel; auto picks one; where a named one cannot run, another does; the reason is recorded",
    )
    timings: int = option(1, help="time dense layers in one of so many batches; 0: no timings", unit="batches", least=0)
    timings_share: float = option(
        0.01,
        help="share of the capture's time that dense layers may take once each was timed; 1: every layer in each batch",
        least=0,
        most=1,
    )
    loss: bool = option(True, help="record the loss of the next token")
    probes: Literal["counts", "neurons", "all"] = option(
        "all", help="counts: per token only; neurons: also sums of each neuron and tile; all: also unions of blocks"
    )
    generate: int = option(
        0,
        help="continue each sequence by this many tokens, or up to its end-of-sequence token; documents are then cut "
        "into sequences that are this much shorter than --seq-len, and each is a prompt; 0: generate nothing",
        unit="tokens",
        least=0,
    )
    temperature: float = option(0.0, help="sample tokens at this temperature; 0: take the most likely one", least=0)
    seed: int = option(0, help="seed of the sampling", least=0, most=2**32 - 1)
    threshold: float | None = option(
        None,
        help="count neurons with |hidden| above this, and run the model unchanged; for FFNs without zeros (SiLU)",
        least=0,
    )
    examples: int = option(0, help="record this many of each neuron's largest values, and as many at random", least=0)
    fired: str | None = option(
        None,
        help="record the activations of these layers on this share of the tokens, such as 0,3-5:0.01; or all",
        value="LAYERS[:SHARE]",
    )
    revision: str | None = option(None, help="branch, tag or commit of a hub model", value="REV")
    resume: bool = option(False, help="continue the run in --out where it stopped; start it if there is none")

    @property
    def rows_of_batch(self) -> int:
        """Return the size of a batch in tokens, as it is given or on a CPU."""
        return self.batch_tokens or CPU_BATCH


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Capture the bundled model on bundled text; open the dashboard.

    twell demo
    twell demo --out /tmp/demo --no-app
    """

    out: Path = option(Path("runs/demo"), help="the run's folder; a complete demo run in it is reused")
    app: bool = option(True, help="open the dashboard afterwards")
    port: int = option(8501, help="the dashboard's port", least=1, most=65_535)


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """Build the summaries that tables and pages are read from.

    twell summarize runs/mine
    twell summarize runs/mine --summary-only runs/to-share
    """

    runs: tuple[Path, ...] = option(help="run folders", value="RUN", argument=True)
    summary_only: Path | None = option(
        None, help="also write a copy of one run to this folder, without the rows of single tokens"
    )
    engine: str = option("duckdb", help="where queries run: duckdb (here) or spark://HOST:PORT", value="ENGINE")
    without_damaged: bool = option(False, help=WITHOUT_DAMAGED)


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
        help="by_layer, by_token, …, or a table of the run; may be repeated; default: every analysis table",
        value="TABLE",
    )
    format: Format | None = option(
        None,
        help="tables as parquet, csv or json; fired or dead_neurons as npz; the whole run as notebook or html page; "
        "default: what --out ends in (.csv, .ipynb, …), else parquet",
    )
    out: Path = option(help="a file for one table, a folder for several")
    without_damaged: bool = option(False, help=WITHOUT_DAMAGED)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Set runs side by side: loss, nnz, speed, and what differs.

    twell compare runs/mine runs/demo
    """

    runs: tuple[Path, ...] = option(help="run folders; differences are to the first one", value="RUN", argument=True)
    without_damaged: bool = option(False, help=WITHOUT_DAMAGED)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Check every file and row of runs, and that they agree.

    twell check runs/mine
    """

    runs: tuple[Path, ...] = option(help="run folders", value="RUN", argument=True)


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Open the dashboard over a folder of runs.

    twell app runs/mine --port 8600 --no-browser
    """

    runs: Path = option(Path("runs"), help="a folder of runs, or one run", value="RUNS", argument=True)
    port: int = option(8501, help="port to listen on", least=1, most=65_535)
    host: str = option("127.0.0.1", help="address to listen on; default: for this machine alone", value="ADDRESS")
    browser: bool = option(True, help="open a browser window")
    without_damaged: bool = option(False, help=WITHOUT_DAMAGED)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compare a run with the checkpoint's own code; time its probes.

    Logits and counts are compared on tokens of the run, and the results are written into the run's manifest.

    twell verify runs/mine
    twell verify runs/mine --tokens 20000 --model path/to/model
    """

    run: Path = option(help="a run's folder", value="RUN", argument=True)
    tokens: int = option(8_000, help="compare this many tokens, from the beginning of the run", unit="tokens", least=1)
    model: str | None = option(
        None, help="the model's folder, if the name in the manifest does not lead to it", value="PATH"
    )
    device: Device = option("auto", help="where to run")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Print a text with each token shaded by the neurons it fires.

    Below it stand the layers and the tokens that fire most, with the neurons of the largest values. Nothing is saved.

    twell text "A lichen lives on the bark of an old tree."
    twell text "Once upon a time" --generate 40 --layer 3
    twell text - --model path/to/model
    """

    text: str = option(help="the words themselves; - for standard input", value="TEXT", argument=True)
    model: str = option("builtin:demo", help="a local folder, a hub id, or builtin:demo", value="MODEL")
    layer: int | None = option(None, help="shade by this layer alone; default: the sum of all", least=0)
    generate: int = option(0, help="continue the text by this many tokens", unit="tokens", least=0)
    temperature: float = option(0.0, help="sample tokens at this temperature; 0: take the most likely one", least=0)
    seed: int = option(0, help="seed of the sampling", least=0, most=2**32 - 1)
    threshold: float | None = option(None, help="count neurons with |hidden| above this (FFNs without zeros)", least=0)
    device: Device = option("auto", help="where to run")
    revision: str | None = option(None, help="branch, tag or commit of a hub model", value="REV")


@dataclass(frozen=True, kw_only=True)
class TokensOptions:
    """List the tokens of a run that fire most neurons, and fewest.

    twell tokens runs/demo --words
    """

    run: Path = option(help="a run's folder", value="RUN", argument=True)
    words: bool = option(False, help="whole words in place of tokens")
    rows: int = option(12, help="lines at each end", least=1, most=1000)
    min_count: int = option(20, help="leave out what occurs less often", unit="occurrences", least=1)
    without_damaged: bool = option(False, help=WITHOUT_DAMAGED)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Show what this machine has, and which kernel would run and why.

    twell doctor
    """


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a sparse model: ReLU gate, a little L1 on activations.

    twell train --config demo --text corpus.txt.zst --out models/mine --minutes 5
    twell train --config demo --from path/to/silu-model --rate 3e-4 --l1 0.01 --text corpus.txt.zst --out models/relu
    twell train --config demo --from path/to/silu-model --teacher path/to/silu-model --text a.txt --out models/taught
    """

    config: str = option(help="a named recipe (demo, h200-8x2048) or a .toml or .json file of one", value="NAME|FILE")
    text: tuple[str, ...] = option(help="text to train on, as for `twell capture`; may be repeated", value="SOURCE")
    out: Path = option(help="the model's folder; training continues from a checkpoint of the same recipe in it")
    from_: str | None = option(None, help="go on from this model, SiLU ones too, with the recipe's ReLU", value="MODEL")
    teacher: str | None = option(
        None,
        help="also follow the logits of this model, such as that of --from; its vocabulary is the same",
        value="MODEL",
    )
    valid: tuple[str, ...] = option((), help="other text to measure the finished model on", value="SOURCE")
    holdout: float = option(0.02, help="share at the end of each text that is never trained on", unit="share")
    licences: str = option("", help="licences of the text, for the model card")
    tokens: int | None = option(None, help="train on this many tokens instead of the recipe's length", unit="tokens")
    steps: int | None = option(None, help="train for this many steps instead", unit="steps")
    minutes: float | None = option(None, help="train for this many minutes after compilation instead", unit="minutes")
    l1: float | None = option(None, help="replace the recipe's L1 coefficient")
    rate: float | None = option(None, help="replace the recipe's peak learning rate")
    rows: int | None = option(None, help="replace the recipe's rows per step, and the few of a CPU", unit="rows")
    seed: int | None = option(None, help="replace the recipe's seed")
    device: Device = option("auto", help="where to train")
    compile: bool = option(True, help="compile the model (on CUDA)")
    kernel: TrainingKernel = option("auto", help="kernels of the FFN: sparse where few neurons fire (auto), or always")
    shard: bool = option(False, help="with torchrun: divide weights, gradients and moments over the GPUs (FSDP)")
    prepared: Path | None = option(None, help="keep tokenizer and token ids here, for further runs on the same text")
    checkpoint_minutes: float = option(5.0, help="time between checkpoints", unit="minutes")
