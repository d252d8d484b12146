"""Whether a version of a drafter may become the champion: pure rules on what the registry recorded of both.

It must be lossless and, on every named scope, keep no fewer tokens per round than the present champion, but for a
margin.
Both must have been measured alike: same target, same prompts, same conditions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dspark.evaluation.recorded import CONDITIONS, SAMPLING, Recorded, recorded_in, scope_named
from dspark.sections import REGISTERED

TARGET = "target_fingerprint"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Entry:
    """A registered version as the gate sees it."""

    name: str
    version: int
    tags: Mapping[str, str]

    @property
    def uri(self) -> str:
        return f"{REGISTERED}{self.name}/{self.version}"


@dataclass(frozen=True)
class Line:
    """Acceptance lengths on one scope; `champion` and `needed` are None for the first champion."""

    scope: str
    candidate: float
    champion: float | None
    needed: float | None

    @property
    def passed(self) -> bool:
        return self.needed is None or self.candidate >= self.needed - _ROUNDING


@dataclass(frozen=True)
class Verdict:
    """What was compared, and everything that stands against the promotion; no fault: it may pass."""

    lines: tuple[Line, ...]
    faults: tuple[str, ...]


def judge(candidate: Entry, champion: Entry | None, names: Sequence[str], margin: float) -> Verdict:
    """Compares two versions.

    Args:
        champion: the present one; None: the candidate would be the first, and no length is compared.
        names: benchmarks and scopes (`dspark.evaluation.recorded`); empty: all greedy ones that the champion has.
        margin: tokens per round that the candidate may keep fewer.
    """
    found = recorded_in(candidate.tags)
    if found is None:
        return Verdict((), (_unmeasured(candidate),))
    faults = [fault for fault in (_loss(candidate, found),) if fault is not None]
    scopes = [scope_named(name) for name in names]
    if champion is None:
        scopes = scopes or list(found.lengths)
        lines = [Line(scope, found.lengths[scope], None, None) for scope in scopes if scope in found.lengths]
        return Verdict(tuple(lines), tuple(faults + list(_lacking(candidate, found, scopes))))
    other = recorded_in(champion.tags)
    if (fault := _other_target(candidate, champion)) is not None:
        return Verdict((), (*faults, fault))
    if other is None:
        return Verdict((), (*faults, _unmeasured(champion)))
    scopes = scopes or [scope for scope in other.lengths if scope.startswith("t0.")]
    faults += [*_lacking(candidate, found, scopes), *_lacking(champion, other, scopes)]
    shared = [scope for scope in scopes if scope in found.lengths and scope in other.lengths]
    faults += _differences(candidate, found, champion, other, shared)
    lines = [Line(scope, found.lengths[scope], other.lengths[scope], other.lengths[scope] - margin) for scope in shared]
    faults += [_worse(line, champion, margin) for line in lines if not line.passed]
    return Verdict(tuple(lines), tuple(faults))


def _unmeasured(entry: Entry) -> str:
    return (
        f"no evaluation of {entry.uri} is recorded: measure it with `dspark evaluate PRESET {entry.uri}`, then "
        f"`dspark registry record {entry.name} {entry.version} RUN`"
    )


def _loss(entry: Entry, found: Recorded) -> str | None:
    if found.lossless:
        return None
    if found.compared == 0:
        advice = "measure again with prompts at temperature 0"
    elif found.dtype != "fp32":
        advice = "ties break otherwise in other types, so measure again with evaluate.dtype=fp32"
    else:
        advice = (
            "the drafter is not verified correctly, or two tokens tie within rounding: see results.jsonl of that run"
        )
    return (
        f"the lossless check of {entry.uri} found {found.identical} of {found.compared} texts at temperature 0 equal "
        f"to plain decoding in {found.dtype}, needed are all of at least one in fp32: {advice}"
    )


def _other_target(candidate: Entry, champion: Entry) -> str | None:
    ours, theirs = (f"{entry.tags.get(TARGET, 'not stated')}" for entry in (candidate, champion))
    if ours == theirs and TARGET in candidate.tags:
        return None
    names = [entry.tags.get("target", "not stated") for entry in (candidate, champion)]
    return (
        f"{candidate.uri} is for target weights {ours} ({names[0]}), the champion {champion.uri} for {theirs} "
        f"({names[1]}): a champion's successor needs the same target, register drafters of another one under another "
        "name"
    )


def _lacking(entry: Entry, found: Recorded, scopes: Sequence[str]) -> Iterator[str]:
    missing = [scope for scope in scopes if scope not in found.lengths]
    if missing:
        yield (
            f"{entry.uri} has no acceptance length on {', '.join(missing)}, recorded are {', '.join(found.lengths)}: "
            "name other benchmarks, or evaluate and record it on these"
        )


def _differences(
    candidate: Entry, found: Recorded, champion: Entry, other: Recorded, scopes: Sequence[str]
) -> Iterator[str]:
    """Why lengths cannot be compared; both versions in one `dspark evaluate` are always measured alike."""
    keys = CONDITIONS + (SAMPLING if any(scope.startswith("t1.") for scope in scopes) else ())
    unlike = [
        f"{key} was {found.conditions.get(key)} and {other.conditions.get(key)}"
        for key in keys
        if found.conditions.get(key) != other.conditions.get(key)
    ]
    unlike += [
        f"the prompts of {scope} differ ({found.prompts[scope]} and {other.prompts[scope]}, number and hash)"
        for scope in scopes
        if found.prompts[scope] != other.prompts[scope]
    ]
    if unlike:
        yield (
            f"{candidate.uri} and the champion {champion.uri} were not measured alike: {'; '.join(unlike)}. Measure "
            f"both in one run, `dspark evaluate PRESET {candidate.uri} {champion.uri}`, and record it for both with "
            "`dspark registry record`"
        )


def _worse(line: Line, champion: Entry, margin: float) -> str:
    return (
        f"acceptance length on {line.scope} is {line.candidate:.4f}, the champion's ({champion.uri}) is "
        f"{line.champion:.4f}, needed with a margin of {margin:g} is {line.needed:.4f}: train a better drafter, or "
        "allow more with --margin"
    )
