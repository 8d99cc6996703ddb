"""The text of single tokens, as the vocabulary displays it or by their bytes.

    token_text(run, ids)                "�" for a token that is a part of a character
    token_text(run, ids, spelled=True)  "\\xe2\\x80" for it: the vocabulary of byte-level BPE has many of them
    spell(b" \\xe2")                     the same, of bytes

A running text joins the bytes of neighbours into characters (`text_around.pieces`); a token that stands alone has no
neighbours, and many would look alike. Statistics of spelling, as the classes of tokens, go by the displayed text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray

from twell.analysis.memo import memoized
from twell.workbench.run.store import Run

SPELLED = "backslashreplace"  # how bytes of no whole character are decoded, as an error handler of Python


def spell(data: bytes) -> str:
    """Return a token's bytes as text, those of no whole character as tokenizers' users write them: \\xe2\\x80."""
    return data.decode("utf-8", SPELLED)


def token_text(run: Run, token_ids: NDArray, spelled: bool = False) -> ExtensionArray:
    """Return the text of each token as the vocabulary displays it; <id> for an id that the vocabulary lacks.

    spelled: whether bytes of no whole character are written out, so that no two of them look alike
    """
    vocab, token_ids = vocabulary(run), np.asarray(token_ids)
    vocab_ids = vocab["token_id"]
    row = np.full(1 + max(vocab_ids.max(initial=0), token_ids.max(initial=0)), -1)
    row[vocab_ids] = np.arange(len(vocab_ids))
    row = row[token_ids]
    text = vocab["spelled" if spelled else "text"].take(pa.array(row, mask=row < 0))
    if text.null_count:
        names = [f"<{token}>" for token in token_ids]
        text = pc.coalesce(text, pa.array(names, pa.string()))
    return text.to_pandas().array


@memoized
def vocabulary(run: Run) -> dict[str, Any]:
    """Return the vocabulary's columns token_id, text and spelled (see `token_text`); all empty if the run has none."""
    if not run.has("vocab"):
        return {"token_id": np.zeros(0, np.int32)} | dict.fromkeys(("text", "spelled"), pa.array([], pa.string()))
    table = run.arrow("vocab", ["token_id", "bytes", "text"]).combine_chunks()
    text, data = (table[name].combine_chunks() for name in ("text", "bytes"))
    unclear = pc.and_(pc.match_substring(text, "�"), pc.greater(pc.binary_length(data), 0))  # special ones have none
    unclear = unclear.fill_null(False)
    spellings = pa.array([spell(each) for each in data.filter(unclear).to_pylist()], text.type)
    spelled = pc.replace_with_mask(text, unclear, spellings)
    return {"token_id": table["token_id"].to_numpy(), "text": text, "spelled": spelled}
