"""Small models with random weights, captures of them, and an independent count of what fires in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from twell.workbench.capturing.command import record
from twell.workbench.models.families import FAMILIES
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run
from twell.workbench.text.sources import TextSource

END = "<|endoftext|>"
TEXT = [
    "The harbour lay quiet in the morning, and nobody couldn't hear the gulls.",
    "def count(rows):\n    return sum(1 for row in rows if row > 0)  # naïve, but right\n",
    "Ten metres.",
    "Formaldehyde, CH₂O, is a gas; see https://example.org/a?b=c. " * 5,
    "日本語 and emoji 🎈 split into bytes.\tTabs too.",
    "x",
]


def save_tokenizer(folder: Path, vocab: int = 320) -> PreTrainedTokenizerFast:
    """Train and save a byte-level BPE that puts one special token before each text."""
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
    """Return a decoder layer's map into the FFN whose output decides what fires."""
    holder = getattr(layer, "mlp", layer)
    return next(getattr(holder, name) for name in ("gate_proj", "fc1", "up_proj") if hasattr(holder, name))


def save_model(folder: Path, family: str = "llama", **fields: Any) -> Path:
    """Save a model of the real configuration class with random weights, and a tokenizer; return its folder.

    In families that the kernels run, neuron 5 of layer 1, or of the only layer, never fires. fields: of the
    configuration
    """
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
            first_map(model.get_decoder().layers[:2][-1]).weight[5] = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@dataclass
class Plain:
    """Results of a plain transformers model over sequences, one after another and without padding.

    nnz int64, near bool: [tokens of all sequences, layers]; near: a gate pre-activation within 1e-5 of its row's root
    mean square from zero. gates: by sequence, by layer, [tokens, d_ff]; logits: by sequence, [tokens, vocabulary].
    """

    nnz: np.ndarray
    near: np.ndarray
    gates: list[list[np.ndarray]]
    logits: list[torch.Tensor]


def run_plain(folder: Path, sequences: list[np.ndarray], dtype: torch.dtype, keep: bool = True) -> Plain:
    """Pass each sequence through the model of a folder.

    keep: whether gates and logits are kept too, for a tiny model and text
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    nnz: list[torch.Tensor] = []
    near: list[torch.Tensor] = []
    gates: list[np.ndarray] = []

    def on_output(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        gate = output if output.dim() == 2 else output[0]
        nnz.append((gate > 0).sum(-1))
        near.append(gate.abs().amin(-1) < 1e-5 * gate.square().mean(-1).sqrt())
        if keep:
            gates.append(gate.numpy().copy())

    for layer in model.get_decoder().layers:
        first_map(layer).register_forward_hook(on_output)
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for ids in sequences:
            row = torch.from_numpy(ids.astype(np.int64))[None]
            if keep:
                logits.append(model(input_ids=row).logits[0])
            else:
                model.model(input_ids=row)
    layers = len(model.get_decoder().layers)

    def joined(calls: list[torch.Tensor]) -> np.ndarray:
        return np.concatenate([torch.stack(calls[at : at + layers], 1) for at in range(0, len(calls), layers)])

    by_sequence = [gates[at : at + layers] for at in range(0, len(gates), layers)]
    return Plain(joined(nnz), joined(near), by_sequence, logits)


def run_capture(
    folder: Path, out: Path, text: tuple[str, ...], dtype: torch.dtype = torch.float32, **given: Any
) -> Run:
    """Capture a model folder on the CPU in a dtype; small batches, short sequences unless given."""
    fields = {"batch_tokens": 64, "seq_len": 24, "timings": 0, "device": "cpu", **given}
    options = CaptureOptions(model=str(folder), text=text, out=out, **fields)
    loaded = load(str(folder), device="cpu", dtype=dtype, threshold=options.threshold)
    return record(loaded, options, [TextSource(name) for name in text])


def sequences_of(run: Run, phase: int | None = None) -> list[np.ndarray]:
    """Return the token ids of each sequence from the activity table, in one phase or in all."""
    frame = run.activity()
    chosen = np.ones(len(frame), bool) if phase is None else frame["phase"] == phase
    return [group["token_id"][chosen[group.index]].to_numpy() for _, group in frame.groupby("sequence")]


def counts_of(run: Run) -> np.ndarray:
    """Return nnz, int64 [tokens, layers]."""
    return run.activity()[nnz_columns(run.layers)].to_numpy().astype(np.int64)


def ends_with(folder: Path, token: int | list[int]) -> None:
    """Let a model end its sequences with a token, or with any of several."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token, "do_sample": True, "top_k": 3}))
