"""Capture one run with several processes, a GPU each: `torchrun --nproc-per-node N -m twell.workbench capture …`.

The idea: every rank reads all of the text, so all of them cut and number the same sequences; each runs every N-th
window of it. Which files are whose, and the one manifest, are in `run/rank_share.py`. No rank waits for another, except
for rank 0 to begin the run, and rank 0 for all others at the end, when examples are cut to the best of all ranks.

A rank that dies is named by the ranks that end after it. --resume continues the run, with as many ranks as it began
with.

Cost: the text is tokenised once in each rank. All ranks must be on one host, because they write to one folder and look
for each other's processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from twell.workbench.errors import UserError
from twell.workbench.options import CPU_BATCH
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, Manifest
from twell.workbench.run.part_files import read_part
from twell.workbench.run.rank_share import RankShare, is_alive, not_launched
from twell.workbench.run.store import Run
from twell.workbench.text.sources import TextSource
from twell.workbench.text.streams import STDIN

POLL_SECONDS = 0.2  # between two checks of whether the other ranks are done
BATCH = "batch"  # where rank 0 posts the rows of a batch
BEGUN, FAILED = "yes", "no"  # what rank 0 posts under "begun"; or COMPLETE, where nothing is left to capture


class Ranks(RankShare):
    """The ranks that capture together, seen from this process; `Ranks()` is a capture by a single process.

    store: torch's key-value store that all ranks reach; None for a single process
    """

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None) -> None:
        super().__init__(rank, world)
        self._store = store
        self._processes: dict[int, int] = {}  # process id of each rank
        if store is not None:
            store.set(f"process/{rank}", str(os.getpid()))

    @classmethod
    def from_environment(cls, device: str) -> Ranks:
        """Join the ranks that torchrun started, as its environment variables say; a single process without them.

        device: auto | cpu | cuda; unless it is cpu, the rank's GPU becomes the current one
        Raises UserError for ranks on several hosts, for ranks without a GPU each, and for variables that no launcher
        sets.
        """
        world = os.environ.get("WORLD_SIZE", "1")
        if world == "1":
            return cls()
        if (on_this_host := os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
            raise UserError(
                f"Expected all ranks on one host, as they write to one folder, got {on_this_host} of {world} here: "
                "launch with one node, and give each host text and an --out of its own."
            )
        import torch

        try:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if device != "cpu" and torch.cuda.is_available():
                _take_gpu(local)
            store, rank, ranks = next(torch.distributed.rendezvous("env://"))
        except (ValueError, RuntimeError) as error:
            raise not_launched(world, error) from None
        return cls(rank, ranks, store)

    def runs(self, window: int) -> bool:
        """Return whether this rank runs a window of the text, by its number."""
        return window % self.world == self.rank

    def refuse_stdin(self, sources: list[TextSource]) -> None:
        """Raise UserError for standard input, which several processes cannot each read from the beginning."""
        if self.world > 1 and any(source.name == STDIN for source in sources):
            raise UserError("Expected text that every rank can read, got standard input: put it into a file.")

    def begin(self, folder: Path, manifest: Manifest) -> Run | None:
        """Begin the run in a folder and return this rank's share of it; None where the run is complete already.

        Rank 0 writes `manifest`, of a new run or of one that is resumed; the other ranks wait until it has, and do not
        use theirs. Raises UserError where rank 0 could not begin.
        """
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            manifests.write(folder, manifest)
            self.post("begun", BEGUN)
        elif (answer := self._store.get("begun").decode()) == COMPLETE:
            return None
        elif answer != BEGUN:
            raise UserError(f"Expected rank 0 to begin {folder}, it could not: see its message.")
        self._processes = {rank: int(self._store.get(f"process/{rank}")) for rank in range(self.world)}
        return Run(folder, self.share(manifests.read(folder)))

    def gather_examples(self, folder: Path, stopped: Callable[[], bool]) -> Iterator[pa.Table]:
        """Wait, in rank 0, until every other rank has ended or died; then yield the examples of each.

        stopped: returns whether to stop waiting. From then on these parts are left out of the manifest, because rank
        0's own part will hold the best of all.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        while self.rank == 0 and not stopped() and any(map(self._is_running, others)):
            time.sleep(POLL_SECONDS)
        self.lost = [rank for rank in others if not self._has_ended(rank) and not is_alive(self._processes[rank])]
        if self.rank or self.world == 1 or self.lost or stopped():
            return
        parts = manifests.read(folder).parts
        self.merged = [part for part in parts if part.table == "examples" and part.rank]
        yield from (read_part(folder / part.file) for part in self.merged)

    def end(self, folder: Path) -> None:
        """Post that this rank has ended its share, and remove the files that were merged into its own."""
        for part in self.merged:
            (folder / part.file).unlink(missing_ok=True)
        self.post(f"ended/{self.rank}", "yes")

    def lost_error(self, whole: Manifest) -> UserError:
        """Return the UserError that names the ranks that died."""
        deaths = [f"rank {rank} died after {whole.ranks[rank]['tokens']:,} tokens" for rank in self.lost]
        return UserError(
            f"Expected {self.world} ranks to finish {whole.name}, {' and '.join(deaths)}: what was captured is kept; "
            "give the same command with --resume, and as many ranks."
        )

    def agreed_batch(self, rows: int) -> int:
        """Return the rows of a batch that rank 0 chose, as all ranks must cut the text alike. rows: of this rank"""
        if self._store is None:
            return rows
        if self.rank == 0:
            self.post(BATCH, str(rows))
            return rows
        return int(self._store.get(BATCH))

    def post_begun(self, answer: str) -> None:
        """In rank 0: set what the other ranks wait for, where there is nothing that they could do."""
        if self.rank == 0:
            self.post(BATCH, str(CPU_BATCH))
        self.post("begun", answer)

    def post(self, name: str, value: str) -> None:
        """Set a value that the other ranks read. Never raises: a rank that is gone is named at the end."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(name, value)

    def _is_running(self, rank: int) -> bool:
        return not self._has_ended(rank) and is_alive(self._processes[rank])

    def _has_ended(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"ended/{rank}"]))
        except RuntimeError:  # the process that holds the store is gone
            return False


def _take_gpu(local: int) -> None:
    """Make a GPU the current one. local: the rank's number on this host, and so the GPU's."""
    import torch

    if local >= torch.cuda.device_count():
        raise UserError(
            f"Expected a GPU for each rank, got {torch.cuda.device_count()} for rank {local} of this host: "
            "lower --nproc-per-node, or add --device cpu."
        )
    torch.cuda.set_device(local)
