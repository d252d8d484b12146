"""The model card of an exported drafter: target, data, licences, settings, and metrics with the command that gave them.

What a checkpoint does not say is printed as not stated, never guessed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from dspark.evaluation.definitions import DEFINITIONS
from dspark.model.config import Eagle3Config
from dspark.model.kinds import AnyConfig

NOT_STATED = "not stated"


@dataclass(frozen=True)
class Licences:
    """Names of licences, such as `apache-2.0`; None: not stated."""

    drafter: str | None = None
    target: str | None = None
    data: str | None = None


@dataclass(frozen=True)
class CardData:
    """What the card is made of: `facts` are the checkpoint's, `settings` and `result` those of the run beside it.

    `vocabulary`: what the folder holds of the target, as in `dspark.model.stored.Layout`.
    """

    title: str
    layout: str
    dtype: str
    config: AnyConfig
    vocabulary: Literal["whole", "kept", "rows", "none"]
    facts: Mapping[str, Any]
    licences: Licences
    settings: Mapping[str, Any] | None
    result: Mapping[str, Any] | None


def model_card(card: CardData) -> str:
    """README.md of a drafter's folder: front matter that hubs read, then Markdown."""
    config = card.config
    target = {"name": None, "revision": None, "fingerprint": None} | _section(card.facts, "target")
    name = target["name"]
    target["name"] = _placeless(name)
    result = card.result or {}
    rows = list(_rows(result))
    return _environment().get_template("model_card.md.j2").render(
        front=_front(card.licences, name),
        title=card.title,
        layout=card.layout,
        dtype=card.dtype,
        config=config,
        vocabulary=card.vocabulary,
        chained=isinstance(config, Eagle3Config),
        own=_own(config),
        target=target,
        data={"conversations": None, "fingerprint": None} | _section(card.facts, "data"),
        facts={"rows": None, "render": None, "steps": None, "seed": None} | dict(card.facts),
        loss=_section(card.facts, "loss"),
        licences=card.licences,
        settings=None if card.settings is None else _settings(card.settings),
        rows=rows,
        command=" ".join(map(_placeless, str(result.get("command") or NOT_STATED).split(" "))),
        definitions=DEFINITIONS,
    )  # fmt: skip


def _own(config: AnyConfig) -> dict[str, str]:
    """What drafters of this kind alone have."""
    if isinstance(config, Eagle3Config):
        return {"chained steps in training": str(config.ttt_length)}
    return {
        "mask token id": str(config.mask_token_id),
        "Markov head": f"{config.markov_head}, rank {config.markov_rank}" if config.markov_rank else "none",
        "confidence head": "yes" if config.confidence else "no",
    }


def _section(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = facts.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def _settings(settings: Mapping[str, Any]) -> str:
    """YAML of what made the drafter; where it was made and tracked is left out."""
    told = {key: _placeless(value) for key, value in settings.items() if key not in ("output", "tracking", "ray")}
    return yaml.safe_dump(told, sort_keys=False)


def _placeless(value: Any) -> Any:
    """The same with the last part of every absolute path alone: the rest says where, not what."""
    if isinstance(value, Mapping):
        return {key: _placeless(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placeless(inner) for inner in value]
    key, equals, path = value.rpartition("=") if isinstance(value, str) else ("", "", "")
    return f"{key}{equals}{PurePath(path).name}" if PurePath(path).is_absolute() else value


def _front(licences: Licences, target: str | None) -> str:
    """Only an id of a hub is a base model; `other` is the hubs' word for a licence that they do not know."""
    front: dict[str, Any] = {"license": licences.drafter or "other", "tags": ["speculative-decoding", "dspark"]}
    if target is not None and target.count("/") == 1 and not PurePath(target).is_absolute():
        front["base_model"] = target
    return yaml.safe_dump(front, sort_keys=True)


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(prompts, summary) of everything that was measured, as `result.json` holds it."""
    for part, title in (("held_out", "held out"), ("benchmarks", "benchmarks")):
        for summary in _section(result, part).values():
            heading = f"{title}, T={summary['temperature']:g}"
            domains: Mapping[str, Any] = summary["by_domain"]
            yield from ((f"{heading}, {domain}", row) for domain, row in domains.items() if len(domains) > 1)
            yield heading, summary["overall"]


def _environment() -> Environment:
    # Markdown is no HTML: the filters keep texts inside their cells and fences.
    environment = Environment(
        loader=PackageLoader("dspark.evaluation", "."),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "fenced": _fenced, "number": _number, "pair": _pair}
    return environment


def _cell(value: Any) -> str:
    if value is None:
        return NOT_STATED
    text = value if isinstance(value, str) else json.dumps(value)
    for sign, safe in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("`", "'")):
        text = text.replace(sign, safe)
    return " ".join(text.split())


def _fenced(text: str) -> str:
    return text.strip().replace("```", "'''")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _pair(value: Sequence[int] | None) -> str:
    return "–" if value is None else "{} of {}".format(*value)
