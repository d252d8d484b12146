"""What a drafter's forward keeps for its backward: each tensor by its name, as bytes for one query or one column.

The names follow `dspark.model.layers`, `light`, `tiles` and `eagle3`; whoever changes what these save changes it here.
A query is a slot of a block, or a chain at one of its steps; a column is a position of a row of tensors.
"""

from dataclasses import dataclass

from dspark.model.attention import padded
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config

Tensors = dict[str, int]
_FP32 = 4


@dataclass(frozen=True)
class Load:
    """One micro-batch: `rows` of `columns` tokens, `groups` blocks or chains in each, of `slots` slots or steps."""

    rows: int
    columns: int
    groups: int
    slots: int
    used: int  # slots that are projected to the vocabulary
    places: int  # distinct columns under them

    @property
    def positions(self) -> int:
        return self.rows * self.columns

    @property
    def chains(self) -> int:
        """Blocks or chains of all rows."""
        return self.rows * self.groups

    @property
    def queries(self) -> int:
        return self.chains * self.slots


def norm_tensors(name: str, rows: int = 1) -> Tensors:
    """What `rows` rows of a norm keep beside their input: a number each."""
    return {f"{name} scale": rows * _FP32}


def key_value_tensors(config: DraftConfig, size: int) -> Tensors:
    """Of one position whose keys and values are read."""
    width = config.kv_heads * config.head_dim
    kept = {"keys": width * size, "values": width * size}
    if config.form.qk_norm:
        kept |= {"keys projected": width * size, **norm_tensors("k_norm", config.kv_heads)}
    if config.form.v_norm:
        # Left to autograd, which keeps its input in fp32.
        own = 0 if size == _FP32 and config.shared_kv else width * _FP32
        kept |= {"values projected, fp32": own, **norm_tensors("v_norm", config.kv_heads)}
    return kept


def query_tensors(config: DraftConfig, size: int) -> Tensors:
    """Of one query in attention."""
    width = config.heads * config.head_dim
    kept = {"queries": width * size, "attention output": width * size, "log sums": config.heads * _FP32}
    if config.form.qk_norm:
        kept |= {"queries projected": width * size, **norm_tensors("q_norm", config.heads)}
    return kept


def mlp_tensors(config: DraftConfig, size: int) -> Tensors:
    """Of one query behind attention: the second residual, its norm and the gated product."""
    hidden, inner = config.hidden * size, config.intermediate * size
    kept = {"residual": hidden, **norm_tensors("post_attention_layernorm"), "normed": hidden}
    kept |= {"gate": inner, "up": inner, "product": inner}
    if config.form.sandwich:
        for name in ("mixed", "mlp output"):
            kept |= {name: hidden, **norm_tensors(f"norm of {name}")}
    return kept


def layer_tensors(config: DraftConfig, size: int) -> Tensors:
    """Of one query in a draft layer of a block: input, norm, attention and MLP."""
    hidden = config.hidden * size
    entry = {"input": hidden, **norm_tensors("input_layernorm"), "attention input": hidden}
    return entry | key_value_tensors(config, size) | query_tensors(config, size) | mlp_tensors(config, size)


def context_tensors(config: DraftConfig, size: int) -> Tensors:
    """Of one column before the layers: taps, feature, its norm; and its rotary table."""
    hidden = config.hidden * size
    kept = {"taps": len(config.taps) * hidden, "feature": hidden, "rotary": 2 * config.head_dim * _FP32}
    kept |= {**norm_tensors("hidden_norm"), "normed feature": hidden}
    if isinstance(config, Eagle3Config):
        kept |= {"embedding": hidden, **norm_tensors("input_layernorm"), "joined": 2 * hidden}
    return kept


def head_tensors(config: DSparkConfig, size: int) -> Tensors:
    """Of one slot behind the layers: the last norm, and what the Markov and confidence heads read."""
    hidden, rank = config.hidden * size, config.markov_rank * size
    kept = {"output": hidden, **norm_tensors("norm"), "states": hidden}
    kept |= {"rotary": 2 * config.head_dim * _FP32, "markov embedding": rank}
    if config.markov_rank and config.markov_head == "gated":
        kept |= {"gate input": hidden + rank, "markov gate": rank}
    if config.markov_rank and config.markov_head == "rnn":
        kept |= {"joint input": hidden + 2 * rank, "joint gates": 3 * rank, "joint state and features": 3 * rank}
    if config.confidence:
        kept["confidence input"] = hidden + (rank if config.confidence_with_markov else 0)
    return kept


def context_bytes(config: DraftConfig, size: int, load: Load) -> int:
    """Context features of all columns, and their keys and values in every layer."""
    layer = sum(key_value_tensors(config, size).values())
    return load.positions * (sum(context_tensors(config, size).values()) + config.layers * layer)


def block_bytes(config: DSparkConfig, size: int, load: Load, recompute: bool, gpu: bool) -> int:
    """Activations of blocks at the start of the backward."""
    layer = load.queries * sum(layer_tensors(config, size).values())
    if gpu:
        layer += joined_keys(config, size, load.rows, load.columns, load.groups * load.slots)
    kept = load.queries * config.hidden * size
    layers = config.layers * kept + layer if recompute else config.layers * layer
    return layers + load.queries * sum(head_tensors(config, size).values())


def chain_bytes(config: Eagle3Config, size: int, load: Load, recompute: bool, gpu: bool) -> int:
    """Activations of chained steps, all of which live until the backward.

    Every step keeps copies of the own keys and values of all steps before it.
    """
    hidden, steps = config.hidden * size, load.slots
    kv = 2 * config.kv_heads * config.head_dim * size
    join = {"state": hidden, "embedding": hidden, "joined": 2 * hidden, "rotary": 2 * config.head_dim * _FP32}
    join |= norm_tensors("input_layernorm")
    join |= norm_tensors("hidden_norm") | norm_tensors("norm")
    outside = sum(join.values()) + sum(key_value_tensors(config, size).values()) + hidden
    inside = sum(query_tensors(config, size).values()) + sum(mlp_tensors(config, size).values())
    own = kv * steps * (steps - 1) // 2
    joined = joined_keys(config, size, load.rows, load.columns, load.groups * (steps - 1)) if gpu else 0
    layer = load.chains * inside + joined
    return load.chains * (steps * outside + own) + (1 if recompute else steps) * layer


def joined_keys(config: DraftConfig, size: int, rows: int, columns: int, own: int) -> int:
    """On a GPU, keys and values of a call of attention side by side, the context's and the own, both padded."""
    return rows * (padded(columns) + padded(own)) * 2 * config.kv_heads * config.head_dim * size


def passing_bytes(config: DraftConfig, size: int, load: Load) -> int:
    """In the backward of one layer's gated product: its gradient, the activation once more, the gradients of both."""
    queries = load.queries if isinstance(config, DSparkConfig) else load.chains
    return 4 * queries * config.intermediate * size
