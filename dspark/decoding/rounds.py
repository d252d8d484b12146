"""Requests, rounds and what becomes of them: bookkeeping in plain Python, without a tensor.

The prefill gives the first token, which belongs to no round. Every round then commits the accepted drafts and one token
of the target's own, until a stop id or the cap ends the text: kept tokens of all rounds + 1 = tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dspark.decoding.sampling import Place, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt to continue. The id names its random numbers: equal ids and seeds give equal texts."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Round:
    """One propose, verify, commit of one request."""

    proposed: int  # draft tokens offered for verification, the first ones of those drafted
    accepted: int  # of these accepted by the target's test
    kept: int  # tokens kept from this round: accepted + 1, fewer when a stop id ends it
    confidences: tuple[float, ...]  # of all drafted slots, after calibration if there is one; () without the head
    logits: tuple[float, ...]  # of the confidence head for the same slots, before calibration
    drafted: int  # draft tokens made; a policy may offer fewer of them


class Drafts(NamedTuple):
    """What a drafter made for one request in one round; confidences and their logits are empty without their head."""

    tokens: Sequence[int]
    confidences: Sequence[float]
    logits: Sequence[float]


@dataclass(frozen=True)
class Generation:
    """A finished request. The stop token that ended it, if any, is its last token."""

    id: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]  # whether token i was an accepted draft token
    rounds: tuple[Round, ...]
    finish: Literal["stop", "length"]


@dataclass
class Progress:
    """A request while it is decoded. `cap` is the number of tokens that it may get, at least 1."""

    number: int  # place among the requests of the call
    request: Request
    cap: int
    stop_ids: Collection[int]
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    @property
    def anchor(self) -> int:
        """Position of the last token; the target's states are known for all positions before it."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def text(self, start: int, end: int) -> list[int]:
        """Tokens at positions start..end-1 of prompt and answer."""
        prompt, first = self.request.prompt, len(self.request.prompt)
        return [*prompt[start:end], *self.tokens[max(start - first, 0) : max(end - first, 0)]]

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.cap - len(self.tokens)

    @property
    def place(self) -> Place:
        """What a sampler needs to know of it."""
        return Place(self.request.sampling, self.request.id, self.anchor)

    def begin(self, token: int) -> None:
        """Commits the first token, which the prefill gave."""
        self._commit([token], accepted=0)

    def commit(self, drafts: Drafts, proposed: int, accepted: int, following: int) -> None:
        """Commits a round: the accepted ones of its `proposed` first drafts, then the target's token."""
        kept = self._commit([*drafts.tokens[:accepted], following], accepted)
        self.rounds.append(
            Round(proposed, accepted, kept, tuple(drafts.confidences), tuple(drafts.logits), len(drafts.tokens))
        )

    def generation(self) -> Generation:
        """The result of a finished request."""
        assert self.finish is not None, "this request is still being decoded"
        return Generation(self.request.id, tuple(self.tokens), tuple(self.drafted), tuple(self.rounds), self.finish)

    def _commit(self, tokens: Sequence[int], accepted: int) -> int:
        """Keeps tokens up to the first stop id, and returns how many. A stop id that fills the cap counts as stop."""
        assert len(tokens) <= self.room, "more drafts were offered than the cap leaves room for"
        kept = 0
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            self.drafted.append(place < accepted)
            kept += 1
            if token in self.stop_ids:
                self.finish = "stop"
                return kept
        if not self.room:
            self.finish = "length"
        return kept
