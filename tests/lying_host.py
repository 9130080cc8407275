"""A host that lies: it takes the agent, throws it away, and speaks frames of its own.

A copy of this file is the host's `python`; `lies.json` beside it says what is answered to which operation: an object
is the result, a text in `raw` goes out as a frame's payload as it is, `data` is sent before as log bytes.
"""

import base64
import json
import os
import struct
import sys
from pathlib import Path


def frame(kind, payload):
    os.write(1, kind + struct.pack(">I", len(payload)) + payload)


def read(count):
    data = b""
    while len(data) < count:
        block = os.read(0, count - len(data))
        if not block:
            sys.exit(0)
        data += block
    return data


# -c BOOTSTRAP NONCE SIZE, whatever options of Python stand before
given = sys.argv.index("-c") + 2
nonce, size = sys.argv[given : given + 2]
lies = json.loads((Path(__file__).parent / "lies.json").read_text())
read(int(size))
os.write(1, f"\n{lies.get('greeting', 'DFLASH-OPS')} {nonce}{lies.get('after', '')}\n".encode())
while True:
    head = read(5)
    payload = read(struct.unpack(">I", head[1:])[0])
    if head[:1] != b"J":
        continue
    request = json.loads(payload)
    lie = lies.get(request["op"], {"result": {}})
    if "data" in lie:
        frame(b"D", b"\0" + base64.b64decode(lie["data"]))
    if "wire" in lie:
        os.write(1, base64.b64decode(lie["wire"]))
    elif "raw" in lie:
        frame(b"J", lie["raw"].encode())
    elif "error" in lie:
        frame(b"J", json.dumps({"id": request["id"], "ok": False, "error": lie["error"]}).encode())
    else:
        frame(b"J", json.dumps({"id": request["id"], "ok": True, "result": lie["result"]}).encode())
