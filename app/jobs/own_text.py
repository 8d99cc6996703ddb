"""Own text and measurements as they are on the pages: what starts one, how far it is, how it ended."""

from __future__ import annotations

import re
import time
from pathlib import Path

import streamlit as st

from twell.app.jobs.runner import OWN, Desk, Job, model_of
from twell.app.ui import widgets
from twell.app.ui.formatting import plural, whole
from twell.app.ui.url_state import RECORDED, digest, draw_anew, keep, open_page, parameter, runs_folder, shown
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, open_run

LONGEST = 20_000  # characters of own text
MEASURED = {"layers": "This model's layers", "compressions": "Compressions", "nnz": "Any sparsity"}
SAID = {
    "layers": "Every layer with its own weights, on its own activity on the bundled text.",
    "compressions": "The same with tiles of 63, 31 and 15 slots: which is the fastest that holds every row?",
    "nnz": "Made-up weights of this shape, from 1 % to all neurons firing: up to where does sparse pay?",
}
COMPRESSIONS = "8,4,16"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # of the neurons, that made-up inputs fire


@st.cache_resource(show_spinner=False)
def desk() -> Desk:
    """The desk that all visitors of this server share."""
    return Desk()


def own_text(run: Run) -> None:
    """A place to write in, and the button that has the run's model read it."""
    with st.popover("Your own text", key=_fresh("own")):
        model = model_of(run)
        if model is None:
            widgets.note(_far(run))
            return
        widgets.note(
            f"Up to {whole(LONGEST)} characters, read by this run's model, on this machine, in a process of its own. "
            "It becomes a run like others.",
            width=520,
        )
        with st.form(_fresh("own-form"), border=False):
            text = st.text_area("Text", key="own-words", height=180, width=520)
            asked = st.form_submit_button(
                "Read it", type="primary", key="own-start", disabled=desk_is_busy(), on_click=keep
            )
        _say_if_busy()
        if not asked:
            return
        if not text.strip():
            st.info("Write some words first.")
        elif len(text) > LONGEST:
            st.info(f"These are {whole(len(text))} characters: shorten them to {whole(LONGEST)}.")
        else:
            _start_own(model, text)


def _start_own(model: tuple[str, str | None], text: str) -> None:
    """Have the model read the text, into a run that is named after its first words."""
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())[:4])[:32]
    stamp = time.strftime("%m%d-%H%M%S")
    name = "-".join(word for word in ("own", slug, stamp) if word)
    arguments = ["capture", *_model(model), "--text", OWN, "--timings", "0"]
    _start("own text", runs_folder().resolve() / name, name, arguments, text=text)


def measure(run: Run) -> None:
    """A button that times dense against sparse at the run's shape, now and on this machine."""
    with st.popover("Measure now", key=_fresh("measure")):
        model = model_of(run)
        if model is None:
            widgets.note(_far(run))
            return
        if run.manifest.status == "recording":
            widgets.note("This run is still being recorded: what is measured joins a run that has ended.")
            return
        widgets.note(
            "Dense against sparse on the same input, in turns, on this machine and in a process of its own. Each case "
            "appears here as it is done, and stays with the run. Anything else that runs meanwhile slows both."
        )
        what = st.segmented_control(
            "What",
            list(MEASURED),
            format_func=lambda k: MEASURED[k],
            default="layers",
            required=True,
            key="measured",
            on_change=keep,
        )
        widgets.note(SAID[str(what)])
        if st.button("Measure", type="primary", key="measure-start", disabled=desk_is_busy(), on_click=keep):
            arguments, cases = measurement(run, model, str(what))
            _start("a measurement", run.path.resolve(), str(st.session_state["run"]), arguments, cases=cases)
        _say_if_busy()


def measurement(run: Run, model: tuple[str, str | None], what: str) -> tuple[list[str], int]:
    """The arguments of `twell bench`, and how many cases it will time."""
    if what != "nnz":
        more = ["--compression", COMPRESSIONS] if what == "compressions" else []
        return ["bench", *_model(model), "--inputs", "text", "--no-compile", *more], run.layers
    nnz = [str(max(round(share * run.d_ff), 1)) for share in SHARES]
    shape = f"{run.manifest.model['d_model']},{run.d_ff}"
    return ["bench", "--shape", shape, "--inputs", "even,dense", "--nnz", ",".join(nnz), "--no-compile"], len(nnz) + 1


def desk_is_busy() -> bool:
    """Whether a process is running already."""
    job = desk().job
    return job is not None and job.running


def _say_if_busy() -> None:
    """Why nothing can be started now."""
    job = desk().job
    if job is not None and job.running:
        widgets.note(f"One process runs at a time, and one does ({job.purpose}): wait for its end, or stop it.")


def job_status() -> None:
    """How far this server's job is, where there is one; what it has written is on the page with the next look."""
    if desk().job is not None:
        _follow(digest(shown()))


@st.fragment(run_every=0.5)
def _follow(seen: str) -> None:
    job = desk().job
    if job is None:
        return
    here = st.session_state.get("run") == job.run
    if job.running:
        if here and _written(job) != seen:
            draw_anew()
        _progress(job)
        return
    failed = job.failure()
    mine = st.session_state.get("job") is job
    page = "text" if job.purpose == "own text" else "kernels"
    whose = st.session_state.get("lender")  # of the scale, so that a few words do not look as busy as any text
    scale = {"scale": whose} if mine and whose and job.purpose == "own text" else {}
    if failed is None and mine:  # who did not start it stays where they are
        desk().clear()
        if here:
            draw_anew()
        open_page(page, run=job.run, **scale)
    if here and failed is None:
        if _written(job) != seen:
            draw_anew()
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="job"):
        if failed is None:
            widgets.note(f"{job.purpose.capitalize()}: done", width="content")
            widgets.linked(page, "Open it →", run=job.run)
        else:
            (st.info if job.stopped else st.warning)(widgets.plain(failed), width=520)
        if st.button("Close", key="job-close"):
            desk().clear()
            draw_anew()


def _written(job: Job) -> str:
    """The digest of the run that the job writes."""
    try:
        return digest(open_run(job.out))
    except (UserError, OSError):
        return ""


def _progress(job: Job) -> None:
    """One line and, where the amount is known, a bar."""
    done, said = job.done(), job.said()
    unit = "case" if job.cases is not None else "token"
    state = f"{plural(done, unit)} done" if done else "the model is at work" if said else "the process is starting"
    if job.stopped:
        state = "stopping"
    words = f"{job.purpose.capitalize()}: {state}, {job.seconds:.0f} s"
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="job"):
        if job.cases:
            st.progress(min(done / job.cases, 1.0), f"{words}; {job.cases} cases in all", width=520)
        else:
            widgets.note(f'<span class="tw-mark live">{words}</span>', width="content")
        st.button("Stop", key="job-stop", on_click=job.stop)


def _start(purpose: str, out: Path, run: str, arguments: list[str], text: str = "", cases: int | None = None) -> None:
    """Start a job and draw the page anew; what cannot be started is said."""
    if text and (out.parent / "run.json").exists():
        st.info("The dashboard was started on a single run: start it on a folder of runs, so that another can join.")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        st.session_state["job"] = desk().start(purpose, out, run, arguments, text, cases)
    except (UserError, OSError) as error:
        st.warning(widgets.plain(str(error)))
        return
    st.session_state["lender"] = parameter("scale") or st.session_state["run"]
    st.session_state["started"] = st.session_state.get("started", 0) + 1
    st.rerun()


def _fresh(key: str) -> str:
    """A key that changes with every start, so that what asked for it closes."""
    return f"{key}-{st.session_state.get('started', 0)}"


def _model(model: tuple[str, str | None]) -> list[str]:
    name, revision = model
    return [name, *(["--revision", revision] if revision else [])]


def _far(run: Run) -> str:
    """That the model is not here."""
    where = "" if not str(st.session_state.get("run", "")).startswith(RECORDED) else " This run came with the package."
    return (
        "The model of this run is not on this machine, and nothing is fetched."
        f"{where} Capture with it here (<code>twell capture MODEL --text FILE --out …</code>), or choose a run of "
        "the bundled model."
    )
