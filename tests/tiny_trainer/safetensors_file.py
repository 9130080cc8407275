"""The safetensors format by hand: u64 header length, JSON header, raw little-endian values."""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from pathlib import Path

Shapes = dict[str, tuple[int, ...]]
_KINDS = {"F32": ("f", 4), "F64": ("d", 8)}


def pack(tensors: dict[str, list[float]], shapes: Shapes, dtype: str) -> bytes:
    """Return a file's bytes; `dtype` is F32 or F64."""
    code, _ = _KINDS[dtype]
    header = {}
    body = bytearray()
    for name in sorted(tensors):
        values = array(code, tensors[name])
        if sys.byteorder == "big":
            values.byteswap()
        start = len(body)
        body += values.tobytes()
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [start, len(body)]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(body)


def unpack(path: Path) -> tuple[dict[str, list[float]], Shapes]:
    """Read values and shapes; raises ValueError for a file that is not whole."""
    raw = path.read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    body = raw[8 + length :]
    tensors, shapes = {}, {}
    for name, entry in header.items():
        code, size = _KINDS[entry["dtype"]]
        start, end = entry["data_offsets"]
        if end > len(body) or end - start != size * math.prod(entry["shape"]):
            raise ValueError(f"{path}: {name} does not fit the file")
        values = array(code, body[start:end])
        if sys.byteorder == "big":
            values.byteswap()
        tensors[name], shapes[name] = values.tolist(), tuple(entry["shape"])
    return tensors, shapes
