"""Run `twell bench` or `twell ablate` in a process of its own, and find the models that are at hand.

One job runs at a time, because two would slow each other down and falsify the measurement. It becomes a table, `bench`
or `effects`, of the run that is shown. The dashboard itself never imports torch. Nothing is downloaded: models of the
hub are looked up in the local cache only.
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
from twell.workbench.run import manifest as manifests
from twell.workbench.run.homes.model_home import model_home
from twell.workbench.run.store import Run

BUNDLED = "demo-model"
CASE = re.compile(r", [\d,]+ rows, nnz [\d.,]+: ")  # the line that `twell bench` prints once it has timed a case
REPORT = re.compile(r"  nnz [\d.,]+(, |$)")  # the line above the figures of one, which come after the last
WHOLE = re.compile(r"^whole model.*, nnz [\d.,]+$")  # the same of a whole model
BATCHES = re.compile(r"^([\d,]+) of ([\d,]+) batches")  # the line that `twell ablate` prints now and then


def require_torch() -> None:
    """Raise UserError where torch and transformers, which run models, are not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise UserError(
            "Expected torch and transformers, they are not installed here: pip install 'twell-workbench[capture]'."
        )


@dataclass
class Job:
    """A `twell` process.

    Attributes:
        purpose: "a measurement", as messages name it.
        out: the folder of the run that it writes.
        run: that run's name in the address.
        cases: how many cases it times; 0 of a study, whose batches it counts itself.
        process: the process.
        folder: its working directory, with its log.
        page: the name of the page that shows what it writes.
        before: when the run's manifest had been written last, in ns, as it started.
        began: when it started, by the monotonic clock.
        stopped: whether the user has stopped it.
    """

    purpose: str
    out: Path
    run: str
    cases: int
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)
    page: str = "kernels"
    before: int = 0
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def log_lines(self) -> list[str]:
        """Return the lines that the process has printed so far, without empty ones."""
        log = Path(self.folder.name) / "log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return [line.strip() for line in text.splitlines() if line.strip()]

    def progress(self) -> tuple[int, int]:
        """Return the number of cases timed so far, or of batches, and how many there are; 0 where that is not known."""
        lines = self.log_lines()
        if self.cases:
            done = max(sum(kind.search(line) is not None for line in lines) for kind in (CASE, REPORT, WHOLE))
            return done, self.cases
        batches = [match for line in lines if (match := BATCHES.match(line))]
        if not batches:
            return 0, 0
        return int(batches[-1][1].replace(",", "")), int(batches[-1][2].replace(",", ""))

    @property
    def has_recorded(self) -> bool:
        """Whether anything was written into the run since the job began."""
        return _written(self.out) != self.before

    def failure(self) -> str | None:
        """Return why the job ended without a result, in a sentence; None if it is running or has one."""
        code = self.process.poll()
        if code in (None, 0) or (self.stopped and self.has_recorded):
            return None
        if self.stopped:
            return "Stopped before anything was recorded."
        lines = [line.removeprefix("twell: ") for line in self.log_lines()]
        return lines[-1] if lines else f"The process ended with exit code {code} and printed nothing."

    def stop(self) -> None:
        """Have the process end and keep what it has; the second call kills it."""
        if self.running:
            self.process.send_signal(signal.SIGKILL if self.stopped else signal.SIGTERM)
        self.stopped = True


class JobRunner:
    """The only job of this server, if there is one."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(self, purpose: str, out: Path, run: str, arguments: list[str], cases: int, page: str = "kernels") -> Job:
        """Start `twell` in a temporary folder.

        Args:
            purpose, out, run, cases, page: see Job.
            arguments: the command line after `twell`.

        Raises UserError if another job is running, or if torch and transformers are not installed.
        """
        require_torch()
        with self._lock:
            if self.job is not None and self.job.running:
                raise UserError(f"Expected no other process, one is running ({self.job.purpose}): wait, or stop it.")
            if self.job is not None:
                self.job.folder.cleanup()
            folder, before = tempfile.TemporaryDirectory(prefix="twell-"), _written(out)
            line = [sys.executable, "-m", "twell.workbench", *arguments]
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
            self.job = Job(purpose, out, run, cases, process, folder, page, before)
            return self.job

    def clear(self) -> None:
        """Forget the job if it has ended."""
        if self.job is not None and not self.job.running:
            self.job.folder.cleanup()
            self.job = None

    def close(self) -> None:
        """End the job when the server ends."""
        if self.job is not None and self.job.running:
            self.job.process.terminate()


def _written(out: Path) -> int:
    """Return when a run's manifest was written last, in ns; 0 if there is none."""
    try:
        return (out / manifests.FILE).stat().st_mtime_ns
    except OSError:
        return 0


def model_of(run: Run) -> tuple[str, str | None] | None:
    """Return where `twell` can load the run's model from: a folder or hub id, and a revision; None if this machine does
    not have the model."""
    name = str(run.manifest.model["name"])
    source = str(run.manifest.options.get("model", name))
    revision = run.manifest.model.get("revision")
    bundled = Path(str(resources.files("twell.data") / BUNDLED))
    if name == BUNDLED and _has_shape_of(bundled, run):
        return str(bundled), None
    if folder := model_home(run.manifest):
        return folder, None
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    if source.count("/") == 1 and (cache.expanduser() / f"models--{source.replace('/', '--')}").is_dir():
        return source, revision
    return None


def weights_folder(run: Run) -> str:
    """Return the folder of the run's model, "" where this machine does not have it as a folder."""
    model = model_of(run)
    return model[0] if model is not None and Path(model[0]).is_dir() else ""


def _has_shape_of(folder: Path, run: Run) -> bool:
    """Return whether the model in the folder has the run's layers, width and d_ff."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    shape = (config.get("num_hidden_layers"), config.get("hidden_size"), config.get("intermediate_size"))
    return shape == (run.layers, run.manifest.model["d_model"], run.d_ff)
