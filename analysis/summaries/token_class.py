"""Class tokens as function words, names, numbers, punctuation or parts of URLs, by spelling.

    classify(" the")                      "function word"
    read_classes(run).of_rows(token, …)   the class of each row, as an index into CLASSES

A token belongs to one class by its displayed text, but for parts of URLs: a row of such a token counts as one only
beside a `.`, `/` or `:`, or where it holds one itself; elsewhere "com" or "doi" is a piece like any other. A class
describes the vocabulary and not grammar: a name is a capitalised word-initial piece, so words at the start of a
sentence count as names too. Cost: 30 ms for 50 000 tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.workbench.run.store import Run

_FUNCTION_WORDS = (
    "a an the this that these those and or but nor so yet if then than as of in on at by for from to into onto with "
    "without within about over under after before between through during against among is are was were be been being "
    "am has have had do does did will would shall should can could may might must not no it its he him his she her "
    "hers they them their we us our you your i me my who whom whose which what when where while because there here "
    "also very just only such each both all any some more most other"
)
_URL_PARTS = "http https ftp www com org net gov edu htm html php doi url io co uk :// // /// .com .org .net"
FUNCTION_WORDS, URL_PARTS = frozenset(_FUNCTION_WORDS.split()), frozenset(_URL_PARTS.split())
NAMED = (
    ("whitespace", r"(?:\s|\\[nrtvf])*"),
    ("number", r"\s?\d+"),
    ("punctuation", r"(?:[^\w�]|_)+"),
    ("name", r" [A-Z][^\W\d_]+"),
    ("word-initial piece", r" [^\W\d_]+"),
    ("word-inner piece", r"[^\W\d_]+"),
)
MARKS = [re.compile(form) for form in (r"\A[./:]", r"[./:]\Z", r"[./:]")]  # of URLs: at the start, at the end, any
RULES = re.compile("|".join(f"({pattern})" for _, pattern in NAMED))
URL_PART, FUNCTION_WORD, OTHER = "URL part", "function word", "other"
CLASSES = pa.array([URL_PART, FUNCTION_WORD, *(name for name, _ in NAMED), OTHER])


def classify(text: str) -> str:
    """Return the class of a token by its displayed text."""
    return CLASSES[class_number(text)].as_py()


def class_number(text: str, in_url: bool = True) -> int:
    """Return a token's class as an index into CLASSES: URL parts first, then function words, then `NAMED` in order.

    in_url: whether the token may be a part of a URL.
    """
    word = text.strip().lower()
    if in_url and word in URL_PARTS:
        return 0
    if word in FUNCTION_WORDS and text[0] == " ":
        return 1
    match = RULES.fullmatch(text)
    return 1 + match.lastindex if match and match.lastindex else len(CLASSES) - 1


@dataclass(frozen=True)
class Classes:
    """The vocabulary by token id, and a last entry for ids that it lacks.

    kinds: the class by spelling, as an index into CLASSES; elsewhere: the same, of a URL part that is not beside a mark
    of URLs; begins, ends, holds: whether the text begins with such a mark, ends with one, has any.
    """

    kinds: NDArray
    elsewhere: NDArray
    begins: NDArray
    ends: NDArray
    holds: NDArray

    def of_tokens(self, token: NDArray) -> NDArray:
        """Return the class of each token by its spelling alone."""
        return self.kinds[self._index(token)]

    def of_rows(self, token: NDArray, sequence: NDArray) -> NDArray:
        """Return the class of each row; token, sequence [row]: in the order of the text."""
        index = self._index(token)
        kinds = self.kinds[index]
        parts = np.flatnonzero(self.elsewhere[index] != kinds)
        before, after = np.maximum(parts - 1, 0), np.minimum(parts + 1, len(token) - 1)
        beside = self.holds[index[parts]]
        beside |= self.ends[index[before]] & (sequence[before] == sequence[parts]) & (before != parts)
        beside |= self.begins[index[after]] & (sequence[after] == sequence[parts]) & (after != parts)
        alone = parts[~beside]
        kinds[alone] = self.elsewhere[index[alone]]
        return kinds

    def _index(self, token: NDArray) -> NDArray:
        return np.where((token >= 0) & (token < len(self.kinds)), token, len(self.kinds) - 1)


def read_classes(run: Run) -> Classes:
    """Return the classes of the run's vocabulary; all "other" where it has none."""
    vocab = run.arrow("vocab", ["token_id", "text"]) if run.has("vocab") else None
    token_ids = np.zeros(0, np.int64) if vocab is None else vocab["token_id"].to_numpy()
    texts = [] if vocab is None else vocab["text"].to_pylist()
    size, other = 2 + int(token_ids.max(initial=-1)), len(CLASSES) - 1
    kinds, marks = np.full(size, other), np.zeros((3, size), bool)
    kinds[token_ids] = [class_number(text) for text in texts]
    elsewhere = kinds.copy()
    elsewhere[token_ids] = [class_number(text, in_url=False) for text in texts]
    for row, pattern in zip(marks, MARKS, strict=True):
        row[token_ids] = [pattern.search(text) is not None for text in texts]
    return Classes(kinds, elsewhere, *marks)
