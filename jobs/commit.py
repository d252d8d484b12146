"""Which code made a run: the git commit of the checkout, also in a submitted job, whose copy has no history."""

import os
import subprocess
from pathlib import Path

# `dspark submit` sets it for the job.
VARIABLE = "DSPARK_GIT_COMMIT"
_ROOT = Path(__file__).parents[1]


def git_commit() -> str | None:
    """The commit of this code, with `-dirty` behind it where tracked files differ; None outside a checkout."""
    if given := os.environ.get(VARIABLE):
        return given
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _ROOT.resolve():
        return None  # installed packages, perhaps inside somebody else's checkout
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
