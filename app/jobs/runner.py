"""What the dashboard runs with a model: own text, and measurements; each a `twell` process of its own.

One at a time, because two would slow each other down and a measurement would lie. Own text becomes a run of its own
(`twell capture`), a measurement the `bench` table of the run that is shown (`twell bench`); no process here ever
imports what runs models. Nothing is fetched: hub ids are looked
up in the local cache alone.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, open_run

BUNDLED = "demo-model"
OWN = "own-text.txt"  # what the source of own text is called in its run
CASE = re.compile(r"nnz [\d.,]+, [\d,]+ rows$")  # the line with which `twell bench` begins what it says of a case


@dataclass
class Job:
    """A process: what it is for, the run that it writes and its name in the address, what it has said, and how many
    cases it has to time."""

    purpose: str
    out: Path
    run: str
    cases: int | None
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def said(self) -> list[str]:
        """The lines that the process has printed."""
        log = Path(self.folder.name) / "log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return [line.strip() for line in text.splitlines() if line.strip()]

    def done(self) -> int:
        """Cases timed so far, or tokens recorded."""
        if self.cases is not None:
            return sum(CASE.search(line) is not None for line in self.said())
        try:
            return open_run(self.out).manifest.tokens
        except (UserError, OSError):
            return 0

    def failure(self) -> str | None:
        """Why it ended without what was asked of it, in a sentence; None where it did not."""
        code = self.process.poll()
        if code is None or (self.done() > 0 and (code == 0 or self.stopped)):
            return None
        if self.stopped:
            return "Stopped before anything was recorded."
        said = [line.removeprefix("twell: ") for line in self.said()]
        return said[-1] if said else f"The process ended with exit code {code} and said nothing."

    def stop(self) -> None:
        """Ask it to end and to keep what it has; asked twice, it ends at once."""
        if self.running:
            self.process.send_signal(signal.SIGKILL if self.stopped else signal.SIGTERM)
        self.stopped = True


class Desk:
    """The one job of this server, if there is any."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(
        self, purpose: str, out: Path, run: str, arguments: list[str], text: str = "", cases: int | None = None
    ) -> Job:
        """Start `twell` with the arguments and `--out`, in a folder where the file `OWN` holds the text.

        Raises UserError while another job runs, and where the half that runs models is not installed.
        """
        if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
            raise UserError(
                "Expected the half that runs models, it is not installed here: pip install 'twell-workbench[capture]'."
            )
        with self._lock:
            if self.job is not None and self.job.running:
                raise UserError(f"Expected no other process, one is running ({self.job.purpose}): wait, or stop it.")
            if self.job is not None:
                self.job.folder.cleanup()
            folder = tempfile.TemporaryDirectory(prefix="twell-")
            (Path(folder.name) / OWN).write_text(text, encoding="utf-8")
            line = [sys.executable, "-m", "twell.workbench", *arguments, "--out", str(out)]
            with open(Path(folder.name) / "log", "wb") as log:
                process = subprocess.Popen(
                    line,
                    cwd=folder.name,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "400", "PYTHONUNBUFFERED": "1"},
                )
            self.job = Job(purpose, out, run, cases, process, folder)
            return self.job

    def clear(self) -> None:
        """Forget a job that has ended."""
        if self.job is not None and not self.job.running:
            self.job.folder.cleanup()
            self.job = None

    def close(self) -> None:
        """End what still runs when the server ends."""
        if self.job is not None and self.job.running:
            self.job.process.terminate()


def model_of(run: Run) -> tuple[str, str | None] | None:
    """What `twell` can be told to load the run's model again (a folder or a hub id, and a revision), where it
    is at hand on this machine; else None."""
    name = str(run.manifest.model["name"])
    asked = str(run.manifest.options.get("model", name))
    revision = run.manifest.model.get("revision")
    bundled = Path(str(resources.files("twell.data") / BUNDLED))
    if name == BUNDLED and _same(bundled, run):
        return str(bundled), None
    if (Path(asked) / "config.json").is_file():
        return str(Path(asked).resolve()), None
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    if asked.count("/") == 1 and (cache.expanduser() / f"models--{asked.replace('/', '--')}").is_dir():
        return asked, revision
    return None


def _same(folder: Path, run: Run) -> bool:
    """Whether the model in the folder has the run's shape."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    shape = (config.get("num_hidden_layers"), config.get("hidden_size"), config.get("intermediate_size"))
    return shape == (run.layers, run.manifest.model["d_model"], run.d_ff)
