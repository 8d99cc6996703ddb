"""Serve the dashboard: `python -m twell.workbench.worker.serve`, a request a line of JSON, an answer a line.

    {"model": "path/to/model", "revision": null, "threshold": null, "weights": null, "out": "folder", "text": "words"}
    {"tokens": 12}                      the run is in the folder
    {"error": "Expected …"}             one sentence

The first line that it writes is {"ready": true}. Of a request, `text` or `ids` is what to read, and `silent`, if it is
there, names neurons that do not fire meanwhile; `weights` is what the run that is shown says of its model, null to take
any. With `texts` and `counted` in their place the folder holds `nearest.parquet`, no run. The model of the last request
stays loaded. The process ends with its standard input, in the middle of a request too, so that none outlives the server
that started it. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

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


def _requests(lines: TextIO) -> SimpleQueue[str]:
    """Return a queue of the lines to come; their end ends the process, whatever it does then."""
    queue: SimpleQueue[str] = SimpleQueue()

    def take() -> None:
        for line in lines:
            queue.put(line)
        os._exit(0)

    threading.Thread(target=take, name="twell-requests", daemon=True).start()
    return queue


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints
    requests, handler = _requests(sys.stdin), RequestHandler()
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        answer = handler.answer(json.loads(requests.get()))


if __name__ == "__main__":
    main()
