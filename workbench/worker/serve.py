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
from queue import SimpleQueue
from typing import Any, TextIO

from twell.workbench.garbage import uncollected


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
    requests = _requests(sys.stdin)
    with uncollected():
        from twell.workbench.worker.handler import RequestHandler
    handler = RequestHandler()
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        answer = handler.answer(json.loads(requests.get()))


if __name__ == "__main__":
    main()
