"""Damage to a file of a run: to its bytes, to the manifest's content, or as other software would write it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from support.fuzz.damaged_manifests import MANIFEST, Case

from twell.workbench.run.part_files import checksum

# ---- damage to any file


def truncate(case: Case, path: Path) -> str:
    size = int(case.rng.integers(path.stat().st_size))
    os.truncate(path, size)
    return f"cut to {size} bytes"


def flip(case: Case, path: Path) -> str:
    data = bytearray(path.read_bytes())
    offsets = case.rng.integers(len(data), size=int(case.rng.integers(1, 4)))
    for offset in offsets:
        data[offset] ^= 1 << int(case.rng.integers(8))
    path.write_bytes(data)
    return f"bits flipped in bytes {offsets.tolist()}"


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
