"""Imports are not looked through for garbage: while they go on, later, and as the process ends."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import atexit, gc, json
atexit.register(lambda: print(json.dumps([*seen, len(gc.get_objects()) < 1000])))  # what is frozen is not among them
from twell.workbench.garbage import uncollected
with uncollected():
    from decimal import Decimal
    inside = gc.isenabled()
seen = inside, gc.isenabled(), gc.get_freeze_count() > 1000, gc.get_threshold()[0]
later = [[] for _ in range(10_000)]
"""


def test_imports_and_the_end_are_not_looked_through() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [False, True, True, 50_000, True], "inside, after, kept, how seldom, at the end"


def test_garbage_that_comes_later_is_found() -> None:
    code = CODE + "class Own: pass\nown = Own(); own.own = own; import weakref; it = weakref.ref(own); del own\n"
    code += "more = [[] for _ in range(60_000)]; assert it() is None"
    subprocess.run([sys.executable, "-c", code], check=True)
