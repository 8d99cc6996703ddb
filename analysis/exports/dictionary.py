"""Describe the exported analysis tables, for data/README.md, from the docstrings of their functions.

python -m twell.analysis.exports.dictionary   prints it; a test holds data/README.md to it
"""

from __future__ import annotations

import inspect

from twell.analysis.exports.tables import ANALYSIS

HEADING = """## Tables of the analysis

The tables that `twell export` writes. Each is what the function of `twell.analysis` of the same name returns with its
defaults. `mean` is that of a table's own subject: nnz a token, in `union_sizes` different neurons a block. Tables with
another subject (times, bins of loss, changes between runs) call the mean of nnz `nnz_mean`, as recorded ones do."""


def dictionary() -> str:
    """Return the tables in the order of an export, as Markdown: name, then columns with units and meanings."""
    entries = (f"### {name}\n\n{inspect.getdoc(compute)}" for name, compute in ANALYSIS.items())
    return "\n\n".join((HEADING, *entries)) + "\n"


if __name__ == "__main__":
    print(dictionary(), end="")
