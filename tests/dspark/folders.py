"""Small drafters as folders of any layout, and copies of them with other keys or tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from dspark.model.checkpoints import save_drafter
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.model.exchange import check_expressible, read_checkpoint, with_vocabulary, write_checkpoint
from dspark.model.stored import Verifier
from tests.dspark.small import SMALL_EAGLE3, small_drafter, small_eagle3, small_vocabulary

TARGET = LlamaConfig(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=None, max_position_embeddings=64)
VERIFIER = Verifier("org/target", ("LlamaForCausalLM",))
FACTS = {"seed": 3, "target": {"name": "org/target"}}


def save(folder: Path, config: DSparkConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A small drafter in the published layout; of a reduced vocabulary it keeps the even ids."""
    drafter = small_drafter(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(0, 2 * config.draft_vocab, 2))
    save_drafter(folder, drafter.state_dict(), config, small_vocabulary(config), TARGET, 12, dtype, FACTS)
    return folder


def save_eagle3(folder: Path, config: Eagle3Config = SMALL_EAGLE3, dtype: torch.dtype = torch.float32) -> Path:
    """A small EAGLE-3 drafter in the published layout; of a reduced vocabulary it keeps the even ids."""
    drafter = small_eagle3(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(0, 2 * config.draft_vocab, 2))
    save_drafter(folder, drafter.state_dict(), config, small_vocabulary(config), TARGET, None, dtype, FACTS)
    return folder


def convert(source: Path, out: Path, name: str, config: DraftConfig | None = None, check: bool = True) -> Path:
    """Exports a folder; `config` names the target whose embedding and head complete it."""
    found = read_checkpoint(source)
    if check:
        check_expressible(found, name)
    if config is not None:
        found = with_vocabulary(found, small_vocabulary(config))
    write_checkpoint(out, found, name, VERIFIER, {})
    return out


def values_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def edited(source: Path, folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Path:
    """A copy with other keys or tensors."""
    values, tensors = values_of(source), tensors_of(source)
    change(values, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder
