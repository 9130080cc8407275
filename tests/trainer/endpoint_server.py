"""A small OpenAI-compatible server: real requests over a real socket, answered by a real target with transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass
class Behaviour:
    """How the server answers. `trouble` is used up, one request each: a status, or `cut` for half an answer."""

    token_ids: str | None = "token_ids"
    trouble: list[int | str] = field(default_factory=list)
    key: str | None = None
    models: tuple[str, ...] = ("tiny",)
    spoken: Callable[[str], str] = lambda text: text
    dies_after: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    """Those that were answered."""


@contextmanager
def serving(target: Path, behaviour: Behaviour) -> Iterator[str]:
    """The URL of a server on a free port."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    declared = model.generation_config.eos_token_id
    ends = set(declared if isinstance(declared, list) else [declared])
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._say(200, {"object": "list", "data": [{"id": name} for name in behaviour.models]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                trouble = behaviour.trouble.pop(0) if behaviour.trouble else None
                gone = behaviour.dies_after is not None and len(behaviour.prompts) >= behaviour.dies_after
                if behaviour.key is not None and self.headers["Authorization"] != f"Bearer {behaviour.key}":
                    self._say(401, {"error": {"message": "no such key"}})
                elif trouble == "cut" or gone:
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [')
                    self.close_connection = True
                elif isinstance(trouble, int):
                    self._say(trouble, {"error": {"message": "trouble"}})
                elif asked["model"] not in behaviour.models:
                    self._say(404, {"error": {"message": f"The model {asked['model']} does not exist"}})
                else:
                    assert self.path == "/v1/completions" and asked["temperature"] == 0
                    self._say(200, self._completion(asked))

        def _completion(self, asked: dict[str, Any]) -> dict[str, Any]:
            prompt = asked["prompt"]
            made = model.generate(
                torch.tensor([prompt]), max_new_tokens=asked["max_tokens"], do_sample=False, pad_token_id=1
            )
            ids = made[0, len(prompt) :].tolist()
            behaviour.prompts.append(prompt)
            ended = ids[-1] in ends
            text = tokenizer.decode(ids[:-1] if ended else ids)
            choice = {"index": 0, "text": behaviour.spoken(text), "finish_reason": "stop" if ended else "length"}
            if behaviour.token_ids and asked.get("return_token_ids"):
                choice[behaviour.token_ids] = ids
            elif ended:
                choice["stop_reason"] = ids[-1]
            return {"object": "text_completion", "choices": [choice]}

        def _say(self, status: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 429:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
