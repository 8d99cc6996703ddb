"""The job of this server as the pages show it: starting one, its progress, and how it ended."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from twell.app.jobs.runner import Job, JobRunner
from twell.app.ui import widgets
from twell.app.ui.formatting import message_markdown, plural
from twell.app.ui.run_cache import digest
from twell.app.ui.run_catalog import RECORDED
from twell.app.ui.url_state import current_run, open_page, redraw_page
from twell.workbench.errors import UserError
from twell.workbench.run.store import open_run

MEASUREMENT, STUDY = "a measurement", "a study"  # the purposes of jobs
INTERVAL = 0.5  # seconds between two looks at the job


@st.cache_resource(show_spinner=False)
def job_runner() -> JobRunner:
    """Return the runner that all visitors of this server share."""
    return JobRunner()


def start_job(purpose: str, out: Path, run: str, arguments: list[str], cases: int, page: str = "kernels") -> None:
    """Start a job and draw the page again, or show why it cannot be started. For the arguments see JobRunner.start."""
    try:
        st.session_state["job"] = job_runner().start(purpose, out, run, arguments, cases, page)
    except (UserError, OSError) as error:
        st.warning(message_markdown(str(error)))
        return
    st.session_state["jobs_started"] = st.session_state.get("jobs_started", 0) + 1
    st.rerun()


def is_busy() -> bool:
    """Return whether a job is running."""
    job = job_runner().job
    return job is not None and job.running


def note_if_busy() -> None:
    """Draw a note that says why no job can be started now."""
    job = job_runner().job
    if job is not None and job.running:
        widgets.note(f"One job runs at a time, and {job.purpose} is running: wait until it ends, or stop it.")


def fresh_key(key: str) -> str:
    """Return a widget's key that changes with every job started, so that the popover which started it closes."""
    return f"{key}-{st.session_state.get('jobs_started', 0)}"


def model_arguments(model: tuple[str, str | None]) -> list[str]:
    """Return the arguments with which `twell` loads a model, given as (folder or hub id, revision)."""
    name, revision = model
    return [name, *(["--revision", revision] if revision else [])]


def note_model_missing() -> None:
    """Draw a note that says that this machine does not have the run's model, and what to do."""
    packaged = " This run came with the package." if str(st.session_state.get("run", "")).startswith(RECORDED) else ""
    widgets.note(
        f"The model of this run is not on this machine, and nothing is downloaded.{packaged} Capture a model that is "
        "(<code>twell capture MODEL --text FILE --out …</code>), or choose a run of the bundled model."
    )


def job_status() -> None:
    """Draw the progress of this server's job, if there is one; its results appear on the page as they are written."""
    if job_runner().job is not None:
        _follow(digest(current_run()))


@st.fragment(run_every=INTERVAL)
def _follow(drawn_digest: str) -> None:
    """Draw the job's state, draw the page again once its run has more to show, and open the run once it ends.

    Args:
        drawn_digest: the digest of the page's run as it is drawn.
    """
    job = job_runner().job
    if job is None:
        return
    on_its_run = st.session_state.get("run") == job.run
    if job.running:
        if on_its_run and _run_digest(job) != drawn_digest:
            redraw_page()
        _draw_progress(job)
        return
    failure, started_here = job.failure(), bool(st.session_state.get("job") is job)
    if failure is None and started_here:
        _open_result(job, on_its_run)
    if on_its_run and failure is None:
        if _run_digest(job) != drawn_digest:
            redraw_page()
        return
    _draw_end(job, failure)


def _open_result(job: Job, on_its_run: bool) -> None:
    """Show a finished job's run to the visitor who started it; others stay where they are."""
    job_runner().clear()
    if on_its_run:
        redraw_page()
    open_page(job.page, run=job.run)


def _draw_end(job: Job, failure: str | None) -> None:
    """Draw how the job ended, with a link to its run or the reason why there is none."""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="job"):
        if failure is None:
            widgets.note(f"{job.purpose.capitalize()}: done", width="content")
            widgets.page_link(job.page, "Open it →", run=job.run)
        else:
            (st.info if job.stopped else st.warning)(message_markdown(failure), width=520)
        if st.button("Close", key="job-close"):
            job_runner().clear()
            redraw_page()


def _run_digest(job: Job) -> str:
    """Return the digest of the run that the job writes, or "" before there is one."""
    try:
        return digest(open_run(job.out))
    except (UserError, OSError):
        return ""


def _draw_progress(job: Job) -> None:
    """Draw a line about a running job, with a bar of its cases or batches, and a button that stops it."""
    (done, total), lines = job.progress(), job.log_lines()
    unit, units = ("case", "cases") if job.cases else ("batch", "batches")
    state = "the model is running" if lines else "the process is starting"
    if done:
        state = f"{plural(done, unit, units.removeprefix(unit))} done"
    if job.stopped:
        state = "stopping"
    text = f"{job.purpose.capitalize()}: {state}, {job.seconds:.0f} s"
    in_all = f"; {total} {units} in all" if total else ""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="job"):
        st.progress(min(done / max(total, 1), 1.0), text + in_all, width=520)
        st.button("Stop", key="job-stop", on_click=job.stop)
