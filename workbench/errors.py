"""The two errors that a person is meant to read.

Each message is one sentence: what was expected, what came, what to do. The command line prints it and exits
with code 2; the dashboard shows it in place of what could not be shown.
"""


class UserError(Exception):
    """Something outside the program is wrong: an argument, a file, a model, a disk."""


class Missing(UserError):
    """A run lacks what a question needs: a table it never recorded, or rows that a summary-only run leaves out."""
