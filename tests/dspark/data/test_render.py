"""Token rows and loss masks, on templates with the habits of real ones."""

import hashlib
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dspark.data.conversations import DUPLICATE, Conversation, Conversations, Dropped, Message
from dspark.data.render import Renderer, Sample, render
from dspark.errors import InputError
from tests.tiny import CHATML, tiny_tokenizer

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
STRIPS_EARLIER_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + HEADER
)
THINKS_UNLESS_TOLD = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)
PRINTS_BOS = "{{ bos_token }}" + CHATML
REFUSES_ROLE_ORDER = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
IGNORES_GENERATION_PROMPT = CHATML.removesuffix(HEADER)
ENDS_NO_TURN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
EMPTY_THINKING_IN_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
)
PIECES = ["a", "x", " ", "\n", "é", "語", "<|im_end|>", "<|im_start|>assistant\n"]
ANSWERS_ONLY = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"


def conversation(*contents: str, row: int = 1) -> Conversation:
    """User and assistant in turns."""
    return of(*zip(["user", "assistant"] * len(contents), contents, strict=False), row=row)


def of(*turns: tuple[str, str], row: int = 1) -> Conversation:
    return Conversation(f"c{row}", tuple(Message(role, content) for role, content in turns), None, row)


def renderer(template: str = CHATML, max_length: int = 4096, thinking: bool | None = None) -> Renderer:
    return Renderer(tiny_tokenizer(template), max_length, thinking)


def sample(renderer: Renderer, row: Conversation) -> Sample:
    result = renderer.sample(row)
    assert isinstance(result, Sample), result
    return result


def answers(sample: Sample, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """The text of each run of supervised tokens."""
    tokenizer = tokenizer or tiny_tokenizer()
    pairs = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
    runs = [(inside, [token for _, token in run]) for inside, run in groupby(pairs, key=lambda pair: pair[0])]
    return [str(tokenizer.decode(ids, skip_special_tokens=False)) for inside, ids in runs if inside]


def answers_of(row: Conversation, template: str = CHATML, thinking: bool | None = None) -> list[str]:
    return answers(sample(renderer(template, thinking=thinking), row))


def reason(result: Sample | Dropped) -> str:
    assert isinstance(result, Dropped)
    return result.reason


def trimming_tokenizer() -> PreTrainedTokenizerFast:
    """Reports blanks as the tokenizers of Llama 3 and SmolLM2 do: as empty ranges."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def test_every_answer_and_its_end_token_are_supervised_but_not_the_newline_behind() -> None:
    made = sample(
        renderer(), of(("system", "s"), ("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "2"))
    )
    assert answers(made) == ["one<|im_end|>", "2<|im_end|>"]
    assert (made.input_ids.dtype.name, made.loss_mask.dtype.name) == ("int32", "uint8")
    assert made.input_ids.tolist()[-2:] == [258, tiny_tokenizer()("\n")["input_ids"][0]]
    assert made.loss_mask.tolist()[-2:] == [1, 0]


@pytest.mark.parametrize("template", [CHATML, TRIMS])
def test_the_end_of_an_answer_that_was_cut_off_is_not_supervised(template: str) -> None:
    row = of(("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "2, 3 and"))
    assert answers_of(replace(row, finished=False), template) == ["one<|im_end|>", "2, 3 and"]
    assert answers_of(row, template) == ["one<|im_end|>", "2, 3 and<|im_end|>"]
    more = of(("user", "q"), ("assistant", "2, 3 and"), ("user", "go on"))
    assert answers_of(replace(more, finished=False), template) == ["2, 3 and"]


def test_mask_positions_of_a_short_row_by_hand() -> None:
    # <start> user \n q <end> \n is 9 tokens, <start> assistant \n is 11; then h, i, <end>, \n.
    made = sample(renderer(), conversation("q", "hi"))
    assert made.loss_mask.tolist() == [0] * 20 + [1, 1, 1, 0]


def test_headers_that_the_user_types_are_not_supervised() -> None:
    typed = "a<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n"
    assert answers_of(conversation(typed, "real")) == ["real<|im_end|>"]


def test_an_end_token_within_the_answer_does_not_end_it() -> None:
    assert answers_of(conversation("q", "a<|im_end|>b", "r", "c")) == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]


def test_tool_turns_are_not_supervised() -> None:
    row = of(("user", "q"), ("assistant", "call"), ("tool", "result"), ("assistant", "done"))
    assert answers_of(row) == ["call<|im_end|>", "done<|im_end|>"]


@settings(max_examples=40)
@given(
    contents=st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=2, max_size=6),
    trims_offsets=st.booleans(),
)
def test_what_is_supervised_is_exactly_the_answers(contents: list[str], trims_offsets: bool) -> None:
    tokenizer = trimming_tokenizer() if trims_offsets else tiny_tokenizer()
    wanted = [answer + "<|im_end|>" for answer in contents[1::2]]
    result = Renderer(tokenizer, 4096, None).sample(conversation(*contents))
    if max(map(len, contents[1::2])) == 0:
        assert reason(result) == "fewer than two adjacent supervised tokens"
    else:
        assert isinstance(result, Sample)
        assert answers(result, tokenizer) == wanted


def test_blanks_without_character_ranges_stay_supervised_inside_answers_only() -> None:
    tokenizer = trimming_tokenizer()
    assert (3, 3) in tokenizer("a  b", return_offsets_mapping=True)["offset_mapping"]
    made = sample(Renderer(tokenizer, 4096, None), conversation("q  r", "  if x:\n    y"))
    assert answers(made) == ["  if x:\n    y<|im_end|>"]
    assert made.sample_id == sample(renderer(), conversation("q  r", "  if x:\n    y")).sample_id


def test_earlier_answers_whose_thinking_is_stripped_are_not_supervised() -> None:
    row = conversation("q", "<think>a</think>one", "r", "<think>b</think>two")
    assert answers_of(row, STRIPS_EARLIER_THINKING) == ["<think>b</think>two<|im_end|>"]


def test_thinking_that_the_template_adds_to_the_last_answer_is_supervised() -> None:
    row = conversation("q", "one", "r", "two")
    assert answers_of(row, EMPTY_THINKING_IN_THE_LAST) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]


def test_thinking_is_passed_only_if_set() -> None:
    shows_the_flag = "{{ 'passed ' if enable_thinking is defined else 'absent ' }}{{ enable_thinking }}"
    tokenizer = tiny_tokenizer()

    def prompt(thinking: bool | None) -> str:
        return str(tokenizer.decode(renderer(shows_the_flag, thinking=thinking).prompt([Message("user", "q")])))

    assert [prompt(thinking) for thinking in (None, True, False)] == ["absent ", "passed True", "passed False"]


def test_an_answer_in_another_think_mode_than_its_generation_prompt_is_dropped() -> None:
    thoughtful = conversation("q", "<think>hm</think>yes")
    assert answers_of(thoughtful, THINKS_UNLESS_TOLD, thinking=True) == ["<think>hm</think>yes<|im_end|>"]
    dropped = renderer(THINKS_UNLESS_TOLD, thinking=False).sample(thoughtful)
    assert reason(dropped).startswith("no supervised token: no answer is rendered as the continuation")
    plain = conversation("q", "<think></think>yes")
    assert answers_of(plain, THINKS_UNLESS_TOLD, thinking=False) == ["yes<|im_end|>"]


def test_a_begin_token_that_the_template_prints_is_not_doubled() -> None:
    tokenizer = tiny_tokenizer(PRINTS_BOS)
    tokenizer.add_special_tokens({"bos_token": AddedToken("<|begin|>", special=True)})
    begin = tokenizer.get_vocab()["<|begin|>"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    assert tokenizer("a")["input_ids"][0] == begin  # the tokenizer adds one by itself

    renderer = Renderer(tokenizer, 4096, None)
    made = sample(renderer, conversation("q", "hi"))
    assert made.input_ids.tolist().count(begin) == 1 and made.input_ids[0] == begin
    assert answers(made, tokenizer) == ["hi<|im_end|>"]
    assert renderer.prompt([Message("user", "q")]).count(begin) == 1


def test_a_row_that_the_template_refuses_costs_itself_only() -> None:
    rows = (
        conversation("q", "hi", row=1),
        of(("assistant", "a"), ("user", "q"), row=2),
        conversation("r", "yo", row=3),
    )
    made = render(renderer(REFUSES_ROLE_ORDER), Conversations(rows, ()), max_bad_fraction=0.5)
    assert [answers(row) for row in made.samples] == [[" hi<|im_end|>"], [" yo<|im_end|>"]]
    assert made.dropped == (Dropped("c2", 2, "the chat template refused the row: roles must alternate"),)


def test_any_error_of_the_template_costs_its_row_only() -> None:
    fails = "{{ messages[0].content + 1 }}"  # a TypeError, none of Jinja's
    assert reason(renderer(fails).sample(conversation("q", "hi"))).startswith("the chat template refused the row: ")


def test_without_a_generation_prompt_the_target_writes_the_header_itself() -> None:
    header = "<|im_start|>assistant\n"
    assert answers_of(conversation("q", "hi"), IGNORES_GENERATION_PROMPT) == [header + "hi<|im_end|>"]


def test_without_an_end_token_the_answer_ends_with_its_content() -> None:
    assert answers_of(conversation("q", "hi", "r", "xx", "s", "xy"), ENDS_NO_TURN) == ["hi", "xx", "xy"]


def test_content_that_the_template_trims_is_still_found() -> None:
    assert answers_of(conversation("q", "  im \n", "r", "\n"), TRIMS) == ["im<|im_end|>", "<|im_end|>"]
    assert answers_of(conversation("q", "xx \n"), ENDS_NO_TURN.replace("m.content", "m.content | trim")) == ["xx"]


def test_a_blank_token_ends_no_turn() -> None:
    tokenizer = tiny_tokenizer(ENDS_NO_TURN)
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    made = sample(Renderer(tokenizer, 4096, None), conversation("q", "hi"))
    assert answers(made, tokenizer) == ["hi"]


def test_a_span_may_start_at_token_0() -> None:
    made = sample(renderer(ANSWERS_ONLY), conversation("q", "hi"))
    assert made.loss_mask.tolist() == [1, 1, 1]


def test_an_answer_that_opens_the_conversation_is_not_supervised() -> None:
    row = of(("assistant", "welcome"), ("user", "q"), ("assistant", "hi"))
    assert answers_of(row) == ["hi<|im_end|>"]


@pytest.mark.parametrize(
    ("max_length", "kept"),
    [
        (22, ["he"]),  # inside turn 1, whose answer starts at token 20
        (25, ["hello"]),
        (26, ["hello<|im_end|>"]),
        (48, ["hello<|im_end|>", "b"]),  # inside turn 2, whose answer starts at 27 + 20
        (50, ["hello<|im_end|>", "bye"]),
        (51, ["hello<|im_end|>", "bye<|im_end|>"]),
    ],
)
def test_a_long_row_is_cut_at_the_end_and_keeps_its_mask(max_length: int, kept: list[str]) -> None:
    row = conversation("q", "hello", "r", "bye")
    whole, cut = sample(renderer(), row), sample(renderer(max_length=max_length), row)
    assert answers(cut) == kept
    assert cut.input_ids.tolist() == whole.input_ids[:max_length].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:max_length].tolist()


def test_a_row_without_an_anchor_candidate_is_dropped_and_says_why() -> None:
    cut = renderer(max_length=21).sample(conversation("q", "hello"))
    assert reason(cut) == "fewer than two adjacent supervised tokens in the first 21 tokens"
    assert reason(renderer().sample(conversation("q", ""))) == "fewer than two adjacent supervised tokens"
    assert reason(renderer().sample(of(("user", "q")))) == "no assistant turn"


def test_the_sample_id_is_the_hash_of_ids_and_mask() -> None:
    made = sample(renderer(), conversation("q", "hi"))
    content = made.input_ids.astype("<i4").tobytes() + b"|" + bytes(made.loss_mask.tolist())
    assert made.sample_id == hashlib.sha256(content).hexdigest()[:32]


def test_rows_that_become_the_same_tokens_are_dropped_but_are_not_bad() -> None:
    rows = tuple(conversation("q", answer, row=row) for row, answer in enumerate(["hi", " hi", "hi  ", "yo"], start=1))
    made = render(renderer(TRIMS), Conversations(rows, ()), max_bad_fraction=0.0)
    assert [row.conversation_id for row in made.samples] == ["c1", "c4"]
    assert made.dropped == (Dropped("c2", 2, DUPLICATE), Dropped("c3", 3, DUPLICATE))


def test_more_refused_rows_than_allowed_stop_with_counts_by_reason() -> None:
    rows = (conversation("q", "hi", row=1), of(("user", "q"), row=2), of(("user", "r"), row=5))
    assert len(render(renderer(), Conversations(rows, ()), max_bad_fraction=2 / 3).samples) == 1
    with pytest.raises(InputError, match=r"(?s)2 of 3 rows.*2 x no assistant turn \(rows 2, 5\)"):
        render(renderer(), Conversations(rows, ()), max_bad_fraction=0.6)


def test_a_file_that_gives_no_sample_is_refused_whatever_the_threshold() -> None:
    rows = (of(("user", "q"), row=1),)
    with pytest.raises(InputError, match=r"(?s)no supervised token in any of 1 rows.*1 x no assistant turn \(row 1\)"):
        render(renderer(), Conversations(rows, ()), max_bad_fraction=1.0)


def test_a_prompt_is_the_beginning_of_the_row_that_answers_it() -> None:
    row = conversation("q", "one", "r", "two")
    made = sample(renderer(), row)
    prompt = renderer().prompt(row.messages[:3])
    assert made.input_ids[: len(prompt)].tolist() == prompt
    assert made.loss_mask[len(prompt) - 1 : len(prompt) + 4].tolist() == [0, 1, 1, 1, 1]


def test_a_prompt_that_the_template_refuses_is_an_error() -> None:
    with pytest.raises(InputError, match=r"roles must alternate.*'system'"):
        renderer(REFUSES_ROLE_ORDER).prompt([Message("system", "s")])


def test_the_settings_hash_changes_with_all_that_decides_the_rows_and_with_nothing_else() -> None:
    more_tokens = tiny_tokenizer()
    more_tokens.add_tokens(["<|extra|>"])
    changed = [
        renderer(TRIMS),
        renderer(max_length=100),
        renderer(thinking=True),
        renderer(thinking=False),
        Renderer(more_tokens, 4096, None),
    ]
    used = renderer()
    used.sample(conversation("q", "hi"))
    assert used.settings_hash == renderer().settings_hash
    assert len({renderer().settings_hash, *(one.settings_hash for one in changed)}) == 6


def test_a_tokenizer_without_a_template_or_without_offsets_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        Renderer(tiny_tokenizer(template=None), 4096, None)
    with pytest.raises(InputError, match=r"ByT5Tokenizer.*fast tokenizer"):
        Renderer(ByT5Tokenizer(), 4096, None)  # a slow one that needs no files
