"""Wheels of a few bytes, and an index of them: what a managed environment is built from without a network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, code: str = "", requires: str = "", script: str = ""
) -> Path:
    """A pure wheel with one module; `script`: a console script's name, which calls its `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": code or f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script} = {name}:main\n"
    record = [f"{path},sha256={_record_hash(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_in, text in files.items():
            # the same bytes each time: a wheel is named by its hash
            archive.writestr(zipfile.ZipInfo(name_in, (2020, 1, 1, 0, 0, 0)), text)
    return path


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def locked(*wheels: Path, hashes: dict[str, str] | None = None) -> str:
    """A lock of these wheels; `hashes`: other ones than they have, by the package's name."""
    lines = ["# made by a test"]
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        sha256 = (hashes or {}).get(name) or hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines += [f"{name}=={version} \\", f"    --hash=sha256:{sha256}", "    # via nothing"]
    return "\n".join(lines) + "\n"


@dataclass
class Index:
    """A simple index (PEP 503) of one folder. Files wait until `gate` is open; `asked` are those that were wanted."""

    folder: Path
    password: str | None = None
    url: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, dict[str, str]]:
        """Of a request, or of a host: how pip finds it."""
        patient, url = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "300"}, {"PIP_INDEX_URL": self.url}
        return {"environment": patient, "secrets": url} if self.password else {"environment": {**patient, **url}}

    def answer(self, path: str, authorization: str | None) -> tuple[str, bytes] | None:
        """None for who may not."""
        name = path.strip("/").split("/")[-1]
        if self.password and authorization != f"Basic {base64.b64encode(f'me:{self.password}'.encode()).decode()}":
            return None
        if path.endswith("/"):
            files = [one.name for one in self.folder.iterdir() if one.name.split("-")[0].replace("_", "-") == name]
            return "text/html", "".join(f'<a href="/files/{file}">{file}</a>' for file in files).encode()
        self.asked.append(name)
        assert self.gate.wait(120)
        return "application/octet-stream", (self.folder / name).read_bytes()


@contextmanager
def serving(folder: Path, *, password: str | None = None) -> Iterator[Index]:
    one = Index(folder, password)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = one.answer(self.path, self.headers.get("Authorization"))
            self.send_response(401 if answer is None else 200)
            kind, data = answer or ("text/plain", b"")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            # pip may have been killed meanwhile
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one.url = f"http://{f'me:{password}@' if password else ''}127.0.0.1:{server.server_address[1]}/simple/"
        try:
            yield one
        finally:
            one.gate.set()
            server.shutdown()
