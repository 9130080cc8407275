"""What never goes into a release: secrets and weights, told by name and by content."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from dflash_ops.release.errors import ReleaseError

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_BIN_BYTES = 1024 * 1024

_SECRET_NAMES = (
    ".env",
    ".env.*",
    "*.pem",
    "*.ppk",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.kdbx",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ecdsa_sk",
    "id_ed25519",
    "id_ed25519_sk",
    ".netrc",
    ".pgpass",
    ".git-credentials",
    ".pypirc",
)
_SECRET_FOLDERS = frozenset({".ssh", ".aws", ".gnupg"})
_WEIGHT_NAMES = (
    "*.safetensors",
    "*.gguf",
    "*.ggml",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.onnx",
    "*.h5",
)

_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-[0-9]")
# torch.save before 1.6: protocol 2 pickle of torch's magic number, 0x1950a86a20f9469cfc6c
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"

_KEEP_SECRETS_OUT = (
    "take it out of git (git rm --cached) or out of `include`; secrets belong on the host, not in a release"
)
_KEEP_WEIGHTS_OUT = "take it out of git or out of `include`; a playbook names weights by path, they are not shipped"


def refuse_name(path: str) -> None:
    """Raises ReleaseError when the path alone tells a secret, a weight file or a name no host can take."""
    pure = PurePosixPath(path)
    name = pure.name.lower()
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ReleaseError(
            "the file's name is not UTF-8", ascii(path), "rename it, or leave it out of the release"
        ) from error
    if not path.isprintable() or "\\" in path:
        raise ReleaseError(
            "the file's name has a backslash or a control character",
            ascii(path),
            "rename it, or leave it out of the release",
        )
    for pattern in _SECRET_NAMES:
        if fnmatchcase(name, pattern):
            raise ReleaseError(f"looks like a secret: its name matches {pattern}", path, _KEEP_SECRETS_OUT)
    for part in pure.parts[:-1]:
        if part.lower() in _SECRET_FOLDERS:
            raise ReleaseError(f"looks like a secret: it lies in {part}/", path, _KEEP_SECRETS_OUT)
    for pattern in _WEIGHT_NAMES:
        if fnmatchcase(name, pattern):
            raise ReleaseError(f"looks like weights: its name matches {pattern}", path, _KEEP_WEIGHTS_OUT)


def refuse_size(path: str, size: int) -> None:
    """Raises ReleaseError for a file (`size` in bytes) that is too large for source."""
    if path.lower().endswith(".bin") and size > MAX_BIN_BYTES:
        raise ReleaseError(
            f"looks like weights: a .bin file of {size} bytes (over {MAX_BIN_BYTES})", path, _KEEP_WEIGHTS_OUT
        )
    if size > MAX_FILE_BYTES:
        raise ReleaseError(
            f"has {size} bytes; a file of a release has {MAX_FILE_BYTES} at most",
            path,
            "keep data on the host and name it in the playbook's settings",
        )


def refuse_content(path: str, data: bytes) -> None:
    """Raises ReleaseError when the content is a private key or weights, whatever the name says."""
    if _PRIVATE_KEY.search(data):
        raise ReleaseError("holds a private key", path, _KEEP_SECRETS_OUT)
    kind = _weights_kind(data)
    if kind is not None:
        raise ReleaseError(f"holds weights: {kind}", path, _KEEP_WEIGHTS_OUT)


def _weights_kind(data: bytes) -> str | None:
    if data.startswith(b"GGUF"):
        return "a GGUF file"
    if data.startswith(_LEGACY_TORCH):
        return "a file of torch.save (old format)"
    if data.startswith(_HDF5):
        return "an HDF5 file"
    # torch.save writes a zip whose entries are NAME/data.pkl and NAME/data/0; names stand in it uncompressed
    if data.startswith(_ZIP) and b"data.pkl" in data:
        return "a file of torch.save (zip)"
    return "a safetensors file" if _is_safetensors(data) else None


def _is_safetensors(data: bytes) -> bool:
    """8 bytes little-endian header length, then a JSON object (https://github.com/huggingface/safetensors)."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 10 or data[8:9] != b"{" or not 2 <= length <= len(data) - 8:
        return False
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict)
