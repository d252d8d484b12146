"""What the registry remembers of an evaluation: acceptance by scope, the lossless check, and how both were measured.

results of one drafter, description -> `Recorded` -> tags of its version -> `Recorded` again, for the gate

A scope names prompts at a temperature: `t0.held_out`, `t0.held_out.math` (a domain of several), `t0.gsm8k` (a
benchmark), `t0.mean_math` (over the benchmarks of a domain); `t1` is the sampling temperature of the evaluation.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluation.definitions import DEFINITIONS
from dspark.evaluation.metrics import PromptResult, identical, summarise
from dspark.evaluation.summary import by_origin, main_results
from dspark.sections import BENCHMARKS

LENGTH, LOSSLESS, EVALUATION, DEFINITION = "acceptance_length.", "lossless", "evaluation", "acceptance_definition"
# Of an evaluation's description, what the acceptance depends on; prompts are compared scope by scope.
CONDITIONS = (
    "target", "data.max_length", "thinking", "evaluate.dtype", "evaluate.max_new_tokens", "evaluate.policy",
    "evaluate.slots", "evaluate.threshold", "content of evaluate.calibration", "evaluate.batch",
)  # fmt: skip
SAMPLING = ("evaluate.temperature", "evaluate.top_k", "evaluate.top_p")  # at `t1` alone
_LOSSLESS = re.compile(r"(\d+) of (\d+) in (\w+)")
_DIGITS = 6  # of an acceptance length in a tag


@dataclass(frozen=True)
class Recorded:
    """One evaluation of one drafter. `lengths` and `prompts` are by scope; `conditions` by key of the description."""

    lengths: Mapping[str, float]
    prompts: Mapping[str, str]  # their number, and a hash that is equal for equal prompts
    conditions: Mapping[str, Any]
    identical: int  # of `compared` prompts at temperature 0, those with the tokens of plain decoding
    compared: int
    dtype: str

    @property
    def lossless(self) -> bool:
        """Whether every text at temperature 0 was plain decoding's; bf16 ties break otherwise, so fp32 alone counts."""
        return self.dtype == "fp32" and self.compared > 0 and self.identical == self.compared

    def tags(self) -> dict[str, str]:
        """All of it as tags, the definition of acceptance beside it."""
        return {
            **{f"{LENGTH}{scope}": f"{length:.{_DIGITS}f}" for scope, length in self.lengths.items()},
            LOSSLESS: f"{self.identical} of {self.compared} in {self.dtype}",
            EVALUATION: json.dumps({"conditions": dict(self.conditions), "prompts": dict(self.prompts)}),
            DEFINITION: DEFINITIONS["acceptance_length"],
        }


def is_recorded(tag: str) -> bool:
    """Whether a tag belongs to the recorded evaluation, so that another one replaces it."""
    return tag.startswith(LENGTH) or tag in (LOSSLESS, EVALUATION, DEFINITION)


def recorded_of(results: Sequence[PromptResult], description: Mapping[str, Any]) -> Recorded:
    """From all results of one drafter, and what `evaluation.json` says of their making."""
    lengths, prompts = {}, {}
    for scope, length, rows in _scopes(main_results(results)):
        lengths[scope] = round(length, _DIGITS)
        prompts[scope] = f"{len(rows)} {_hash_of(rows)}"
    equal, compared = identical(results) or (0, 0)
    conditions = {key: description.get(key) for key in (*CONDITIONS, *SAMPLING)}
    # The acceptance is that of the first batch size, and only a schedule asks how many are decoded together.
    scheduled = description.get("evaluate.policy") == "scheduled"
    conditions["evaluate.batch"] = description["evaluate.batch"][0] if scheduled else None
    return Recorded(lengths, prompts, conditions, equal, compared, str(description["evaluate.dtype"]))


def recorded_in(tags: Mapping[str, str]) -> Recorded | None:
    """What `Recorded.tags` made these tags of; None where no evaluation is recorded, or only pieces of one."""
    counts = _LOSSLESS.fullmatch(tags.get(LOSSLESS, ""))
    lengths = {tag.removeprefix(LENGTH): float(text) for tag, text in tags.items() if tag.startswith(LENGTH)}
    if counts is None or not lengths or EVALUATION not in tags:
        return None
    how = json.loads(tags[EVALUATION])
    return Recorded(lengths, how["prompts"], how["conditions"], int(counts[1]), int(counts[2]), counts[3])


def scope_named(name: str) -> str:
    """The scope that a user means: without a temperature, greedy decoding."""
    return name if re.match(r"t[01]\.", name) else f"t0.{name}"


def _scopes(results: Sequence[PromptResult]) -> Iterator[tuple[str, float, list[PromptResult]]]:
    """(scope, acceptance length, its results), without scopes in which no round was decoded."""
    for origin, chosen in by_origin(results).items():
        for at, summary in summarise(chosen).items():
            rows = [one for one in chosen if (one.temperature > 0) == (at == "t1")]
            if origin == "held_out":
                found = {"held_out": (summary["overall"], rows)}
                domains = summary["by_domain"] if len(summary["by_domain"]) > 1 else {}
                found |= {f"held_out.{_tag(name)}": (row, _of(rows, {name})) for name, row in domains.items()}
            else:
                found = {name: (row, _of(rows, {name})) for name, row in summary["by_domain"].items()}
                for group, row in summary["by_group"].items():
                    names = {name for name, domain in BENCHMARKS.items() if domain == group}
                    found[f"mean_{group}"] = (row, _of(rows, names))
            for scope, (row, members) in found.items():
                if row["acceptance_length"] is not None:
                    yield f"{at}.{scope}", row["acceptance_length"], members


def _of(rows: Sequence[PromptResult], domains: set[str]) -> list[PromptResult]:
    return [one for one in rows if one.domain in domains]


def _tag(domain: str) -> str:
    """A domain of somebody's data as a part of a tag's name."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", domain)


def _hash_of(rows: Sequence[PromptResult]) -> str:
    asked = sorted([one.id, one.turn, one.prompt_tokens, one.prompt] for one in rows)
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]
