"""Generate the pages of data/: BENCHMARKS.md and CLAIMS.md from the bundled recorded runs, and the column dictionary in
README.md from the declarations of tables.

    python -m twell.analysis.exports.pages    writes them again (`make docs` does so)

A test compares the files with what is generated. Cost: a second.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from twell.analysis.exports import benchmarks, claims
from twell.analysis.exports.dictionary import dictionary
from twell.workbench.run import schema
from twell.workbench.run.store import open_run

RECORDED = "h200-8x2048"
WIDE = "h200-28x2048"  # whose whole model was timed


def folder() -> Path:
    """Return the folder of the package's data."""
    return Path(str(resources.files("twell.data")))


def pages() -> dict[str, str]:
    """Return the text of each generated page by the name of its file."""
    run, wide = (open_run(folder() / "recorded" / name) for name in (RECORDED, WIDE))
    return {"BENCHMARKS.md": benchmarks.page(run, wide), "CLAIMS.md": claims.page(run), "README.md": columns()}


def columns() -> str:
    """Return data/README.md with its column dictionary generated again; the text before the first table stays."""
    frame = (folder() / "README.md").read_text(encoding="utf-8").partition("\n### ")[0]
    return f"{frame}\n{schema.dictionary().strip()}\n\n{dictionary()}"


if __name__ == "__main__":
    for name, text in pages().items():
        (folder() / name).write_text(text, encoding="utf-8")
        print(f"Wrote {folder() / name}.")
