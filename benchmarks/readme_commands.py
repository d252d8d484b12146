"""Runs the commands of README.md, one after the other, so that none of them can go stale.

Blocks marked `sh` are read; `make` lines are stages of their own in continuous integration and are left out.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands(text: str) -> list[str]:
    """The command lines of all `sh` blocks, continuation lines joined, comments and `make` left out."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "make ", "apt-get ", "source "))]


def main() -> int:
    for command in commands(README.read_text()):
        print(f"$ {command}", flush=True)
        since = time.monotonic()
        code = subprocess.run(command, shell=True, cwd=README.parent, check=False).returncode
        print(f"[exit {code} after {time.monotonic() - since:.0f} s]", flush=True)
        if code != 0:
            print(f"error: README.md has a command that fails: {command}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
