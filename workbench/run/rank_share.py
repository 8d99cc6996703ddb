"""Share one run folder among the processes that capture together: each writes its own files, all share one manifest.

The idea: each process (a rank) writes parts of its own, `part-…` by rank 0 and `rank-R-…` by the others. The manifest
is shared: a rank that has closed a part locks the folder for a moment and updates its own share of the manifest.
Floating-point sums are added in the order of the ranks, so a run has the same bits whichever rank was first. A capture
by one process is the case of one rank, whose share is the whole run.

Cost: reading and writing the manifest once for every part that is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, first_line
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED, RECORDING, Manifest, Part

NOT_EMPTY = "Expected an empty output folder"
ADDED_UP = ("tokens", "sequences", "loss_sum", "loss_tokens")  # manifest fields that are summed over ranks


class RankShare:
    """The share of a run that one process writes; `RankShare()` is a run written by a single process.

    rank: this process's number, from 0; world: how many processes there are
    release: the function that unlocks the folder, if this process has locked it already
    """

    def __init__(self, rank: int = 0, world: int = 1, release: Callable[[], object] | None = None) -> None:
        self.rank, self.world = rank, world
        self.lost: list[int] = []  # ranks whose process died before its share was done
        self.merged: list[Part] = []  # parts of other ranks whose rows rank 0's own parts repeat
        self._release = release  # unlocks the claimed folder

    @property
    def prefix(self) -> str:
        """Return how the names of this rank's files begin."""
        return f"rank-{self.rank}" if self.rank else "part"

    def written(self, path: Path) -> bool:
        """Return whether this rank wrote a table's file."""
        return path.name.startswith(f"{self.prefix}-") or (self.rank == 0 and not path.name.startswith("rank-"))

    def claim(self, folder: Path) -> None:
        """Lock a run's folder for this capture until `release`, or until this object or its process ends.

        Only rank 0 locks it. Raises UserError where another capture has locked the folder, since both would write the
        same parts.
        """
        if self.rank or self._release is not None:
            return
        self._release = locks.claim(folder, self)
        if self._release is None:
            raise UserError(
                f"Expected a run that nothing else records in {folder}, another capture is writing to it: wait for its "
                "end, or stop it first."
            )

    def release(self) -> None:
        """Unlock the folder, if it was claimed."""
        if self._release is not None:
            self._release()
            self._release = None

    def blank_ranks(self) -> list[dict[str, Any]]:
        """Return the manifest's field `ranks` for a new run; empty for a single process."""
        blank = {"status": RECORDING, "seconds": 0.0, "text": [], **dict.fromkeys(ADDED_UP, 0)}
        return [dict(blank) for _ in range(self.world)] if self.world > 1 else []

    def share(self, manifest: Manifest) -> Manifest:
        """Return the run's manifest reduced to this rank: its parts, and the sums over them."""
        if self.world == 1:
            return manifest
        own = manifest.ranks[self.rank]
        text = own["text"] or [{"source": source["source"]} for source in manifest.text]
        fields = {name: own[name] for name in ("status", "seconds", *ADDED_UP)}
        return replace(manifest, parts=[part for part in manifest.parts if part.rank == self.rank], text=text, **fields)

    def publish(self, folder: Path, own: Manifest) -> None:
        """Write this rank's share into the run's manifest. own: what `share` returned, brought up to date."""
        if self.world == 1:
            manifests.write(folder, own)
            return
        with locks.locked(folder / "activity"):  # not the folder itself, which rank 0 has claimed
            manifest = manifests.read(folder)
            other_parts = [part for part in manifest.parts if part.rank != self.rank and part not in self.merged]
            manifest.parts = sorted([*other_parts, *own.parts], key=lambda part: part.rank)
            manifest.ranks[self.rank] = {name: getattr(own, name) for name in ("status", "seconds", "text", *ADDED_UP)}
            for rank in self.lost:
                manifest.ranks[rank]["status"] = INTERRUPTED
            _add_up(manifest)
            manifests.write(folder, manifest)


@contextmanager
def own_folders() -> Iterator[None]:
    """Have the refusal of a folder that is not empty name its likely cause, where a launcher has started several ranks
    and each runs code of a person's own, with the same folder in it; also a decorator."""
    try:
        yield
    except UserError as error:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1" and str(error).startswith(NOT_EMPTY):
            error.args = (f"{str(error).rstrip('.')}; of {ranks} ranks, give each a folder of its own.",)
        raise


def not_launched(world: str, error: Exception) -> UserError:
    """Return the UserError for a WORLD_SIZE beside which the other variables of a launcher are missing or wrong."""
    return UserError(
        f"Expected the variables that torchrun sets beside WORLD_SIZE={world}, got an error ({first_line(error)}): "
        "launch with torchrun, or unset WORLD_SIZE."
    )


def is_alive(process: int) -> bool:
    """Return whether a process of this host is running; one that has ended is not, even before its parent reads how."""
    with suppress(OSError, IndexError):  # no /proc here, or no such process
        return (Path("/proc") / str(process) / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _add_up(manifest: Manifest) -> None:
    """Set the manifest's own fields from those of its ranks."""
    for name in ADDED_UP:
        setattr(manifest, name, sum(rank[name] for rank in manifest.ranks))
    manifest.seconds = max(rank["seconds"] for rank in manifest.ranks)
    states = {rank["status"] for rank in manifest.ranks}
    manifest.status = COMPLETE if states == {COMPLETE} else RECORDING if RECORDING in states else INTERRUPTED
    for source in manifest.text:
        reported = [entry for rank in manifest.ranks for entry in rank["text"] if entry["source"] == source["source"]]
        source |= {name: value for entry in reported for name, value in entry.items() if name in ("sha256", "bytes")}
        for name in ("documents", "sequences", "tokens"):
            if any(name in entry for entry in reported):
                source[name] = sum(entry.get(name, 0) for entry in reported)
