"""Own text and measurements as they are on the pages: what starts one, how far it is, how it ended."""

from __future__ import annotations

import re
import time

import streamlit as st

from twell.app import parts
from twell.app.jobs import OWN, Desk, Job, model_of
from twell.app.state import RECORDED, open_page, runs_folder
from twell.app.words import plural, whole
from twell.workbench.errors import UserError
from twell.workbench.store import Run

LONGEST = 20_000  # characters of own text
MEASURED = {"4 k tokens": 4096, "32 k tokens": 32_768, "128 k tokens": 131_072}
BATCH = 1024  # tokens: what is timed of a batch on a CPU


@st.cache_resource(show_spinner=False)
def desk() -> Desk:
    """The desk that all visitors of this server share."""
    return Desk()


def own_text(run: Run) -> None:
    """A place to write in, and the button that has the run's model read it."""
    with st.popover("Your own text", key=_fresh("own")):
        model = model_of(run)
        if model is None:
            parts.note(_far(run))
            return
        parts.note("Read by this run's model, on this machine, in a process of its own. It becomes a run like others.")
        text = st.text_area("Text", key="own-words", height=180, max_chars=LONGEST, width=520)
        if st.button("Read it", type="primary", key="own-start", disabled=desk_is_busy()):
            if not text.strip():
                st.info("Write some words first.")
                return
            slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())[:4])[:32]
            arguments = [*_model(model), "--text", OWN, "--timings", "0"]
            _start("own text", "own", slug, arguments, text=text)


def measure(run: Run) -> None:
    """A button that times dense against sparse with the run's model, now and on this machine."""
    with st.popover("Measure now", key=_fresh("measure")):
        model = model_of(run)
        if model is None:
            parts.note(_far(run))
            return
        parts.note(
            "Dense against sparse, layer by layer, on the same bundled text: in a process of its own, on this "
            "machine. Times appear here as they are taken, and more text gives more of them. Anything else that runs "
            "meanwhile slows both."
        )
        size = st.segmented_control("Text", list(MEASURED), default="4 k tokens", required=True, key="measure-size")
        if st.button("Measure", type="primary", key="measure-start", disabled=desk_is_busy()):
            tokens = MEASURED[size or "4 k tokens"]
            arguments = [*_model(model), "--text", "builtin:passages", "--text", "builtin:python-docs"]
            arguments += ["--timings", "1", "--tokens", str(tokens), "--batch-tokens", str(BATCH)]
            _start("a measurement", "measured", str(run.manifest.model["name"]), arguments, tokens=tokens)


def desk_is_busy() -> bool:
    """Whether a process is running already."""
    job = desk().job
    return job is not None and job.running


def job_status(page: str) -> None:
    """How far this server's job is, where there is one; once it has its run, the page opens on it."""
    if desk().job is not None:
        _follow(page)


@st.fragment(run_every=0.5)
def _follow(page: str) -> None:
    job = desk().job
    if job is None:
        return
    if job.running and not _opens_early(job, page):
        _progress(job)
        return
    failed = job.failure()
    if failed is not None:
        st.warning(parts.plain(failed))
        if st.button("Close", key="job-close"):
            desk().clear()
            st.rerun()
        return
    name = job.out.name
    if not job.running:
        desk().clear()
    if st.session_state.get("run") != name:
        open_page("text" if job.purpose == "own text" else "kernels", run=name)
    elif job.running:
        _progress(job)
    else:
        st.rerun()


def _opens_early(job: Job, page: str) -> bool:
    """A measurement is followed from its first part on; a text is opened whole."""
    return job.purpose != "own text" and job.done() > 0


def _progress(job: Job) -> None:
    """One line and, where the amount is known, a bar."""
    done, said = job.done(), job.said()
    state = (
        f"{plural(done, 'token')} recorded" if done else "the model is at work" if said else "the process is starting"
    )
    if job.stopped:
        state = "stopping at the end of this batch"
    words = f"{job.purpose.capitalize()}: {state}, {job.seconds:.0f} s"
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="job"):
        if job.tokens:
            st.progress(min(done / job.tokens, 1.0), f"{words} of {whole(job.tokens)} tokens", width=520)
        else:
            parts.note(f'<span class="tw-mark live">{words}</span>')
        st.button("Stop", key="job-stop", on_click=job.stop)


def _start(purpose: str, kind: str, slug: str, arguments: list[str], text: str = "", tokens: int | None = None) -> None:
    """Start a job and draw the page anew; what cannot be started is said."""
    folder = runs_folder()
    if (folder / "run.json").exists():
        st.info("The dashboard was started on a single run: start it on a folder of runs, so that another can join.")
        return
    stamp = time.strftime("%m%d-%H%M%S")
    name = "-".join(word for word in (kind, re.sub(r"[^A-Za-z0-9_.-]+", "-", slug).strip("-."), stamp) if word)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        desk().start(purpose, folder.resolve() / name, arguments, text, tokens)
    except (UserError, OSError) as error:
        st.warning(parts.plain(str(error)))
        return
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
