"""Read and write `run.json`, the manifest: which model read which text on which device, and which files are the run.

The manifest is the run's commit point. A Parquet file belongs to the run once the manifest lists it, so what a crash
leaves behind is never read. The manifest is replaced as a whole (temporary name, fsync, rename), so a reader sees one
state or the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError
from twell.workbench.run.checks import manifest_fields as checks
from twell.workbench.run.checks.regular_file import is_within, read_text, remove_leftover
from twell.workbench.run.schema import SCHEMA_VERSION

FILE = "run.json"
RECORDING, COMPLETE, INTERRUPTED = "recording", "complete", "interrupted"

# model["norm"]: the norm before the head. rms divides by the root mean square, layer subtracts the mean first, and
# layer_plus_one also scales by 1 + weight. Absent where it is not known, and in older runs where it is rms.
# model["ffn_parameters"]: numbers in the matrices of all FFNs, where nnz is counted above a threshold, of any FFN.
# model["widths"]: neurons of each layer, where they differ; d_ff is the greatest.
RMS_NORM, LAYER_NORM, LAYER_NORM_PLUS_ONE = "rms", "layer", "layer_plus_one"

# MIGRATIONS[v] turns the JSON object of schema version v + 1 into that of v + 2. Append only.
MIGRATIONS: list[Callable[[dict[str, Any]], dict[str, Any]]] = []


@dataclass(frozen=True)
class Part:
    """One Parquet file of the run: its table, path in the run, rows, size in bytes and checksum."""

    table: str
    file: str
    rows: int
    bytes: int
    sha256: str

    @property
    def number(self) -> int:
        """Return the number of the part that the file belongs to; -1 for a table of one file."""
        digits = Path(self.file).stem.rpartition("-")[2]
        return int(digits) if digits.isdigit() else -1

    @property
    def rank(self) -> int:
        """Return the number of the process that wrote the file, where several captured together; else 0."""
        kind, _, remainder = Path(self.file).stem.partition("-")
        return int(remainder.partition("-")[0]) if kind == "rank" else 0


PART = tuple(item.name for item in fields(Part))


@dataclass
class Manifest:
    """The content of `run.json`. Counts are in tokens, times in seconds, losses in nats."""

    name: str
    model: dict[str, Any]  # name, revision, family, layers, d_model, d_ff, vocab_size, parameters
    tokenizer: dict[str, Any]  # name, vocab_size
    nnz_definition: str
    dtype: str
    device: str
    driver: str
    kernel: dict[str, str]  # name, reason
    layout: dict[str, int]  # tile, compression, slots
    created: str  # UTC, ISO 8601
    schema_version: int = SCHEMA_VERSION
    status: str = RECORDING
    summary_only: bool = False
    text: list[dict[str, Any]] = field(default_factory=list)  # source, sha256, documents, sequences, tokens
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    parity: dict[str, Any] | None = None
    overhead: dict[str, Any] | None = None
    training: dict[str, Any] | None = None  # of a training: recipe, corpus, and once complete what was measured
    effects: list[dict[str, Any]] = field(default_factory=list)  # of `twell ablate`: each study, conditions and text
    ranks: list[dict[str, Any]] = field(
        default_factory=list
    )  # each process's share of the above, where several captured together
    parts: list[Part] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)  # file, reason, tokens, sequences of each
    summaries: dict[str, str] = field(default_factory=dict)  # of a summary-only copy: the sha256 of each file, by name

    @property
    def layers(self) -> int:
        return int(self.model["layers"])

    @property
    def d_ff(self) -> int:
        return int(self.model["d_ff"])

    @property
    def widths(self) -> list[int]:
        """Return how many neurons each layer has."""
        return self.model.get("widths") or [self.d_ff] * self.layers

    @property
    def counts_used(self) -> bool:
        """Return whether rows also have used_LL: how many fired neurons have a product that is not zero."""
        return bool(self.model.get("up_relu"))

    @property
    def only_trains(self) -> bool:
        """Return whether the run is a training, which has recorded no activity."""
        return self.training is not None and not any(part.table == "activity" for part in self.parts)

    @property
    def loss(self) -> float | None:
        """Return the mean next-token loss in nats, or None where no loss was recorded."""
        return self.loss_sum / self.loss_tokens if self.loss_tokens else None


def spelled(widths: Sequence[int], form: Callable[[int], str] = "{:,}".format) -> str:
    """Return how many neurons a layer has, in words: `5,632`, or `104 to 176` where layers differ."""
    least, most = min(widths), max(widths)
    return form(most) if least == most else f"{form(least)} to {form(most)}"


def read(folder: Path) -> Manifest:
    """Read the manifest of a run folder.

    Raises UserError where there is none, where it is cut short or written by a newer version, and where it names files
    outside the folder or has numbers that no run has.
    """
    path = folder / FILE
    if path.is_symlink() and not is_within(path, folder):
        raise UserError(f"Expected the run's own manifest at {path}, got a link out of its folder: {checks.ADVICE}")
    try:
        data = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        got = f"a file of that name, not a folder with a {FILE}" if folder.is_file() else f"no {FILE} there"
        raise UserError(
            f"Expected a run in {folder}, found {got}: give the folder that `twell capture --out` wrote."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Expected a readable manifest at {path}, got {_unreadable(error)}: {checks.ADVICE}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise UserError(f"Expected a run manifest at {path}, got JSON without a schema_version: is this a run folder?")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"Expected a run of schema version {SCHEMA_VERSION} or older in {folder}, got version {version}: "
            "update twell-workbench to read it."
        )
    changed = checks.is_changed(data)
    for migrate in MIGRATIONS[version - 1 :]:
        data = migrate(data)
    checks.check_fields(path, data)
    known = {f.name for f in fields(Manifest)}
    try:
        manifest = Manifest(**{key: value for key, value in data.items() if key in known})
        manifest.parts = [Part(**{name: part[name] for name in PART}) for part in data.get("parts", [])]
    except TypeError as error:
        raise UserError(
            f"Expected a complete manifest at {path}, got one that lacks fields ({error}): "
            "copy the run again from where it was recorded."
        ) from None
    checks.check_files(folder, [part.file for part in manifest.parts])
    checks.check_parts(folder, data)
    if changed:
        raise UserError(
            f"Expected a manifest at {path} as it was written, got one that differs from its own checksum: copy the "
            'run again from where it was recorded or, if you edited the file, remove its entry "sha256".'
        )
    return manifest


def _unreadable(error: Exception) -> str:
    """Return why a manifest cannot be read, to go into a sentence."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return "lists or objects nested without end"
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON in line {error.lineno}, column {error.colno}"
    return "a number of too many digits"


def write(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a run folder, whole or not at all."""
    content = json.loads(json.dumps(asdict(manifest)))  # as it is read back, tuples as lists
    text = json.dumps({**content, "sha256": checks.digest(content)}, indent=1, ensure_ascii=False)
    temporary = folder / (FILE + ".tmp")
    remove_leftover(temporary)
    temporary.write_text(text + "\n", encoding="utf-8")
    sync_file(temporary)
    os.replace(temporary, folder / FILE)
    sync_folder(folder)


def update(folder: Path, **changes: Any) -> Manifest:
    """Set fields of a run's manifest. It is read again first, because others may have changed it in the meantime.

    changes: values by name of the field. Returns the manifest as written.
    """
    manifest = read(folder)
    for name, value in changes.items():
        setattr(manifest, name, value)
    write(folder, manifest)
    return manifest


def sync_file(path: Path) -> None:
    """Wait until what was written to a file is on disk, as before it is renamed or named by another."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut; does nothing on systems where folders cannot be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
