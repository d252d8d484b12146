"""Whether a target, a drafter and the sizes of an engine belong together."""

from dspark.errors import InputError
from dspark.model.kinds import AnyDrafter
from dspark.target import Target


def check_fit(target: Target, drafter: AnyDrafter | None, batch: int, max_length: int) -> None:
    """Passes iff the target can decode so many requests of this length, with this drafter if there is one.

    Raises:
        InputError: says which size, type or device is in the way.
    """
    if batch < 1 or max_length < 2:
        raise InputError(f"batch={batch} and max_length={max_length}: needed are at least 1 row and 2 tokens")
    if len(target.computed_on) > 1:
        raise InputError(
            f"the target's layers are computed on {', '.join(sorted(target.computed_on))}: decoding keeps its keys and "
            "values on one device, load the target without target.device_map or with one that names one GPU"
        )
    limit = target.config.max_position_embeddings
    if max_length > limit:
        raise InputError(f"max_length={max_length} is beyond the target's {limit} positions: lower it")
    if drafter is None:
        return
    config = drafter.config
    pairs = {
        "vocabulary": (config.vocab, target.vocab_size),
        "hidden width": (config.hidden, target.hidden),
        "target layers": (config.target_layers, target.layers),
        "dtype": (drafter.fc.weight.dtype, target.dtype),
        "device": (drafter.fc.weight.device, target.device),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise InputError(
                f"the drafter's {name} is {ours}, the target's is {theirs}: load a drafter of this target, in the "
                "target's dtype and on its device"
            )
