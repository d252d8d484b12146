"""What turns hold beside their content: tool calls, tool definitions, reasoning, and answers that are context only."""

from dataclasses import replace
from typing import Any

from dspark.data.conversations import Message
from tests.dspark.data.test_render import HEADER, answers_of, of, reason, renderer, sample
from tests.tiny import CHATML, tiny_tokenizer

WITH_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    + HEADER
)


def calling(name: str = "f", **more: Any) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": {"x": 1}}}
    return Message("assistant", "let me see ", {"tool_calls": [call]}, **more)


def test_a_tool_call_is_supervised_up_to_its_end_of_turn_and_tool_definitions_are_printed() -> None:
    ask, result = Message("user", "q"), Message("tool", "r")
    row = replace(of(("user", "q")), messages=(ask, calling(), result, Message("assistant", "done")))
    called = 'let me see <call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>'
    assert answers_of(row, WITH_TOOLS) == [called, "done<|im_end|>"]
    defined = replace(row, tools=({"type": "function", "function": {"name": "f"}},))
    text = tiny_tokenizer().decode(sample(renderer(WITH_TOOLS), defined).input_ids.tolist())
    assert str(text).startswith('<tools>[{"type": "function", "function": {"name": "f"}}]</tools>')
    assert answers_of(defined, WITH_TOOLS) == answers_of(row, WITH_TOOLS)


def test_an_answer_that_is_context_only_is_printed_and_not_supervised() -> None:
    row = replace(
        of(("user", "q")), messages=(Message("user", "q"), calling(supervised=False), Message("assistant", "a"))
    )
    assert answers_of(row, WITH_TOOLS) == ["a<|im_end|>"]
    assert "<call>" in str(tiny_tokenizer().decode(sample(renderer(WITH_TOOLS), row).input_ids.tolist()))


def test_reasoning_is_supervised_where_the_template_prints_it_and_refused_where_it_never_does() -> None:
    thought = Message("assistant", "a", {"reasoning_content": "hm"})
    row = replace(of(("user", "q")), messages=(Message("user", "q"), thought))
    assert answers_of(row, WITH_TOOLS) == ["<think>hm</think>a<|im_end|>"]
    assert reason(renderer(CHATML).sample(row)) == (
        "the chat template does not print a message's reasoning_content: put it into the content"
    )
    later = replace(row, messages=(*row.messages, Message("user", "r"), Message("assistant", "b")))
    assert answers_of(later, WITH_TOOLS) == ["b<|im_end|>"]  # the first answer stands there without its thinking
