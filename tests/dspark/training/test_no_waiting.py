"""A step asks its device for nothing: forward and backward have no operation that the host would have to wait for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.learning import Eagle3Settings, LossSettings
from dspark.model.config import Eagle3Config
from dspark.model.kinds import AnyConfig
from dspark.training.chains import chain_anchors, make_chains
from dspark.training.eagle3 import Eagle3Objective
from dspark.training.objective import DraftObjective, Objective, step_weight
from dspark.training.transfer import with_tensors
from tests.dspark.small import (
    HEADS,
    SMALL_EAGLE3,
    positions,
    small_batch,
    small_blocks,
    small_config,
    small_drafter,
    small_eagle3,
    small_vocabulary,
)

MASKS = [[0, 1, 1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
# Their results, or the sizes of these, are numbers on the host.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "is_nonzero"}


class Waiting(TorchDispatchMode):
    """Names of the operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # Which elements a mask chooses is known on the device alone.
        chosen = args[1] if name in {"index", "index_put_", "index_put"} else []
        if name in WAITING or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in chosen):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def objective_of(config: AnyConfig, device: torch.device) -> Callable[[], Objective]:
    """A call of a module on inputs that are there already."""
    batch = small_batch(config, MASKS)
    vocabulary = small_vocabulary(config)
    module: nn.Module
    if isinstance(config, Eagle3Config):
        settings = Eagle3Settings(ttt_length=4)
        anchors = [chain_anchors(np.array(mask, np.uint8), settings) for mask in MASKS]
        blocks: Any = make_chains(batch, anchors, [len(mask) for mask in MASKS], settings)
        module, weight = Eagle3Objective(small_eagle3()), torch.tensor(2.0)
    else:
        blocks = small_blocks(config, batch, positions([1, 2, 3, 7], [0, 3, 4]))
        module, weight = DraftObjective(small_drafter(config), LossSettings()), step_weight(blocks)
    inputs = [with_tensors(value, lambda tensor: tensor.to(device)) for value in (vocabulary, batch, blocks, weight)]
    module.to(device)
    return lambda: module(*inputs)


CONFIGS = {head: small_config(head) for head in HEADS} | {"eagle3": SMALL_EAGLE3}


@pytest.mark.parametrize("kind", CONFIGS)
def test_forward_and_backward_have_no_operation_that_waits(kind: str) -> None:
    run = objective_of(CONFIGS[kind], torch.device("cpu"))
    with Waiting() as waiting:
        run().loss.backward()
    assert waiting.found == []


def test_what_waits_is_found() -> None:
    values = torch.arange(4.0)
    with Waiting() as waiting:
        values[values > 1].sum().item()
    assert waiting.found == ["index", "_local_scalar_dense"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", CONFIGS)
def test_on_a_gpu_the_host_never_waits_for_a_step(kind: str) -> None:
    run = objective_of(CONFIGS[kind], torch.device("cuda", torch.cuda.current_device()))
    run().loss.backward()  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        run().loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
