"""Small drafters, vocabularies and batches for tests; every weight is random, so that nothing hides behind a zero."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.model.drafter import Drafter
from dspark.model.eagle3 import Eagle3Drafter
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM
from dspark.model.vocabulary import Vocabulary
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks, make_blocks

SMALL = DSparkConfig(
    hidden=16,
    intermediate=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    vocab=30,
    draft_vocab=30,
    norm_eps=1e-6,
    max_positions=64,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    target_layers=6,
    layers=2,
    block=3,
    taps=(-1, 2),
    mask_token_id=29,
    markov_rank=5,
    markov_head="vanilla",
    confidence=True,
    confidence_with_markov=True,
)
SMALL_EAGLE3 = Eagle3Config(
    **{field.name: getattr(SMALL, field.name) for field in fields(DraftConfig)} | {"layers": 1, "block": 3},
    target_name="small",
    ttt_length=4,
    step_loss_decay=0.5,
)
# An epsilon so large that embeddings are seen to be scaled, although a norm stands behind them.
_GEMMA4 = replace(
    SMALL_EAGLE3, form=GEMMA4_FORM, activation="gelu_pytorch_tanh", embedding_scale=4.0, soft_cap=2.0, norm_eps=0.5
)
# Every form that an EAGLE-3 layer may have.
EAGLE3_FORMS: dict[str, Eagle3Config] = {
    "qwen3": SMALL_EAGLE3,
    "llama": replace(SMALL_EAGLE3, form=LLAMA_FORM),
    "gemma4": replace(_GEMMA4, kv_heads=1, shared_kv=True),
    "gemma4_own_values": _GEMMA4,
}
# Every head that a drafter may have.
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_head": "vanilla"},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "confidence_alone": {"markov_rank": 0, "confidence_with_markov": False},
    "none": {"markov_rank": 0, "confidence": False, "confidence_with_markov": False},
}


def small_config(head: str = "vanilla", **changes: Any) -> DSparkConfig:
    """A config with one of `HEADS`, and further fields changed."""
    return replace(SMALL, **{**HEADS[head], **changes})


def small_drafter(config: DSparkConfig, seed: int = 0) -> Drafter:
    """A drafter with random weights, norms and biases too."""
    drafter = Drafter(config)
    _shake(drafter, seed)
    return drafter


def small_eagle3(config: Eagle3Config = SMALL_EAGLE3, seed: int = 0) -> Eagle3Drafter:
    """An EAGLE-3 drafter with random weights and norms."""
    drafter = Eagle3Drafter(config)
    _shake(drafter, seed)
    return drafter


def _shake(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = noise + (1 if parameter.ndim == 1 else 0)
    for name, buffer in module.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)


def small_vocabulary(config: DraftConfig, seed: int = 1) -> Vocabulary:
    """A random embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, config.vocab, config.hidden, generator=generator)
    return Vocabulary(embedding, head, embedding_scale=config.embedding_scale, soft_cap=config.soft_cap)


def small_batch(config: DraftConfig, masks: Sequence[Sequence[int]], seed: int = 2) -> Batch:
    """Random rows with the given loss masks; row i is the same whatever the others are. Shorter rows are padded."""
    length = max(len(mask) for mask in masks)
    ids = torch.zeros(len(masks), length, dtype=torch.int64)
    in_loss = torch.zeros(len(masks), length, dtype=torch.bool)
    taps = torch.zeros(len(masks), length, len(config.taps) * config.hidden)
    final = torch.zeros(len(masks), length, config.hidden)
    for row, mask in enumerate(masks):
        generator = torch.Generator().manual_seed(seed + 1000 * row)
        size = len(mask)
        ids[row, :size] = torch.randint(config.vocab - 1, (size,), generator=generator)
        in_loss[row, :size] = torch.tensor(mask, dtype=torch.bool)
        taps[row, :size] = torch.randn(size, taps.shape[-1], generator=generator)
        final[row, :size] = torch.randn(size, config.hidden, generator=generator)
    return Batch(ids, in_loss, taps, final)


def positions(*rows: Sequence[int]) -> list[NDArray[np.int64]]:
    """Anchors of each row."""
    return [np.array(row, dtype=np.int64) for row in rows]


def small_blocks(
    config: DSparkConfig, batch: Batch, anchors: Sequence[NDArray[np.int64]], gamma: float | None = 4.0
) -> Blocks:
    """Blocks of the config's size."""
    return make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, config.block, gamma)
