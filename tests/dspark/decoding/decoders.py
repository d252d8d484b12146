"""Tiny targets, drafters and requests that the tests of the decoding engine share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dspark.config import Settings
from dspark.decoding.engine import Engine, Generation, Request, Sampling
from dspark.decoding.sampling import Place, Sampler, distribution
from dspark.learning import DrafterSettings, Eagle3Settings, LossSettings
from dspark.model.config import Eagle3Config, draft_config, drafter_config
from dspark.model.drafter import Drafter, new_drafter
from dspark.model.eagle3 import Eagle3Drafter, new_eagle3_drafter
from dspark.model.vocabulary import Vocabulary
from dspark.sections import DataSettings, TargetSettings
from dspark.target import Target, load_target
from dspark.training.batch import Batch
from dspark.training.blocks import make_blocks
from dspark.training.chains import chain_anchors, make_chains
from dspark.training.eagle3 import Eagle3Objective
from dspark.training.objective import DraftObjective, step_weight
from tests.tiny import MASK_ID, tiny_model, tiny_target_folder, tiny_tokenizer

HEADS = ["none", "vanilla", "gated", "rnn", "reduced"]  # reduced: a vanilla head over two thirds of the tokens
TAPS = (0, 2, 4)
BLOCK = 4


@cache
def tiny_target(family: str = "llama") -> Target:
    with TemporaryDirectory() as folder:
        return load_target(TargetSettings(model=str(tiny_target_folder(Path(folder), family)), dtype="fp32"))


@cache
def small_vocabulary_target(tokens: int, family: str = "llama") -> Target:
    """A few layers and tokens: chance alone accepts many drafts, and laws can be written out."""
    sizes: dict[str, Any] = {
        "vocab_size": tokens, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 4 if family.startswith("gemma4") else 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.4,
        "pad_token_id": None, "eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = tiny_model(family, sizes)
    return Target(model, tiny_tokenizer(), "small", "local", "none")


def random_drafter(target: Target, head: str, taps: tuple[int, ...] = TAPS, mask: int = MASK_ID) -> Drafter:
    """Untrained, with a Markov bias and confidences that are not all alike."""
    kind: Any = "vanilla" if head in ("none", "reduced") else head
    kept = torch.arange(target.vocab_size)[torch.arange(target.vocab_size) % 3 != 1] if head == "reduced" else None
    settings = DrafterSettings(
        layers=2, block=BLOCK, taps=taps, mask_token_id=mask, markov_rank=0 if head == "none" else 8,
        markov_head=kind, confidence_with_markov=head != "none",
        vocab=None if kept is None else len(kept),
    )  # fmt: skip
    drafter = new_drafter(draft_config(target.config, settings), seed=1, kept=kept)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=1.5 if "markov_w2" in name else 0.3, generator=generator)
    return drafter.eval()


def random_eagle3(
    target: Target, taps: tuple[int, ...] = TAPS, reduced: bool = False, family: Any = None
) -> Eagle3Drafter:
    """Untrained, its weights as wide as those of `random_drafter`."""
    kept = torch.arange(target.vocab_size)[torch.arange(target.vocab_size) % 3 != 1] if reduced else None
    settings = Settings(
        name="tiny",
        target=TargetSettings(model="tiny"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none")),
        drafter=DrafterSettings(
            kind="eagle3", block=BLOCK, taps=taps, family=family, vocab=None if kept is None else len(kept)
        ),
        eagle3=Eagle3Settings(ttt_length=BLOCK),
    )
    config = drafter_config(target.config, settings)
    assert isinstance(config, Eagle3Config)
    drafter = new_eagle3_drafter(config, seed=1, kept=kept)
    generator = torch.Generator().manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.3, generator=generator)
    return drafter.eval()


def requests(target: Target, count: int, new: int, sampling: Sampling | None = None) -> list[Request]:
    """Prompts of 1, 4, 7, ... tokens."""
    generator = torch.Generator().manual_seed(3)
    high = min(target.vocab_size, 256)
    return [
        Request(
            f"request {number}",
            tuple(torch.randint(high, (1 + 3 * number,), generator=generator).tolist()),
            new + number,
            sampling or Sampling(),
        )
        for number in range(count)
    ]


@torch.inference_mode()
def without_cache(target: Target, request: Request) -> tuple[int, ...]:
    """Greedy decoding that computes everything anew for every token."""
    ids = list(request.prompt)
    for _ in range(request.max_new_tokens):
        final = target.states(torch.tensor([ids]), ()).final
        ids.append(int(target.vocabulary.logits(final[0, -1]).argmax()))
        if ids[-1] in target.stop_ids:
            break
    return tuple(ids[len(request.prompt) :])


def text_batch(target: Target, ids: Sequence[int]) -> Batch:
    ids_BS = torch.tensor([list(ids)])
    states = target.states(ids_BS, TAPS)
    return Batch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), states.taps.clone(), states.final.clone())


@cache
def greedy_texts() -> list[Batch]:
    """The target's own greedy texts, each a batch."""
    target = tiny_target()
    return [
        text_batch(target, [*request.prompt, *generation.tokens])
        for request, generation in zip(
            requests(target, 4, 40), Engine(target, None, 4, 100).generate(requests(target, 4, 40)), strict=True
        )
    ]


@cache
def trained_drafter() -> Drafter:
    """Trained for 60 steps on the target's own greedy texts, long enough to guess many of their tokens."""
    target = tiny_target()
    drafter, texts = random_drafter(target, "vanilla").train(), greedy_texts()
    objective = DraftObjective(drafter, LossSettings(ce=1.0, l1=0.0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for step in range(60):
        batch = texts[step % len(texts)]
        anchors = [np.arange(batch.input_ids_BS.shape[1] - 1)]
        blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, BLOCK, gamma=None)
        objective(target.vocabulary, batch, blocks, step_weight(blocks)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@cache
def trained_eagle3() -> Eagle3Drafter:
    """Trained on the same texts for 90 steps."""
    target, settings = tiny_target(), Eagle3Settings(ttt_length=BLOCK)
    drafter, texts = random_eagle3(target).train(), greedy_texts()
    objective = Eagle3Objective(drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2)
    for step in range(90):
        batch = texts[step % len(texts)]
        mask = batch.loss_mask_BS[0].numpy().astype(np.uint8)
        chains = make_chains(batch, [chain_anchors(mask, settings)], [len(mask)], settings)
        objective(target.vocabulary, batch, chains, chains.divisor).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def accepted(generations: Sequence[Generation]) -> int:
    return sum(round.accepted for generation in generations for round in generation.rounds)


def outcomes(generations: Sequence[Generation]) -> list[Any]:
    """Everything but the confidences, which a batch changes by rounding."""
    return [
        (one.tokens, one.drafted, [(round.proposed, round.accepted, round.kept) for round in one.rounds])
        for one in generations
    ]


class Recorder(Sampler):
    """A sampler that remembers the logits and drafts of every round."""

    rounds: ClassVar[list[list[tuple[Tensor, Tensor]]]] = []

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        super().__init__(places, device)
        self.rounds.append([])

    def choose(self, logits_RD: Tensor, slot: int, vocabulary: Vocabulary) -> Tensor:
        tokens_R = super().choose(logits_RD, slot, vocabulary)
        self.rounds[-1].append((logits_RD.clone(), tokens_R))
        return tokens_R


@dataclass
class Reader(Sampler):
    """Chooses a text's own tokens, and remembers the logits that it was shown."""

    text: list[int]
    shown: list[Tensor]

    def choose(self, logits_RD: Tensor, slot: int, vocabulary: Vocabulary) -> Tensor:
        self.shown.append(logits_RD)
        return torch.tensor([self.text[slot]])


@torch.inference_mode()
def law_of_three_tokens(target: Target, prompt: tuple[int, int, int], rule: Sampling) -> Tensor:
    """Probabilities [27] of the three tokens after `prompt`, from a target of three tokens."""
    texts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    final = target.states(torch.cat((torch.tensor(prompt).expand(9, 3), texts), dim=1), ()).final
    law_93V = distribution(target.vocabulary.logits(final[:, 2:]), rule)
    first, second, third = law_93V[0, 0], law_93V[::3, 1], law_93V[:, 2]
    exact: Tensor = (first[:, None, None] * second[:, :, None] * third.view(3, 3, 3)).flatten()
    return exact
