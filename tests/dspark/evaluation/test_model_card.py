"""The model card: what it states, what it says when nothing is known, and that no text leaves its place."""

from dataclasses import replace

import pytest
import yaml

from dspark.evaluation.definitions import DEFINITIONS
from dspark.evaluation.metrics import PromptResult
from dspark.evaluation.model_card import CardData, Licences, model_card
from dspark.evaluation.summary import result_json
from tests.dspark.small import SMALL_EAGLE3, small_config

FACTS = {
    "target": {"name": "org/target", "revision": "main", "fingerprint": "abc"},
    "data": {"conversations": "train.jsonl", "fingerprint": "def"},
    "rows": 33,
    "render": "ghi",
    "steps": 17,
    "seed": 3,
    "loss": {"ce": 0.1, "gamma": None},
}
BARE = CardData("drafter", "specforge", "bfloat16", small_config(), "none", {}, Licences(), None, None)
FULL = replace(
    BARE,
    layout="deepspec",
    vocabulary="whole",
    facts=FACTS,
    licences=Licences("apache-2.0", "mit", "cc-by-4.0"),
    settings={"name": "tiny", "seed": 3, "output": "/home/someone/runs", "data": {"held_out": "/home/someone/h.jsonl"}},
)


def measured(prompts: int = 2) -> dict[str, object]:
    """`result.json` of a run: two rounds a prompt, 2 + 3 tokens kept."""
    rounds = [
        {"proposed": 2, "accepted": 1, "kept": 2, "confidences": []},
        {"proposed": 2, "accepted": 2, "kept": 3, "confidences": []},
    ]
    results = [
        PromptResult(
            id=f"p{i}", domain=("math", "code")[i % 2], temperature=0.0, prompt_tokens=4, tokens=[0] * 6,
            drafted=[False] * 6, finish="length", rounds=rounds, plain_tokens=[0] * 6, identical=True,
            plain_seconds=0.6, speculative_seconds=0.3, text="", prompt="",
            seconds={"prefill": 0.1, "draft": 0.1, "verify": 0.1, "other": 0.0},
        )
        for i in range(prompts)
    ]  # fmt: skip
    return {
        **result_json(results, {}, 17, None, []),
        "command": "dspark run /home/someone/tiny.yaml loss.l1=0.5 output=/home/someone/runs",
    }


def cells(card: str) -> dict[str, str]:
    """The tables with two columns."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_target_data_licences_and_settings_are_stated() -> None:
    card = model_card(FULL)
    found = cells(card)
    assert (found["model"], found["fingerprint of the weights"]) == ("org/target", "abc")
    assert (found["conversations"], found["rows"]) == ("train.jsonl", "33")
    assert (found["this drafter"], found["the target"], found["the data"]) == ("apache-2.0", "mit", "cc-by-4.0")
    assert (found["optimizer steps"], found["seed"], found["loss.ce"]) == ("17", "3", "0.1")
    assert found["Markov head"] == "vanilla, rank 5"
    assert "```yaml\nname: tiny\nseed: 3\ndata:\n  held_out: h.jsonl\n```" in card
    assert "holds copies of the target's embedding" in card


def test_the_front_matter_is_what_hubs_read() -> None:
    _, front, _ = model_card(FULL).split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/target",
        "license": "apache-2.0",
        "tags": ["speculative-decoding", "dspark"],
    }


def test_metrics_come_with_their_definitions_and_the_command_that_gave_them() -> None:
    card = model_card(replace(FULL, result=measured()))
    assert "| held out, T=0 | 2 | 2.500 | 0.750 | 2 of 2 | 10.0 | 20.0 | 2.00 |" in card
    assert "| held out, T=0, math | 1 | 2.500 |" in card
    assert DEFINITIONS["acceptance_length"] in card
    assert "```sh\ndspark run tiny.yaml loss.l1=0.5 output=runs\n```" in card


def test_what_is_not_known_is_said_to_be_not_stated() -> None:
    card = model_card(BARE)
    found = cells(card)
    for label in (
        "model",
        "conversations",
        "rows",
        "this drafter",
        "the target",
        "the data",
        "optimizer steps",
        "seed",
    ):
        assert found[label] == "not stated", label
    assert "license: other" in card and "base_model" not in card
    assert "Nothing was measured" in card
    assert "holds neither embedding nor output head" in card


@pytest.mark.parametrize("name", ["/home/someone/models/llama", "smollm2-135m-instruct"])
def test_a_target_that_no_hub_knows_is_named_without_its_place(name: str) -> None:
    card = model_card(replace(FULL, facts={**FACTS, "target": {"name": name, "revision": "main", "fingerprint": "x"}}))
    assert cells(card)["model"] == name.rpartition("/")[2]
    assert "someone" not in card and "base_model" not in card


def test_no_text_leaves_its_cell_or_its_fence() -> None:
    hostile = "a | b\n\n# heading ```\n<script>"
    card = model_card(replace(FULL, licences=Licences(data=hostile), settings={"x": "```\n# heading"}))
    assert "| the data | a \\| b # heading ''' &lt;script> |" in card.splitlines()
    assert card.count("```") == 2


def test_the_card_of_an_eagle3_drafter_says_how_it_proposes_and_was_trained() -> None:
    facts = {**FACTS, "loss": {"ttt_length": 4, "normaliser": "sequences"}}
    card = model_card(replace(FULL, config=SMALL_EAGLE3, facts=facts))
    found = cells(card)
    assert (found["chained steps in training"], found["eagle3.normaliser"]) == ("4", "sequences")
    assert "EAGLE-3. It proposes up to 3 tokens one after the other" in card and "in one pass" not in card
    assert not {"mask token id", "Markov head", "confidence head"} & found.keys()
