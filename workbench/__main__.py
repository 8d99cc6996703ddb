"""`python -m twell.workbench …` is `twell …`, for launchers that want a module."""

from twell.workbench.cli import main

main()
