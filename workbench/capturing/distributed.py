"""One capture by several processes, a GPU each: `torchrun --nproc-per-node N -m twell.workbench capture …`.

The idea: every rank reads all of the text, so all of them cut and number the same sequences, and runs every N-th
window. Each writes parts of its own, `part-…` by rank 0 and `rank-R-…` by the others. The one manifest is theirs
together: whoever has closed a part takes its lock for a moment, and puts what it knows of its own share into it. Nobody
waits for another, but for rank 0 to begin the run, and rank 0 at the end for all. What floating-point sums there are
add up in the order of the ranks. Examples are cut to the best of all ranks at the end.

A rank that dies is named by those that end after it. The run goes on with --resume and as many ranks as it began with.

Cost: the text is tokenised once a rank. One host, as all ranks write to one folder and look for each other's processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench.errors import UserError, first_line
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED, RECORDING, Manifest, Part
from twell.workbench.run.store import Run
from twell.workbench.text.sources import Source
from twell.workbench.text.streams import STDIN

if TYPE_CHECKING:
    from twell.workbench.capturing.resume import Recorded

LOOK = 0.2  # seconds between two looks at the other ranks
SHARED = ("tokens", "sequences", "loss_sum", "loss_tokens")  # fields that add up over ranks


class Ranks:
    """This process's place among those that capture together; one rank is a capture by itself."""

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.rank, self.world, self._store = rank, world, store
        self.lost: list[int] = []  # ranks whose process is gone before its share was done
        self._merged: list[Part] = []  # of other ranks: rank 0's own part has what they hold
        self._claim: Callable[[], object] | None = None  # gives the claimed folder back
        self._processes: dict[int, int] = {}
        if store is not None:
            store.set(f"process/{rank}", str(os.getpid()))

    @classmethod
    def here(cls, device: str) -> Ranks:
        """As torchrun tells by its environment variables; `device`: as the option has it. UserError for ranks of
        several hosts, without a GPU each, and for variables that no launcher sets."""
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            return cls()
        if (here := os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
            raise UserError(
                f"Expected all ranks on one host, as they write to one folder, got {here} of {world} here: launch with "
                "one node, and give each host text and an --out of its own."
            )
        import torch  # here, as whoever writes a run without a model needs none

        try:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if device != "cpu" and torch.cuda.is_available():
                _take_gpu(local)
            store, rank, ranks = next(torch.distributed.rendezvous("env://"))
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"Expected the variables that torchrun sets beside WORLD_SIZE={world}, got an error "
                f"({first_line(error)}): launch with torchrun, or unset WORLD_SIZE."
            ) from None
        return cls(rank, ranks, store)

    def runs(self, window: int) -> bool:
        """Whether a window of the text is this rank's."""
        return window % self.world == self.rank

    @property
    def prefix(self) -> str:
        """What this rank's parts are called."""
        return f"rank-{self.rank}" if self.rank else "part"

    def wrote(self, path: Path) -> bool:
        """Whether a file of a table is this rank's."""
        return path.name.startswith(f"{self.prefix}-") or (self.rank == 0 and not path.name.startswith("rank-"))

    # ---- the folder

    def claim(self, folder: Path) -> None:
        """Rank 0 takes a run's folder for this capture, until `release`, or the end of this object or its process.
        UserError where another capture has it: both would write the same parts."""
        if self.rank or self._claim is not None:
            return
        self._claim = locks.claim(folder, self)
        if self._claim is None:
            raise UserError(
                f"Expected a run that nothing else records in {folder}, another capture is writing to it: wait for its "
                "end, or stop it first."
            )

    def release(self) -> None:
        """Gives back what was claimed."""
        if self._claim is not None:
            self._claim()
            self._claim = None

    # ---- the one manifest

    def planned(self) -> list[dict[str, Any]]:
        """The manifest's `ranks` when a run begins."""
        blank = {"status": RECORDING, "seconds": 0.0, "text": [], **dict.fromkeys(SHARED, 0)}
        return [dict(blank) for _ in range(self.world)] if self.world > 1 else []

    def share(self, whole: Manifest) -> Manifest:
        """What the manifest says of this rank alone: its parts, and sums over them."""
        if self.world == 1:
            return whole
        own = whole.ranks[self.rank]
        text = own["text"] or [{"source": one["source"]} for one in whole.text]
        given = {name: own[name] for name in ("status", "seconds", *SHARED)}
        return replace(whole, parts=[part for part in whole.parts if part.rank == self.rank], text=text, **given)

    def publish(self, folder: Path, own: Manifest) -> None:
        """Puts this rank's share into the run's manifest."""
        if self.world == 1:
            manifests.write(folder, own)
            return
        with locks.locked(folder / "activity"):  # the folder itself is claimed
            whole = manifests.read(folder)
            others = [part for part in whole.parts if part.rank != self.rank and part not in self._merged]
            whole.parts = sorted([*others, *own.parts], key=lambda part: part.rank)
            whole.ranks[self.rank] = {name: getattr(own, name) for name in ("status", "seconds", "text", *SHARED)}
            for rank in self.lost:
                whole.ranks[rank]["status"] = INTERRUPTED
            _add_up(whole)
            manifests.write(folder, whole)

    # ---- the others

    def refuse(self, sources: list[Source]) -> None:
        """UserError for a source that several processes cannot each read from the beginning."""
        if self.world > 1 and any(source.name == STDIN for source in sources):
            raise UserError("Expected text that every rank can read, got standard input: put it into a file.")

    def begin(self, folder: Path, planned: Manifest, recorded: Recorded | None) -> Run | None:
        """This rank's share of the run in a folder, or None where that is complete. Rank 0 makes the run, or has found
        one to go on with; the others wait for that. UserError where it could not."""
        if self.rank == 0:
            if recorded is None:
                folder.mkdir(parents=True, exist_ok=True)
            manifests.write(folder, planned if recorded is None else recorded.goes_on(planned))
            self.say("begun", "yes")
        elif (said := self._store.get("begun").decode()) == COMPLETE:
            return None
        elif said != "yes":
            raise UserError(f"Expected rank 0 to begin {folder}, it could not: see what it says.")
        self._processes = {rank: int(self._store.get(f"process/{rank}")) for rank in range(self.world)}
        return Run(folder, self.share(manifests.read(folder)))

    def gather(self, folder: Path, asked: Callable[[], bool]) -> Iterator[pa.Table]:
        """Rank 0 waits until every other rank has ended, or died, or it is asked to stop; then what examples they have.

        From then on these parts are no longer listed, as rank 0's own will hold the best of all.
        """
        while self.rank == 0 and not asked() and any(map(self._runs_still, self._others)):
            time.sleep(LOOK)
        self.lost = [rank for rank in self._others if not self._has_ended(rank) and not self._lives(rank)]
        if self.rank or self.world == 1 or self.lost or asked():
            return
        parts = manifests.read(folder).parts
        self._merged = [part for part in parts if part.table == "examples" and part.rank]
        yield from (pq.read_table(folder / part.file) for part in self._merged)

    def ended(self, folder: Path) -> None:
        """Says that this rank has ended its share."""
        for part in self._merged:
            (folder / part.file).unlink(missing_ok=True)
        self.say(f"ended/{self.rank}", "yes")

    def died(self, whole: Manifest) -> UserError:
        """One sentence on ranks that are gone."""
        told = [f"rank {rank} died after {whole.ranks[rank]['tokens']:,} tokens" for rank in self.lost]
        return UserError(
            f"Expected {self.world} ranks to finish {whole.name}, {' and '.join(told)}: what was captured is kept; "
            "give the same command with --resume, and as many ranks."
        )

    def say(self, name: str, value: str) -> None:
        """Tells the other ranks. Never raises: one that is gone is named at the end."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(name, value)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def _runs_still(self, rank: int) -> bool:
        return not self._has_ended(rank) and self._lives(rank)

    def _has_ended(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"ended/{rank}"]))
        except RuntimeError:  # who holds the store is gone
            return False

    def _lives(self, rank: int) -> bool:
        try:
            os.kill(self._processes[rank], 0)
        except ProcessLookupError:
            return False
        return True


def _take_gpu(local: int) -> None:
    """Makes the GPU of a rank of this host the current one."""
    import torch

    if local >= torch.cuda.device_count():
        raise UserError(
            f"Expected a GPU for each rank, got {torch.cuda.device_count()} for rank {local} of this host: "
            "lower --nproc-per-node, or add --device cpu."
        )
    torch.cuda.set_device(local)


def _add_up(whole: Manifest) -> None:
    """The manifest's own fields from those of its ranks."""
    for name in SHARED:
        setattr(whole, name, sum(one[name] for one in whole.ranks))
    whole.seconds = max(one["seconds"] for one in whole.ranks)
    states = {one["status"] for one in whole.ranks}
    whole.status = COMPLETE if states == {COMPLETE} else RECORDING if RECORDING in states else INTERRUPTED
    for source in whole.text:
        told = [one for rank in whole.ranks for one in rank["text"] if one["source"] == source["source"]]
        source |= {name: value for one in told for name, value in one.items() if name in ("sha256", "bytes")}
        for name in ("documents", "sequences", "tokens"):
            if any(name in one for one in told):
                source[name] = sum(one.get(name, 0) for one in told)
