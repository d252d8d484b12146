"""Drafters that start from what the target knows, instead of at random.

Layers are copies of the target's last ones, which read the last tap through the norm that the layer behind this tap
reads it through. That layer's context values are then the target's own from the first step on, and so are its keys in
a family whose form the drafter takes; the Qwen3 form of a Llama-shaped target norms queries and keys that the target
does not, and starts at their average size.
The Markov head starts as the best low-rank form of the target's bigrams: of what it predicts when it has seen one
token of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark.errors import InputError
from dspark.model.drafter import MARKOV_STD, Drafter
from dspark.model.families import family_of
from dspark.model.layers import DraftLayer
from dspark.model.vocabulary import Vocabulary
from dspark.sections import TargetSettings
from dspark.target_files import load_tensors, load_whole_config

if TYPE_CHECKING:  # trainers start sooner without the modules of transformers' models
    from dspark.target import Target

# What the other taps, mixed in at random, add to the last one at the start.
_OTHER_TAPS = 0.1


# Tokens in one forward of `bigrams_of`; their attention mask grows with the square.
_TOGETHER = 512


@dataclass(frozen=True)
class Bigrams:
    """What a target predicts after single tokens: N tokens, how often the data has each, and the states after them."""

    tokens_N: Tensor
    counts_N: Tensor
    states_NH: Tensor  # normed last states: the head makes logits of them


def bigrams_of(target: "Target", prompt: Sequence[int], tokens: Tensor, counts: Tensor) -> Bigrams:
    """The target's states after `prompt` and one token, for each of `tokens` [N].

    Every token sees the prompt and itself, so that one row holds many of them.
    """
    states, first = [], len(prompt)
    for together in tokens.split(_TOGETHER):
        ids_1Q = torch.cat((torch.tensor(prompt, dtype=torch.int64), together))[None].to(target.device)
        width = ids_1Q.shape[1]
        positions_1Q = torch.arange(width, device=target.device).clamp(max=first)[None]
        columns_Q = torch.arange(width, device=target.device)
        visible_QQ = (columns_Q < first) & (columns_Q <= columns_Q[:, None]) | (columns_Q == columns_Q[:, None])
        states.append(target.states(ids_1Q, (), positions_1Q, visible_QQ[None, None]).final[0, first:].float().cpu())
    return Bigrams(tokens, counts, torch.cat(states))


@torch.no_grad()
def start_from_bigrams(drafter: Drafter, bigrams: Bigrams, vocabulary: Vocabulary) -> None:
    """Overwrites W1 and W2 so that the bias after a token comes closest to the target's logits after it.

    Least squares over all pairs, each token weighted by its count, about the mean over the tokens: what all tokens
    share is left to the layers. Tokens that the data lacks get no bias. A gated head starts at half open gates, which
    is made up for; an rnn head has no such start and stays as it is.

    With G the rows of the head for the D draft tokens, G = Q R, and X the weighted states, the bias matrix is
    X R^T Q^T; its r leading right singular vectors v in the basis Q give W2 = Q v and W1 = (states - mean) R^T v.
    """
    head = drafter.markov_head
    if head is None or head.kind == "rnn":
        return
    rows_DH = vocabulary.draft_head_DH.float().cpu()
    basis_DH, mix_HH = torch.linalg.qr(rows_DH - rows_DH.mean(0))
    weights_N1 = bigrams.counts_N.float()[:, None] / bigrams.counts_N.sum()
    centred_NH = (bigrams.states_NH - (weights_N1 * bigrams.states_NH).sum(0)) @ mix_HH.T
    _, _, directions_HH = torch.linalg.svd(weights_N1.sqrt() * centred_NH, full_matrices=False)
    directions_Hr = directions_HH[: drafter.config.markov_rank].T
    features_Nr = centred_NH @ directions_Hr
    scale_r = features_Nr.std(0, correction=0).clamp(min=1e-6) / MARKOV_STD
    found = directions_Hr.shape[1]
    head.markov_w1.weight.zero_()
    head.markov_w1.weight[bigrams.tokens_N, :found] = (features_Nr / scale_r).to(head.markov_w1.weight)
    openness = 0.5 if head.kind == "gated" else 1.0
    head.markov_w2.weight.zero_()
    head.markov_w2.weight[:, :found] = (basis_DH @ directions_Hr * scale_r / openness).to(head.markov_w2.weight)


@torch.no_grad()
def start_from_target(drafter: Drafter, target: TargetSettings) -> None:
    """Overwrites the layers, norms and `fc` of a fresh drafter, in place.

    Draft layer i becomes the target's layer L - D + i (projections, MLP, norms), `norm` the target's last norm,
    `hidden_norm` the input norm of the layer behind the last tap, and `fc` passes that tap on.

    Raises:
        InputError: more draft layers than target layers, or the target's files lack a tensor.
    """
    config = drafter.config
    if config.layers > config.target_layers:
        raise InputError(
            f"drafter.init=target copies {config.layers} layers, the target has {config.target_layers}: "
            "lower drafter.layers"
        )
    prefix = f"{family_of(load_whole_config(target)).decoder}."
    sources: dict[str, Tensor] = {}
    for number, layer in enumerate(drafter.layers):
        place = f"{prefix}layers.{config.target_layers - config.layers + number}."
        sources |= {f"{place}{name}": tensor for name, tensor in layer.named_parameters()}
    # The target's heads may lack the norms of queries and keys that its drafter's form has.
    found = load_tensors(
        target, set(sources), optional={name for name in sources if name.endswith(("q_norm.weight", "k_norm.weight"))}
    )
    for name, tensor in found.items():
        sources[name].copy_(tensor)
    if any(name.endswith("q_norm.weight") for name in sources.keys() - found.keys()):
        for layer in drafter.layers:
            _scale_heads(layer)
    norms = {
        f"{prefix}norm.weight": drafter.norm,
        f"{prefix}layers.{config.taps[-1] + 1}.input_layernorm.weight": drafter.hidden_norm,
    }
    for name, tensor in load_tensors(target, set(norms)).items():
        norms[name].weight.copy_(tensor)
    drafter.fc.weight.mul_(_OTHER_TAPS)
    drafter.fc.weight[:, -config.hidden :].add_(torch.eye(config.hidden))


def _scale_heads(layer: DraftLayer) -> None:
    """Norms of queries and keys that give them the size which the target's have without norms, on average.

    A normed input has entries of mean square w^2, with w the weights of the norm, so a projection's output has the mean
    square of its rows' |row * w|^2. One number per norm: entries that RoPE turns into each other must stay alike.
    """
    width = layer.input_layernorm.weight
    attention: Any = layer.self_attn
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        norm.weight.fill_((projection.weight * width).square().sum(1).mean().sqrt())
