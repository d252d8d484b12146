"""`dspark prepare`: conversations in, rows with the target's own answers out.

source -> cleaned, distinct conversations -> responders -> ledger of answers -> train, validation, held_out, failures
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark.config import Settings
from dspark.data.conversations import Conversation, Dropped
from dspark.data.ledger import Ledger, Outcome, begin_folder, check_new, check_resumed
from dspark.data.prepared import FAILURES, write_prepared
from dspark.errors import InputError
from jobs.answering import by_actors, by_endpoint
from jobs.preparing import Work, first_prompt_lengths, plan_work, print_work
from jobs.progress import Stage, stage


def prepare(settings: Settings, resume: Path | None, dry_run: bool) -> None:
    """Answers every conversation of the source; with `dry_run` only says what would happen.

    Raises:
        InputError: anything that a user, a file, a server or the machine can mend; what was answered stays on disk.
    """
    console = Console()
    named = settings.prepare.folder
    if resume is not None and named is not None and named.resolve() != resume.resolve():
        raise InputError(f"--resume {resume} and prepare.folder={named} are two folders: leave prepare.folder out")
    work = plan_work(settings, resume)
    if resume is None:
        check_new(work.folder)
    else:
        check_resumed(work.folder, work.making.identity)
    if dry_run:
        _print_plan(console, work, resumed=resume is not None)
        return
    if resume is None:
        begin_folder(work.folder, work.making.identity)
    with Ledger(work.folder, write=True) as ledger:
        missing = work.missing(ledger)
        lengths = first_prompt_lengths(work, missing)
        print_work(console, work, missing, lengths, ledger)
        unreachable = _answer(console, work, missing, lengths, ledger)
        manifest = _write(console, work, ledger, unreachable)
    _print_result(console, work, manifest, unreachable)


def _print_plan(console: Console, work: Work, resumed: bool) -> None:
    with Ledger(work.folder, write=False) if resumed else nullcontext() as ledger:
        missing = work.missing(ledger)
        print_work(console, work, missing, first_prompt_lengths(work, missing), ledger)


def _answer(
    console: Console, work: Work, missing: Sequence[Conversation], lengths: Sequence[int], ledger: Ledger
) -> dict[str, str]:
    """Answers what is missing, batch by batch into the ledger; returns what no server answered, with the reasons."""
    unreachable: dict[str, str] = {}
    if not missing:
        return unreachable
    batches = by_actors(work, missing, lengths)
    if work.settings.prepare.via == "endpoint":
        batches = by_endpoint(work, missing, unreachable)
    with closing(batches), stage(console, "answers", len(missing)) as bar:
        _collect(bar, batches, ledger, unreachable)
    return unreachable


def _collect(bar: Stage, batches: Iterator[list[Outcome]], ledger: Ledger, unreachable: dict[str, str]) -> None:
    done = tokens = cut = failed = 0
    for outcomes in batches:
        ledger.append(outcomes)
        done += len(outcomes)
        tokens += sum(answer.tokens for outcome in outcomes for answer in outcome.answers)
        cut += sum(answer.finish == "length" for outcome in outcomes for answer in outcome.answers)
        failed += sum(outcome.failure is not None for outcome in outcomes)
        note = f"{tokens:,} tokens  {bar.rate(tokens):,.0f} tok/s  {cut} cut off  {failed + len(unreachable)} failed"
        bar.update(done + len(unreachable), note)


def _write(console: Console, work: Work, ledger: Ledger, unreachable: dict[str, str]) -> dict[str, Any]:
    """The final files from the ledger."""

    def results(bar: Stage) -> Iterator[dict[str, Any] | Dropped]:
        for number, row in enumerate(work.rows, start=1):
            reason = unreachable.get(row.digest)
            yield work.making.row(row, Outcome(row.digest, (), reason, 0.0) if reason else ledger[row.digest])
            bar.update(number)

    facts = {"source": work.source, "target": dict(work.target)}
    allowed = work.settings.data.max_bad_fraction
    with stage(console, "rows", len(work.rows)) as bar:
        return write_prepared(work.folder, work.making, work.rows, results(bar), work.dropped, facts, allowed)


def _print_result(console: Console, work: Work, manifest: dict[str, Any], unreachable: dict[str, str]) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for name, counts in manifest["files"].items():
        cut = f", {counts['cut']} of them cut off" if counts["cut"] else ""
        line(f"{name}: {counts['rows']:,} rows, {counts['tokens']:,} tokens{cut}")
    for reason, count in manifest["failures"].items():
        line(f"{FAILURES}: {count:,} x {reason}")
    if unreachable:
        line(f"{len(unreachable)} had no answer from any server: --resume {work.folder} asks again")
    if not any(counts["rows"] for counts in manifest["files"].values()):
        raise InputError(
            f"no conversation became a row, see {work.folder / FAILURES}: raise prepare.max_tokens, or go on with "
            f"--resume {work.folder} prepare.keep_cut=true to keep answers that were cut off"
        )
    line(f"data.conversations={work.folder}/train.jsonl data.held_out={work.folder}/held_out.jsonl")
    line(str(work.folder))


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("prepare")
