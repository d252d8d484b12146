"""What `benchmarks/decode.py` measured, as a table on screen and as the figures of docs/decoding.md."""

from pathlib import Path
from typing import Any

from rich.table import Table

PAGE = Path("docs/decoding.md")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# What fp32 must reach.
BOUNDS = {
    "plain_8_over_1": (">=", 4.5),
    "speculative_8_over_1": (">=", 2.5),
    "round_in_plain_tokens": ("<=", 1.8),
    "plain_pass_over_products": ("<=", 1.3),
    "verify_pass_over_products": ("<=", 1.3),
    "draft_pass_over_products": ("<=", 1.3),
    "outside_share": ("<=", 0.1),
}
MEANINGS = {
    "plain_1_tokens_per_s": "tokens per second behind the prompts, plain, batch 1",
    "plain_8_tokens_per_s": "the same, batch 8",
    "plain_16_tokens_per_s": "the same, batch 16",
    "speculative_1_tokens_per_s": "tokens per second behind the prompts, speculative, batch 1",
    "speculative_8_tokens_per_s": "the same, batch 8",
    "speculative_16_tokens_per_s": "the same, batch 16",
    "plain_1_with_prompts": "tokens per second with the prompts' passes, plain, batch 1",
    "plain_8_with_prompts": "the same, batch 8",
    "plain_16_with_prompts": "the same, batch 16",
    "speculative_1_with_prompts": "tokens per second with the prompts' passes, speculative, batch 1",
    "speculative_8_with_prompts": "the same, batch 8",
    "speculative_16_with_prompts": "the same, batch 16",
    "plain_8_over_1": "plain, batch 8 over batch 1",
    "plain_16_over_1": "plain, batch 16 over batch 1",
    "speculative_8_over_1": "speculative, batch 8 over batch 1",
    "speculative_16_over_1": "speculative, batch 16 over batch 1",
    "acceptance_length": "tokens kept per round",
    "plain_token_ms": "a plain token at batch 1, ms",
    "round_ms": "a speculative round at batch 1, ms",
    "round_in_plain_tokens": "a round in plain tokens",
    "plain_pass_ms": "the target's pass over one token, ms",
    "plain_products_ms": "its bare matrix products, ms",
    "plain_pass_over_products": "the pass over its products",
    "verify_pass_ms": "the target's pass over anchor and drafts, ms",
    "verify_products_ms": "its bare matrix products, ms",
    "verify_pass_over_products": "the pass over its products",
    "draft_pass_ms": "the drafter in a round, ms",
    "draft_products_ms": "its bare matrix products, ms",
    "draft_pass_over_products": "the drafter over its products",
    "outside_share": "largest share of time outside all passes",
    "prefill_share": "largest share of time in the prompts",
    "identical": "every text that of plain decoding at batch 1",
}


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Meaning, fp32, bound, bf16 of every number."""
    return [
        [meaning, _text(report["fp32"].get(name)), " ".join(map(str, BOUNDS.get(name, ()))),
         _text(report["bf16"].get(name))]
        for name, meaning in MEANINGS.items()
    ]  # fmt: skip


def table(report: dict[str, Any]) -> Table:
    found = Table("number", "fp32", "bound", "bf16", title=report["drafter"]["name"], title_justify="left")
    for row in rows(report):
        found.add_row(*row)
    return found


def figures(report: dict[str, Any]) -> list[str]:
    """The lines between the marks of the page."""
    exact, rounded = report["fp32"], report["bf16"]
    measured_on = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    trained = report["drafter"]["steps"]
    lines = [
        f"Measured by `{report['command']}` on: {measured_on}. Target: SmolLM2-135M-Instruct. Drafter: "
        f"{report['drafter']['name']}{f', trained for {trained} steps' if trained else ''}. {_size(exact)} in fp32, "
        f"{_size(rounded)} in bf16, at temperature 0.",
        "",
        "| number | fp32 | bound | bf16 |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows(report)),
        "",
    ]
    missed = [MEANINGS[name] for name in report["missed"]]
    lines.append(f"Missed: {', '.join(missed)}." if missed else "Every bound is met.")
    return [*lines, "", *differences(rounded["differences"])]


def differences(found: list[dict[str, Any]]) -> list[str]:
    """Every text that left plain decoding's in bf16."""
    if not found:
        return ["In bf16 every text was that of plain decoding at batch 1."]
    lines = ["First differences to plain decoding at batch 1, in bf16:", ""]
    lines += ["| prompt | decoding | batch | token | top-2 gap | in roundings |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for one in found:
        gap, roundings = f"{one['gap']:.3f}", f"{one['roundings']:.1f}"
        lines.append(f"| {one['prompt']} | {one['side']} | {one['batch']} | {one['place']} | {gap} | {roundings} |")
    return lines


def record(report: dict[str, Any]) -> None:
    """Puts the figures into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *figures(report), "", f"{END}{after}"]))


def _size(found: dict[str, Any]) -> str:
    return f"{found['prompts']} prompts of {found['prompt_tokens']:,} tokens, {found['new_tokens']} new tokens each"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,.4g}"
