"""The case that damage is done in, and damage to the content of a run's manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """One case: the folder of the damaged run, a whole run beside it, and the source of random choices."""

    run: Path
    whole: Path
    rng: Rng

    def manifest(self) -> dict[str, Any]:
        """Return the content of the run's manifest."""
        return json.loads((self.run / "run.json").read_text())

    def pick(self, choices: list[Any]) -> Any:
        """Return one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]


ODD: list[Any] = [
    None,
    [],
    {},
    -1,
    2.5,
    "x",
    True,
    float("nan"),
    float("inf"),
    1e300,
    10**30,
    [[]],
    {"a": None},
    "\ud800",
]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, entry in entries for below in _paths(entry, (*path, key)))]


def odd_value(case: Case, path: Path) -> str:
    """Put a value of another kind, in a manifest without a checksum as older versions wrote it."""
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    where = case.pick(_paths(data))
    holder = data
    for key in where[:-1]:
        holder = holder[key]
    before = holder[where[-1]] if where else data
    odd = case.pick([value for value in ODD if type(value) is not type(before)])
    if before is None or (isinstance(before, float) and isinstance(odd, int)):
        odd = []
    if where:
        holder[where[-1]] = odd
    path.write_text(json.dumps(data if where else odd))
    return f"{'.'.join(map(str, where))} = {odd!r}"


def lost_value(case: Case, path: Path) -> str:
    """Remove one named value."""
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    where = case.pick([keys for keys in _paths(data)[1:] if isinstance(keys[-1], str)])
    holder = data
    for key in where[:-1]:
        holder = holder[key]
    del holder[where[-1]]
    path.write_text(json.dumps(data))
    return f"without {'.'.join(map(str, where))}"


def absurd_text(case: Case, path: Path) -> str:
    """Replace the whole text: too deep, too long, or no object."""
    text = case.pick(
        [
            "[" * 100_000 + "]" * 100_000,
            '{"a":' * 100_000 + "1" + "}" * 100_000,
            path.read_text().replace("12", "9" * 5_000, 1),
            "null",
            "5",
            '"run"',
            "[]",
            "{}",
            "\x00" * 50,
            "\ufeff" + path.read_text(),
        ]
    )
    path.write_text(text)
    return f"replaced by {text[:20]!r}…"


def elsewhere(case: Case, path: Path) -> str:
    """Let a part's file lie outside the run, or be no file name."""
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    part = case.pick(data["parts"])
    part["file"] = case.pick(
        [
            "../whole/vocab.parquet",
            str(case.whole / "vocab.parquet"),
            "/dev/zero",
            "s3://a/b.parquet",
            "a/*.parquet",
            "",
        ]
    )
    path.write_text(json.dumps(data))
    return f"a part at {part['file']!r}"


def listed_twice(case: Case, path: Path) -> str:
    """List one part twice."""
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    part = case.pick(data["parts"])
    data["parts"].append(part)
    path.write_text(json.dumps(data))
    return f"{part['file']} listed twice"


def unlisted(case: Case, path: Path) -> str:
    """Take one part of rows off the list."""
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    rows = [part for part in data["parts"] if part["table"] in ("activity", "sequences")]
    if not rows:
        return odd_value(case, path)
    part = case.pick(rows)
    data["parts"].remove(part)
    path.write_text(json.dumps(data))
    return f"{part['file']} not listed"


MANIFEST = [odd_value, odd_value, odd_value, lost_value, absurd_text, elsewhere, listed_twice, unlisted]
