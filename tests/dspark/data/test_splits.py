"""Duplicates and splits: what stays, and that nothing moves when rows are added."""

from hypothesis import given
from hypothesis import strategies as st

from dspark.data.conversations import Conversation, Message
from dspark.data.splits import SAME_QUESTION, askable, split_of


def rows(*questions: str) -> list[Conversation]:
    return [
        Conversation(str(i), (Message("system", "short"), Message("user", question)), None, i)
        for i, question in enumerate(questions, start=1)
    ]


def test_of_equal_final_user_texts_the_first_stays_whatever_came_before_them() -> None:
    first, other, again = rows("what?", "who?", " what?\n")
    followed = Conversation(
        "4", (Message("user", "what?"), Message("assistant", "x"), Message("user", "go on")), None, 4
    )
    silent = Conversation("5", (Message("system", "s"),), None, 5)
    kept, dropped = askable([first, other, again, followed, silent])
    assert kept == [first, other, followed]
    assert [(one.row, one.reason) for one in dropped] == [(3, SAME_QUESTION), (5, "no user turn")]


@given(
    old=st.lists(st.text("abc", max_size=3), max_size=12),
    new=st.lists(st.text("abc", max_size=3), max_size=6),
    shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.4)),
)
def test_rows_that_are_added_anywhere_move_no_other_row(
    old: list[str], new: list[str], shares: tuple[float, float]
) -> None:
    def splits(*questions: str) -> dict[str, str]:
        kept, _ = askable(rows(*questions))
        return {row.messages[-1].content: split_of(row.digest, *shares) for row in kept}

    before = splits(*old)
    assert before.items() <= splits(*old, *new).items()
    assert before.items() <= splits(*new, *old).items()
    assert len(before) == len(set(old))


def test_the_splits_have_the_shares_that_were_asked_for() -> None:
    splits = [split_of(f"digest {i}", validation=0.1, held_out=0.2) for i in range(4000)]
    assert abs(splits.count("validation") - 400) < 95  # 5 deviations
    assert abs(splits.count("held_out") - 800) < 127
    assert {split_of(str(i), 0.0, 0.0) for i in range(100)} == {"train"}
    # A larger share takes rows from training alone.
    larger = [split_of(f"digest {i}", validation=0.2, held_out=0.2) for i in range(4000)]
    assert all(new == old or (old, new) == ("train", "validation") for old, new in zip(splits, larger, strict=True))


def test_the_split_of_a_conversation_is_the_same_in_every_process() -> None:
    found = [split_of(name, 0.3, 0.3) for name in "abcde"]
    assert found == ["train", "validation", "held_out", "held_out", "train"]
