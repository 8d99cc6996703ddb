"""Answer from what a watch has recorded: arrays, tables of the analysis, single firings.

This is the one place here that reaches into another half of the house. The analysis is imported when the first question
is asked, so that a watch needs nothing that it needs.
"""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from twell.workbench.errors import Missing, UserError
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.shaded import ShadedPassage
from twell.workbench.run.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_matrix

    from twell.workbench.models.attach import AttachedModel


class Answers:
    """The questions that a watch answers; `run` is what it has recorded."""

    loaded: AttachedModel

    @property
    def run(self) -> Run:
        raise NotImplementedError

    @property
    def nnz(self) -> np.ndarray:
        """How many neurons each token fired in each layer, int32 [tokens, layers], a row for each row of `table`."""
        return self._activity()[nnz_columns(self.loaded.layers)].to_numpy()

    def table(self) -> pd.DataFrame:
        """Return a row a token that was read, padding left out, by sequence and position.

        Columns: sequence; position; token_id; text; phase (0 prefill, 1 decode); flags (0: it counts); loss (of the
        next token, nats, rounded to float16; where it was taken); nnz_LL (neurons that it fired in layer LL); used_LL
        (of these, with a product that is not zero; where a layer has a ReLU on the up branch too).
        """
        rows = self._activity()
        text = [f"<{token}>" for token in rows["token_id"]]
        if self.run.has("vocab"):
            named = self.run.vocab["text"].reindex(rows["token_id"])
            text = [one if isinstance(one, str) else given for one, given in zip(named, text, strict=True)]
        rows.insert(3, "text", text)
        return rows.drop(columns=[name for name in ("loss", "entropy") if rows[name].isna().all()])

    def by_layer(self, flagged: bool = False) -> pd.DataFrame:
        """Return the mean, spread and dead neurons of each layer, of what was read: `twell.analysis.by_layer`, whose
        help names the columns. flagged: whether special, first and non-finite tokens count too."""
        return ask("by_layer", self.run, flagged=flagged)

    def by_token(
        self,
        min_count: int = 1,
        flagged: bool = False,
        rank: Literal["shrunk", "z", "z_position"] = "shrunk",
        spelled: bool = False,
    ) -> pd.DataFrame:
        """Return the tokens that were read, loudest first: `twell.analysis.by_token`, whose help names the columns.

        min_count: least occurrences of a token; flagged: as in `by_layer`; rank: shrunk | z | z_position, by which they
        are ordered; spelled: whether bytes of no whole character are written out
        """
        return ask("by_token", self.run, min_count=min_count, flagged=flagged, rank=rank, spelled=spelled)

    def by_neuron(self, layer: int | None = None) -> pd.DataFrame:
        """Return how often and how strongly each neuron fired, of one layer or all: `twell.analysis.by_neuron`, whose
        help names the columns."""
        return ask("by_neuron", self.run, layer=layer)

    def by_position(self, flagged: bool = False, total: bool = False) -> pd.DataFrame:
        """Return mean nnz at each position and layer: `twell.analysis.by_position`, whose help names the columns.

        flagged: as in `by_layer`; total: the sum over the layers, as layer -1, in place of them
        """
        return ask("by_position", self.run, flagged=flagged, total=total)

    def text(self, sequence: int = 0, layer: int | None = None) -> ShadedPassage:
        """Return a sequence that a notebook shows shaded by nnz, in all layers or one; `str()` of it is its text."""
        return ask("shaded_text", self.run, sequence=sequence, layer=layer)

    @overload
    def fired(self, layer: int, form: Literal["scipy"] = "scipy") -> csr_matrix: ...

    @overload
    def fired(self, layer: int, form: Literal["torch"]) -> Tensor: ...

    def fired(self, layer: int, form: Literal["scipy", "torch"] = "scipy") -> csr_matrix | Tensor:
        """Return a layer's values as a CSR matrix [tokens, d_ff], a row for each row of `table`, or for each of those
        that were drawn if the watch keeps a share.

        form: scipy | torch. Values are what the activation makes of the gate, before the up branch multiplies it, or
        with a threshold |hidden|; rounded to float16, as in a run.
        """
        if form not in ("scipy", "torch"):
            raise UserError(f"Expected form= as scipy or torch, got {form!r}.")
        self._check_kept(layer)
        matrix: csr_matrix = ask("fired_csr", self.run, layer=layer)[0]
        if form == "scipy":
            return matrix
        begins, neurons, values = (torch.from_numpy(one) for one in (matrix.indptr, matrix.indices, matrix.data))
        with warnings.catch_warnings():  # its notes on CSR as a beta, and on checks of what scipy has made
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(begins, neurons, values, size=matrix.shape)

    def neurons(self, token: int, layer: int) -> pd.DataFrame:
        """Return the neurons that a token fired in a layer, the largest value first. Columns: neuron, value (as in
        `fired`).

        token: the row in `table`
        """
        self._check_kept(layer)
        rows = self._activity()
        _check_number("token", token, len(rows))
        where = rows.iloc[token]
        fired = ask("neurons_at", self.run, sequence=int(where["sequence"]), position=int(where["position"]))
        fired = fired.loc[fired["layer"] == layer, ["neuron", "value"]]
        return fired.sort_values(["value", "neuron"], ascending=[False, True], ignore_index=True)

    def _activity(self) -> pd.DataFrame:
        """Return the rows of all tokens, by sequence and position."""
        return self.run.activity().sort_values(["sequence", "position"], ignore_index=True)

    def _check_kept(self, layer: int) -> None:
        self._check_layer(layer)
        run = self.run
        if not run.has("fired") or not run.rows("fired", [("layer", "=", layer)], ["layer"]).num_rows:
            raise Missing(
                f"This watch keeps no firings of layer {layer}: begin it with fired=[{layer}], or fired=True for all "
                "layers."
            )

    def _check_layer(self, layer: int) -> None:
        if not hasattr(self, "loaded"):
            raise Missing("This watch has not begun: call the model inside the with block.")
        _check_number("layer", layer, self.loaded.layers)


def _check_number(what: str, number: int, count: int) -> None:
    """Raise UserError for what is no whole number below a count."""
    if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < count:
        raise UserError(f"Expected a {what} from 0 to {count - 1}, got {number!r}.")


def ask(question: str, run: Run, **options: Any) -> Any:
    """Return the answer of `twell.analysis` to a question about a run. question: by_layer, …"""
    try:
        from twell import analysis
    except ImportError as error:
        raise UserError(
            f"Expected the analysis for {question}, it cannot be imported ({error.name} is missing): pip install "
            "'twell-workbench[dashboard]'."
        ) from None
    return getattr(analysis, question)(run, **options)


def nothing_seen(idle_calls: int) -> str:
    """Return why a watch has no answer. idle_calls: in which no FFN ran"""
    if idle_calls:
        return (
            f"This watch has seen calls of the model, {idle_calls} in all, in which none of its FFNs ran: code that "
            "runs others in their place, as torch's fast path of nn.TransformerEncoder, leaves nothing to count."
        )
    return "This watch has seen no call of the model: call it inside the with block."
