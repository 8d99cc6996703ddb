"""Logit lens: the tokens whose logits a neuron's down row raises and lowers most.

    written(run, "data/demo-model", layer=3, neuron=42)           both ends of its effect on the logits
    answers_to(run, "data/demo-model", layer=3, neuron=42)        the token embeddings that its gate row matches, if any
    promoted(run, "data/demo-model", neurons=((3, 42), (7, 1)))   the tokens that each of many neurons raises most

A fired neuron adds its product times its down row to the residual; the final norm's scale and the unembedding turn that
into logits. This is the direct effect alone. It leaves out later layers, which read the residual too, and the norm's
division by the residual's length, which is one positive number a token. Logits are relative to their mean over the
vocabulary, which does not change the softmax. Weights are mapped from safetensors; bfloat16 needs no library, since its
16 bits are the upper half of a float32. Cost: one pass over the unembedding, 20 ms for 6 144 tokens of 256.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.tokens.token_text import token_text
from twell.workbench.errors import Missing
from twell.workbench.run.manifest import LAYER_NORM, LAYER_NORM_PLUS_ONE, RMS_NORM
from twell.workbench.run.store import Run

EACH = 12  # tokens at either end of the ranking
SURE = 0.99  # share of shuffled gate rows that a match has to surpass, to be told from chance
SHUFFLED = 512  # gate rows of a layer that are shuffled, 5 ms for 6 144 tokens of 256
AT_ONCE = 8192  # rows of the unembedding that are multiplied at a time
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
NORMS_OF_OLDER_RUNS = {  # by family; newer manifests say it of every family that the kernels run
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "llama_sparse_relu", "bamboo"), RMS_NORM),
    "nemotron": LAYER_NORM_PLUS_ONE,
    "opt": LAYER_NORM,
}


class CheckpointTensors:
    """The tensors of a checkpoint folder by name, memory-mapped, and its config."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors, self.config = folder, dict[str, np.ndarray](), dict[str, Any]()
        try:
            for path in sorted(folder.glob("*.safetensors")):
                self._map(path)
            if (config := folder / "config.json").is_file():
                self.config = dict(json.loads(config.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Missing(f"The weights in {folder} cannot be read ({error}).") from None
        if not self.tensors:
            raise Missing(f"There are no safetensors in {folder}, so what the neuron writes cannot be told.")

    def _map(self, path: Path) -> None:
        """Map the tensors of one safetensors file."""
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in TYPES:
                start = 8 + length + tensor["data_offsets"][0]
                kind = np.dtype(TYPES[tensor["dtype"]])
                self.tensors[name] = np.memmap(path, kind, "r", start, tuple(tensor["shape"]))

    def ending(self, *ends: str) -> np.ndarray | None:
        """Return the tensor whose name ends in one of `ends`, earlier endings first; None if there is none."""
        return next((array for end in ends for name, array in self.tensors.items() if name.endswith(end)), None)

    def down(self, layer: int) -> np.ndarray:
        """Return the down product's weights, [d_model, d_ff]."""
        weights = self.ending(f".layers.{layer}.mlp.down_proj.weight", f".layers.{layer}.fc2.weight")
        if weights is None:
            raise Missing(f"The weights in {self.folder} name no down product of layer {layer}.")
        return weights

    def gate(self, layer: int) -> np.ndarray:
        """Return the weights of the product that decides what fires, [d_ff, d_model]."""
        ends = (f".layers.{layer}.mlp.gate_proj.weight", f".layers.{layer}.mlp.up_proj.weight")
        weights = self.ending(*ends, f".layers.{layer}.fc1.weight")
        if weights is None:
            raise Missing(f"The weights in {self.folder} name no gate product of layer {layer}.")
        return weights

    def is_gated(self, layer: int) -> bool:
        """Return whether the layer's FFN has a gate and an up branch."""
        return self.ending(f".layers.{layer}.mlp.gate_proj.weight") is not None

    def unembedding(self) -> np.ndarray:
        """Return the unembedding [vocab, d_model], or the embedding if the two are tied."""
        weights = self.ending("lm_head.weight", "embed_tokens.weight")
        if weights is None:
            raise Missing(f"The weights in {self.folder} name no unembedding.")
        return weights


def as_float32(array: np.ndarray) -> np.ndarray:
    """Return an array as float32, whatever type it is stored in."""
    if array.dtype == np.dtype("<u2"):
        return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)


def written(run: Run, folder: str, layer: int, neuron: int) -> pd.DataFrame:
    """Return the tokens raised most, then those lowered most. Columns: kind (raised, lowered); token_id; text; logit
    (relative to the vocabulary's mean, for a product of 1, before the final norm's division).

    `attrs`: tokens; signed (whether the product may be negative, as in a gated FFN without a ReLU on its up branch);
    scaled (whether a final norm's scale is folded in). Missing where the folder's weights are not the run's, by their
    shapes.
    """
    weights = CheckpointTensors(Path(folder))
    logits, scaled = _logits(run, weights, ((layer, neuron),))
    frame = _both_ends(run, logits[:, 0])
    signed = weights.is_gated(layer) and not run.manifest.counts_used
    frame.attrs = {"tokens": len(logits), "signed": signed, "scaled": scaled}
    return frame


def promoted(run: Run, folder: str, neurons: tuple[tuple[int, int], ...], each: int = 3) -> pd.DataFrame:
    """Return the `each` tokens whose logits each neuron raises most, the neurons in their given order. Columns: layer;
    neuron; token_id; text; logit (as in `written`).

    neurons: pairs of layer and neuron. Cost: one pass over the unembedding for all of them.
    """
    columns = ["layer", "neuron", "token_id", "text", "logit"]
    if not neurons:
        return pd.DataFrame(columns=columns)
    logits, _ = _logits(run, CheckpointTensors(Path(folder)), neurons)
    each = min(each, len(logits))
    first = np.argpartition(-logits, each - 1, axis=0)[:each]
    first = np.take_along_axis(first, np.argsort(-np.take_along_axis(logits, first, 0), axis=0, kind="stable"), 0)
    values = np.take_along_axis(logits, first, 0) - logits.mean(axis=0)
    frame = pd.DataFrame(np.repeat(np.array(neurons, np.int64), each, axis=0), columns=columns[:2])
    frame["token_id"] = first.T.ravel().astype("int64")
    frame["text"] = token_text(run, frame["token_id"], spelled=True)
    return frame.assign(logit=values.T.ravel().astype("float64"))


def answers_to(run: Run, folder: str, layer: int, neuron: int) -> pd.DataFrame:
    """Return the tokens whose embeddings match the neuron's gate row better, or worse, than chance would: at most EACH
    of both, no row where nothing stands out.

    The rule: a match counts where it goes beyond what SURE of the layer's gate rows, their entries shuffled and scaled
    to this row's length, reach with any token. So 1 of 100 neurons that match nothing has a token at an end. Shuffled
    are SHUFFLED rows, from all over the layer, once a layer.

    Columns: kind (raised, lowered); token_id; text; logit (the embedding times the gate row, relative to the
    vocabulary's mean). The embedding is what a token brings before any layer has added to it. `attrs`: tokens; least,
    most_negative (what a match has to exceed at either end).
    """
    path = Path(folder)
    weights = CheckpointTensors(path)
    gate = weights.gate(layer)
    embedding = weights.ending("embed_tokens.weight")
    width = int(run.manifest.model["d_model"])
    if gate.shape != (run.widths[layer], width) or embedding is None or embedding.shape[1:] != (width,):
        raise Missing(
            f"The weights in {folder} are not this run's: expected a gate product of {run.widths[layer]} × {width}."
        )
    tokens, norm_kind = _vocabulary_size(run, len(embedding)), _norm_kind(run, weights)
    row = _gate_rows(weights, layer, np.array([neuron]), norm_kind)[0]
    matches = _products(embedding, row[:, None])[:tokens, 0]
    changed = max(file.stat().st_mtime_ns for file in path.glob("*.safetensors"))
    high, low = (float(np.linalg.norm(row)) * end for end in _by_chance(folder, changed, layer, norm_kind, tokens))
    frame = _both_ends(run, matches)
    stands_out = np.where(frame["kind"] == "raised", frame["logit"] > high, frame["logit"] < low)
    frame = frame[stands_out].reset_index(drop=True)
    frame.attrs = {"tokens": len(matches), "least": high, "most_negative": low}
    return frame


def _gate_rows(weights: CheckpointTensors, layer: int, neurons: NDArray[np.int64], norm_kind: str) -> NDArray[Any]:
    """Return gate rows as they meet a residual of length 1, float32 [neurons, d_model]: with the norm's scale."""
    ends = (f".layers.{layer}.post_attention_layernorm.weight", f".layers.{layer}.final_layer_norm.weight")
    norm = weights.ending(*ends)
    rows = as_float32(weights.gate(layer)[neurons])
    if norm is not None:
        rows = rows * (as_float32(norm) + (1.0 if norm_kind == LAYER_NORM_PLUS_ONE else 0.0))
    return rows if norm_kind == RMS_NORM else rows - rows.mean(axis=1, keepdims=True)


@lru_cache(maxsize=64)
def _by_chance(folder: str, changed: int, layer: int, norm_kind: str, tokens: int) -> tuple[float, float]:
    """Return the greatest and the least match with any token that shuffled gate rows of length 1 reach, with SURE.

    changed: when the weights were written last, so that others under the same name are read anew
    """
    weights = CheckpointTensors(Path(folder))
    count, embedding = len(weights.gate(layer)), weights.ending("embed_tokens.weight")
    assert embedding is not None  # `answers_to` has refused such weights
    rows = _gate_rows(weights, layer, np.linspace(0, count - 1, min(SHUFFLED, count)).astype(np.int64), norm_kind)
    rows = np.random.default_rng(layer).permuted(rows, axis=1)
    rows = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).T
    total, most, least = np.zeros(rows.shape[1]), np.full(rows.shape[1], -np.inf), np.full(rows.shape[1], np.inf)
    for start in range(0, tokens, AT_ONCE):
        part = as_float32(embedding[start : min(start + AT_ONCE, tokens)]) @ rows
        total += part.sum(axis=0)
        most, least = np.maximum(most, part.max(axis=0)), np.minimum(least, part.min(axis=0))
    mean = total / tokens
    return float(np.quantile(most - mean, SURE)), float(np.quantile(least - mean, 1 - SURE))


def _logits(
    run: Run, weights: CheckpointTensors, neurons: tuple[tuple[int, int], ...]
) -> tuple[NDArray[np.float32], bool]:
    """Return what neurons add to the logits, float32 [vocab, neurons], and whether a final norm's scale is in it."""
    norm_kind = _norm_kind(run, weights)
    width, unembedding = int(run.manifest.model["d_model"]), weights.unembedding()
    rows = np.empty((width, len(neurons)), np.float32)
    for index, (layer, neuron) in enumerate(neurons):
        down = weights.down(layer)
        if down.shape != (width, run.widths[layer]) or unembedding.shape[1:] != (width,):
            raise Missing(
                f"The weights in {weights.folder} are not this run's: expected a down product of {width} × "
                f"{run.widths[layer]}, got {' × '.join(map(str, down.shape))}, and an unembedding of "
                f"{' × '.join(map(str, unembedding.shape))}."
            )
        rows[:, index] = as_float32(down[:, neuron])
    if norm_kind != RMS_NORM:
        rows -= rows.mean(axis=0)
    norm = weights.ending("model.norm.weight", "decoder.final_layer_norm.weight")  # OPT's layers have such a norm too
    if norm is not None:
        rows *= (as_float32(norm) + (1.0 if norm_kind == LAYER_NORM_PLUS_ONE else 0.0))[:, None]
    return _products(unembedding, rows)[: _vocabulary_size(run, len(unembedding))], norm is not None


def _norm_kind(run: Run, weights: CheckpointTensors) -> str:
    """Return the kind of the model's norms. Missing for a family whose norms are not known: those of Gemma scale by
    1 + weight, those of others subtract the mean or lie elsewhere, under the same names. Missing for an OPT whose norms
    come after a layer's products too: each scales all that was written before it anew."""
    model = run.manifest.model
    kind = model.get("norm") or NORMS_OF_OLDER_RUNS.get(str(model.get("family")))
    if kind is None:
        raise Missing(
            f"How the norms of {model.get('family')} scale is not known, so what a neuron writes and reads cannot be "
            "told."
        )
    if weights.config.get("do_layer_norm_before") is False:
        raise Missing(
            "This model's norms stand after its FFNs (do_layer_norm_before is false), so those of all later layers "
            "scale what a neuron writes: neither that nor what it reads can be told."
        )
    return str(kind)


def _products(table: np.ndarray, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a mapped table of token vectors [vocab, d_model] times columns [d_model, n], a stretch at a time."""
    chunks = range(0, len(table), AT_ONCE)
    return np.concatenate([as_float32(table[start : start + AT_ONCE]) @ rows for start in chunks])


def _vocabulary_size(run: Run, rows: int) -> int:
    """Return how many rows of a table of token vectors are tokens; the rest are padding."""
    return int(run.manifest.tokenizer.get("vocab_size", rows))


def _both_ends(run: Run, values: NDArray[np.float32]) -> pd.DataFrame:
    """Return the tokens of greatest, then of least value, EACH of both: kind, token_id, text, logit (less the mean)."""
    order = np.argsort(values, kind="stable")
    per_end = min(EACH, len(order) // 2)
    token_ids = np.concatenate([order[::-1][:per_end], order[:per_end]])
    return pd.DataFrame(
        {
            "kind": ["raised"] * per_end + ["lowered"] * per_end,
            "token_id": token_ids.astype("int64"),
            "text": token_text(run, token_ids, spelled=True),
            "logit": (values[token_ids] - values.mean()).astype("float64"),
        }
    )
