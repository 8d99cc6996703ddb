"""Train every model of the studies, measure their speed, and pack what is to be kept, within a time.

The idea: the trainings are small and many, so several share one GPU as processes of their own; a step's time is
measured afterwards, with nothing beside it. A short first training measures the pace, from which follows how many
tokens the models can have: as many a parameter for each of the scale series, and as many in all for each of the
others. A training that fails or does not fit into the time is reported and left out.

    python data/studies/run.py --text train.txt.zst --valid valid.txt.zst --out studies --seconds 540

Cost: the seconds that are given, of one GPU and 16 cores; one more step of 5 s where a training has to be stopped. For
a trial on a CPU give `--tokens`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
L1 = ("0", "3e-5", "1e-3", "4e-3", "1.2e-2", "4e-2")
PARAMETERS = 7_868_672  # of small.toml's model: the unit of tokens a parameter and of costs
MOST, LEAST = 6.0, 0.5  # tokens a parameter
# Of five trainings at once on an H200 each ran at 0.7 of the pace of one alone, which waits for its launches.
SHARED = 0.7
START = 27.0  # seconds from a training's start to its first step, and from its last step to its end
LIMIT = 15 * 2**20  # bytes of an archive
ARCHIVES = 6


@dataclass(frozen=True)
class Job:
    """A training. parameters: in the unit of small.toml's; cost: of a token, in the same unit"""

    name: str
    recipe: str
    options: tuple[str, ...] = ()
    parameters: float = 1.0  # for a scale series: its tokens are as many a parameter
    cost: float = 1.0


def sweep(seed: int) -> Iterator[Job]:
    """Yield the trainings with every L1; that of small.toml's own L1 belongs to each study."""
    for l1 in sorted(L1, key=lambda value: value != "1.2e-2"):
        yield Job(f"l1-{l1}-{seed}", "small", ("--l1", l1, "--seed", str(seed)))


def variants(seed: int) -> Iterator[Job]:
    for name in ("plain", "silu", "restarts"):
        yield Job(f"{name}-{seed}", f"small-{name}", ("--seed", str(seed)))


# By weight, where time runs out; a training that takes long comes early.
JOBS = (
    Job("scale-16x256", "scale-16x256", parameters=1.8, cost=1.9),
    Job("scale-8x384", "scale-8x384", parameters=2.05, cost=2.0),
    *sweep(0),
    *variants(0),
    Job("scale-4x256", "scale-4x256", parameters=0.6, cost=0.6),
    Job("scale-8x128", "scale-8x128", parameters=0.317, cost=0.6),
    *sweep(1),
    *variants(1),
)
# Each measurement's share of the time that is left when it begins.
SPEED = {"captures": 0.65, "steps": 0.5, "processor": 1.0}


@dataclass
class Plan:
    """The time, the pace and the tokens of a run of this script. tokens: of small.toml's model"""

    began: float
    seconds: float
    speed_seconds: float
    lanes: int
    pace: float = 0.0
    tokens: int = 0
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until trainings must have ended."""
        return self.began + self.seconds - self.speed_seconds - time.monotonic()

    def expected(self, job: Job) -> float:
        """Return the seconds that a training takes beside others in all lanes."""
        return START + job.cost * job.parameters * self.tokens / (SHARED * self.pace)

    def afforded(self, jobs: list[Job]) -> float:
        """Return how many tokens a parameter all of these trainings can have in the time that is left."""
        longest = max(job.cost * job.parameters for job in jobs)
        unit = max(sum(job.cost * job.parameters for job in jobs) / self.lanes, longest)
        starts = START * (len(jobs) / self.lanes + 1)  # and the last ones end one by one
        return max(0.0, self.left - starts) * SHARED * self.pace / unit / PARAMETERS


def main() -> int:
    """Run the studies; return 0 if every training ended."""
    options = parse()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    speed = 0.0 if options.device == "cpu" else options.speed_seconds
    plan = Plan(time.monotonic(), options.seconds, speed, options.lanes)
    builds = start([sys.executable, str(HERE / "speed.py"), "build", "--device", options.device], work / "build.txt")
    measure_pace(plan, options, work)
    train_all(plan, options, work)
    plan.jobs["build"] = {"exit": wait(builds, plan.left + speed / 3), "seconds": time.monotonic() - plan.began}
    for what, share in SPEED.items():
        left = share * (plan.began + plan.seconds - 10 - time.monotonic())
        command = [sys.executable, str(HERE / "speed.py"), what, "--work", str(work), "--text", absolute(options.valid)]
        command += ["--device", options.device, "--seconds", f"{left:.0f}", "--tokens", str(options.captured)]
        begun = time.monotonic()
        code = wait(start(command, work / f"{what}.txt"), left)
        plan.jobs[what] = {"exit": code, "seconds": round(time.monotonic() - begun, 1)}
        print(f"{what}: exit {code} after {plan.jobs[what]['seconds']} s", flush=True)
    pack(plan, work, Path(options.out))
    failed = [name for name, job in plan.jobs.items() if job["exit"] != 0]
    print(f"{len(plan.jobs)} tasks; failed or left out: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and measure every model of the studies.")
    parser.add_argument("--text", required=True, help="text to train on, at least 20 million tokens")
    parser.add_argument("--valid", required=True, help="other text, which is captured")
    parser.add_argument("--out", required=True, help="folder of the archives")
    parser.add_argument("--work", default="/tmp/studies", help="folder of models and runs")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--speed-seconds", type=float, default=150.0, help="of them for speed, on a GPU")
    parser.add_argument("--lanes", type=int, default=5, help="trainings at once")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, help="of small.toml's model; default: what the pace allows")
    parser.add_argument("--captured", type=int, default=200_000, help="tokens of a capture")
    parser.add_argument("--only", default="", help="trainings whose name begins so")
    parser.add_argument("--train-option", action="append", default=[], help="passed on to `twell train`: --rows=2")
    parser.add_argument("--licences", default="", help="licences of the text, for model cards")
    return parser.parse_args()


def absolute(source: str) -> str:
    """Return a source as other folders can name it."""
    return source if source.startswith("builtin:") else str(Path(source).resolve())


def environment(shares: bool) -> dict[str, str]:
    """Return the environment of a process, with `twell` on its path. shares: whether others run beside it"""
    link = ROOT / ".ns" / "twell"
    if not link.exists():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("..")
    path = os.pathsep.join(filter(None, [str(link.parent), os.environ.get("PYTHONPATH")]))
    few = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"} if shares else {}
    return {"TOKENIZERS_PARALLELISM": "true", **few, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def start(command: list[str], log: Path, shares: bool = False) -> subprocess.Popen[bytes]:
    """Start a command in the log's folder; its output goes to the log."""
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(shares), cwd=log.parent)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return a process's exit code; stop it where it takes longer."""
    try:
        return process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            return process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def train_command(job: Job, tokens: int, options: argparse.Namespace, work: Path) -> list[str]:
    """Return the command of a training, which runs densely: what few neurons gain is measured afterwards."""
    command = [sys.executable, "-m", "twell.workbench", "train", "--config", str(HERE / f"{job.recipe}.toml")]
    command += ["--text", absolute(options.text), "--prepared", str(work / "ids"), "--kernel", "dense"]
    command += ["--device", options.device, "--tokens", str(tokens), "--out", str(work / "models" / job.name)]
    command += ["--licences", options.licences] if options.licences else []
    return [*command, *job.options, *options.train_option]


def measure_pace(plan: Plan, options: argparse.Namespace, work: Path) -> None:
    """Tokenise the text, compile, and set the tokens that each model can have from the pace of a short training."""
    first = Job("first", "small")
    tokens = 6_500_000 if options.device == "cuda" else (options.tokens or 4096)
    process = start(train_command(first, tokens, options, work), work / "first.txt")
    if wait(process, plan.left):
        sys.exit(f"The first training failed:\n{(work / 'first.txt').read_text(errors='replace')[-3000:]}")
    import pyarrow.parquet as pq

    parts = sorted((work / "models" / "first" / "training").glob("*.parquet"))
    rates = pq.ParquetFile(parts[-1]).read(columns=["tokens_per_second"])["tokens_per_second"].to_pylist()
    plan.pace = float(sorted(rates)[len(rates) // 2])
    affordable = plan.afforded([job for job in JOBS if job.name.startswith(options.only)])
    plan.tokens = options.tokens or int(PARAMETERS * min(MOST, max(LEAST, affordable)))
    print(
        f"Pace {plan.pace:,.0f} tokens/s after {time.monotonic() - plan.began:.0f} s; {plan.tokens:,} tokens for "
        f"{PARAMETERS:,} parameters ({plan.tokens / PARAMETERS:.1f} each), {plan.left:.0f} s for trainings",
        flush=True,
    )
    shutil.rmtree(work / "models" / "first")


def train_all(plan: Plan, options: argparse.Namespace, work: Path) -> None:
    """Run the trainings, as many at once as there are lanes, in order."""
    queue = [job for job in JOBS if job.name.startswith(options.only)]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    while queue or running:
        for name, (process, begun) in list(running.items()):
            if process.poll() is None and plan.left > 0:
                continue
            code = wait(process, 0)
            plan.jobs[name] = {"exit": code, "seconds": round(time.monotonic() - begun, 1)}
            del running[name]
            print(f"{name}: exit {code} after {plan.jobs[name]['seconds']} s, {plan.left:.0f} s left", flush=True)
        while queue and len(running) < plan.lanes:
            job = queue.pop(0)
            tokens = int(plan.tokens * job.parameters)
            if plan.expected(job) > plan.left:
                plan.jobs[job.name] = {"exit": None, "seconds": 0.0}
                print(f"{job.name}: left out, takes about {plan.expected(job):.0f} s of {plan.left:.0f}", flush=True)
                continue
            log = work / f"{job.name}.txt"
            running[job.name] = (start(train_command(job, tokens, options, work), log, True), time.monotonic())
        time.sleep(0.2)


def pack(plan: Plan, work: Path, out: Path) -> None:
    """Pack logs, cards and captures, without weights, into archives that are small enough to carry."""
    out.mkdir(parents=True, exist_ok=True)
    report = dataclasses.asdict(plan) | {"took": time.monotonic() - plan.began, "parameters": PARAMETERS}
    (work / "studies.json").write_text(json.dumps(report, indent=1))
    small = [path for path in work.glob("*") if path.suffix in (".txt", ".json")]
    small += [path for path in work.glob("models/*/*") if path.name in ("run.json", "training.json", "README.md")]
    small += work.glob("models/*/training/*.parquet")
    captures = [path for path in sorted(work.glob("captures*/*/**/*")) if path.is_file()]
    captures.sort(key=lambda path: (path.parent.name == "activity", path.parts[len(work.parts) + 1].endswith("-1")))
    archives: list[list[Path]] = [[]]
    sizes, dropped = [0], []
    for path in [*small, *captures]:
        if path.name.endswith(".lock"):
            continue
        size = path.stat().st_size + 1024
        if sizes[-1] + size > LIMIT:
            if len(archives) == ARCHIVES:
                dropped.append(str(path.relative_to(work)))
                continue
            archives.append([])
            sizes.append(0)
        archives[-1].append(path)
        sizes[-1] += size
    for number, paths in enumerate(archives):
        with tarfile.open(out / f"studies-{number}.tar", "w") as archive:
            for path in paths:
                archive.add(path, arcname=path.relative_to(work))
    print(f"{len(archives)} archives, {sum(sizes):,} bytes; {len(dropped)} files left out: {dropped[:8]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
