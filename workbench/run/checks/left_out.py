"""Leave damaged parts out of a run, by name: `open_run(path, without_damaged=True)`.

Nothing is left out unless that is asked for. A part is then left out with every table that was recorded with it, so
that counts of neurons, values, tiles and unions are still those of the tokens that are there; the manifest counts what
is left, and lists each file with the reason. Cost: comparing every file with its checksum (`verified`), once, and
reading the losses that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import first_line
from twell.workbench.run.checks import verified
from twell.workbench.run.checks.columns_on_disk import column_fault, values_in
from twell.workbench.run.checks.manifest_fields import digest
from twell.workbench.run.checks.ranges import Sizes
from twell.workbench.run.manifest import COMPLETE, Manifest, Part
from twell.workbench.run.part_files import read_part
from twell.workbench.run.schema import TABLES, expand

if TYPE_CHECKING:
    import pandas as pd

# Recorded together: a part of each is of the same tokens. Examples are of the whole run, in a single part.
OF_TOKENS = ("activity", "sequences", "neurons", "value_bins", "tiles", "unions", "fired")
OF_ALL_TOKENS = "examples"
COUNTED = {"tokens": "activity", "sequences": "sequences"}  # what the manifest counts: the table whose rows these are
WITH = "was recorded together with what is damaged"  # the reason of a file that is whole itself
NAMED = 6  # most files in a sentence
ATTRIBUTE = "left_out"  # of a DataFrame: the sentence that names what it lacks


def damaged_parts(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> list[tuple[Part, str]]:
    """Return the parts whose file is damaged, each with that clause: missing, other than its checksum in the manifest,
    with columns that are not as declared, or without losses that the manifest counts."""
    listed = {part.file: part for part in parts}
    sizes = Sizes.of(manifest)

    def fault(file: str) -> str:
        table = listed[file].table
        columns = expand(TABLES[table], sizes.layers, sizes.d_ff, sizes.used)
        return column_fault(folder / file, table, columns, sizes, listed[file].rows)

    clauses = verified.faults(folder, {part.file: part.sha256 for part in parts}, fault, str(sizes))
    return [(listed[file], clause) for file, clause in (clauses or _lost_losses(folder, manifest, parts)).items()]


def _lost_losses(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> dict[str, str]:
    """Return a clause for each part of a complete run that lacks losses; for all its parts where none has none.

    A loss may be null, so the number of losses tells. It is compared where all the parts of rows are among `parts`.
    """
    import pyarrow as pa

    files = [part.file for part in parts if part.table == "activity" and part.rows]
    tokens = sum(part.rows for part in parts if part.table == "activity")
    if manifest.status != COMPLETE or not manifest.loss_tokens or not files or tokens != manifest.tokens:
        return {}
    checksums = {part.file: part.sha256 for part in parts if part.file in files}
    rule = f"{manifest.loss_tokens} losses in {digest(checksums)}"

    @cache
    def clauses() -> dict[str, str]:
        try:
            losses = {file: values_in(folder / file, "loss") for file in files}
        except (OSError, pa.ArrowException) as error:
            return dict.fromkeys(files, f"cannot be read ({first_line(error)})")
        total, least = sum(losses.values()), manifest.loss_tokens
        clause = f"is of a table with {total:,} losses, where the manifest counts {least:,}" if total < least else ""
        return dict.fromkeys([file for file in files if not losses[file]] or files, clause)

    return verified.faults(folder, checksums, lambda file: clauses().get(file, ""), rule)


def without_damaged(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest of a run without its damaged parts, and without what was recorded together with them.

    Its counts of tokens and sequences, and its loss, are those of what is left; `left_out` lists the files. The loss is
    the mean of float16 numbers then, where the manifest's own was summed before they were rounded. `seconds` stays that
    of the whole run.
    """
    reasons = {part.file: clause for part, clause in damaged_parts(folder, manifest, manifest.parts)}
    if not reasons:
        return manifest
    groups = {_group(part) for part in manifest.parts if part.file in reasons and part.table in OF_TOKENS}
    for part in manifest.parts:
        if _group(part) in groups if part.table in OF_TOKENS else part.table == OF_ALL_TOKENS and groups:
            reasons.setdefault(part.file, WITH)
    lost = [part for part in manifest.parts if part.file in reasons]
    kept = [part for part in manifest.parts if part.file not in reasons]
    entries: list[dict[str, Any]] = [{"file": part.file, "reason": reasons[part.file]} | _counts(part) for part in lost]
    smaller = replace(
        manifest,
        parts=kept,
        left_out=[*manifest.left_out, *entries],
        tokens=manifest.tokens - sum(entry["tokens"] for entry in entries),
        sequences=manifest.sequences - sum(entry["sequences"] for entry in entries),
    )
    if smaller.tokens < manifest.tokens and manifest.loss_tokens:
        smaller.loss_sum, smaller.loss_tokens = _losses(folder, kept)
    return smaller


def _group(part: Part) -> tuple[int, int]:
    """Return what the files that were recorded together share: the process that wrote them, and the part's number."""
    return part.rank, part.number


def _counts(part: Part) -> dict[str, int]:
    """Return how many tokens and sequences a run lacks without a file."""
    return {name: part.rows if part.table == table else 0 for name, table in COUNTED.items()}


def _losses(folder: Path, parts: Sequence[Part]) -> tuple[float, int]:
    """Return the sum of the losses in parts, in nats, and how many there are."""
    total, count = 0.0, 0
    for part in parts:
        if part.table == "activity":
            losses = read_part(folder / part.file, columns=["loss"])["loss"].drop_null().to_numpy()
            total, count = total + float(losses.sum(dtype="float64")), count + len(losses)
    return total, count


def sentence(manifest: Manifest) -> str:
    """Return a sentence that names the files which a run is used without, and what it lacks with them; "" if none."""
    entries = manifest.left_out
    if not entries:
        return ""
    damaged = [f"{entry['file']} {entry['reason']}" for entry in entries if entry["reason"] != WITH]
    files = ", ".join(damaged[:NAMED]) + (f" and {len(damaged) - NAMED:,} more" if len(damaged) > NAMED else "")
    tokens, others = sum(entry["tokens"] for entry in entries), len(entries) - len(damaged)
    lacking = f"; {tokens:,} of {tokens + manifest.tokens:,} tokens are missing" if tokens else ""
    together = f", and {others} {'files' if others > 1 else 'file'} recorded together with it" if others else ""
    return f"Left out as damaged: {files}{together}{lacking}."


def labelled(frame: pd.DataFrame, manifest: Manifest) -> pd.DataFrame:
    """Return a frame that names in its `attrs` what the run is used without."""
    if manifest.left_out:
        frame.attrs[ATTRIBUTE] = sentence(manifest)
    return frame
