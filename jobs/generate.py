"""`dspark generate`: one answer, streamed, with the tokens that the drafter guessed marked.

prompt -> chat template -> engine, round by round -> characters as they become complete -> terminal
"""

import re
from collections.abc import Generator
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dspark.data.conversations import Message
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.model.exchange import load_for_target
from dspark.sections import Precision, TargetSettings
from dspark.target import load_target

ACCEPTED = "green"
# What a model writes must not steer the terminal.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def generate(
    checkpoint: Path,
    target: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: Precision,
) -> None:
    """Answers `prompt` on stdout; on a terminal accepted draft tokens are green, elsewhere the text is plain.

    Raises:
        InputError: target, checkpoint and prompt do not go together.
    """
    settings = TargetSettings(model=target, dtype=dtype)
    loaded = load_target(settings)
    drafter = load_for_target(checkpoint, settings, loaded.device, loaded.dtype).drafter
    limit = loaded.config.max_position_embeddings
    ids = Renderer(loaded.tokenizer, limit, thinking=None).prompt([Message("user", prompt)])
    engine = Engine(loaded, drafter, batch=1, max_length=min(len(ids) + max_new_tokens, limit))
    request = Request("generate", tuple(ids), max_new_tokens, Sampling(temperature=temperature, seed=seed))
    console = Console(highlight=False)
    generation = show(engine.stream(request), loaded.tokenizer, console)
    console.print(Text(summary(generation, engine.seconds.total), style="dim"), soft_wrap=True)


def show(
    stream: Generator[tuple[int, bool], None, Generation], tokenizer: PreTrainedTokenizerBase, console: Console
) -> Generation:
    """Prints the text of a stream as it arrives and returns the stream's result."""
    characters = Characters(tokenizer)
    while True:
        try:
            token, drafted = next(stream)
        except StopIteration as end:
            _write(console, characters.rest() + "\n", drafted=False)
            return cast(Generation, end.value)
        _write(console, characters.of(token), drafted)


def _write(console: Console, text: str, drafted: bool) -> None:
    if console.is_terminal:
        # Not wrapped: a piece is printed without knowing the column where it starts.
        console.print(Text(CONTROL.sub("\ufffd", text), style=ACCEPTED if drafted else ""), end="", soft_wrap=True)
    else:
        console.file.write(text)
    console.file.flush()


class Characters:
    """Text of tokens that arrive one by one: a character is given out when all its bytes are there.

    What was given out is not decoded again, so the cost of a token does not grow; but for the last piece, because a
    tokenizer may drop the blank at the start of what it decodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

    def of(self, token: int) -> str:
        """The characters that `token` completes; special tokens have none."""
        self._pending.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def rest(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        piece, self._pending = self._piece(), []
        return piece

    def _piece(self) -> str:
        return self._decode([*self._before, *self._pending])[len(self._decode(self._before)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def summary(generation: Generation, seconds: float) -> str:
    """Tokens, speed and acceptance length of one generation, with the definition of the latter."""
    tokens, rounds = len(generation.tokens), len(generation.rounds)
    speed = f"{tokens} token{'s' if tokens > 1 else ''}, {tokens / seconds:.1f} tokens/s"
    if not rounds:
        return f"{speed}, no round: the prefill gave the only token"
    kept = sum(round.kept for round in generation.rounds)
    return (
        f"{speed}, acceptance length {kept / rounds:.2f} over {rounds} rounds (tokens kept per round: accepted drafts "
        "+ 1, fewer in the round that a stop token or the cap ends; the prefill's token belongs to no round)"
    )


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("generate")
