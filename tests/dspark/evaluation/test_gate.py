"""The gate before a champion, on tags that are written out."""

import json

import pytest

from dspark.evaluation.gate import Entry, judge
from dspark.evaluation.recorded import Recorded, recorded_in, recorded_of, scope_named
from tests.dspark.evaluation.test_metrics import result_of, round_of

CONDITIONS = {"target": "t", "evaluate.dtype": "fp32", "evaluate.temperature": 1.0}
PROMPTS = {"t0.gsm8k": "16 aa", "t0.held_out": "48 bb", "t1.held_out": "12 cc"}


def entry(version: int, gsm8k: float = 2.0, held_out: float = 3.0, **tags: str) -> Entry:
    lengths = {"t0.gsm8k": gsm8k, "t0.held_out": held_out, "t1.held_out": 1.5}
    recorded = Recorded(lengths, PROMPTS, CONDITIONS, 64, 64, "fp32").tags()
    return Entry("m", version, {**recorded, "target_fingerprint": "t", "target": "org/t", **tags})


def faults(candidate: Entry, champion: Entry | None, *names: str, margin: float = 0.0) -> str:
    return "; ".join(judge(candidate, champion, names, margin).faults)


def test_what_is_recorded_is_read_back_from_its_tags() -> None:
    found = Recorded({"t0.gsm8k": 2.123456}, {"t0.gsm8k": "16 aa"}, CONDITIONS, 63, 64, "bf16")
    assert recorded_in(found.tags()) == found
    assert recorded_in({"lossless": "1 of 1 in fp32"}) is None
    assert [scope_named(name) for name in ("gsm8k", "t1.held_out")] == ["t0.gsm8k", "t1.held_out"]


def test_every_greedy_scope_of_the_champion_counts_unless_some_are_named() -> None:
    better_and_worse = entry(2, gsm8k=2.5, held_out=2.9)
    assert "t0.held_out is 2.9000, the champion's (models:/m/1) is 3.0000" in faults(better_and_worse, entry(1))
    assert faults(better_and_worse, entry(1), "gsm8k") == ""
    lines = judge(better_and_worse, entry(1), (), 0.0).lines
    assert [(line.scope, line.passed) for line in lines] == [("t0.gsm8k", True), ("t0.held_out", False)]


def test_a_margin_is_tokens_per_round_and_holds_at_its_edge() -> None:
    assert faults(entry(2, gsm8k=1.9), entry(1), "gsm8k", margin=0.1) == ""
    assert "needed with a margin of 0.1 is 1.9000" in faults(entry(2, gsm8k=1.8999), entry(1), "gsm8k", margin=0.1)


def test_the_first_champion_needs_the_lossless_check_and_a_recorded_acceptance() -> None:
    assert faults(entry(1), None) == ""
    assert "no evaluation of models:/m/1 is recorded" in faults(Entry("m", 1, {"target_fingerprint": "t"}), None)
    assert "has no acceptance length on t0.humaneval, recorded are t0.gsm8k" in faults(entry(1), None, "humaneval")


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        ("63 of 64 in fp32", "see results.jsonl"),
        ("64 of 64 in bf16", "evaluate.dtype=fp32"),
        ("0 of 0 in fp32", "prompts at temperature 0"),
    ],
)
def test_texts_that_are_not_proved_to_be_plain_decodings_stop_any_promotion(found: str, advice: str) -> None:
    for champion in (None, entry(1)):
        said = faults(entry(2, gsm8k=9.0, held_out=9.0, lossless=found), champion)
        assert "lossless check of models:/m/2" in said and advice in said


def test_another_target_or_another_way_of_measuring_is_refused() -> None:
    assert "models:/m/2 is for target weights u (org/u)" in faults(
        entry(2, target_fingerprint="u", target="org/u"), entry(1)
    )
    nameless = Entry("m", 2, {tag: text for tag, text in entry(2).tags.items() if tag != "target_fingerprint"})
    assert "not stated" in faults(nameless, entry(1))
    other = json.dumps(
        {"conditions": {**CONDITIONS, "evaluate.temperature": 0.5}, "prompts": {**PROMPTS, "t0.gsm8k": "9 x"}}
    )
    warmer = entry(2, evaluation=other)
    assert "prompts of t0.gsm8k differ (9 x and 16 aa" in faults(warmer, entry(1))
    # The sampling temperature says nothing about greedy decoding.
    assert faults(warmer, entry(1), "held_out") == ""
    assert "evaluate.temperature was 0.5 and 1.0" in faults(warmer, entry(1), "t1.held_out")
    assert "no evaluation of models:/m/1 is recorded" in faults(entry(2), Entry("m", 1, {"target_fingerprint": "t"}))


def test_only_a_schedule_makes_the_batch_a_condition() -> None:
    results = [result_of([round_of(4, 2)], name="held_out/0")]
    common = {"evaluate.dtype": "fp32", "evaluate.policy": "threshold"}
    alone, together = (recorded_of(results, {**common, "evaluate.batch": [size]}) for size in (1, 16))
    assert alone == together
    common["evaluate.policy"] = "scheduled"
    alone, together = (recorded_of(results, {**common, "evaluate.batch": [size]}) for size in (1, 16))
    first, second = (
        Entry("m", number, {**one.tags(), "target_fingerprint": "t"}) for number, one in ((1, alone), (2, together))
    )
    assert "evaluate.batch was 16 and 1" in faults(second, first, next(iter(alone.lengths)))
