"""The decoding engine: many requests at once, speculative with a drafter, plain without one.

queue --prefill--> active rows --draft, policy--> proposals --one target pass over all rows--> accepted drafts + one
          ^                                                                                           |        token
          +---- a slot is free when a stop id or the cap ends its request <------- commit ------------+

Active rows fill the slots 0..n-1, so that every pass works on views of the stores. The target's states are known up to
each row's anchor, its last committed token; a round computes the anchor and the drafts behind it.
Shape suffixes: R active rows, P prompt positions, K drafts, Q = most proposed drafts of a row + 1, N single positions.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark.decoding.chains import ChainProposer
from dspark.decoding.fit import check_fit
from dspark.decoding.kv import Aim, AimedCache, PackedAim, target_store
from dspark.decoding.policies import WHOLE_BLOCK, Fixed, Policy, admitted, calibrated, check_policy
from dspark.decoding.proposer import Proposal, Proposer
from dspark.decoding.rounds import Drafts, Generation, Progress, Request, Round
from dspark.decoding.sampling import Sampler, Sampling
from dspark.errors import InputError
from dspark.model.drafter import Drafter
from dspark.model.kinds import AnyDrafter
from dspark.model.vocabulary import Vocabulary
from dspark.packed import Packed
from dspark.target import Target, TargetStates

__all__ = ["Engine", "Generation", "Request", "Round", "Sampling", "Seconds"]

# Prompts are prefilled together while at most this share of the pass is padding.
_MAX_PADDING = 0.2


@dataclass
class Seconds:
    """Wall time since the engine was made: `draft` and `verify` are passes with their heads, `total` is all of it."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    total: float = 0.0


class Engine:
    """Decodes requests with one target and at most one drafter, `batch` at a time, each up to `max_length` tokens.

    At temperature 0 the tokens are those of plain decoding whatever batch and policy (exactly in fp32, where no two
    logits are closer than rounding). Above 0 they have the target's law and depend on seed and request id alone, unless
    the policy is a schedule, whose lengths depend on the requests that share the batch.
    """

    def __init__(
        self,
        target: Target,
        drafter: AnyDrafter | None,
        batch: int,
        max_length: int,
        policy: Policy = WHOLE_BLOCK,
        temperatures: tuple[float, ...] | None = None,
    ) -> None:
        """
        Args:
            policy: how many drafts of each request are verified in a round.
            temperatures: calibration of the confidences, one per slot of the block; None: as the head gives them.

        Raises:
            InputError: lengths or sizes that target and drafter cannot serve, or a policy that the drafter cannot.
        """
        check_fit(target, drafter, batch, max_length)
        confident = isinstance(drafter, Drafter) and drafter.confidence_head is not None
        check_policy(policy, temperatures, drafter.config.block if drafter is not None else None, confident)
        self.policy, self.temperatures = policy, temperatures
        self.target, self.batch, self.max_length = target, batch, max_length
        self.store = target_store(target.config, batch, target.device, target.dtype)
        self.proposer = None if drafter is None else _proposer(drafter, target.decoding_vocabulary, batch)
        self.taps = drafter.config.taps if drafter is not None else ()
        self.seconds = Seconds()
        self._busy = False

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """All results, in the order of the requests.

        Raises:
            InputError: a request that cannot be decoded.
        """
        rows = {row.number: row for row in self._decode(requests)}
        return [rows[number].generation() for number in range(len(requests))]

    def stream(self, request: Request) -> Generator[Progress, None, None]:
        """The request as it stands after its prompt pass and after every round; closed early, it ends there.

        The engine decodes nothing else until the stream is exhausted or closed.
        """
        return self._decode([request])

    def _decode(self, requests: Sequence[Request]) -> Generator[Progress, None, None]:
        """Yields each request whenever it has got new tokens."""
        queue = deque(self._progress(number, request) for number, request in enumerate(requests))
        assert not self._busy, "an engine decodes one call at a time: exhaust or close its stream first"
        self._busy = True
        try:
            self._reserve(queue)
            active: list[Progress] = []
            while queue or active:
                while queue and len(active) < self.batch:
                    admitted = self._admit(queue, self.batch - len(active))
                    self._prefill(admitted, first=len(active))
                    yield from admitted
                    active += admitted
                    self._retire(active)
                if active:
                    self._round(active)
                    yield from list(active)
                    self._retire(active)
        finally:
            self._busy = False

    def _progress(self, number: int, request: Request) -> Progress:
        prompt, largest = len(request.prompt), max(request.prompt, default=0)
        if not 0 < prompt < self.max_length:
            raise InputError(
                f"request {request.id!r} has a prompt of {prompt} tokens, and the engine holds {self.max_length} "
                "tokens of prompt and answer: shorten the prompt or raise max_length"
            )
        if request.max_new_tokens < 1:
            raise InputError(f"request {request.id!r} asks for {request.max_new_tokens} new tokens: ask for at least 1")
        if largest >= self.target.vocab_size or min(request.prompt) < 0:
            raise InputError(
                f"request {request.id!r} holds token ids outside 0..{self.target.vocab_size - 1}: use the target's "
                "tokenizer"
            )
        cap = min(request.max_new_tokens, self.max_length - prompt)
        return Progress(number, request, cap, self.target.stop_ids)

    def _reserve(self, rows: Sequence[Progress]) -> None:
        # The last token of a text is never computed, but rows with few drafts left are padded by up to a block.
        slack = self.proposer.drafter.config.block if self.proposer else 0
        length = max((len(row.request.prompt) + row.cap + slack for row in rows), default=0)
        self.store.reserve(length)
        if self.proposer:
            self.proposer.store.reserve(length)

    def _admit(self, queue: deque[Progress], free: int) -> list[Progress]:
        """Takes the next requests that fit into one prefill without much padding; at least one."""
        admitted: list[Progress] = []
        used = longest = 0
        while queue and len(admitted) < free:
            prompt = len(queue[0].request.prompt)
            used, longest = used + prompt, max(longest, prompt)
            if admitted and used < (1 - _MAX_PADDING) * longest * (len(admitted) + 1):
                break
            admitted.append(queue.popleft())
        return admitted

    @torch.inference_mode()
    def _prefill(self, rows: Sequence[Progress], first: int) -> None:
        """Computes the prompts of new rows into the slots from `first` on, and commits their first tokens."""
        with self._timed("total"), self._timed("prefill"):
            device = self.target.device
            prompts = [torch.tensor(row.request.prompt) for row in rows]
            lengths = [len(prompt) for prompt in prompts]
            # Padding stands behind the prompts, where a causal mask hides it and the answer will overwrite it.
            ids_RP = pad_sequence(prompts, batch_first=True).to(device)
            positions_RP = torch.arange(ids_RP.shape[1], device=device).expand_as(ids_RP)
            cache = AimedCache(self.store, Aim(first, positions_RP, ids_RP.shape[1]))
            states = self.target.states(ids_RP, self.taps, positions_RP, cache=cache)
            last_RH = states.final[torch.arange(len(rows)), torch.tensor(lengths) - 1]
            sampler = Sampler([row.place for row in rows], device)
            verdict = sampler.judge(
                self.target.decoding_vocabulary.logits(last_RH[:, None]), ids_RP[:, :0], [0] * len(rows)
            )
            for row, token in zip(rows, verdict.following.tolist(), strict=True):
                row.begin(token)
            if self.proposer:
                firsts = [place * ids_RP.shape[1] for place in range(len(rows))]
                self._observe(states.taps.flatten(0, 1), dict(enumerate(rows)), [0] * len(rows), firsts, first)
        self._settle()

    @torch.inference_mode()
    def _round(self, rows: Sequence[Progress]) -> None:
        """One propose, verify, commit of all active rows."""
        with self._timed("total"):
            device = self.target.device
            anchors = [row.anchor for row in rows]
            sampler = Sampler([row.place for row in rows], device)
            drafted = [self._slots(row) for row in rows]
            proposal = Proposal(torch.empty(len(rows), 0, dtype=torch.int64, device=device), None)
            if self.proposer and max(drafted):
                with self._timed("draft"):
                    last_R = torch.tensor([row.tokens[-1] for row in rows], device=device)
                    proposal = self.proposer.propose(last_R, anchors, max(drafted), sampler)
            drafts = self._drafts(proposal, drafted)
            proposed = admitted(self.policy, drafted, [one.confidences for one in drafts])
            packed = Packed(anchors, [1 + count for count in proposed], device)
            with self._timed("verify"):
                states, logits_RQV = self._verify(rows, drafts, proposed, packed)
            verdict = sampler.judge(logits_RQV, proposal.tokens_RK[:, : max(proposed)], proposed)
            accepted, following = verdict.accepted.tolist(), verdict.following.tolist()
            for slot, row in enumerate(rows):
                row.commit(drafts[slot], proposed[slot], accepted[slot], following[slot])
            going = {slot: row for slot, row in enumerate(rows) if row.finish is None}
            if self.proposer and going:
                with self._timed("draft"):
                    starts, firsts = ([of[slot] for slot in going] for of in (anchors, packed.firsts))
                    self._observe(states.taps[0], going, starts, firsts, 0)
        self._settle()

    def _slots(self, row: Progress) -> int:
        """Draft tokens worth making: the target's own token comes on top, and the drafter's positions end."""
        if self.proposer is None:
            return 0
        config = self.proposer.drafter.config
        most = self.policy.slots if isinstance(self.policy, Fixed) and self.policy.slots else config.block
        return min(most, row.room - 1) if row.anchor + config.block <= config.max_positions else 0

    def _drafts(self, proposal: Proposal, drafted: Sequence[int]) -> list[Drafts]:
        """The drafts of each row on the host; a row with little room left has no use for all that the pass made."""
        logits: list[list[float]] = [[] for _ in drafted]
        confidences = logits
        if proposal.confidence_RK is not None:
            logits = proposal.confidence_RK.tolist()
            confidences = calibrated(proposal.confidence_RK, self.temperatures).tolist()
        parts = zip(proposal.tokens_RK.tolist(), confidences, logits, drafted, strict=True)
        return [Drafts(*(part[:count] for part in row)) for *row, count in parts]

    def _verify(
        self, rows: Sequence[Progress], drafts: Sequence[Drafts], proposed: Sequence[int], packed: Packed
    ) -> tuple[TargetStates, Tensor]:
        """States [1, N] of each row's anchor and proposed drafts, and their logits [R, Q, V], a view if Q is common."""
        parts = zip(rows, drafts, proposed, strict=True)
        ids = [token for row, made, count in parts for token in (row.tokens[-1], *made.tokens[:count])]
        ids_1N = torch.tensor([ids], device=self.target.device)
        cache = AimedCache(self.store, PackedAim(packed))
        states = self.target.states(ids_1N, self.taps, cache=cache, packed=packed)
        return states, packed.by_row(self.target.decoding_vocabulary.logits(states.final[0]))

    def _observe(
        self, taps_NLH: Tensor, rows: Mapping[int, Progress], starts: Sequence[int], firsts: Sequence[int], slot: int
    ) -> None:
        """Hands the drafter the taps of a pass for rows by their place in it, from `starts` to below the anchor.

        A row's taps stand together from `firsts` on, and it has the place `slot` + its place in the pass in the store.
        """
        assert self.proposer is not None
        indices = [
            (place + slot, first + column, start + column, token)
            for (place, row), start, first in zip(rows.items(), starts, firsts, strict=True)
            for column, token in enumerate(row.text(start + 1, row.anchor + 1))
        ]
        rows_N, columns_N, positions_N, following_N = torch.tensor(indices, device=taps_NLH.device).unbind(1)
        self.proposer.observe(rows_N, positions_N, taps_NLH[columns_N], following_N)

    def _retire(self, active: list[Progress]) -> None:
        """Frees the slots of finished rows; the last row moves into a gap, so that active rows stay together."""
        for slot in reversed(range(len(active))):
            if active[slot].finish is None:
                continue
            last = active.pop()
            if slot < len(active):
                active[slot] = last
                self.store.move(len(active), slot, last.anchor)
                if self.proposer:
                    self.proposer.move(len(active), slot, last.anchor)

    @contextmanager
    def _timed(self, part: Literal["prefill", "draft", "verify", "total"]) -> Iterator[None]:
        start = self._now()
        yield
        setattr(self.seconds, part, getattr(self.seconds, part) + self._now() - start)

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _settle(self) -> None:
        spent = self.seconds
        spent.other = spent.total - spent.prefill - spent.draft - spent.verify


def _proposer(drafter: AnyDrafter, vocabulary: Vocabulary, rows: int) -> Proposer | ChainProposer:
    if isinstance(drafter, Drafter):
        return Proposer(drafter, vocabulary, rows)
    return ChainProposer(drafter, vocabulary, rows)
