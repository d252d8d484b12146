"""Commands and messages as the pages show them."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def commands_of(page: Path) -> list[list[str]]:
    """The words behind `dspark` of each command in the page's blocks; optional parts in brackets are left out."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    dspark ")]
    shown = [re.sub(r" \[[^]]*\]| \.\.\.", "", line.partition(" #")[0]) for line in lines]
    return [shlex.split(line)[1:] for line in shown if line.startswith("dspark ")]


@cache
def printed() -> list[str]:
    """Every text in the code, with `…` for what is filled in."""
    files = [file for package in ("dspark", "actors", "jobs") for file in (ROOT / package).rglob("*.py")]
    return [text for file in files for text in _texts(ast.parse(file.read_text(encoding="utf-8")))]


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def symptoms_of(page: Path) -> list[str]:
    """The first column of the page's tables, where it holds words that are printed."""
    rows = re.findall(r"^\| `([^`]+(?:`[^`|]+`[^`|]+)*)` \|", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [row for row in rows if " " in row]


def links_of(page: Path) -> list[tuple[Path, str]]:
    """(file, heading) that the page links to; the heading may be empty."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    found = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in found]


def anchors_of(page: Path) -> set[str]:
    """Headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
