"""What is done to a file of a run: to its bytes, to the manifest's content, or as other software would write it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench.run.part_files import checksum

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


# ---- damage to any file


def truncate(case: Case, path: Path) -> str:
    size = int(case.rng.integers(path.stat().st_size))
    os.truncate(path, size)
    return f"cut to {size} bytes"


def flip(case: Case, path: Path) -> str:
    data = bytearray(path.read_bytes())
    places = case.rng.integers(len(data), size=int(case.rng.integers(1, 4)))
    for place in places:
        data[place] ^= 1 << int(case.rng.integers(8))
    path.write_bytes(data)
    return f"bits flipped in bytes {places.tolist()}"


def zeros(case: Case, path: Path) -> str:
    data = bytearray(path.read_bytes())
    first = int(case.rng.integers(len(data)))
    length = min(int(case.rng.integers(1, 300)), len(data) - first)
    data[first : first + length] = bytes(length)
    path.write_bytes(data)
    return f"{length} bytes of zeros from {first}"


def longer(case: Case, path: Path) -> str:
    path.write_bytes(path.read_bytes() + case.rng.bytes(int(case.rng.integers(1, 300))))
    return "bytes appended"


def empty(case: Case, path: Path) -> str:
    path.write_bytes(b"")
    return "emptied"


def delete(case: Case, path: Path) -> str:
    path.unlink()
    return "deleted"


def swap(case: Case, path: Path) -> str:
    others = sorted(other for other in case.run.rglob("*") if other.is_file() and other != path)
    other = case.pick(others)
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return f"swapped with {other.relative_to(case.run)}"


def another_runs(case: Case, path: Path) -> str:
    other = case.whole / path.relative_to(case.run)
    if not other.is_file():
        return flip(case, path)
    shutil.copyfile(other, path)
    return "replaced by that of another run"


def special_file(case: Case, path: Path) -> str:
    path.unlink()
    kind = case.pick(["pipe", "folder", "link to itself", "link to zeros", "link out", "broken link", "socket"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140644)
    else:
        target = {
            "link to itself": path,
            "link to zeros": Path("/dev/zero"),
            "link out": case.whole / path.relative_to(case.run),
            "broken link": Path("nowhere"),
        }[kind]
        path.symlink_to(target)
    return f"replaced by a {kind}"


ANY_FILE = [truncate, flip, flip, flip, zeros, longer, empty, delete, swap, another_runs, special_file]


# ---- damage to the manifest's content


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
    """A value of another kind, in a manifest without a checksum as older versions wrote it."""
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
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    where = case.pick([place for place in _paths(data)[1:] if isinstance(place[-1], str)])
    holder = data
    for key in where[:-1]:
        holder = holder[key]
    del holder[where[-1]]
    path.write_text(json.dumps(data))
    return f"without {'.'.join(map(str, where))}"


def absurd_text(case: Case, path: Path) -> str:
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
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    part = case.pick(data["parts"])
    data["parts"].append(part)
    path.write_text(json.dumps(data))
    return f"{part['file']} listed twice"


def unlisted(case: Case, path: Path) -> str:
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


# ---- files that other software wrote


def _relist(case: Case, path: Path, rows: int) -> None:
    """List a file as it is now, in a manifest without a checksum of its own."""
    data = case.manifest()
    data.pop("sha256", None)
    for part in data["parts"]:
        if part["file"] == str(path.relative_to(case.run)):
            part |= {"rows": rows, "bytes": path.stat().st_size, "sha256": checksum(path)}
    (case.run / "run.json").write_text(json.dumps(data))


def retyped(case: Case, path: Path) -> str:
    table = pq.ParquetFile(path).read()
    number = int(case.rng.integers(table.num_columns))
    name = table.schema.names[number]
    kind = case.pick(["string", "dropped", "renamed", "float64", "int64", "null"])
    if kind == "dropped":
        table = table.drop(name)
    elif kind == "renamed":
        table = table.rename_columns(["other" if column == name else column for column in table.schema.names])
    elif kind == "null":
        table = table.set_column(number, name, pa.nulls(table.num_rows, table.schema.types[number]))
    else:
        plain = [None if value is None else str(value) for value in table[name].to_pylist()]
        values = pa.array(plain) if kind == "string" else pa.array(np.arange(len(plain)).astype(kind))
        if values.type == table.schema.types[number]:
            values = pa.array(plain) if values.type != pa.string() else pa.array(np.arange(len(plain)))
        table = table.set_column(number, name, values)
    pq.write_table(table, path)
    _relist(case, path, table.num_rows)
    return f"column {name}: {kind}"


def out_of_range(case: Case, path: Path) -> str:
    table = pq.ParquetFile(path).read()
    keys = ["layer", "neuron", "token_id", "sequence", "position", "flags", "phase", "nnz_00", "neurons", "occupancy"]
    names = [name for name in table.schema.names if name in keys]
    if not names or not table.num_rows:
        return flip(case, path)
    name = case.pick(names)
    number, kind = table.schema.names.index(name), table.schema.field(name).type
    if not pa.types.is_integer(kind):
        return flip(case, path)
    limits = np.iinfo(kind.to_pandas_dtype())
    value = case.pick([limits.max, limits.min]) if limits.min else limits.max
    values = table[name].to_numpy().copy()
    values[int(case.rng.integers(len(values)))] = value if value or limits.min else limits.max
    table = table.set_column(number, table.schema.field(name), pa.array(values, kind))
    pq.write_table(table, path)
    _relist(case, path, table.num_rows)
    return f"{name} = {value}"


def fewer_rows(case: Case, path: Path) -> str:
    table = pq.ParquetFile(path).read()
    rows = table.num_rows
    pq.write_table(table.slice(0, int(case.rng.integers(rows)) if rows else 0), path)
    _relist(case, path, rows)
    return "rows lost"


LISTED = [retyped, retyped, out_of_range, out_of_range, fewer_rows]


def damage(case: Case) -> str:
    """Damage one thing of the run; return what was done, in words."""
    share = case.rng.random()
    parts = [case.run / part["file"] for part in case.manifest()["parts"]]
    if share < 0.4:
        path, how = case.pick(parts), case.pick(ANY_FILE)
    elif share < 0.55:
        path, how = case.run / "run.json", case.pick(ANY_FILE)
    elif share < 0.7:
        path, how = case.run / "run.json", case.pick(MANIFEST)
    elif share < 0.85:
        path, how = case.pick(parts), case.pick(LISTED)
    else:
        summaries = sorted(path for path in case.run.glob("summary/*/*") if path.is_file())
        path, how = case.pick([case.run / "summary" / "v2" / "built.json", *summaries]), case.pick(ANY_FILE)
    return f"{path.relative_to(case.run)}: {how(case, path)}"
