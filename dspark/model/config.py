"""The drafter's architecture: one frozen value, from a target and settings or from a `config.json`."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from dspark.config import DrafterSettings, Settings
from dspark.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes that drafters of every kind have. Lengths in tokens, widths in units."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int  # tokens that the drafter may propose, D; the target's V unless it is reduced
    norm_eps: float
    max_positions: int
    rope: dict[str, Any]
    target_layers: int
    layers: int
    block: int  # tokens proposed in a round
    taps: tuple[int, ...]
    activation: str = "silu"
    init_std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DraftConfig):
    """A DSpark drafter (design section 4)."""

    mask_token_id: int
    markov_rank: int
    markov_head: str
    confidence: bool
    confidence_with_markov: bool

    def __str__(self) -> str:
        taps = list(self.taps)
        return f"DSpark, {self.layers} layers, block {self.block}, taps {taps}, rank {self.markov_rank}"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """An EAGLE-3 drafter, of one layer (design section 5), and the training that it had."""

    target_name: str
    ttt_length: int  # chained steps
    step_loss_decay: float

    def __str__(self) -> str:
        return f"EAGLE-3, block {self.block}, taps {list(self.taps)}, {self.ttt_length} chained steps"


def drafter_config(target: PreTrainedConfig, settings: Settings) -> DSparkConfig | Eagle3Config:
    """The drafter of an experiment, of whichever kind.

    Raises:
        InputError: see `draft_config`.
    """
    if settings.drafter.kind == "dspark":
        return draft_config(target, settings.drafter)
    return Eagle3Config(
        **_sizes(target, settings.drafter),
        layers=1,
        target_name=settings.target.model,
        ttt_length=settings.eagle3.ttt_length,
        step_loss_decay=settings.eagle3.step_loss_decay,
    )


def draft_config(target: PreTrainedConfig, settings: DrafterSettings) -> DSparkConfig:
    """The DSpark drafter that `settings` asks for on top of `target` (its text configuration).

    Raises:
        InputError: a tap outside -1..layers-2, or a mask token that is out of range or already means something.
    """
    sizes = _sizes(target, settings)
    assert settings.mask_token_id is not None
    check_mask_token(settings.mask_token_id, target)
    return DSparkConfig(
        **sizes,
        layers=settings.layers,
        mask_token_id=settings.mask_token_id,
        markov_rank=settings.markov_rank,
        markov_head=settings.markov_head,
        confidence=settings.confidence,
        confidence_with_markov=settings.confidence and settings.confidence_with_markov,
    )


def _sizes(target: PreTrainedConfig, settings: DrafterSettings) -> dict[str, Any]:
    """What every kind of drafter takes from its target, and the settings that all have."""
    _check_taps(settings.taps, target.num_hidden_layers)
    if settings.vocab is not None and settings.vocab > target.vocab_size:
        raise InputError(
            f"drafter.vocab={settings.vocab} exceeds the target's {target.vocab_size} tokens: lower it, or leave it out"
        )
    heads = target.num_attention_heads
    return dict(
        hidden=target.hidden_size,
        intermediate=target.intermediate_size,
        heads=heads,
        kv_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab=target.vocab_size,
        draft_vocab=settings.vocab or target.vocab_size,
        norm_eps=target.rms_norm_eps,
        max_positions=target.max_position_embeddings,
        rope=dict(target.rope_parameters),
        target_layers=target.num_hidden_layers,
        block=settings.block,
        taps=settings.taps,
        activation=target.hidden_act,
        init_std=target.initializer_range,
    )


def _check_taps(taps: tuple[int, ...], layers: int) -> None:
    last = layers - 1
    if last in taps:
        raise InputError(
            f"drafter.taps holds {last}, the target's last layer, whose raw output differs from the normed `final` "
            f"that is captured anyway: use layers -1 to {last - 1}"
        )
    if beyond := [tap for tap in taps if tap > last]:
        raise InputError(f"drafter.taps holds {beyond}, but the target has layers 0 to {last}: use -1 to {last - 1}")


def check_mask_token(token: int, target: PreTrainedConfig) -> None:
    """Refuses a mask token that the target's vocabulary lacks or uses for padding or for ending a text.

    Raises:
        InputError: names the token and the rule that it breaks.
    """
    if token >= target.vocab_size:
        raise InputError(f"drafter.mask_token_id={token} is outside the vocabulary 0..{target.vocab_size - 1}")
    eos = target.eos_token_id
    taken = {"pad": {target.pad_token_id}, "eos": set(eos) if isinstance(eos, list) else {eos}}
    for name, ids in taken.items():
        if token in ids:
            raise InputError(
                f"drafter.mask_token_id={token} is the target's {name} token: choose an id that no text contains"
            )
