"""A target with its drafter that answers conversations, and how it is asked to.

messages -> chat template -> engine -> the answer, round by round
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.data.conversations import Message
from dspark.data.render import Renderer
from dspark.decoding.engine import Engine, Request, Sampling
from dspark.decoding.policies import PolicyName, choose_policy
from dspark.decoding.rounds import Progress
from dspark.errors import InputError
from dspark.model.exchange import check_made_for, load_for_target, target_facts_of
from dspark.sections import Precision, TargetSettings
from dspark.target import load_target


@dataclass(frozen=True)
class Wish:
    """How to answer. `target` None: the one that the drafter was trained for."""

    target: str | None = None
    system: str | None = None
    thinking: bool | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    policy: PolicyName = "fixed"
    slots: int | None = None
    threshold: float | None = None
    calibration: Path | None = None
    dtype: Precision = "fp32"


class Assistant:
    """A target and its drafter that answer conversations, one at a time."""

    def __init__(self, checkpoint: Path, wish: Wish) -> None:
        """
        Raises:
            InputError: target, drafter and wish do not go together.
        """
        self.sampling = Sampling(wish.temperature, wish.top_k, wish.top_p, wish.seed)
        policy = choose_policy(wish.policy, wish.slots, wish.threshold, wish.calibration)
        settings = target_of(checkpoint, wish)
        check_made_for(settings, checkpoint)
        target = load_target(settings)
        drafter = load_for_target(checkpoint, settings, target.device, target.dtype).drafter
        self.tokenizer, self.positions = target.tokenizer, target.config.max_position_embeddings
        self.opening = () if wish.system is None else (Message("system", wish.system),)
        self._longest = wish.max_new_tokens
        self._engine = Engine(target, drafter, 1, self.positions, *policy)
        self._renderer = Renderer(target.tokenizer, self.positions, wish.thinking)

    def stream(self, messages: Sequence[Message]) -> Generator[Progress, None, None]:
        """The answer to a conversation, round by round; the same for the same messages and seed.

        Raises:
            InputError: the template refuses the conversation, or it leaves no room for an answer.
        """
        ids = self._renderer.prompt(messages)
        if len(ids) >= self.positions:
            raise InputError(
                f"the conversation has {len(ids)} tokens and the target {self.positions} positions, so that none is "
                "left for an answer: shorten it, or begin a new one"
            )
        return self._engine.stream(Request("generate", tuple(ids), self._longest, self.sampling))


def target_of(checkpoint: Path, wish: Wish) -> TargetSettings:
    """The target to load.

    Raises:
        InputError: none is named, and the drafter does not say for which it was trained.
    """
    if wish.target is not None:
        return TargetSettings(model=wish.target, dtype=wish.dtype)
    made_for = target_facts_of(checkpoint)
    if "name" not in made_for:
        raise InputError(f"{checkpoint} does not say for which target it was trained: name it with --target")
    return TargetSettings(model=made_for["name"], revision=made_for.get("revision"), dtype=wish.dtype)
