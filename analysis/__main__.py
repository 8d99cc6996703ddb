"""Print what several runs say about the claims, side by side: python -m twell.analysis RUN …"""

from __future__ import annotations

import sys

from twell.analysis.claims.findings import side_by_side
from twell.workbench.errors import UserError
from twell.workbench.run.store import open_run

USE = "python -m twell.analysis RUN …"

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"Expected one run or more: {USE}")
    if {"-h", "--help"} & set(sys.argv):
        print(f"{USE}: a table of the claims, with what each run says about them.")
        sys.exit()
    try:
        print(side_by_side([open_run(path) for path in sys.argv[1:]]))
    except UserError as error:
        sys.exit(str(error))
