"""How targets, trainers, network and object store go together at a size that nobody has tried yet: arithmetic alone.

shape of the target, settings, assumptions about machines -> work per token of either side -> tokens per second
  -> targets per trainer, bytes per second, bytes in the object store

A product of m x k by k x n takes 2 m k n operations. A backward takes twice the forward, or once where the weights are
frozen. Left out: norms, softmax, optimizer, attention of the target (below a tenth at the lengths that are trained on).
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from dspark.config import Settings
from dspark.sections import Fraction, Positive, Section

Amount = Annotated[float, Field(gt=0)]
_GB = 1e9


class Machine(Section):
    """One GPU of a role, and how many a node has."""

    tflops: Amount = Field(description="dense bf16 operations per second, in 10^12")
    utilisation: Annotated[float, Field(gt=0, le=1)] = Field(description="share of them that the work reaches")
    memory_gb: Amount
    per_node: Positive

    @property
    def flops(self) -> float:
        """Operations per second that the work reaches."""
        return self.tflops * 1e12 * self.utilisation


class Shape(Section):
    """Sizes of a target, and of its last layer, which those of the drafter have."""

    parameters_b: Amount = Field(description="weights without embedding and head, in 10^9")
    embedding_b: Amount = Field(description="weights of the embedding, and of the head if it has its own")
    hidden: Positive
    vocab: Positive
    intermediate: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive


class ClusterAssumptions(Section):
    """The file of `--cluster`: what is assumed of machines and rows, and the shapes of the targets, by preset."""

    trainer: Machine
    target: Machine
    network_gbit_per_s: Amount = Field(description="of one node, in one direction")
    mean_tokens: Positive = Field(description="of a training row")
    supervised_share: Fraction = Field(description="of its tokens")
    presets: dict[str, Shape] = Field(description="by path of a preset, from this file's folder")


@dataclass(frozen=True)
class Scale:
    """One row of the table."""

    name: str
    bytes_per_token: int
    trainer_tokens_per_s: float  # of one trainer; what its targets must capture
    target_tokens_per_s: float  # of one target
    network_bytes_per_s: float  # into one trainer
    trainers_per_link: float  # trainers of a node that its network can feed
    object_store_bytes: float  # of one optimizer step and what is in flight, over all nodes
    target_memory_bytes: float  # weights in bf16

    @property
    def targets_per_trainer(self) -> float:
        return self.trainer_tokens_per_s / self.target_tokens_per_s


def bytes_per_token(hidden: int, taps: int) -> int:
    """Taps and the last state in bf16, the id in four bytes, the mask in one."""
    return 2 * hidden * (taps + 1) + 4 + 1


def trainer_operations(shape: Shape, settings: Settings, tokens: int, supervised: float) -> float:
    """Operations of a DSpark step on one row, forward and backward."""
    drafter = settings.drafter
    blocks = min(settings.train.anchors, supervised * tokens)
    slots = blocks * drafter.block
    keys = 2 * shape.kv_heads * shape.head_dim
    queries = shape.heads * shape.head_dim
    feature = len(drafter.taps) * shape.hidden * shape.hidden + drafter.layers * keys * shape.hidden
    layer = (2 * queries + keys + 3 * shape.intermediate) * shape.hidden
    # A slot looks at the tokens before its anchor, half of the row on average: scores, and sums over values.
    attention = 2 * queries * (tokens / 2 + drafter.block)
    trained = (
        tokens * feature + slots * drafter.layers * (layer + attention) + slots * drafter.markov_rank * shape.vocab
    )
    # The head is frozen: the draft's logits and one product of the backward, and the target's logits without any.
    frozen = slots * shape.hidden * shape.vocab
    judged = min(tokens, slots) * shape.hidden * shape.vocab
    return 2 * (3 * trained + 2 * frozen + judged)


def scale_of(name: str, shape: Shape, settings: Settings, cluster: ClusterAssumptions) -> Scale:
    """What one preset needs on machines like these."""
    tokens = cluster.mean_tokens
    width = bytes_per_token(shape.hidden, len(settings.drafter.taps))
    work = trainer_operations(shape, settings, tokens, cluster.supervised_share) / tokens
    trained = cluster.trainer.flops / work
    captured = cluster.target.flops / (2 * shape.parameters_b * 1e9)
    fed = trained * width
    # The rows of a step stay until it is made, and the next step's gather meanwhile.
    step = settings.train.global_batch * tokens * width
    return Scale(
        name=name,
        bytes_per_token=width,
        trainer_tokens_per_s=trained,
        target_tokens_per_s=captured,
        network_bytes_per_s=fed,
        trainers_per_link=cluster.network_gbit_per_s * _GB / 8 / fed,
        object_store_bytes=2 * step + settings.targets.in_flight_mb * 2**20,
        target_memory_bytes=2e9 * (shape.parameters_b + shape.embedding_b),
    )
