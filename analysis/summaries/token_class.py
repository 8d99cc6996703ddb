"""Class tokens as function words, names, numbers, punctuation or parts of URLs, by spelling alone.

    classify(" the")        "function word"
    class_numbers(run)      the class of every token of the vocabulary, as an index into CLASSES

A token belongs to one class by its displayed text. A class describes the vocabulary and not grammar: a name is a
capitalised word-initial piece, so words at the start of a sentence count as names too. Cost: 30 ms for 50 000 tokens.
"""

from __future__ import annotations

import re

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
RULES = re.compile("|".join(f"({pattern})" for _, pattern in NAMED))
URL_PART, FUNCTION_WORD, OTHER = "URL part", "function word", "other"
CLASSES = pa.array([URL_PART, FUNCTION_WORD, *(name for name, _ in NAMED), OTHER])


def classify(text: str) -> str:
    """Return the class of a token by its displayed text."""
    return CLASSES[class_number(text)].as_py()


def class_number(text: str) -> int:
    """Return a token's class as an index into CLASSES: URL parts first, then function words, then `NAMED` in order."""
    word = text.strip().lower()
    if word in URL_PARTS:
        return 0
    if word in FUNCTION_WORDS and text[0] == " ":
        return 1
    match = RULES.fullmatch(text)
    return 1 + match.lastindex if match and match.lastindex else len(CLASSES) - 1


def class_numbers(run: Run) -> NDArray:
    """Return the class of each token of the vocabulary by its id, as an index into CLASSES; the last entry is for ids
    that the vocabulary lacks."""
    if not run.has("vocab"):
        return np.array([len(CLASSES) - 1])
    vocab = run.arrow("vocab", ["token_id", "text"])
    token_ids = vocab["token_id"].to_numpy()
    numbers = np.full(2 + token_ids.max(initial=-1), len(CLASSES) - 1)
    numbers[token_ids] = [class_number(text) for text in vocab["text"].to_pylist()]
    return numbers
