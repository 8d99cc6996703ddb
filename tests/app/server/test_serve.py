"""What is imported before the server runs says nothing: Streamlit warns of what would be cached without one."""

from __future__ import annotations

import subprocess
import sys

CODE = "from twell.app.server.serve import PAGES, load; load(*PAGES)"


def test_imports_ahead_of_the_server_are_silent() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
