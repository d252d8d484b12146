"""Draft layers that start as copies of the target's last layers, instead of at random.

The copied layers read the last tap through the norm that they read it through in the target, so their context keys and
values are the target's own from the first step on; what training has left to learn is the side of the queries.
"""

import torch
from torch import Tensor

from dspark.config import TargetSettings
from dspark.errors import InputError
from dspark.model.drafter import Drafter
from dspark.model.families import family_of
from dspark.target import load_config, load_tensors

# What the other taps, mixed in at random, add to the last one at the start.
_OTHER_TAPS = 0.1


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
    prefix = f"{family_of(load_config(target)).decoder}."
    sources: dict[str, Tensor] = {}
    for number, layer in enumerate(drafter.layers):
        place = f"{prefix}layers.{config.target_layers - config.layers + number}."
        sources |= {f"{place}{name}": tensor for name, tensor in layer.named_parameters()}
    # The target's heads may lack the norms of queries and keys that every drafter has; those stay at one.
    found = load_tensors(
        target, set(sources), optional={name for name in sources if name.endswith(("q_norm.weight", "k_norm.weight"))}
    )
    for name, tensor in found.items():
        sources[name].copy_(tensor)
    norms = {
        f"{prefix}norm.weight": drafter.norm,
        f"{prefix}layers.{config.taps[-1] + 1}.input_layernorm.weight": drafter.hidden_norm,
    }
    for name, tensor in load_tensors(target, set(norms)).items():
        norms[name].weight.copy_(tensor)
    drafter.fc.weight.mul_(_OTHER_TAPS)
    drafter.fc.weight[:, -config.hidden :].add_(torch.eye(config.hidden))
