"""Write a trained model's card from its record and its log alone.

model_card(json.loads(Path("models/demo/training.json").read_text()), rows_of_the_log) -> Markdown
"""

from __future__ import annotations

from typing import Any

ROWS = 13  # most rows of the table of curves

UNITS = {
    "layers": "",
    "d_model": "",
    "d_ff": "",
    "gated": "FFN: down(act(gate) · up); else down(act(up))",
    "activation": "of the FFN",
    "head_size": "",
    "kv_heads": "",
    "vocab": "entries, byte-level BPE",
    "seq_len": "tokens",
    "rows": "rows of seq_len tokens a step",
    "rate": "peak, AdamW",
    "warmup": "steps",
    "warmup_share": "of the steps, warmup at most",
    "schedule": "",
    "decay": "of the steps, at the end",
    "betas": "",
    "weight_decay": "on matrices, not on norms",
    "clip": "gradient norm",
    "l1": "× mean over layers of the mean over tokens of Σ|h|, h = relu(gate) · up",
    "l1_warmup": "steps",
    "l1_weights": "factors of l1, a layer each",
    "restart_every": "steps after which dead neurons start anew; 0: never",
    "micro_batches": "parts of a step's rows",
    "checkpointing": "",
    "seed": "",
}


def model_card(record: dict[str, Any], log: list[dict[str, Any]]) -> str:
    """Return the card as Markdown: the model, its measured loss and sparsity, its training and its text.

    record: the content of training.json; log: rows of the table `training`
    """
    sections = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
        *_what_it_is(record),
        *_other_text(record),
        *_training(record, log),
        *_text(record),
    ]
    return "\n\n".join(sections) + "\n"


def _what_it_is(record: dict[str, Any]) -> list[str]:
    heldout, d_ff = record["heldout"], record["recipe"]["d_ff"]
    nnz = sum(heldout["nnz"]) / len(heldout["nnz"])
    layers = [
        [layer, f"{n:.2f}", f"{1 - n / d_ff:.2%}", f"{dead:.1%}"]
        for layer, (n, dead) in enumerate(zip(heldout["nnz"], heldout["dead"], strict=True))
    ]
    return [
        f"# {record['recipe']['name']}",
        f"A Llama with a ReLU gate, trained so that few of its FFN neurons fire: {record['parameters']:,} parameters, "
        f"bf16. On {heldout['tokens']:,} held-out tokens its loss is **{heldout['loss']:.3f} nats a token** (guessing "
        f"by training frequency alone, the unigram loss, is {record['unigram_loss']:.3f}), and a token fires "
        f"**{nnz:.1f} of {d_ff} neurons a layer: sparsity {1 - nnz / d_ff:.2%}**. The weights that were measured are "
        "the weights in the file, rounded to bf16.",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```',
        "It is small and saw little text: made to study sparse activity on, not to be believed.",
        "## By layer",
        f"nnz: neurons a token fires (gate > 0), mean. Dead: no firing in these {heldout['tokens']:,} tokens.",
        _table(["layer", "nnz", "sparsity", "dead"], layers),
    ]


def _other_text(record: dict[str, Any]) -> list[str]:
    if not record["valid"]:
        return []
    rows = [
        [source, f"{measured['tokens']:,}", f"{measured['loss']:.3f}", f"{measured['unigram_loss']:.3f}"]
        for source, measured in record["valid"].items()
    ]
    return ["## On other text", _table(["source", "tokens", "loss", "unigram loss"], rows)]


def _training(record: dict[str, Any], log: list[dict[str, Any]]) -> list[str]:
    recipe = record["recipe"]
    left_out = {name for name, value in recipe.items() if value is None}
    left_out |= {"decay"} if recipe["schedule"] == "cosine" else set()
    settings = [[f"`{name}`", _plain(recipe[name]), unit] for name, unit in UNITS.items() if name not in left_out]
    columns = ["step", "tokens", "loss", "held-out", "L1 term", "nnz", "dead", "rate", "tokens/s"]
    return [
        "## Training",
        f"```\n{record['command']}\n```",
        f"{record['steps']:,} steps, {record['tokens']:,} tokens ({record['epochs']:.1f} times the training text), "
        f"{record['minutes']:.1f} minutes on one {record['device']}.{_origin(record)}",
        _table(["setting", "value", ""], settings),
        "## Curves",
        "From the table `training` of this folder's run; loss, L1 term, nnz and dead share are means over layers and "
        "over the steps since "
        "the log's previous row, dead: fired on none of the tokens of those steps. Held-out: the first 131,072 tokens.",
        _table(columns, [_curve(row) for row in _chosen(log)]),
    ]


def _origin(record: dict[str, Any]) -> str:
    """Return a sentence on the model that the training went on from; "" for one of its own beginning."""
    if "origin" not in record:
        return ""
    origin, taught = record["origin"], record.get("teacher") or {}
    teacher = f", with the logits of `{taught['name']}` as its teacher" if taught else ""
    return (
        f" It goes on from `{origin['name']}`, whose loss on the held-out text is {record['origin_loss']:.3f} with "
        f"{origin['activation']}{teacher}."
    )


def _text(record: dict[str, Any]) -> list[str]:
    corpus = record["corpus"]
    sources = [
        [source["source"], f"{source['bytes']:,}", f"{source['heldout_from']:,}", f"`{source['sha256'][:16]}…`"]
        for source in corpus["sources"]
    ]
    return [
        "## Text",
        f"The last {corpus['holdout']:.0%} of each source, from the byte given, was left out of training, of the "
        f"tokenizer's too: {corpus['train_tokens']:,} tokens to train on, {corpus['heldout_tokens']:,} held out.",
        _table(["source", "bytes", "held out from byte", "sha256"], sources),
        f"Licences of the text: {record['licences'] or 'not stated'}.",
    ]


def _chosen(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log's first row and those with a held-out loss, at most ROWS of them, evenly spaced."""
    rows = [row for row_number, row in enumerate(log) if row_number == 0 or row.get("heldout_loss") is not None]
    indices = range(len(rows)) if len(rows) <= ROWS else [i * (len(rows) - 1) // (ROWS - 1) for i in range(ROWS)]
    return [rows[index] for index in indices]


def _curve(row: dict[str, Any]) -> list[Any]:
    heldout = row.get("heldout_loss")
    nnz, dead = ([value for name, value in row.items() if name.startswith(prefix)] for prefix in ("nnz_", "dead_"))
    return [
        f"{row['step']:,}",
        f"{row['tokens']:,}",
        f"{row['loss']:.3f}",
        "" if heldout is None else f"{heldout:.3f}",
        f"{row['l1']:.2f}",
        f"{sum(nnz) / len(nnz):.1f}",
        f"{sum(dead) / len(dead):.1%}",
        f"{row['rate']:.1e}",
        f"{row['tokens_per_second']:,.0f}",
    ]


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
