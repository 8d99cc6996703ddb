"""Refuse a manifest that names files outside its folder, or fields that no run has, before anything is made of them.

A run may come from anywhere, and everything that reads, copies or removes its files goes by what its manifest lists.
Cost: 8 µs a part.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError
from twell.workbench.run.checks.regular_file import is_within
from twell.workbench.run.schema import TABLES

FILE_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)?\.parquet")  # TABLE.parquet or TABLE/NAME.parquet
SUMMARY_NAME = re.compile(r"summary/v\d+/[a-z_]+\.(parquet|json)")
SHA256 = re.compile(r"[0-9a-f]{64}")
STATES = ("recording", "complete", "interrupted")
MAX_LAYERS, MAX_NEURONS = 2**14, 2**24
MAX_COUNT = 2**53  # tokens, sequences, rows, bytes
MAX_DEPTH = 20  # lists and objects in each other
ADVICE = "copy the run again from where it was recorded."

Rule = tuple[str, Callable[[Any], bool]]  # what is expected, in words; whether a value is that


def _whole(least: int, most: int) -> Rule:
    return f"from {least} to {most:,}", lambda value: type(value) is int and least <= value <= most


def _or_none(rule: Rule) -> Rule:
    return f"{rule[0]} or null", lambda value: value is None or rule[1](value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**1000  # type: ignore[arg-type]


COUNT = _whole(0, MAX_COUNT)
SIZE = _whole(1, MAX_NEURONS)
TEXT: Rule = ("as text", lambda value: isinstance(value, str))
FLAG: Rule = ("as true or false", lambda value: isinstance(value, bool))
NUMBER: Rule = ("as a number", _is_number)
OBJECT: Rule = ("as an object", lambda value: isinstance(value, dict))
OBJECTS: Rule = (
    "as a list of objects",
    lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
)
STATE: Rule = (f"as one of {', '.join(STATES)}", lambda value: value in STATES)
DIGEST: Rule = ("as 64 hexadecimal digits", lambda value: isinstance(value, str) and bool(SHA256.fullmatch(value)))
TABLE: Rule = (f"as one of {', '.join(TABLES)}", lambda value: isinstance(value, str) and value in TABLES)

# By field: its rule, and whether every manifest has it. Fields of a manifest that must be there raise elsewhere.
FIELDS: dict[str, Rule] = {
    **dict.fromkeys(("name", "nnz_definition", "dtype", "device", "driver", "created"), TEXT),
    **dict.fromkeys(("model", "tokenizer", "kernel", "layout", "options", "versions", "summaries"), OBJECT),
    **dict.fromkeys(("parity", "overhead"), _or_none(OBJECT)),
    **dict.fromkeys(("text", "ranks", "parts", "left_out", "effects"), OBJECTS),
    **dict.fromkeys(("tokens", "sequences", "loss_tokens"), COUNT),
    **dict.fromkeys(("seconds", "loss_sum"), NUMBER),
    "summary_only": FLAG,
    "status": STATE,
}
NEEDED: dict[str, dict[str, Rule]] = {
    "model": {"name": TEXT, "layers": _whole(1, MAX_LAYERS), "d_ff": SIZE},
    "kernel": {"name": TEXT},
}
OPTIONAL: dict[str, dict[str, Rule]] = {
    "model": {
        **dict.fromkeys(("d_model", "vocab_size", "parameters", "ffn_parameters"), _or_none(COUNT)),
        **dict.fromkeys(("family", "revision", "weights", "norm"), _or_none(TEXT)),
        "up_relu": FLAG,
        "widths": ("as a list of whole numbers", lambda value: isinstance(value, list) and all(map(SIZE[1], value))),
    },
    "tokenizer": {"name": _or_none(TEXT), "vocab_size": _or_none(COUNT)},
    "kernel": {"reason": TEXT},
    "layout": dict.fromkeys(("tile", "compression", "slots"), COUNT),
    "options": {
        **dict.fromkeys(("model", "kernel", "device", "probes", "revision"), _or_none(TEXT)),
        **dict.fromkeys(("batch_tokens", "seq_len", "tokens", "examples"), _or_none(COUNT)),
        "threshold": _or_none(NUMBER),
        "loss": FLAG,
    },
    "parity": {
        **dict.fromkeys(("counts", "differing", "beyond_rounding", "tokens"), COUNT),
        **dict.fromkeys(("logit_error", "same_choice"), NUMBER),
        **dict.fromkeys(("dtype", "kernel"), TEXT),
    },
}
ENTRIES: dict[str, dict[str, Rule]] = {
    "text": {
        "source": TEXT,
        "sha256": _or_none(TEXT),
        **dict.fromkeys(("bytes", "documents", "sequences", "tokens"), _or_none(COUNT)),
    },
    "ranks": {
        "status": STATE,
        "text": OBJECTS,
        **dict.fromkeys(("tokens", "sequences", "loss_tokens"), COUNT),
        **dict.fromkeys(("seconds", "loss_sum"), NUMBER),
    },
    "effects": {
        **dict.fromkeys(("study", "tokens", "unread_table_rows"), COUNT),
        **dict.fromkeys(("seconds", "budget"), NUMBER),
        "complete": FLAG,
    },
    "left_out": {"file": TEXT, "reason": TEXT, "tokens": COUNT, "sequences": COUNT},
    "parts": {"table": TABLE, "file": ("as text", lambda value: True), "rows": COUNT, "bytes": COUNT, "sha256": DIGEST},
}
ADDED = ("budget", "unread_table_rows")  # that not every study has
ENTRIES_NEED = {
    name: ("source",) if name == "text" else tuple(rule for rule in rules if rule not in ADDED)
    for name, rules in ENTRIES.items()
}


def check_fields(path: Path, data: dict[str, Any]) -> None:
    """Raise UserError for fields of another kind, for sizes that no model has and for counts that no run has.

    data: the content of `path`
    """
    _check(path, "", data, FIELDS)
    if "parts" not in data:
        raise _refusal(path, "a list of parts", "none")
    for name, rules in NEEDED.items():
        _check(path, name, data.get(name), rules, needed=tuple(rules))
    for name, rules in OPTIONAL.items():
        _check(path, name, data.get(name) or {}, rules)
    widths = data["model"].get("widths")
    if widths is not None and (len(widths) != data["model"]["layers"] or max(widths) != data["model"]["d_ff"]):
        raise _refusal(path, "widths of each layer, of which d_ff is the greatest", widths)
    for name, number in (data.get("overhead") or {}).items():
        if str(name).endswith("_over_none"):
            _check(path, "overhead", {name: number}, {name: NUMBER})
    for name, rules in ENTRIES.items():
        for entry in data.get(name, []):
            _check(path, name, entry, rules, needed=ENTRIES_NEED[name])
    for name in data.get("summaries", {}):
        if not SUMMARY_NAME.fullmatch(name):
            raise _elsewhere(path.parent, name)
    for name in data.keys() - {"parts"}:
        _check_plain(path, name, data[name])


def check_parts(folder: Path, data: dict[str, Any]) -> None:
    """Raise UserError where the parts do not hold the tokens and sequences that the manifest counts."""
    rows = Counter[str]()
    for part in data.get("parts", []):
        rows[part["table"]] += part["rows"]
    for table, name in (("activity", "tokens"), ("sequences", "sequences")):
        counted = data.get(name, 0)
        may_lack = data.get("summary_only") or table == "sequences"
        if rows[table] != counted and not (may_lack and table not in rows):
            raise UserError(
                f"Expected parts in {folder} that hold the {counted:,} {name} of its manifest, got {rows[table]:,}: "
                f"{ADVICE}"
            )


def check_files(folder: Path, files: Iterable[object]) -> None:
    """Raise UserError for a file of a part that is not in the run's folder, by its name or because it is a link; and
    for one that is listed twice."""
    links: dict[Path, bool] = {}  # of the folders of tables
    listed = set()
    for file in files:
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise _elsewhere(folder, file)
        if file in listed:
            raise UserError(f"Expected each part of {folder} once in its manifest, got {file} twice: {ADVICE}")
        listed.add(file)
        path = folder / file
        if path.parent not in links:
            links[path.parent] = path.parent != folder and path.parent.is_symlink()
        if (links[path.parent] or path.is_symlink()) and not is_within(path, folder):
            raise _elsewhere(folder, file)


def digest(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's fields, without that of the checksum itself."""
    fields = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def is_changed(data: Mapping[str, Any]) -> bool:
    """Return whether a manifest was changed after it was written. Those of older versions have no checksum."""
    return "sha256" in data and data["sha256"] != digest(data)


def _check(path: Path, name: str, data: Any, rules: Mapping[str, Rule], needed: tuple[str, ...] = ()) -> None:
    if not isinstance(data, dict):
        raise _refusal(path, f"{name} as an object", data)
    for field in needed:
        if field not in data:
            raise _refusal(path, f"{name} with {field}", "none")
    for field, (words, accepts) in rules.items():
        if field in data and not accepts(data[field]):
            raise _refusal(path, f"{field} {words}", data[field])


def _check_plain(path: Path, name: str, value: Any) -> None:
    """Raise UserError for a field that is nested too deeply, or that holds text or numbers nothing can write down."""
    pending = [(value, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise _refusal(path, f"{name} with at most {MAX_DEPTH} lists and objects in each other", "more")
            entries = [*value, *value.values()] if isinstance(value, dict) else value
            pending += [(entry, depth + 1) for entry in entries]
        elif isinstance(value, str):
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise _refusal(path, f"{name} in Unicode", value)
        elif isinstance(value, int) and abs(value) >= 2**64:
            raise _refusal(path, f"{name} below 2^64", value)


def _refusal(path: Path, expected: str, value: object) -> UserError:
    return UserError(f"Expected {expected} in the manifest {path}, got {_shown(value)}: {ADVICE}")


def _shown(value: object) -> str:
    """Return a value as it goes into a sentence."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a longer number"
    if isinstance(value, dict | list) and value:
        return "a list" if isinstance(value, list) else "an object"
    text = value if value in ("none", "more") else ascii(value)
    return text if len(str(text)) <= 40 else f"{str(text)[:40]}…"


def _elsewhere(folder: Path, file: object) -> UserError:
    shown = repr(file) if isinstance(file, str) and file.isprintable() else _shown(file)
    return UserError(
        f"Expected a manifest in {folder} that lists files of its own folder, got {shown}: use the run as it was "
        "recorded, and trust no other."
    )
