"""Secrets in texts, by their form, their name and the environment; and what only looks like one."""

from typing import Any

import pytest

from dspark.redaction import redacted

TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:p@ss/word@db/runs", "postgresql://me:***@db/runs"),
        ("open http://me:pw@host:5000/api?x=1 now", "open http://me:***@host:5000/api?x=1 now"),
        ("https://ghtoken@host/x.git", "https://***@host/x.git"),
        ("https://host/?user=me&password=abc&x=1", "https://host/?user=me&password=***&x=1"),
        ("s3://bucket/a?X-Amz-Signature=0a1b&X-Amz-Date=2", "s3://bucket/a?X-Amz-Signature=***&X-Amz-Date=2"),
        ("https://a.blob/c?sv=1&sig=abc%2B", "https://a.blob/c?sv=1&sig=***"),
        ("HF_TOKEN=abc dspark run p.yaml", "HF_TOKEN=*** dspark run p.yaml"),
        ("x --api-key=abc --name n", "x --api-key=*** --name n"),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer ***"),
        (f"401 for {TOKEN}!", "401 for ***!"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln", "***"),
    ],
)
def test_secrets_of_a_known_form_are_hidden(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown
    assert redacted(shown, {}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////data/mlflow.db",
        "https://host:5000/path",
        "drafter.mask_token_id=259 train.pack_tokens=512 prepare.endpoint.key_variable=VLLM_KEY",
        "the first token of an answer",
        "models:/tiny@champion",
        "postgresql://mlflow@db/runs",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redacted(text, {}) == text


def test_values_of_secret_variables_are_hidden_wherever_they_stand() -> None:
    environment = {
        "MLFLOW_TRACKING_PASSWORD": "correct horse",
        "HF_TOKEN": "tttttttt",
        "VLLM_KEY": "kkkkkkkk",
        "AWS_SECRET_ACCESS_KEY": "kkkkkkkkkk",
        "MODEL_TOKEN": "short",
        "HOME": "/home/someone",
        "RAY_AUTH_TOKEN_PATH": "/etc/ray/token",
        "PWD": "/work/here",
        "DB_PWD": "pppppppp",
    }
    text = "correct horse tttttttt kkkkkkkk kkkkkkkkkk pppppppp short /home/someone /etc/ray/token /work/here"
    assert redacted(text, environment) == "*** *** *** *** *** short /home/someone /etc/ray/token /work/here"


def test_nested_values_are_hidden_by_the_names_of_their_keys() -> None:
    values: dict[str, Any] = {
        "tracking": {"uri": "http://a:b@c", "token": "x"},
        "db_password": "x",
        "apiKey": "x",
        "mask_token_id": 3,
        "pack_tokens": "512",
        "list": ["https://u:v@w", 1, None],
        "token": None,
    }
    assert redacted(values, {}) == {
        "tracking": {"uri": "http://a:***@c", "token": "***"},
        "db_password": "***",
        "apiKey": "***",
        "mask_token_id": 3,
        "pack_tokens": "512",
        "list": ["https://u:***@w", 1, None],
        "token": None,
    }
