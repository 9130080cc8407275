"""The target behind an OpenAI-compatible endpoint (vLLM, SGLang) as the engine of `prepare`.

Prompts go out as token ids to `POST /completions`, greedily. The answer's own token ids are taken where the server
gives them (vLLM: `token_ids`, SGLang: `response_token_ids`, both asked for by `return_token_ids`); else its text is
tokenised, and taken where it decodes to the same text again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import requests

from trainer.engine import UNTOLD, Answers, Prompts, until_end
from trainer.errors import EndpointFailed, InputError, headline

KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable whose value, where it is set, is sent as the bearer token."""
_TRIES = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_TIMEOUTS_S = (10.0, 1800.0)
_TRY_AGAIN = (408, 429)
_DENIED = (401, 403)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """`url` ends before `/completions`, as in `http://host:8000/v1`; `model` None: the only one that is served."""

    url: str
    model: str | None
    concurrency: int


class EndpointEngine:
    """Asks for the answers, several at a time; see `Engine`. Answers are at most `tokens` long.

    `ends` are the tokens that end an answer; the tokenizer's own is put where the server names none. Raises
    `InputError` where the endpoint refuses, `EndpointFailed` where it does not answer.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Any, ends: frozenset[int], tokens: int) -> None:
        self._url = endpoint.url.rstrip("/")
        self._concurrency = endpoint.concurrency
        self._tokenizer = tokenizer
        self._ends = ends
        self._tokens = tokens
        self._model = endpoint.model or self._only_model()

    def answers(self, prompts: Prompts, known: Container[int]) -> Iterator[Answers]:
        """See `Engine`. An answer whose tokens cannot be told is `[UNTOLD]`."""
        left = [row for row in sorted(prompts, reverse=True) if row not in known]
        running: dict[Future[Mapping[str, Any]], int] = {}
        http = _Http(self._url)
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="endpoint")
        try:
            while left or running:
                # no more than are at work: a failure is met before everything was asked
                while left and len(running) < self._concurrency:
                    row = left.pop()
                    running[pool.submit(self._ask, http, prompts[row])] = row
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                failed = next((each.exception() for each in done if each.exception() is not None), None)
                found = {running.pop(each): each.result() for each in done if each.exception() is None}
                if found:
                    yield {row: self._token_ids(choice) for row, choice in found.items()}
                if failed is not None:
                    raise failed
        finally:
            http.give_up()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, http: _Http, prompt: Sequence[int]) -> Mapping[str, Any]:
        said = http.call(
            "POST",
            "/completions",
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": self._tokens,
                "temperature": 0,
                "return_token_ids": True,
                "skip_special_tokens": False,
            },
        )
        try:
            choice: Mapping[str, Any] = said["choices"][0]
            if isinstance(choice["text"], str) and choice["finish_reason"] in ("stop", "length"):
                return choice
        except (KeyError, IndexError, TypeError):
            pass
        raise _refusal(
            self._url, f"it answers with no completion: {str(said)[:200]}", "give an OpenAI-compatible server"
        )

    def _token_ids(self, choice: Mapping[str, Any]) -> list[int]:
        given = choice.get("token_ids") or choice.get("response_token_ids")
        ids = [int(each) for each in given] if given else self._tokenised(choice["text"])
        if any(not 0 <= each < len(self._tokenizer) for each in ids if ids != [UNTOLD]):
            raise _refusal(
                self._url,
                f"it answers with token {max(ids)}, the target's tokenizer has {len(self._tokenizer)}",
                "serve the model of workload.target there",
            )
        ids = until_end(ids, self._ends)
        if choice["finish_reason"] == "stop" and not (ids and (ids[-1] in self._ends or ids[-1] == UNTOLD)):
            ids.append(self._end(choice))
        return ids

    def _tokenised(self, text: str) -> list[int]:
        """Tokens of a text; a character that was cut in its midst (U+FFFD) has none."""
        ids = [int(each) for each in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        same = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        return ids if same and "\ufffd" not in text else [UNTOLD]

    def _end(self, choice: Mapping[str, Any]) -> int:
        """The end token that the server left out: the one it names (vLLM), else the tokenizer's."""
        for named in (choice.get("stop_reason"), choice.get("matched_stop"), self._tokenizer.eos_token_id):
            if isinstance(named, int) and named in self._ends:
                return named
        return min(self._ends, default=UNTOLD)

    def _only_model(self) -> str:
        said = _Http(self._url).call("GET", "/models", None)
        listed = said.get("data") if isinstance(said, dict) else None
        names = [str(each.get("id")) for each in listed or [] if isinstance(each, dict)]
        if len(names) != 1:
            raise InputError(
                f"{self._url} serves {', '.join(names) or 'no model'}",
                "training.endpoint_model",
                f"give {' or '.join(names)}" if names else "start the server with the model of workload.target",
            )
        return names[0]


class _Bearer(requests.auth.AuthBase):
    """The key as a header. It is no part of the session's headers, and a .netrc is not asked."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class _Http:
    """Calls of one server by several threads: again, later and later, where it is busy, broken or away."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._threads = threading.local()
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Nobody waits for an answer any more: no call is made again."""
        self._given_up.set()

    def call(self, method: str, path: str, body: object) -> Any:
        """The decoded answer. Raises `InputError` and `EndpointFailed`."""
        delay_s, trouble = _FIRST_WAIT_S, ""
        for left in reversed(range(_TRIES)):
            wait_s = delay_s
            try:
                answer = self._session().request(method, self.url + path, json=body, timeout=_TIMEOUTS_S)
                if answer.ok:
                    return answer.json()
                trouble = f"HTTP {answer.status_code}: {answer.text.strip()[:300]}"
                if answer.status_code not in _TRY_AGAIN and answer.status_code < 500:
                    raise self._refused(answer.status_code, trouble)
                wait_s = _asked_to_wait(answer, delay_s)
            except requests.RequestException as error:
                trouble = headline(error)
            if not left:
                break
            log.warning("%s: %s; again in %.1f s", self.url, trouble, wait_s)
            if self._given_up.wait(wait_s):
                break
            delay_s = min(2 * delay_s, _LONGEST_WAIT_S)
        raise EndpointFailed(f"{self.url} was asked {_TRIES} times: {trouble}; what it answered before is kept")

    def _refused(self, status: int, trouble: str) -> InputError:
        if status in _DENIED:
            return _refusal(
                self.url, trouble, f"put the key into the environment as {KEY_VARIABLE}, a secret of the host"
            )
        return _refusal(
            self.url, trouble, "give the URL up to and with /v1, and training.endpoint_model as it is served"
        )

    def _session(self) -> requests.Session:
        # one for each thread: requests promises nothing about a shared one
        if not hasattr(self._threads, "session"):
            session = requests.Session()
            session.auth = _Bearer(os.environ.get(KEY_VARIABLE))
            self._threads.session = session
        found: requests.Session = self._threads.session
        return found


def _asked_to_wait(answer: requests.Response, otherwise_s: float) -> float:
    try:
        return min(max(float(answer.headers["Retry-After"]), 0.0), _LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return otherwise_s


def _refusal(url: str, what: str, fix: str) -> InputError:
    return InputError(what, f"training.endpoint ({url})", fix)
