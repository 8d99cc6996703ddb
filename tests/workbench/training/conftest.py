"""A text to train on, and the corpus that it becomes."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest

from twell.workbench.training.corpus import Corpus, prepare
from twell.workbench.training.recipes import Recipe


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twenty topics of Python's help to a file."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)[:20]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(text: Path, tiny_recipe: Recipe) -> Corpus:
    """Prepare that text for the small recipe."""
    return prepare((str(text),), text.parent / "corpus", vocab=tiny_recipe.vocab, holdout=0.1, bpe_megabytes=1.0)
