"""The worker as the server sees it: one process with torch, which reads texts and passages with a run's model.

The idea: a reading is named by what was asked, so that a page finds it again by its address, and two pages that ask the
same share it. Readings are runs in a temporary folder, which ends with the server; the user saves those worth keeping.
The process is started on first need, answers one request at a time (`workbench/worker/serve.py` has the protocol), and
ends with the server. If it dies it is started anew, once for each reading, and the reading says so. Nothing is
downloaded: models of the hub are looked up in the local cache only.

Cost: a process that loads torch, once, 4 s; a reading of 30 tokens then takes some 0.2 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from twell.app.jobs.runner import require_torch
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run, refuse_existing

START_SECONDS = 120.0  # until the process must have loaded torch
READ_SECONDS = 300.0  # until a reading must have ended, the loading of its model included
KEPT = 64  # readings; older ones are forgotten
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GOMP_SPINCOUNT": "2000",  # as in `workbench/cli.py`: threads that wait leave the cores to other work
}


@dataclass
class Reading:
    """A text that the worker reads, or has read.

    Attributes:
        key: its name in the address.
        request: the fields that `workbench/worker/serve.py` takes, without `out`.
        out: the folder of the run that it becomes.
        began: when it was asked for, by the monotonic clock.
        error: why there is none, in a sentence.
        note: what the page is to say beside it; empty if nothing.
        stopped: whether the user has given it up.
        done: whether it has ended.
    """

    key: str
    request: dict[str, Any]
    out: Path
    began: float = field(default_factory=time.monotonic)
    error: str = ""
    note: str = ""
    stopped: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> Run:
        """Return the run, once it is done. Raises UserError with the reason where there is none."""
        if self.error:
            raise UserError(self.error)
        return open_run(self.out)


class WorkerProcess:
    """The worker: the process of this server that reads, and the readings that it has made or makes."""

    def __init__(self, read_seconds: float = READ_SECONDS) -> None:
        self.read_seconds = read_seconds
        self.process: subprocess.Popen[str] | None = None
        self.state = ""  # what the process is at, in words
        self._folder = tempfile.TemporaryDirectory(prefix="twell-read-")
        self._readings: OrderedDict[str, Reading] = OrderedDict()
        self._numbers = count()  # of readings: one that is asked for again has a folder of its own
        self._naming = threading.Lock()  # held while a reading is looked up and begun: visitors ask side by side
        self._asking = threading.Lock()  # held by the thread whose request the process has
        self._stopped = False  # whether the process was ended on purpose

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._asking.locked()

    def find(self, key: str) -> Reading | None:
        """Return the reading of that name; None if there is none, or none any more."""
        return self._readings.get(key)

    def ask(self, request: dict[str, Any]) -> Reading:
        """Return the reading of a request, begun if nobody has asked for it yet, or if it failed before.

        Raises UserError if torch and transformers are not installed.
        """
        require_torch()
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
        with self._naming:
            known = self._readings.get(key)
            if known is not None and not known.error:
                self._readings.move_to_end(key)
                return known
            reading = Reading(key, request, Path(self._folder.name) / f"{key}-{next(self._numbers)}")
            self._readings[key] = reading
            while len(self._readings) > KEPT:
                oldest = self._readings.popitem(last=False)[1]
                shutil.rmtree(oldest.out, ignore_errors=True)
        threading.Thread(target=self._answer, args=(reading,), name="twell-reading", daemon=True).start()
        return reading

    def prepare(self) -> None:
        """Start the process in the background if there is none, as somebody is about to ask."""

        def start() -> None:
            with self._asking, suppress(UserError, OSError):  # whoever asks is told; a stopped reading ends it, too
                if self.process is None or self.process.poll() is not None:
                    self._start()

        if (self.process is None or self.process.poll() is not None) and not self.busy:
            threading.Thread(target=start, name="twell-worker", daemon=True).start()

    def stop(self, reading: Reading) -> None:
        """Give up a reading that is not done; the process ends with it."""
        if not reading.done.is_set():
            reading.stopped = self._stopped = True
            if self.process is not None:
                self.process.kill()

    def close(self) -> None:
        """End the process and remove what it has read."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    # ---- in the thread of a reading

    def _answer(self, reading: Reading) -> None:
        """Have the process answer, started anew if it died, and end the reading whatever happens."""
        try:
            with self._asking:
                answer = self._try(reading) or self._try(reading)
                reading.error = answer.get("error", "") if answer else self._ended_twice()
        except (UserError, OSError) as error:
            reading.error = str(error)
        finally:
            if reading.stopped:
                reading.error = "Stopped."
            reading.done.set()

    def _try(self, reading: Reading) -> dict[str, Any] | None:
        """Return the answer to a request; None if the process ended before it came."""
        if reading.stopped:
            return None
        if self.process is not None and self.process.poll() is not None and not self._stopped:
            reading.note = f"The process of the model had ended ({self._ending()}) and was started anew."
        if self.process is None or self.process.poll() is not None:
            self._stopped = False
            self._start()
        shutil.rmtree(reading.out, ignore_errors=True)
        self.state = "the model is running"
        return self._exchange({**reading.request, "out": str(reading.out)}, self.read_seconds)

    def _ended_twice(self) -> str:
        return (
            f"Expected the process of the model to answer, it ended twice ({self._ending()}): read a shorter text, or "
            "see whether the memory of this machine is enough for the model."
        )

    def _start(self) -> None:
        """Start the process, and wait until it has loaded what it needs."""
        self.state = "a process with the model is starting"
        with open(Path(self._folder.name) / "log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "twell.workbench.worker.serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env=ENVIRONMENT | os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            )
        if self._exchange(None, START_SECONDS) is None:
            raise UserError(f"Expected a process with torch, it did not start ({self._ending()}): see `twell doctor`.")

    def _exchange(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
        """Send a request, if one is given, and return the next line that the process writes; None if it ends.

        Raises UserError if no line comes in time; the process is then ended.
        """
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._stopped = True
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            if request is not None:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # a pipe that nobody holds any more
            line = ""
        finally:
            timer.cancel()
        if line:
            return dict(json.loads(line))
        process.wait()
        if late.is_set():
            raise UserError(
                f"Expected an answer of the model within {seconds:,.0f} s, got none: read a shorter text, or generate "
                "fewer tokens."
            )
        return None

    def _ending(self) -> str:
        """Return how the process ended, as part of a sentence."""
        assert self.process is not None
        log = Path(self._folder.name) / "log"
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return f"exit code {self.process.poll()}" + (f", {last}" if last else "")


def save_reading(run: Run, folder: Path) -> Run:
    """Copy a reading to a folder as a run. Raises UserError if that holds a run already, or cannot be written to."""
    refuse_existing(folder)
    try:
        shutil.copytree(run.path, folder, dirs_exist_ok=True)
        manifests.update(folder, name=folder.name)
    except OSError as error:
        raise UserError(
            f"Expected to copy the run to {folder}, got {error.strerror or error}: start the dashboard on a folder "
            "that can be written to."
        ) from None
    return open_run(folder)
