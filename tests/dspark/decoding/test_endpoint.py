"""Answers from real local HTTP servers that are busy, slow, broken or strict."""

import time
from typing import Any

import pytest

from dspark.answering import EndpointSettings
from dspark.data.conversations import Conversation, Message
from dspark.data.render import Renderer
from dspark.decoding.answers import Asking
from dspark.decoding.endpoint import Endpoint, Unreachable, key_of
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from tests.servers import Reply, Server, always, completion, serving
from tests.tiny import CHATML, tiny_tokenizer

SECRET = "sk-not-to-be-seen"
RULE = Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=5)


def asking(thinking: bool | None = None, template: str = CHATML) -> Asking:
    return Asking(Renderer(tiny_tokenizer(template), 4096, thinking), RULE, max_tokens=40, max_length=200)


def endpoint(servers: list[Server], pauses: list[float] | None = None, **settings: Any) -> Endpoint:
    wanted = EndpointSettings(addresses=tuple(server.address for server in servers), **{"attempts": 4, **settings})
    pause = (pauses if pauses is not None else []).append
    return Endpoint(wanted, "the-model", asking(), ["<|im_end|>"], pause)


def question(text: str = "hi", *more: Message) -> Conversation:
    return Conversation("c", (Message("user", text), *more), None, 1)


TWO_TURNS = question("hi", Message("assistant", "recorded"), Message("user", "and?"))


def test_a_conversation_is_asked_turn_by_turn_with_the_targets_own_token_ids() -> None:
    with serving(lambda number, body: completion(f"answer {number}<|im_end|>")) as servers:
        outcome = endpoint(servers).answer(TWO_TURNS)
        (_, key, first), (path, _, second) = servers[0].requests
    assert [answer.text for answer in outcome.answers] == ["answer 1", "answer 2"]
    assert outcome.failure is None and outcome.key == TWO_TURNS.digest
    assert (path, key) == ("/v1/completions", None)
    decode = tiny_tokenizer().decode
    assert decode(second["prompt"]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    rule = {key: first[key] for key in ("model", "temperature", "top_p", "top_k", "max_tokens")}
    assert rule == {"model": "the-model", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 40}
    assert "min_p" not in first and first["seed"] != second["seed"]


def test_chat_sends_messages_and_takes_reasoning_and_calls_apart_as_the_server_does() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"content": None, "reasoning": "hm", "tool_calls": [call]}
    reply = (200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    recorded = question(
        "q", Message("assistant", "", {"tool_calls": [call | {"function": {"name": "f", "arguments": {}}}]})
    )
    tools = ({"type": "function", "function": {"name": "f"}},)
    row = Conversation("c", (*recorded.messages, Message("tool", "1")), None, 1, tools=tools)
    with serving(always(reply)) as servers:
        settings = EndpointSettings(addresses=(servers[0].address,), api="chat")
        outcome = Endpoint(settings, "m", asking(thinking=False), []).answer(row)
        path, _, body = servers[0].requests[0]
    (answer,) = outcome.answers
    assert answer.parts["reasoning_content"] == "hm"
    assert answer.parts["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert path == "/v1/chat/completions" and body["tools"] == list(tools)
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_busy_and_broken_servers_are_asked_again_after_growing_pauses() -> None:
    replies: list[Reply] = [(500, "no"), (200, b"<html>"), (200, {"choices": []}), completion("at last")]
    pauses: list[float] = []
    with serving(lambda number, body: replies[number - 1]) as servers:
        outcome = endpoint(servers, pauses).answer(question())
    assert [answer.text for answer in outcome.answers] == ["at last"]
    assert len(pauses) == 3 and all(0.25 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(pauses))


def test_the_pause_that_a_server_asks_for_is_kept() -> None:
    replies = [(429, "slow down"), completion("ok")]
    pauses: list[float] = []
    with serving(lambda number, body: replies[number - 1]) as servers:
        endpoint(servers, pauses).answer(question())
    assert pauses == [7.0]


def test_another_address_is_asked_after_one_that_fails_times_out_or_is_not_there() -> None:
    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.6)
        return completion("too late")

    with serving(slow, always(completion("in time"))) as servers:
        one = endpoint(servers, timeout_s=0.2)
        assert one.answer(question()).answers[0].text == "in time"
        assert len(servers[0].requests) == 1  # the first address is asked first
        nobody = EndpointSettings(addresses=("http://127.0.0.1:1/v1", servers[1].address))
        outcome = Endpoint(nobody, "m", asking(), [], lambda seconds: None).answer(question())
        assert outcome.answers[0].text == "in time"


def test_attempts_that_are_used_up_name_the_address_and_the_last_reason() -> None:
    pauses: list[float] = []
    with serving(always((503, "overloaded"))) as servers:
        with pytest.raises(Unreachable, match=r"no answer in 4 attempts.*127\.0\.0\.1.*HTTP 503: \"overloaded\""):
            endpoint(servers, pauses).answer(question())
        assert len(servers[0].requests) == 4 and len(pauses) == 3


def test_no_more_attempts_are_made_once_the_job_is_stopped() -> None:
    with serving(always((503, "overloaded"))) as servers:
        settings = EndpointSettings(addresses=(servers[0].address,), attempts=9)
        with pytest.raises(Unreachable, match="before the job was stopped"):
            Endpoint(settings, "m", asking(), [], lambda seconds: True).answer(question())
        assert len(servers[0].requests) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((400, "too many tokens"), "HTTP 400"),
        (completion("x", finish="content_filter"), "the answer ended with 'content_filter'"),
    ],
)
def test_a_request_that_is_refused_costs_its_conversation_and_is_not_repeated(reply: Reply, reason: str) -> None:
    with serving(always(reply)) as servers:
        outcome = endpoint(servers).answer(question())
        assert len(servers[0].requests) == 1
    assert outcome.answers == () and outcome.failure is not None and reason in outcome.failure


def test_a_prompt_without_room_for_an_answer_is_not_sent() -> None:
    with serving(always(completion("x"))) as servers:
        outcome = endpoint(servers).answer(question("long " * 50))
        assert servers[0].requests == []
    assert outcome.failure == "a prompt leaves no room in the target's 200 positions"


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_settings_that_the_servers_refuse_stop_the_job(status: int) -> None:
    with serving(always((status, "no"))) as servers, pytest.raises(InputError, match=f"HTTP {status}"):
        endpoint(servers).answer(question())


def test_a_server_that_reads_another_prompt_renders_otherwise_and_is_refused() -> None:
    length = len(asking().prompt(question().messages, ()))
    with serving(lambda number, body: completion("x", prompt_tokens=length + number - 1)) as servers:
        one = endpoint(servers)
        assert one.answer(question()).failure is None
        with pytest.raises(InputError, match=f"read {length + 1} prompt tokens.*gives {length}"):
            one.answer(question())


def test_the_key_is_sent_and_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", SECRET)
    with serving(always((400, f"bad key {SECRET}"))) as servers:
        outcome = endpoint(servers, key_variable="SOME_KEY").answer(question())
        assert servers[0].requests[0][1] == f"Bearer {SECRET}"
    assert outcome.failure is not None and SECRET not in outcome.line() and "bad key ***" in outcome.failure
    with serving(always((401, SECRET))) as servers, pytest.raises(InputError) as stopped:
        endpoint(servers, key_variable="SOME_KEY").answer(question())
    assert SECRET not in str(stopped.value)


def test_a_key_that_is_not_set_is_named() -> None:
    with pytest.raises(InputError, match="key_variable=NO_SUCH_KEY: that environment variable is not set"):
        key_of(EndpointSettings(key_variable="NO_SUCH_KEY"))
