"""The quickstart's prompts, expanded from templates that were written for this project.

platform/data/prompts.yaml ──expand_prompts──> training prompts, held-out prompts (domains math, code, chat)
"""

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml
from pydantic import Field, StrictInt, StrictStr, ValidationError

from dspark.errors import InputError
from dspark.sections import Section

# Any other brace is literal text, so a snippet of code needs no escaping.
_SLOT = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    text: str


class _Template(Section):
    template: str = Field(min_length=1)
    slots: dict[str, tuple[StrictStr | StrictInt, ...]] = Field(default_factory=dict)


class _Split(Section):
    math: tuple[_Template, ...] = Field(min_length=1)
    code: tuple[_Template, ...] = Field(min_length=1)
    chat: tuple[_Template, ...] = Field(min_length=1)

    def domains(self) -> dict[str, tuple[_Template, ...]]:
        return {"math": self.math, "code": self.code, "chat": self.chat}


class _PromptFile(Section):
    train: _Split
    held_out: _Split


def expand_prompts(
    path: Path, seed: int, train_per_domain: int, held_out_per_domain: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Returns (training, held-out) prompts, each as math, code, chat, math, ...; all texts are distinct.

    A pure function of the file and the arguments. The templates of a domain take turns, in file order. Raises
    `InputError` when the file cannot be read or a template has a missing slot, an unused slot or too few combinations.
    """
    if train_per_domain < 0 or held_out_per_domain < 0:
        raise InputError(
            f"prompts per domain are {train_per_domain} (training) and {held_out_per_domain} (held-out): give 0 or more"
        )
    prompts = _read(path)
    seen: set[str] = set()
    train = _expand(prompts.train, "", 4, seed, train_per_domain, seen)
    held_out = _expand(prompts.held_out, "held-", 2, seed, held_out_per_domain, seen)
    return train, held_out


def _read(path: Path) -> _PromptFile:
    needed = "needed are `train` and `held_out`, each with a list of templates for math, code and chat"
    try:
        prompts = _PromptFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {place or 'the file'} is wrong: {first['msg']}; {needed}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}; {needed}") from error
    templates = [
        t for split in (prompts.train, prompts.held_out) for domain in split.domains().values() for t in domain
    ]
    for text, count in Counter(t.template for t in templates).items():
        if count > 1:
            raise InputError(f"{path}: template {text!r} stands there {count} times: keep one of them")
    return prompts


def _expand(split: _Split, prefix: str, digits: int, seed: int, per_domain: int, seen: set[str]) -> list[Prompt]:
    """One split, interleaved by domain; adds its texts to `seen` and uses none that is already there."""
    columns = []
    for domain, templates in split.domains().items():
        shares = []
        for place, template in enumerate(templates):
            # Seeded by the wording: a template that is added or moved does not change what the others draw.
            rng = random.Random(f"{seed}|{template.template}")
            shares.append(_draw(template, len(range(place, per_domain, len(templates))), rng, seen))
        texts = [shares[i % len(shares)][i // len(shares)] for i in range(per_domain)]
        columns.append([Prompt(f"{prefix}{domain}-{i:0{digits}d}", domain, text) for i, text in enumerate(texts)])
    return [prompt for row in zip(*columns, strict=True) for prompt in row]


def _draw(template: _Template, count: int, rng: random.Random, seen: set[str]) -> list[str]:
    texts = [text for text in _combinations(template) if text not in seen]
    if len(texts) < count:
        raise InputError(
            f"template {template.template!r} gives {len(texts)} new prompts, {count} are needed: add fillers to its "
            "slots, add templates to its domain, or ask for fewer prompts"
        )
    rng.shuffle(texts)
    seen.update(texts[:count])
    return texts[:count]


def _combinations(template: _Template) -> list[str]:
    """Every distinct text of the template, in the order of its filler lists."""
    wanted, given = set(_SLOT.findall(template.template)), set(template.slots)
    if wanted - given:
        raise InputError(
            f"template {template.template!r} has no fillers for {sorted(wanted - given)}: add them to slots"
        )
    if given - wanted:
        raise InputError(f"template {template.template!r} never uses {sorted(given - wanted)}: remove them from slots")
    rows = (dict(zip(template.slots, map(str, row), strict=True)) for row in product(*template.slots.values()))
    return list(dict.fromkeys(_fill(template.template, fillers) for fillers in rows))


def _fill(text: str, fillers: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda slot: fillers[slot[1]], text)
