"""Drafters of any layout are loaded with their target, and with no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.errors import InputError
from dspark.model.checkpoints import save_drafter
from dspark.model.eagle3 import new_eagle3_drafter
from dspark.model.exchange import load_for_target
from dspark.model.families import LLAMA_FORM
from dspark.sections import TargetSettings
from dspark.target import load_target
from tests.dspark.decoding.decoders import random_drafter, random_eagle3
from tests.dspark.folders import FACTS, TARGET, assert_equal, convert, edited
from tests.tiny import MASK_ID, tiny_target_folder


def as_dflash(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values |= {"sample_from_anchor": False}
    values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] -= 1


@pytest.mark.parametrize(
    ("name", "kind"), [("speculators", "dspark"), ("specforge", "dspark"), ("specforge", "eagle3")]
)
def test_decoding_takes_folders_of_any_layout_with_their_own_target_alone(
    tmp_path: Path, tiny_target: Path, name: str, kind: str
) -> None:
    settings = TargetSettings(model=str(tiny_target), dtype="fp32")
    target, cpu = load_target(settings, torch.device("cpu")), torch.device("cpu")
    made: Any = random_drafter(target, "vanilla", (0, 2), MASK_ID)
    if kind == "eagle3":
        config = replace(random_eagle3(target, (0, 2), reduced=True).config, form=LLAMA_FORM)
        made = new_eagle3_drafter(config, 3, torch.arange(config.draft_vocab) + 7)
    state, anchors = made.state_dict(), 8 if kind == "dspark" else None
    save_drafter(tmp_path / "source", state, made.config, target.vocabulary, TARGET, anchors, torch.float32, FACTS)
    out = convert(tmp_path / "source", tmp_path / "out", name)
    for folder in (tmp_path / "source", out):
        loaded = load_for_target(folder, settings, cpu, torch.float32)
        assert loaded.config == made.config
        assert loaded.extra == {"dspark": FACTS}
        assert_equal(loaded.drafter.state_dict(), state)
        assert torch.equal(loaded.vocabulary.head_VH, target.vocabulary.head_VH)
        assert torch.equal(loaded.vocabulary.embedding_VH, target.vocabulary.embedding_VH)
    if (name, kind) != ("specforge", "dspark"):  # which holds nothing of its target
        other = TargetSettings(model=str(tiny_target_folder(tmp_path / "target", seed=1)), dtype="fp32")
        with pytest.raises(InputError, match="of the drafter is not the target's"):
            load_for_target(out, other, cpu, torch.float32)
    if name == "speculators":
        with pytest.raises(InputError, match="no drafter to decode with: slot k predicts the token of its own place"):
            load_for_target(edited(out, tmp_path / "dflash", as_dflash), settings, cpu, torch.float32)
    with pytest.raises(InputError, match=r"holds no drafter that can be loaded: config\.json cannot be read"):
        load_for_target(tmp_path / "nothing", settings, cpu, torch.float32)
