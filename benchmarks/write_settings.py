"""Writes docs/settings.md from the types that declare the settings (`make settings`)."""

from pathlib import Path

from jobs.config import describe_settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def settings_page() -> str:
    """The reference of all settings, a table per section."""
    lines = [
        "# Settings",
        "",
        "Written by `make settings` from the types in `dspark/`. A preset sets any of these, an override such as",
        "`loss.l1=0.9` comes last, and unknown keys are refused.",
    ]
    section: str | None = None
    for key, default, description in describe_settings():
        if (found := key.rpartition(".")[0]) != section:
            section = found
            lines += ["", f"## {section or 'The experiment'}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        lines.append("| " + " | ".join(_cell(text) for text in (f"`{key}`", f"`{default}`", description)) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(settings_page())
