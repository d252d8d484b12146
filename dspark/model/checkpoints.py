"""Drafters on disk, in the published layout that serving engines load: a folder with config.json and model.safetensors.

The weights hold the target's embedding and head too, so that a folder needs no other file; what a run wants to remember
stands in config.json under the one key `dspark`.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from dspark.errors import InputError
from dspark.model.config import DraftConfig, DSparkConfig, Eagle3Config
from dspark.model.eagle3_layout import eagle3_extra_keys, eagle3_from_json, eagle3_to_json, is_eagle3
from dspark.model.kinds import AnyConfig, AnyDrafter, drafter_of
from dspark.model.layers import RotaryTable
from dspark.model.layout import config_from_json, config_to_json, dtype_name, extra_keys
from dspark.model.vocabulary import Vocabulary

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
RUN_KEY = "dspark"
MAPS = {"d2t": torch.int64, "t2d": torch.bool}  # of a reduced vocabulary
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter from disk, with the frozen embedding and head of its target."""

    drafter: AnyDrafter
    vocabulary: Vocabulary
    config: AnyConfig
    extra: dict[str, Any]  # keys of config.json beyond the layout, such as `dspark`


def assemble(tensors: Mapping[str, Tensor], config: AnyConfig) -> tuple[AnyDrafter, Vocabulary]:
    """A drafter and its vocabulary from tensors that are named as in the layout; the memory is shared with them.

    Raises:
        InputError: names every tensor that is missing, unexpected or of another shape, and maps that contradict.
    """
    check_tensors(tensors, config)
    drafter = _blank(config)
    drafter.rotary = RotaryTable(config)
    drafter.load_state_dict({name: tensors[name] for name in drafter.state_dict()}, assign=True)
    vocabulary = Vocabulary(
        tensors[EMBEDDING], tensors[HEAD], embedding_scale=config.embedding_scale, soft_cap=config.soft_cap
    )
    return drafter, vocabulary.narrowed(drafter.kept)


def check_tensors(tensors: Mapping[str, Tensor], config: AnyConfig) -> None:
    """Compares tensors, named as in the layout, with what `config` needs.

    Raises:
        InputError: names every tensor that is missing, unexpected or of another shape, and maps that contradict.
    """
    if faults := _shape_faults(tensors, _blank(config)) or _map_faults(tensors, config):
        raise InputError("; ".join(faults))


def save_drafter(
    folder: Path,
    drafter_state: Mapping[str, Tensor],
    config: AnyConfig,
    vocabulary: Vocabulary,
    target_config: PreTrainedConfig,
    anchors: int | None,
    dtype: torch.dtype,
    extra: Mapping[str, Any],
) -> None:
    """Writes a drafter as `folder`, complete or not at all; `extra` (JSON values) is kept under the key `dspark`.

    `anchors`: blocks drawn per row in training, of a DSpark drafter; None for EAGLE-3, which draws none.

    Raises:
        InputError: the folder holds something already, or the disk refuses.
    """
    tensors = {**drafter_state, EMBEDDING: vocabulary.embedding_VH, HEAD: vocabulary.head_VH}
    faults = _shape_faults(tensors, _blank(config))
    assert not faults, faults
    values = _to_json(config, target_config, anchors, dtype) | {RUN_KEY: dict(extra)}
    write_folder(folder, values, tensors, dtype, {})


def check_free(folder: Path) -> None:
    """Refuses a folder that holds something already: drafters are never written over.

    Raises:
        InputError: names the folder.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists already and is not overwritten: choose another folder or remove it first")


def write_folder(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    texts: Mapping[str, str],
) -> None:
    """Writes config.json, weights in `dtype` and further text files as a new `folder`, complete or not at all.

    Raises:
        InputError: the folder holds something already, or the disk refuses.
    """
    folder = folder.absolute()
    check_free(folder)
    # The file format refuses tensors that share memory, as a tied embedding and head do: each gets its own copy.
    copies = {name: _stored(tensor, dtype) for name, tensor in tensors.items()}
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        save_file(copies, partial / WEIGHTS, metadata={"format": "pt"})
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the drafter could not be written as {folder}: {error}: free space or choose a folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_drafter(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedDrafter:
    """Reads a drafter of the published layout, from one weight file or from several.

    Raises:
        InputError: the folder is no such drafter; names every key and tensor that is missing, unexpected or wrong.
    """
    try:
        values = read_json(folder / CONFIG)
        config = config_of(values)
        tensors = read_tensors(folder)
        check_types(tensors, values.get("dtype"))
        drafter, vocabulary = assemble(tensors, config)
    except InputError as error:
        raise InputError(
            f"{folder} holds no drafter that can be loaded: {error} (needed: {CONFIG} and {WEIGHTS} as `dspark train` "
            "writes them)"
        ) from error
    extra = extra_keys(values) if isinstance(config, DSparkConfig) else eagle3_extra_keys(values)
    return LoadedDrafter(drafter.to(device=device, dtype=dtype), vocabulary.to(device, dtype), config, extra)


def config_of(values: Mapping[str, Any]) -> AnyConfig:
    """The drafter, of whichever kind, that a config.json of the published layout describes.

    Raises:
        InputError: names every key that is missing or wrong.
    """
    return eagle3_from_json(values) if is_eagle3(values) else config_from_json(values)


def _to_json(
    config: AnyConfig, target_config: PreTrainedConfig, anchors: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    if isinstance(config, Eagle3Config):
        return eagle3_to_json(config, target_config, dtype)
    assert anchors is not None, "a DSpark drafter says how many anchors it was trained with"
    return config_to_json(config, target_config, anchors, dtype)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own on the CPU; maps of token ids keep their type."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True).contiguous()


def _blank(config: AnyConfig) -> AnyDrafter:
    """A drafter without memory: names and shapes alone."""
    with torch.device("meta"):
        return drafter_of(config)


def _shape_faults(tensors: Mapping[str, Tensor], drafter: AnyDrafter) -> list[str]:
    table = (drafter.config.vocab, drafter.config.hidden)
    needed = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    needed |= {EMBEDDING: table, HEAD: table}
    return [
        *(f"tensor {name} is missing" for name in needed if name not in tensors),
        *(f"tensor {name} is unexpected" for name in tensors if name not in needed),
        *(
            f"tensor {name} has shape {list(tensors[name].shape)}, needed {list(shape)}"
            for name, shape in needed.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ),
    ]


def _map_faults(tensors: Mapping[str, Tensor], config: DraftConfig) -> list[str]:
    """What is wrong with the two maps of a reduced vocabulary."""
    if config.draft_vocab == config.vocab:
        return []
    if wrong := [name for name, dtype in MAPS.items() if tensors[name].dtype != dtype]:
        return [f"tensor {name} is {dtype_name(tensors[name].dtype)}, needed {MAPS[name]}" for name in wrong]
    kept_D = torch.arange(config.draft_vocab) + tensors["d2t"].cpu()
    if not torch.equal(kept_D, tensors["t2d"].cpu().nonzero()[:, 0]):
        return ["tensors d2t and t2d name different tokens, or not in ascending order"]
    return []


def check_types(tensors: Mapping[str, Tensor], declared: str | None) -> None:
    """Every tensor but the maps has the type that config.json declares, or any that a drafter may have.

    Raises:
        InputError: names every tensor of another type.
    """
    allowed = [DTYPES[declared]] if declared else list(DTYPES.values())
    faults = [
        f"tensor {name} is {dtype_name(tensor.dtype)}, needed {' or '.join(map(dtype_name, allowed))}"
        for name, tensor in tensors.items()
        if tensor.dtype not in allowed and name not in MAPS
    ]
    if faults:
        raise InputError("; ".join(faults))


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path.name} holds {type(values).__name__}, needed an object with keys")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files; only safetensors are read, since pickled weights can run code.

    Raises:
        InputError: no such file, or one that cannot be read.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = [file.name for kind in ("bin", "pt", "pth", "ckpt") for file in sorted(folder.glob(f"*.{kind}"))]
        hint = f" ({', '.join(pickled)} is not read: pickled weights can run code)" if pickled else ""
        raise InputError(f"{WEIGHTS} is missing{hint}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file.name} cannot be read ({error}): copy or write it again") from error
    return tensors
