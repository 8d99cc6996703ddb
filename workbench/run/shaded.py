"""What a run and a watch return to show a passage: its form is known here, the analysis makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pandas as pd


class ShadedPassage(Protocol):
    """A passage that a notebook shows shaded by nnz; `str()` of it is its text."""

    @property
    def rows(self) -> pd.DataFrame:
        """Return the counts of its tokens, a row a token."""

    @property
    def texts(self) -> list[str]:
        """Return the text of each token."""

    def _repr_html_(self) -> str: ...
