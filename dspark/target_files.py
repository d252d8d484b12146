"""A target on disk: where its files are, what they say, and single tensors of them, without loading the model."""

import hashlib
import json
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from dspark import quickstart
from dspark.config import Settings
from dspark.errors import InputError
from dspark.model.families import embedding_scale, family_of, soft_cap
from dspark.model.vocabulary import Vocabulary
from dspark.sections import TargetSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resolve(settings: TargetSettings) -> Path:
    """The folder to load from: a local one, the quickstart's dense copy, or the local snapshot of a hub id.

    Raises:
        InputError: no such folder, and no hub id that is cached or can be reached.
    """
    if settings.model == quickstart.NAME:
        return quickstart.ensure_dense_copy()
    path = Path(settings.model).expanduser()
    if path.is_dir():
        return path.resolve()
    try:
        kept = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
        return Path(snapshot_download(settings.model, revision=settings.revision, allow_patterns=kept))
    except (OSError, ValueError) as error:
        raise InputError(
            f"target.model={settings.model!r} is neither a folder nor a hub id that is cached or can be reached "
            f"({type(error).__name__}): give a folder with config.json, safetensors and a tokenizer"
        ) from error


def load_pretrained(kind: Any, settings: TargetSettings, **options: Any) -> Any:
    folder = resolve(settings)
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"target.model={settings.model!r} could not be loaded from {folder}: {str(error).splitlines()[0]} "
            f"(needed: config.json, safetensors and a tokenizer of a supported family)"
        ) from error


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """The target's tokenizer alone."""
    tokenizer: PreTrainedTokenizerBase = load_pretrained(AutoTokenizer, settings)
    return tokenizer


def load_config(settings: TargetSettings) -> Any:
    """The target's text configuration alone; refuses an unsupported family before any weight is read."""
    return load_whole_config(settings).get_text_config()


def load_whole_config(settings: TargetSettings) -> Any:
    """The target's configuration, with the parts for images and sound where it has them; refuses like `load_config`."""
    config = load_pretrained(AutoConfig, settings)
    family_of(config)
    return config


def load_vocabulary(settings: TargetSettings, device: torch.device, dtype: torch.dtype) -> Vocabulary:
    """Embedding and head of a target, without reading its other weights.

    Raises:
        InputError: the files hold no such tensors.
    """
    whole = load_whole_config(settings)
    family, tied = family_of(whole), whole.get_text_config().tie_word_embeddings
    embedding, head = f"{family.decoder}.embed_tokens.weight", f"{family.head}.weight"
    found = load_tensors(settings, {embedding, head}, optional={head} if tied else set())
    found = {name: tensor.to(device=device, dtype=dtype) for name, tensor in found.items()}
    return vocabulary_of(whole.get_text_config(), found[embedding], found[embedding] if tied else found[head])


def vocabulary_of(text: Any, embedding_VH: Tensor, head_VH: Tensor) -> Vocabulary:
    return Vocabulary(embedding_VH, head_VH, embedding_scale=embedding_scale(text), soft_cap=soft_cap(text))


def load_tensors(
    settings: TargetSettings, names: AbstractSet[str], optional: AbstractSet[str] = frozenset()
) -> dict[str, Tensor]:
    """Single tensors of a target by name, as they are stored.

    Raises:
        InputError: names the tensors that the files lack and that are not optional.
    """
    folder = resolve(settings)
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in names & set(tensors.keys())}
    if missing := names - found.keys() - optional:
        raise InputError(f"target {settings.model!r} in {folder} lacks the tensors {', '.join(sorted(missing))}")
    return found


def native_precision(gpu: bool) -> Literal["fp32", "bf16"]:
    """bf16 on GPUs and on CPUs with bf16 instructions; elsewhere fp32, which is faster there."""
    return "bf16" if gpu or torch.cpu._is_avx512_bf16_supported() else "fp32"


def settled(settings: Settings) -> Settings:
    """Settings with every `auto` precision replaced by what the booked devices multiply natively."""
    target, train = settings.target, settings.train
    if target.dtype == "auto":
        target = target.model_copy(update={"dtype": native_precision(settings.targets.gpus > 0)})
    if train.precision == "auto":
        train = train.model_copy(update={"precision": native_precision(train.gpus > 0)})
    return settings.model_copy(update={"target": target, "train": train})


def default_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fingerprint(folder: Path) -> str:
    """Hash of a target's weights: name, shape and 16 evenly spaced rows of every tensor in its safetensors files.

    Independent of the folder's place, of time stamps and of the compute dtype.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                rows = tensors.get_slice(name)
                shape = rows.get_shape()
                digest.update(json.dumps([name, shape]).encode())
                for row in np.unique(np.linspace(0, shape[0] - 1, 16, dtype=int)) if shape else (...,):
                    digest.update(rows[row].float().numpy().tobytes())
    return digest.hexdigest()[:32]
