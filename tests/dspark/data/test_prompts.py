"""The quickstart's prompts: how templates expand, and that the shipped file is fit for use."""

import re
from collections import Counter
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data.prompts import Prompt, expand_prompts
from dspark.errors import InputError

SHIPPED = Path(__file__).parents[3] / "platform" / "data" / "prompts.yaml"
DOMAINS = ["math", "code", "chat"]


def template(text: str, **slots: list[Any]) -> dict[str, Any]:
    return {"template": text, "slots": slots}


def prompt_file(folder: Path, **train_or_held_out: list[dict[str, Any]]) -> Path:
    """A file with the math templates given as train=[...] and held_out=[...]; all else has one template of 26 texts."""
    letters = list(ascii_lowercase)
    content = {
        split: {domain: [template(f"{split} {domain} {{letter}}", letter=letters)] for domain in DOMAINS}
        for split in ("train", "held_out")
    }
    for split, templates in train_or_held_out.items():
        content[split]["math"] = templates
    path = folder / "prompts.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def math_texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts if prompt.domain == "math"]


def shipped_templates(split: str) -> dict[str, list[dict[str, Any]]]:
    domains: dict[str, list[dict[str, Any]]] = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))[split]
    return domains


def word_runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\{?[a-z]+\}?", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_templates_take_turns_and_domains_are_interleaved(tmp_path: Path) -> None:
    path = prompt_file(
        tmp_path,
        train=[template("{n} plus one?", n=[5]), template("Halve {n}.", n=[8]), template("Is {n} odd?", n=[3])],
        held_out=[template("Double {n}.", n=[4])],
    )
    train, held_out = expand_prompts(path, seed=0, train_per_domain=3, held_out_per_domain=1)
    assert math_texts(train) == ["5 plus one?", "Halve 8.", "Is 3 odd?"]
    assert [p.domain for p in train] == DOMAINS * 3
    assert [p.id for p in train[:4]] == ["math-0000", "code-0000", "chat-0000", "math-0001"]
    assert [p.id for p in held_out] == ["held-math-00", "held-code-00", "held-chat-00"]
    assert held_out[0] == Prompt(id="held-math-00", domain="math", text="Double 4.")


def test_the_draw_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, train=[template("Add {a} and {b}.", a=[1, 2, 3], b=[7, 8, 9])])
    train, _ = expand_prompts(path, seed=11, train_per_domain=4, held_out_per_domain=0)
    assert math_texts(train) == ["Add 1 and 9.", "Add 3 and 7.", "Add 2 and 7.", "Add 2 and 9."]


@settings(max_examples=20)
@given(templates=st.integers(1, 6), count=st.integers(0, 26))
def test_the_spread_over_templates_is_even(
    tmp_path_factory: pytest.TempPathFactory, templates: int, count: int
) -> None:
    path = prompt_file(
        tmp_path_factory.mktemp("spread"),
        train=[template(f"task{i} {{n}}", n=list(range(26))) for i in range(templates)],
        held_out=[template("held {n}", n=[1])],
    )
    texts = math_texts(expand_prompts(path, seed=0, train_per_domain=count, held_out_per_domain=0)[0])
    uses = Counter(text.split()[0] for text in texts)
    assert sum(uses.values()) == len(set(texts)) == count
    per_template = [uses[f"task{i}"] for i in range(templates)]
    assert max(per_template) - min(per_template) <= 1


def test_two_templates_never_yield_the_same_text(tmp_path: Path) -> None:
    path = prompt_file(
        tmp_path,
        train=[template("a {size} dog", size=["big", "small"]), template("a big {pet}", pet=["dog", "cat", "cow"])],
        held_out=[template("a small {pet}", pet=["dog", "owl"])],
    )
    train, held_out = expand_prompts(path, seed=0, train_per_domain=4, held_out_per_domain=1)
    assert sorted(math_texts(train)) == ["a big cat", "a big cow", "a big dog", "a small dog"]
    assert math_texts(held_out) == ["a small owl"]


def test_only_slots_are_filled_and_other_braces_stay(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, train=[template('{code} or {"a": {}}?', code=["{code}"])])
    train, _ = expand_prompts(path, seed=0, train_per_domain=1, held_out_per_domain=0)
    assert math_texts(train) == ['{code} or {"a": {}}?']


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (template("Add {a} and {b}.", a=[1]), r"'Add \{a\} and \{b\}\.' has no fillers for \['b'\]"),
        (template("Add {a}.", a=[1], c=[2]), r"'Add \{a\}\.' never uses \['c'\]"),
        (template("Add {a}.", a=[1, 1]), r"'Add \{a\}\.' gives 1 new prompts, 2 are needed"),
        (template("Add {a}.", a=[]), r"'Add \{a\}\.' gives 0 new prompts, 2 are needed"),
        (template("train code {letter}", letter=["a"]), r"'train code \{letter\}' stands there 2 times"),
        (template("Add {a}.", a=[0.5, 1]), r"train\.math\.0\.slots\.a\.0"),
        ({"template": "Add 1.", "slot": {}}, r"train\.math\.0\.slot is wrong"),
    ],
)
def test_a_bad_template_is_named(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    path = prompt_file(tmp_path, train=[bad])
    with pytest.raises(InputError, match=message):
        expand_prompts(path, seed=0, train_per_domain=2, held_out_per_domain=1)


@pytest.mark.parametrize("content", ["", "train: [", "train: {math: []}", "- 1"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="needed are `train` and `held_out`"):
        expand_prompts(path, seed=0, train_per_domain=1, held_out_per_domain=1)


def test_a_missing_file_and_a_negative_count_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        expand_prompts(tmp_path / "none.yaml", seed=0, train_per_domain=1, held_out_per_domain=1)
    with pytest.raises(InputError, match="give 0 or more"):
        expand_prompts(SHIPPED, seed=0, train_per_domain=-1, held_out_per_domain=1)


def test_the_shipped_file_gives_the_quickstart_its_prompts() -> None:
    train, held_out = expand_prompts(SHIPPED, seed=0, train_per_domain=128, held_out_per_domain=20)
    assert Counter(p.domain for p in train) == {"math": 128, "code": 128, "chat": 128}
    assert Counter(p.domain for p in held_out) == {"math": 20, "code": 20, "chat": 20}
    assert len({p.id for p in train + held_out}) == len({p.text for p in train + held_out}) == 444
    assert (train, held_out) == expand_prompts(SHIPPED, seed=0, train_per_domain=128, held_out_per_domain=20)
    assert train != expand_prompts(SHIPPED, seed=1, train_per_domain=128, held_out_per_domain=20)[0]


def test_shipped_held_out_templates_share_no_five_words_with_training() -> None:
    trained = [t["template"] for templates in shipped_templates("train").values() for t in templates]
    held_out = [t["template"] for templates in shipped_templates("held_out").values() for t in templates]
    seen = set().union(*(word_runs(text, 5) for text in trained))
    assert [text for text in held_out if word_runs(text, 5) & seen] == []
    assert all(len(templates) >= 16 for templates in shipped_templates("train").values())
    assert all(len(templates) >= 9 for templates in shipped_templates("held_out").values())


@pytest.mark.parametrize("seed", range(4))
def test_shipped_prompts_read_well(seed: int) -> None:
    train, held_out = expand_prompts(SHIPPED, seed, train_per_domain=128, held_out_per_domain=20)
    sounds_otherwise = r"(hour|honest|SQL|HTML|one\b|one-|use|user)"
    for prompt in train + held_out:
        assert prompt.text == prompt.text.strip()
        assert not re.search(rf"\b[Aa] (?!{sounds_otherwise})[aeiouAEIOU]", prompt.text), prompt.text
        assert not re.search(rf"\b[Aa]n (?!{sounds_otherwise})[^aeiouAEIOU]", prompt.text), prompt.text


def test_shipped_sums_have_sensible_answers() -> None:
    train = [p.text for seed in range(4) for p in expand_prompts(SHIPPED, seed, 128, 0)[0] if p.domain == "math"]

    def numbers(pattern: str) -> list[tuple[int, ...]]:
        found = [tuple(int(n) for n in match.groups()) for text in train if (match := re.search(pattern, text))]
        assert found, f"no prompt reads {pattern}"
        return found

    assert all(price < paid for price, paid in numbers(r"for (\d+) dollars and pays with a (\d+)"))
    assert all(things % children == 0 for things, children in numbers(r"shares (\d+) .* among (\d+) children"))
    assert all(total % pages == 0 for pages, total in numbers(r"reads (\d+) pages of a (\d+)-page book"))
    assert all((a + b + c) % 3 == 0 for a, b, c in numbers(r"average of (\d+), (\d+) and (\d+)"))
    assert all(price * percent % 100 == 0 for price, percent in numbers(r"is (\d+) dollars\. Today it is (\d+)% off"))
    assert all(grams * many % few == 0 for few, grams, many in numbers(r"for (\d+) people needs (\d+) .* for (\d+)"))
