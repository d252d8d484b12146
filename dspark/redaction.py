"""Texts without the secrets in them: what is logged, printed or stored goes through `redacted`.

What counts as one: the password of a URI, parameters and keys that are named like secrets, tokens whose form gives them
away, and the value of every environment variable that is named like a secret, wherever it stands.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET = r"pass(?:word|wd|phrase)?|secret|token|credentials?|signature|(?:api|access|account|private|secret)[_-]?key"
# `HF_TOKEN`, `db_password`, `apiKey`; but `mask_token_id`, `key_variable` and PWD, the working directory, name none.
_SECRET_NAME = re.compile(
    rf"(?i)^(?:(?:.*[_.-])?(?:{_SECRET}|authorization|sig)|.+[_.-]pwd|.*(?:token|password|secret|apikey))$"
)
# Of variables also those that end so: whoever names one VLLM_KEY means a secret.
_SECRET_VARIABLE = re.compile(r"(?i).*(?:_key|_key_id|_pat)$")
_SHORTEST = 8  # a shorter value of a variable may be a common word

_RULES = (
    # user:password@host, where digits and a slash after the colon are a port; a lone name before @ is a token for HTTP
    (re.compile(r"(://[^/\s:@]*):(?!\d+/)\S+@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(?i)(\bhttps?://)(?!\*\*\*)[^/\s:@]+@"), rf"\1{HIDDEN}@"),
    # ?password=..., &X-Amz-Signature=..., HF_TOKEN=..., --api-key=...
    (re.compile(rf"(?i)((?:^|[\s?&;\"'])(?:--)?(?:[\w.-]*[_.-])?(?:{_SECRET}|sig|pwd)=)[^&\s#\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (
        re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|dapi)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"),
        HIDDEN,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), HIDDEN),  # a JSON web token
)


def redacted(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """The same text, or nested mappings and sequences of texts, with `***` for every secret.

    `environment`: where secrets are known from; None: this process's.
    """
    known = os.environ if environment is None else environment
    secrets = {
        text
        for name, text in known.items()
        if len(text) >= _SHORTEST and (_SECRET_NAME.match(name) or _SECRET_VARIABLE.match(name))
    }
    # The longest first: one secret may begin with another one.
    return _without(value, sorted(secrets, key=len, reverse=True))


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: HIDDEN if _hides(key, inner) else _without(inner, secrets) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without(inner, secrets) for inner in value)
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    for pattern, replacement in _RULES:
        value = pattern.sub(replacement, value)
    return value


def _hides(key: Any, value: Any) -> bool:
    """Whether a value is a secret by the name of its key; numbers and nested values are none."""
    return isinstance(value, str) and bool(value) and isinstance(key, str) and bool(_SECRET_NAME.match(key))
