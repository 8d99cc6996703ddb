"""Turn a captured run into one that ships with the package: at most 4 MB, in data/recorded.

    python data/recorded/ship.py runs/wide data/recorded/h200-28x2048              its summaries, timings and bench
    python data/recorded/ship.py runs/text data/recorded/h200-8x2048-text --rows   all its rows too, to be looked at

With --rows the text can be read from the run, so it must be the package's own:

    twell capture MODEL --text builtin:passages --text builtin:python-docs --tokens 24000 --examples 2 --fired all \
        --out runs/text

The wide run is of a model that was trained for a minute, on text that does not ship, on one H200:

    twell train --config paper-28x2048 --l1 1e-3 --text train.txt.zst --out paper-28x2048 --minutes 1.2
    twell capture paper-28x2048 --text heldout.txt.zst --examples 2 --out runs/wide
    twell bench paper-28x2048 --text heldout.txt.zst --whole --energy --out runs/wide
    twell bench paper-28x2048 --text heldout.txt.zst --inputs text --kernel hopper --out runs/wide

Every column is stored in whichever encoding is smallest, packed by zstd at its greatest level. What then does not fit
goes, least needed first, and what has gone is printed. Numbers that stay are those that were
recorded, but for values around an example, which keep 8 significant bits. Cost: a minute.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from twell.analysis import ensure
from twell.analysis.summaries.built import folder as summary_folder
from twell.analysis.summaries.z_scores import KINDS
from twell.data.recorded.small_parquet import write_small
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.checks.manifest_fields import digest
from twell.workbench.run.homes.summary_home import BUILT
from twell.workbench.run.manifest import Part
from twell.workbench.run.part_files import checksum
from twell.workbench.run.schema import SUMMARIES, TABLES
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.summary_only import copy_without_activity

LIMIT = 4_000_000  # bytes of a run
OWN = "builtin:"  # the sources whose text is the package's own
Tables = dict[str, pa.Table]
Thinner = Callable[[Tables], None]


def main() -> int:
    """Write the run that ships, and print what it holds."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--rows"]
    if len(arguments) != 2:
        print(__doc__)
        return 2
    source, target = map(Path, arguments)
    try:
        ship(source, target, rows="--rows" in sys.argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def ship(source: Path, target: Path, rows: bool = False, limit: int = LIMIT) -> Run:
    """Write a run of at most `limit` bytes, thinned until it fits, and return it.

    rows: whether rows of single tokens are kept too. Raises UserError where the run is not complete, its text is not to
    be shipped, or it does not fit.
    """
    run = open_run(source)
    if run.manifest.status != manifests.COMPLETE:
        raise UserError(f"Expected a complete run, got one that is {run.manifest.status}: capture it to its end.")
    foreign = [text["source"] for text in run.manifest.text if not text["source"].startswith(OWN)]
    if rows and foreign:
        raise UserError(f"Expected text of {OWN}… with --rows, got {foreign[0]}: its words could be read from the run.")
    ensure(run)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / target.name
        for what in drafts_with_rows(run, draft) if rows else drafts_of_summaries(run, draft):
            if size(draft) <= limit:
                break
            print(f"{size(draft):,} bytes {what}")
        else:
            raise UserError(f"Expected at most {limit:,} bytes, got {size(draft):,} with all left out that can be.")
        print(f"{size(draft):,} bytes {what}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(draft, target)
    shipped = open_run(target)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:>10,} {path.relative_to(target)}")
    print(f"{target}: {shipped.manifest.tokens:,} tokens, {size(target):,} bytes")
    return shipped


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- a run with its rows


def drafts_with_rows(run: Run, draft: Path) -> Iterator[str]:
    """Write the run smaller and smaller; yield what was done last, in words."""
    total = run.manifest.sequences
    fired = sum(listed.bytes for listed in run.manifest.parts if listed.table == "fired")
    count = max(1, int(total * min(1, LIMIT / 3 / max(fired, 1))))  # a third of the room is for them

    def few(count: int) -> tuple[str, Thinner]:
        return f"with the fired values of the first {count} of {total} sequences", fired_of(count)

    tables = {name: run.arrow(name) for name in TABLES if run.has(name)}
    for what, thin in (
        few(count),
        ("with windows of examples that are rounded to 8 bits", round_windows),
        ("with two examples of each neuron and kind", examples_of(2)),
        few(max(1, count // 2)),
        ("with one example of each neuron and kind", examples_of(1)),
        few(max(1, count // 4)),
        ("without examples drawn at random, and the counts of values", without_samples),
        few(1),
    ):
        thin(tables)
        write_rows(run, tables, draft)
        yield what


def round_windows(tables: Tables) -> None:
    """Round the values around each example to 8 significant bits, and the random keys of samples to float16."""
    if (examples := tables.get("examples")) is None:
        return
    lists = examples["window"].combine_chunks()
    bits = lists.flatten().to_numpy(zero_copy_only=False).copy().view(np.uint32)
    finite = ~np.isnan(bits.view(np.float32))
    bits[finite] = (bits[finite] + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    rounded = pa.ListArray.from_arrays(lists.offsets, pa.array(bits.view(np.float32)))
    draws = examples["draw"].to_numpy().astype(np.float16).astype(np.float64)
    examples = examples.set_column(examples.schema.get_field_index("window"), examples.field("window"), rounded)
    tables["examples"] = examples.set_column(
        examples.schema.get_field_index("draw"), examples.field("draw"), pa.array(draws)
    )


def fired_of(count: int) -> Thinner:
    """Return the function that keeps the fired values of the first sequences alone."""

    def thin(tables: Tables) -> None:
        if "fired" in tables:
            tables["fired"] = tables["fired"].filter(pc.less(tables["fired"]["sequence"], count))

    return thin


def examples_of(count: int) -> Thinner:
    """Return the function that keeps so many examples of each neuron and kind: the largest values, the least draws."""

    def thin(tables: Tables) -> None:
        if (examples := tables.get("examples")) is None:
            return
        frame = examples.select(["layer", "neuron", "kind", "value", "draw"]).to_pandas()
        ordered = frame.sort_values(["draw", "value"], ascending=[True, False], kind="stable")
        rank = ordered.groupby(["layer", "neuron", "kind"]).cumcount().reindex(frame.index)
        tables["examples"] = examples.filter(pa.array(rank.to_numpy() < count))

    return thin


def without_samples(tables: Tables) -> None:
    """Leave out the examples that were drawn at random, and the counts of values, by which these are placed."""
    tables.pop("value_bins", None)
    if "examples" in tables:
        tables["examples"] = tables["examples"].filter(pc.equal(tables["examples"]["kind"], "top"))


def write_rows(run: Run, tables: Tables, target: Path) -> None:
    """Write a run of these tables, each in one file, and its summaries."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    parts = []
    for name, table in tables.items():
        file = f"{name}.parquet" if TABLES[name].single_file else f"{name}/part-00000.parquet"
        write_small(table, target / file)
        parts.append(part(name, target, file))
    manifests.write(target, replace(run.manifest, name=target.name, parts=parts))
    ensure(open_run(target))
    pack_summaries(open_run(target))


# ---- a run without its rows

# What goes first: tables, or columns of one. Nothing that the first page or a table by layer or neuron needs is here.
LEFT_OUT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("value_bins", ()),
    ("surprisal_classes", ()),  # their correlations stay, with intervals
    ("token_layers", ("nnz_square", "nnz_cross")),  # a token's nnz in a layer has no standard error then
    ("entropy_ranks", ()),
    ("surprisal_ranks", ()),  # without these, those of entropy answer nothing
    ("token_layers", ()),
    ("token_scores", tuple(f"z_position_{kind}" for kind in KINDS)),
)


def drafts_of_summaries(run: Run, draft: Path) -> Iterator[str]:
    """Write a copy without rows of single tokens smaller and smaller; yield what was left out last, in words."""
    with redirect_stdout(StringIO()):
        copy_without_activity(run.path, draft)
    for listed in open_run(draft).manifest.parts:
        write_small(pq.read_table(draft / listed.file, partitioning=None), draft / listed.file)
    write_manifest(draft)
    pack_summaries(open_run(draft))
    write_manifest(draft)
    yield "with all its summaries"
    for name, columns in LEFT_OUT:
        path = open_run(draft).summary_path(name)
        if path.exists() and columns:
            write_small(pq.read_table(path, partitioning=None).drop_columns(list(columns)), path, summary=True)
        elif path.exists():
            path.unlink()
        write_manifest(draft)
        yield f"without {' and '.join(columns) + ' of ' if columns else ''}{name}"


def write_manifest(folder: Path) -> None:
    """Write the sizes and checksums of the copy's files into its manifest."""
    manifest = manifests.read(folder)
    summaries = {file: checksum(folder / file) for file in manifest.summaries if (folder / file).exists()}
    parts = [part(listed.table, folder, listed.file) for listed in manifest.parts]
    manifests.write(folder, replace(manifest, name=folder.name, parts=parts, summaries=summaries))


# ---- both


def part(table: str, folder: Path, file: str) -> Part:
    """Return the manifest's entry of a file."""
    path = folder / file
    return Part(table, file, pq.read_metadata(path).num_rows, path.stat().st_size, checksum(path))


def pack_summaries(run: Run) -> None:
    """Write the summaries of a run anew in the smallest encodings, and their checksums with them."""
    folder = summary_folder(run)
    for leftover in [*folder.glob("*.lock"), *folder.glob("*.tmp")]:
        leftover.unlink()
    (run.path / "summary" / "verified.json").unlink(missing_ok=True)
    built = json.loads((folder / BUILT).read_text(encoding="utf-8"))
    for name in SUMMARIES.tables:
        if run.summary_path(name).exists():
            write_small(pq.read_table(run.summary_path(name), partitioning=None), run.summary_path(name), summary=True)
            built["files"][name] = checksum(run.summary_path(name))
    built["sha256"] = digest(built)
    (folder / BUILT).write_text(json.dumps(built, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
