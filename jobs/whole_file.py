"""Files that appear whole: whoever reads one while it is replaced, or after a kill, finds the old or the new text."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces a file, or makes it."""
    fresh = path.with_name(f".{path.name}.part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
