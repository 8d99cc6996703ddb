"""Tell where the model of a run lies on this machine: every command and every page finds it by the same rule.

The idea: a run's manifest names a model and the checksum of its weights, and no path, because runs travel. The path is
kept in the user's own folder for state ($XDG_STATE_HOME, or ~/.local/state), one small file for each set of weights.
Nothing depends on it: where it cannot be written or read, a folder of the model's name is looked for in the folder that
the command was given in, and else a command asks for --model.
"""

from __future__ import annotations

import os
from pathlib import Path

from twell.workbench.run.manifest import Manifest


def state_folder() -> Path:
    """Return the folder of what is remembered of models; it may not exist."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "twell" / "models"


def remember(weights: str, folder: str) -> None:
    """Remember the folder that weights of this checksum were loaded from; a name that is no folder is not kept."""
    path = Path(folder)
    try:
        if not path.is_dir():
            return
        file = state_folder() / weights
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        temporary.write_text(str(path.resolve()), encoding="utf-8")
        os.replace(temporary, file)
    except (OSError, RuntimeError, UnicodeError):  # no home, no room, no permission
        return


def recall(weights: str) -> str | None:
    """Return the folder that weights of this checksum were last loaded from, if it is still there."""
    if not weights.isalnum():  # as a run of someone else's may say: a path, to anywhere
        return None
    try:
        folder = (state_folder() / weights).read_text(encoding="utf-8")
        return folder if Path(folder).is_dir() else None
    except (OSError, RuntimeError, UnicodeError):
        return None


def model_home(manifest: Manifest) -> str | None:
    """Return the folder of the model that a run was recorded with, None where this machine knows of none."""
    folder = recall(str(manifest.model.get("weights", "")))
    named = Path(str(manifest.options.get("model", manifest.model["name"])))
    return folder or (str(named.resolve()) if (named / "config.json").is_file() else None)
