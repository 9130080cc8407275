"""A target model's files: the transformers folder it loads from, its identity, its configuration and tokenizer.

A GGUF file is converted to safetensors once (about 26 s against 3 s for SmolLM2-135M) under `cache/targets/<key>/`.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from trainer.errors import InputError
from trainer.files import file_lock, fingerprint_file, fsync_dir, fsync_file, sha256_file

_CONVERTER_VERSION = "1"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# what marks a dequantised model as still quantised, so that it refuses to be saved
_QUANTISER_MARKS = ("hf_quantizer", "is_quantized", "quantization_method")

log = logging.getLogger(__name__)
# a log is no terminal: bars would fill it with carriage returns
transformers.utils.logging.disable_progress_bar()


def is_gguf(path: Path) -> bool:
    """A single file in GGUF format, by its magic."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def check_target_path(path: Path, where: str) -> None:
    """Raise `InputError` unless `path` is a transformers folder or a GGUF file."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path} has no config.json", where, "give a transformers folder or a .gguf file")
        if not any(path.glob("*.safetensors")):
            raise InputError(f"{path} has no *.safetensors", where, "save the target with save_pretrained first")
    elif not is_gguf(path):
        raise InputError(f"{path} is no target model", where, "give a transformers folder or a .gguf file")


def target_identity(path: Path) -> str:
    """Hex digest of what the target computes: small files whole, weights by size and first and last MiB."""
    digest = hashlib.sha256(b"target 1\n")
    if path.is_file():
        digest.update(fingerprint_file(path).encode())
        return digest.hexdigest()
    for name in _SMALL_FILES:
        if (path / name).is_file():
            digest.update(f"{name} {sha256_file(path / name)}\n".encode())
    for weights in sorted(path.glob("*.safetensors")):
        digest.update(f"{weights.name} {fingerprint_file(weights)}\n".encode())
    return digest.hexdigest()


def _cached_folder(path: Path, cache: Path) -> Path:
    key = hashlib.sha256(f"{_CONVERTER_VERSION}\n{target_identity(path)}".encode()).hexdigest()[:32]
    return cache / "targets" / key


def target_folder(path: Path, cache: Path) -> Path:
    """The folder to load from: `path` itself, or the safetensors made from a GGUF file (once, in float32)."""
    if not is_gguf(path):
        return path
    folder = _cached_folder(path, cache)
    with file_lock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            log.info("converting %s to safetensors, once, into %s", path.name, folder)
            _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, low_cpu_mem_usage=True
    )
    for mark in _QUANTISER_MARKS:
        model.__dict__.pop(mark, None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(part)
    for each in part.iterdir():
        fsync_file(each)
    fsync_dir(part)
    part.rename(folder)
    fsync_dir(folder.parent)


def _source(path: Path, cache: Path) -> tuple[Path, dict[str, str]]:
    if not is_gguf(path):
        return path, {}
    folder = _cached_folder(path, cache)
    return (folder, {}) if folder.is_dir() else (path.parent, {"gguf_file": path.name})


def load_config(path: Path, cache: Path) -> Any:
    """The target's transformers configuration, without its weights."""
    folder, extra = _source(path, cache)
    return transformers.AutoConfig.from_pretrained(folder, **extra)


def load_tokenizer(path: Path, cache: Path) -> Any:
    """The target's tokenizer, without its weights."""
    folder, extra = _source(path, cache)
    return transformers.AutoTokenizer.from_pretrained(folder, **extra)
