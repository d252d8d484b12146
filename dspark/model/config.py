"""The drafter's architecture: one frozen value, from a target and settings or from a `config.json`."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from dspark.config import Settings
from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.families import FORMS, QWEN3_FORM, Family, Form, embedding_scale, family_of, head_shape, soft_cap


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
    form: Form = QWEN3_FORM  # of the draft layers
    shared_kv: bool = False  # K = V: values are the raw output of k_proj, and there is no v_proj
    embedding_scale: float = 1.0
    soft_cap: float | None = None  # of the base logits, before any bias


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
        InputError: a tap outside -1..layers-2, a mask token that is out of range or already means something, or a form
            or start that the target's family does not have.
    """
    sizes = _sizes(target, settings)
    family = family_of(target)
    assert settings.mask_token_id is not None
    check_mask_token(settings.mask_token_id, target)
    if settings.init == "target" and not family.layers_alike:
        raise InputError(
            f"drafter.init=target copies the target's last layers, and those of the family {family.model_type} differ "
            "in shape from each other and from a draft layer: set drafter.init=random"
        )
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
    family = family_of(target)
    _check_taps(settings.taps, target.num_hidden_layers)
    if settings.vocab is not None and settings.vocab > target.vocab_size:
        raise InputError(
            f"drafter.vocab={settings.vocab} exceeds the target's {target.vocab_size} tokens: lower it, or leave it out"
        )
    # Where layers differ, the last one sees the whole text, and a draft layer takes its shape.
    kv_heads, head_dim = head_shape(target, target.num_hidden_layers - 1)
    return dict(
        hidden=target.hidden_size,
        intermediate=target.intermediate_size,
        heads=target.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=target.vocab_size,
        draft_vocab=settings.vocab or target.vocab_size,
        norm_eps=target.rms_norm_eps,
        max_positions=target.max_position_embeddings,
        # Where kinds of layers rotate differently, there is one set of parameters for each.
        rope=dict(target.rope_parameters.get("full_attention", target.rope_parameters)),
        target_layers=target.num_hidden_layers,
        block=settings.block,
        taps=settings.taps,
        activation=getattr(target, family.activation),
        init_std=target.initializer_range,
        form=_form(settings.family, family),
        shared_kv=getattr(target, "attention_k_eq_v", False),
        embedding_scale=embedding_scale(target),
        soft_cap=soft_cap(target),
    )


def _form(name: str | None, family: Family) -> Form:
    form = family.forms[0] if name is None else FORMS[name]
    if form not in family.forms:
        raise InputError(
            f"drafter.family={name} does not fit a target of the family {family.model_type}: leave it out, or use "
            f"{' or '.join(known.name for known in family.forms)}"
        )
    return form


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
