"""Answers from OpenAI-compatible servers: least busy address first, bounded requests, patience with those that fail.

conversation -> request -> address with the fewest in flight -> answer
                   ^                 | 408, 409, 425, 429, 5xx, a timeout, a body that is no answer
                   +---- growing pause, another address

A request that the servers refuse costs its conversation; a key, model or address that they refuse stops the job.
"""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark.answering import EndpointSettings
from dspark.data.conversations import Conversation, Message, typed_calls
from dspark.data.dialogue import Answer, Dialogue, Finish
from dspark.data.files import Unusable
from dspark.data.ledger import Outcome
from dspark.decoding.answers import Asking, seed_of
from dspark.errors import InputError

_AGAIN = {408, 409, 425, 429}
_WRONG_SETTINGS = {401, 403, 404}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_SHOWN_CHARACTERS = 200
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class Unreachable(Exception):
    """No server answered within the attempts; a later run may be luckier."""


class _Refused(Exception):
    """The servers will never answer this request."""


class _TryAgain(Exception):
    """This attempt failed; `pause_s` is what the server asked for."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to an address that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def key_of(settings: EndpointSettings) -> str | None:
    """The key, from the environment.

    Raises:
        InputError: the variable is not set.
    """
    if settings.key_variable is None:
        return None
    key = os.environ.get(settings.key_variable, "").strip()
    if not key:
        raise InputError(
            f"prepare.endpoint.key_variable={settings.key_variable}: that environment variable is not set; export it, "
            "or set it to null if the servers need no key"
        )
    return key


class Endpoint:
    """The servers of one target; its methods may be called by many threads."""

    def __init__(
        self,
        settings: EndpointSettings,
        model: str,
        asking: Asking,
        end_tokens: Sequence[str],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`end_tokens`: what may end a turn; some servers leave it on the text. `pause` waits between attempts, and
        returns something true where no more shall be made."""
        self.settings, self.model, self.asking = settings, model, asking
        self._ends, self._pause, self._key = tuple(end_tokens), pause, key_of(settings)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._lock = threading.Lock()
        self._in_flight = dict.fromkeys((address.rstrip("/") for address in settings.addresses), 0)

    def answer(self, conversation: Conversation) -> Outcome:
        """All answers of a conversation, or why it has none.

        Raises:
            InputError: the settings are wrong: key, model, address, or a rendering that is not ours.
            Unreachable: the attempts are used up.
        """
        started = time.perf_counter()
        dialogue = Dialogue(conversation)
        failure = None
        try:
            while (context := dialogue.context) is not None:
                dialogue.take(self._answer(context, conversation.tools, dialogue.request_id))
        except _Refused as refused:
            failure = str(refused)
        answers = () if failure else tuple(dialogue.answers)
        return Outcome(conversation.digest, answers, failure, round(time.perf_counter() - started, 4))

    def _answer(self, context: Sequence[Message], tools: Sequence[Mapping[str, Any]], request_id: str) -> Answer:
        try:
            prompt = self.asking.prompt(context, tools)
        except InputError as error:
            raise _Refused(str(error)) from None
        body = self._body(context, tools, prompt, request_id)
        avoid, reason = None, ""
        for attempt in range(self.settings.attempts):
            address = self._take(avoid)
            try:
                return self._read(self._post(address, body), len(prompt))
            except _TryAgain as failed:
                avoid, reason, asked_s = address, f"{address}: {failed}", failed.pause_s or 0.0
            finally:
                self._release(address)
            if attempt + 1 < self.settings.attempts:
                # Half of the pause is chance, so that many who failed together do not come back together.
                pause_s = _FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1)
                if self._pause(min(_LONGEST_PAUSE_S, max(pause_s, asked_s))):
                    raise Unreachable("no answer before the job was stopped")
        raise Unreachable(f"no answer in {self.settings.attempts} attempts, the last one at {reason}")

    def _body(
        self, context: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: Sequence[int], request_id: str
    ) -> dict[str, Any]:
        rule = self.asking.sampling
        room = min(self.asking.max_tokens, self.asking.max_length - len(prompt))
        body: dict[str, Any] = {"model": self.model, "temperature": rule.temperature, "max_tokens": room}
        body |= {"seed": seed_of(rule, request_id), "top_p": rule.top_p}
        # Not in every server's vocabulary, so they are only sent where they say something.
        body |= {"top_k": rule.top_k} if rule.top_k else {}
        body |= {"min_p": rule.min_p} if rule.min_p else {}
        if self.settings.api == "completions":
            return body | {"prompt": list(prompt), "skip_special_tokens": False}
        body["messages"] = [{"role": one.role, "content": one.content, **_sent(one.parts)} for one in context]
        body |= {"tools": [dict(tool) for tool in tools]} if tools else {}
        thinking = self.asking.renderer.facts["thinking"]
        return body if thinking is None else body | {"chat_template_kwargs": {"enable_thinking": thinking}}

    def _post(self, address: str, body: Mapping[str, Any]) -> Any:
        path = "/completions" if self.settings.api == "completions" else "/chat/completions"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self.settings.timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(address, error) from None
        except (OSError, http.client.HTTPException) as error:
            raise _TryAgain(self._shown(str(getattr(error, "reason", error)) or type(error).__name__)) from None
        except ValueError:
            raise _TryAgain("the body is no JSON") from None

    def _refusal(self, address: str, error: urllib.error.HTTPError) -> Exception:
        try:
            said = error.read(10_000).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            said = ""
        reason = f"HTTP {error.code}: {self._shown(said or str(error.reason))}"
        if error.code in _AGAIN or error.code >= 500:
            asked = error.headers.get("Retry-After", "")
            return _TryAgain(reason, float(asked) if asked.isdigit() else None)
        if error.code in _WRONG_SETTINGS or error.code < 400:
            return InputError(
                f"{address} refuses ({reason}): look at prepare.endpoint.addresses, model and key_variable"
            )
        return _Refused(reason)

    def _read(self, found: Any, prompt_tokens: int) -> Answer:
        try:
            choice, usage = found["choices"][0], found.get("usage") or {}
            said = {"content": choice["text"]} if self.settings.api == "completions" else choice["message"]
            text, finish = said.get("content") or "", choice["finish_reason"]
            parts = _parts(said)
            read, written = usage.get("prompt_tokens"), int(usage.get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise _TryAgain(f"the body is no answer: {self._shown(json.dumps(found))}") from None
        if read is not None and read != prompt_tokens:
            raise InputError(
                f"the server read {read} prompt tokens where the target's template gives {prompt_tokens}: it renders "
                "otherwise, so the answers would not fit the training rows; set prepare.endpoint.api=completions, or "
                "data.thinking and target.model to what the server has"
            )
        if finish not in _FINISHES:
            raise _Refused(f"the answer ended with {finish!r}")
        if finish != "length":
            text = text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))
        return Answer(text, _FINISHES[finish], written, parts)

    def _take(self, avoid: str | None) -> str:
        with self._lock:
            free = [address for address in self._in_flight if address != avoid] or list(self._in_flight)
            address = min(free, key=lambda one: self._in_flight[one])
            self._in_flight[address] += 1
            return address

    def _release(self, address: str) -> None:
        with self._lock:
            self._in_flight[address] -= 1

    def _shown(self, text: str) -> str:
        """A server's words for a message: short, on one line, and without the key, which some servers repeat."""
        line = " ".join(text.split())
        return (line.replace(self._key, "***") if self._key else line)[:_SHOWN_CHARACTERS]


def _sent(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a message as the wire has them: arguments of tool calls as JSON text."""
    sent = dict(parts)
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def _parts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of an answer that the server took apart; some servers say `reasoning`."""
    parts = {"reasoning_content": said.get("reasoning_content") or said.get("reasoning")}
    try:
        parts["tool_calls"] = typed_calls(said.get("tool_calls") or [])
    except Unusable as reason:
        raise _Refused(str(reason)) from None
    return {key: value for key, value in parts.items() if value}
