"""What the tables that `twell export` derives from a run hold: their functions' own words, as the column dictionary in
data/README.md has them. `python -m twell.analysis.exports.dictionary` prints it anew.
"""

from __future__ import annotations

import inspect

from twell.analysis.exports.tables import ANALYSIS

HEADING = """## Tables of the analysis

What `twell export` writes, and the functions of `twell.analysis` of the same names answer with their defaults."""


def dictionary() -> str:
    """The tables in the order of an export, as Markdown: name, then columns with units and what they mean."""
    told = (f"### {name}\n\n{inspect.getdoc(table)}" for name, table in ANALYSIS.items())
    return "\n\n".join((HEADING, *told)) + "\n"


if __name__ == "__main__":
    print(dictionary(), end="")
