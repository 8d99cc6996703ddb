"""Odd models: a small Llama's files are changed, and the model is loaded and run as a capture does.

A model that loads must count what transformers' own network counts on the same files; every other one must be refused
in one sentence, with no word beside it, and without memory that its weights do not need.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.fuzz import FAILED, Outcome, generator, outcome
from support.fuzz.kernel_calls import pick
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twell.kernels.modules import Probe
from twell.workbench.models.load import load

Rng = np.random.Generator
MOST_BYTES = 400 * 2**20  # that a case may add to the process
NEAR = 1e-4  # of a pre-activation's row: within rounding of zero
ODD = (
    None, 0, -1, 1, 7, 2**31 - 1, 10**9, 10**18, -(2**63), 0.5, -3.0, 1e308, float("nan"), float("inf"), True, False,
    "",
    "relu", "two", "x" * 5000, "\x1b[31m", [], [1, 2], {}, {"a": 1}, [[[]]], "line\nbreak", 8, 64, 3, 10**6,
)  # fmt: skip
TEXTS = (
    "",
    "{",
    "[]",
    "null",
    "5",
    '"x"',
    "[" * 100_000,
    '{"a":' * 100_000,
    "\x00",
    '{"a": ' + "9" * 5000 + "}",
    "\ufeff{}",
)
FIELDS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "hidden_act", "model_type", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "pad_token_id", "eos_token_id", "dtype",
    "torch_dtype", "architectures", "auto_map", "quantization_config", "text_config", "layer_types", "n_layers",
    "attention_dropout", "pretraining_tp", "use_cache", "sparsity_x", "num_experts", "transformers_version",
    "odd field",
)  # fmt: skip


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Return the function from a case's number to its outcomes."""
    whole = _small_model(folder / "whole")

    def case(number: int) -> list[Outcome]:
        odd = folder / f"model-{number}"
        shutil.copytree(whole, odd)
        try:
            return [_case(odd, generator(seed, number))]
        finally:
            shutil.rmtree(odd)

    return case


def _small_model(folder: Path) -> Path:
    """Save a Llama of two layers with random weights, and the bundled model's tokenizer."""
    bundled = Path(str(files("twell.data") / "demo-model"))
    rows = json.loads((bundled / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = LlamaConfig(**sizes, vocab_size=rows, hidden_act="relu", initializer_range=0.2, max_position_embeddings=64)
    with _words():
        LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder / name)
    return folder


def _case(folder: Path, rng: Rng) -> Outcome:
    """Change a model's files, load and run it, and judge the counts."""
    done = pick(rng, WAYS)(folder, rng)
    before = {path: path.lstat().st_size for path in folder.parent.rglob("*")}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def differs(got: Any) -> str:
        least, most = _own_counts(folder)
        return (
            ""
            if ((least <= got) & (got <= most)).all()
            else f"counts {got.sum()}, expected {least.sum()} to {most.sum()}"
        )

    with _words() as words:
        judged = outcome(done, lambda: _counts(folder), differs, lambda _: False)
    faults = [f"words beside it: {words[0][:300]!r}"] if words[0] and judged.kind == "one sentence" else []
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 > MOST_BYTES:
        faults.append("memory was taken")
    if {path: path.lstat().st_size for path in folder.parent.rglob("*")} != before:
        faults.append("a file was written")
    return Outcome(FAILED, done, f"{'; '.join(faults)}; {judged.details}") if faults else judged


@contextmanager
def _words() -> Iterator[list[str]]:
    """Catch what a block, and the libraries in it, print; the list's one entry is set at the end."""
    words = [""]
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield words
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            words[0] = file.read().decode(errors="replace").strip()


IDS = torch.arange(40).view(2, 20) * 13 % 256


def _counts(folder: Path) -> np.ndarray:
    """Return how many neurons fired by the loaded model, [layers, tokens]."""
    loaded = load(str(folder), device="cpu")
    counts: list[np.ndarray] = []
    probe = Probe("counts", on_stats=lambda _, __, stats: counts.append(stats.nnz.numpy().copy()))
    with loaded.probing(probe), torch.inference_mode():
        loaded.body(input_ids=IDS, use_cache=False)
    return np.stack(counts)


def _own_counts(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return how many neurons surely and perhaps fired by transformers' own network, each [layers, tokens]."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bounds: list[tuple[np.ndarray, np.ndarray]] = []

    def note(_module: Any, _inputs: Any, gate: torch.Tensor) -> None:
        gate = gate.flatten(0, 1)
        near = NEAR * gate.square().mean(1, keepdim=True).sqrt()
        finite = gate.isfinite().all(1)
        bounds.append(tuple((((gate > edge).sum(1)) * finite).numpy() for edge in (near, -near)))  # type: ignore[arg-type]

    for layer in network.get_decoder().layers:
        layer.mlp.gate_proj.register_forward_hook(note)
    with torch.inference_mode():
        network.get_decoder()(input_ids=IDS, use_cache=False)
    least, most = zip(*bounds, strict=True)
    return np.stack(least), np.stack(most)


# ---- what is changed, each returning it in words


def _config(folder: Path, rng: Rng) -> str:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    changes = {}
    for _ in range(int(pick(rng, (1, 1, 1, 2, 3)))):
        name, value = pick(rng, FIELDS if rng.random() < 0.7 else sorted(fields)), pick(rng, ODD)
        changes[name] = value
    path.write_text(json.dumps(fields | changes))
    return f"config.json: {changes!s:.200}"


def _without_field(folder: Path, rng: Rng) -> str:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    name = pick(rng, sorted(fields))
    del fields[name]
    path.write_text(json.dumps(fields))
    return f"config.json without {name}"


def _json_text(folder: Path, rng: Rng) -> str:
    name = pick(rng, ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"))
    text = pick(rng, TEXTS)
    (folder / name).write_text(text)
    return f"{name}: {text[:20]!r}"


def _json_field(folder: Path, rng: Rng) -> str:
    path = folder / pick(rng, ("generation_config.json", "tokenizer_config.json", "tokenizer.json"))
    content = json.loads(path.read_text())
    holder: Any = content
    while True:
        name = pick(rng, sorted(holder) if isinstance(holder, dict) else list(range(len(holder))))
        if not isinstance(holder[name], dict | list) or not holder[name] or rng.random() < 0.4:
            break
        holder = holder[name]
    holder[name] = pick(rng, ODD)
    path.write_text(json.dumps(content))
    return f"{path.name}: {name!r:.40} is {holder[name]!r:.40}"


def _cut(folder: Path, rng: Rng) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    size = int(rng.integers(path.stat().st_size))
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def _flipped(folder: Path, rng: Rng) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    place = int(rng.integers(min(len(data), 3000)))
    data[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    return f"{path.name}: a bit of byte {place}"


def _away(folder: Path, rng: Rng) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    path.unlink()
    way = pick(rng, ("missing", "a folder", "a pipe", "a link to itself"))
    if way == "a folder":
        path.mkdir()
    elif way == "a pipe":
        os.mkfifo(path)
    elif way == "a link to itself":
        path.symlink_to(path)
    return f"{path.name}: {way}"


WAYS = (_config, _config, _config, _config, _without_field, _json_text, _json_field, _json_field, _cut, _flipped, _away)
