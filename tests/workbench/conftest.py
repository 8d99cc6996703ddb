"""Small models with random weights, and an independent count of what fires in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from twell.kernels.dispatch import choose
from twell.workbench.capturing.command import record
from twell.workbench.cli import main
from twell.workbench.models.families import FAMILIES
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run
from twell.workbench.text.sources import Source
from twell.workbench.training.recipes import Recipe

END = "<|endoftext|>"
TEXT = [
    "The harbour lay quiet in the morning, and nobody couldn't hear the gulls.",
    "def count(rows):\n    return sum(1 for row in rows if row > 0)  # naïve, but right\n",
    "Ten metres.",
    "Formaldehyde, CH₂O, is a gas; see https://example.org/a?b=c. " * 5,
    "日本語 and emoji 🎈 split into bytes.\tTabs too.",
    "x",
]


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Kernels compile before the first test, as the line that says so would stand in a command's output."""
    choose("cpu", torch.float32, 64, 64, 1)


def _save_tokenizer(folder: Path, vocab: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts one special token before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    mark = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, mark)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    return fast


def first_map(layer: Any) -> torch.nn.Linear:
    """A decoder layer's map into the FFN whose output decides what fires."""
    holder = getattr(layer, "mlp", layer)
    return next(getattr(holder, name) for name in ("gate_proj", "fc1", "up_proj") if hasattr(holder, name))


def save_model(folder: Path, family: str = "llama", **fields: Any) -> Path:
    """A model of the real configuration class with random weights; of those that the kernels run, neuron 5 of layer 1
    never fires."""
    size = {"hidden_size": 32, "intermediate_size": 264, "num_hidden_layers": 3, "num_attention_heads": 2}
    given: dict[str, Any] = {
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "hidden_act": "relu",
        "num_key_value_heads": 1,
    }
    if family == "opt":
        del size["intermediate_size"], given["hidden_act"], given["num_key_value_heads"]
        given |= {"ffn_dim": 264, "word_embed_proj_dim": 32, "activation_function": "relu", "init_std": 0.2}
    config = CONFIG_MAPPING[family](**{**size, **given, "initializer_range": 0.2, **fields})
    torch.manual_seed(7)
    disable_progress_bar()  # it would stand in a command's output
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family in FAMILIES:
        with torch.no_grad():
            first_map(model.get_decoder().layers[1]).weight[5] = 0
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama; tests that change its files copy it first."""
    return save_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return _save_tokenizer


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Text files of very different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXT):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return tuple(str(folder / f"{number}.txt") for number in range(len(TEXT)))


@dataclass
class Plain:
    """What a plain transformers model does with sequences, one after another and without padding.

    nnz int64, near bool: [tokens of all sequences, layers]; near: a gate pre-activation within 1e-5 of its row's root
    mean square from zero. gates: by sequence, by layer, [tokens, d_ff]; logits: by sequence, [tokens, vocabulary].
    """

    nnz: np.ndarray
    near: np.ndarray
    gates: list[list[np.ndarray]]
    logits: list[torch.Tensor]


def run_plain(folder: Path, sequences: list[np.ndarray], dtype: torch.dtype, keep: bool = True) -> Plain:
    """`keep=False`: without gates and logits, for a model and a text that are not tiny."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    nnz: list[torch.Tensor] = []
    near: list[torch.Tensor] = []
    gates: list[np.ndarray] = []

    def hear(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        gate = output if output.dim() == 2 else output[0]
        nnz.append((gate > 0).sum(-1))
        near.append(gate.abs().amin(-1) < 1e-5 * gate.square().mean(-1).sqrt())
        if keep:
            gates.append(gate.numpy().copy())

    for layer in model.get_decoder().layers:
        first_map(layer).register_forward_hook(hear)
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for ids in sequences:
            whole = torch.from_numpy(ids.astype(np.int64))[None]
            if keep:
                logits.append(model(input_ids=whole).logits[0])
            else:
                model.model(input_ids=whole)
    layers = len(model.get_decoder().layers)

    def joined(heard: list[torch.Tensor]) -> np.ndarray:
        return np.concatenate([torch.stack(heard[at : at + layers], 1) for at in range(0, len(heard), layers)])

    by_sequence = [gates[at : at + layers] for at in range(0, len(gates), layers)]
    return Plain(joined(nnz), joined(near), by_sequence, logits)


@pytest.fixture(scope="session")
def plain() -> Callable[..., Plain]:
    return run_plain


def _run_capture(
    folder: Path, out: Path, text: tuple[str, ...], dtype: torch.dtype = torch.float32, **given: Any
) -> Run:
    """A capture of a model folder on the CPU in a dtype; small batches and short sequences unless told otherwise."""
    fields = {"batch_tokens": 64, "seq_len": 24, "timings": 0, "device": "cpu", **given}
    options = CaptureOptions(model=str(folder), text=text, out=out, **fields)
    loaded = load(str(folder), device="cpu", dtype=dtype, threshold=options.threshold)
    return record(loaded, options, [Source(name) for name in text])


def _sequences_of(run: Run, phase: int | None = None) -> list[np.ndarray]:
    """The token ids of each sequence, from the activity table; of one phase alone, or of all."""
    frame = run.activity()
    here = np.ones(len(frame), bool) if phase is None else frame["phase"] == phase
    return [group["token_id"][here[group.index]].to_numpy() for _, group in frame.groupby("sequence")]


def _counts_of(run: Run) -> np.ndarray:
    """nnz, int64 [tokens, layers]."""
    return run.activity()[nnz_columns(run.layers)].to_numpy().astype(np.int64)


def _ends_with(folder: Path, token: int | list[int]) -> None:
    """Have a model end its sequences with a token, or with any of several."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token, "do_sample": True, "top_k": 3}))


@pytest.fixture(scope="session")
def run_capture() -> Callable[..., Run]:
    return _run_capture


@pytest.fixture(scope="session")
def sequences_of() -> Callable[..., list[np.ndarray]]:
    return _sequences_of


@pytest.fixture(scope="session")
def counts_of() -> Callable[[Run], np.ndarray]:
    return _counts_of


@pytest.fixture(scope="session")
def ends_with() -> Callable[..., None]:
    return _ends_with


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    """A model that trains in seconds on a CPU, and is sparse at the end."""
    return Recipe(
        name="tiny",
        layers=2,
        d_model=32,
        d_ff=96,
        head_size=16,
        kv_heads=1,
        vocab=400,
        seq_len=32,
        steps=60,
        rows=8,
        warmup=5,
        l1=0.03,
        l1_warmup=10,
        log_every=10,
        evaluations=3,
    )


@pytest.fixture
def refused(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., str]:
    """Runs `twell capture` with one thing wrong; gives the sentence, after seeing that nothing was written."""

    def run(*options: str, model: Path | str = tiny, text: Path | str = texts[0], out: Path = tmp_path / "run") -> str:
        before = _files(out)
        words = ["twell", "capture", str(model), "--text", str(text), "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr().err.strip()
        assert stopped.value.code == 2, said
        assert _files(out) == before
        assert said.startswith("twell: "), said
        assert said.count("\n") == 0, said
        assert said.endswith("."), said
        return said

    return run


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
