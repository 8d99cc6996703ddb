"""Answer the dashboard's requests, of the fields that `serve.py` lists, with the model of the last one kept loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, first_line
from twell.workbench.models.checkpoint import find, fingerprint
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.worker.nearest import nearest
from twell.workbench.worker.reading import read

OF_MODEL = ("model", "revision", "threshold")  # fields of a request that say which model is loaded
OBJECT = "object:"  # what the fingerprint of weights begins with that no file holds


class RequestHandler:
    """Answers requests, with the model of the last one loaded."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._loaded: LoadedModel | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; an error is one, and the next request is answered all the same."""
        try:
            wanted = {name: request.pop(name) for name in OF_MODEL}
            weights, out = request.pop("weights"), Path(request.pop("out"))
            loaded = self._model(**wanted)
            if weights is not None and not weights.startswith(OBJECT) and loaded.weights != weights:
                raise UserError(
                    f"Expected the weights that this run was recorded with, got others in {loaded.name}: choose a run "
                    "of the model as it is now, or capture it again."
                )
            if "texts" in request:
                return {"tokens": nearest(loaded, **request, out=out / "nearest.parquet")}
            return {"tokens": read(loaded, out, threshold=wanted["threshold"], **request)}
        except UserError as error:
            return {"error": str(error)}
        except Exception as error:  # a model's own code may raise anything
            self._key = self._loaded = None
            return {"error": f"The model could not read this ({first_line(error)})."}

    def _model(self, model: str, revision: str | None, threshold: float | None) -> LoadedModel:
        """Return the model, from the last request if its files are still the same."""
        folder, _, _ = find(model, revision, threshold)
        key = str(folder), revision, threshold, fingerprint(folder)
        if self._loaded is None or key != self._key:
            self._loaded = None  # one at a time in memory
            self._loaded, self._key = load(model, revision, threshold=threshold), key
        return self._loaded
