"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, eyas' own): chat completions over plain HTTP.

Asks for token ids, which vLLM gives (`return_token_ids`), and does without them where the server refuses the question.
What may pass by itself (no connection, 408, 409, 429, 5xx, a broken answer) is tried again after a pause that doubles.
Refuses to know tokenizers, templates and files. Safe to use from many threads.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from eyas.errors import InputError, one_line
from eyas.verify import FinishReason

_PASSING = (408, 409, 429)  # and all from 500


class EndpointError(Exception):
    """The endpoint does not answer, or not in the way that was asked."""


class _Refused(Exception):
    """The server understood, and says no."""


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    finish: FinishReason
    prompt_ids: list[int] | None  # where the server gives them
    token_ids: list[int] | None


class Endpoint:
    """A server and the name of a model on it."""

    def __init__(
        self, url: str, model: str, key: str | None = None, timeout: float = 600, tries: int = 6, pause: float = 1
    ) -> None:
        """`url` ends where `/chat/completions` is to follow, in `/v1` as a rule. `timeout` and `pause` are seconds.

        Raises:
            InputError: `url` is no HTTP address.
        """
        if not url.startswith(("http://", "https://")) or any(c.isspace() for c in url):
            raise InputError(f"an endpoint is an address like http://localhost:8000/v1, got {url!r}")
        self.url, self.model, self.timeout, self.tries, self.pause = url.rstrip("/"), model, timeout, tries, pause
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._asks_ids = True

    def max_length(self) -> int | None:
        """Tokens of the model's context there, where the server tells it (vLLM, SGLang)."""
        request = urllib.request.Request(f"{self.url}/models", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                found = [model["max_model_len"] for model in json.load(response)["data"] if model["id"] == self.model]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None  # it need not tell, and whether it answers at all will show
        return found[0] if found and type(found[0]) is int and found[0] > 0 else None

    def answer(self, messages: Seq[Mapping[str, str]], temperature: float, max_tokens: int, seed: int) -> Reply:
        """The model's answer to a conversation.

        Raises:
            EndpointError: there is none, after all tries.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        problem = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                return _reply(self._post(body))
            except _Refused as error:
                raise EndpointError(f"the endpoint {self.url} refuses: {error}") from error
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
                problem = one_line(error)
        raise EndpointError(f"the endpoint {self.url} gives no answer in {self.tries} tries: {problem}")

    def _post(self, body: Mapping[str, object]) -> object:
        asks_ids = self._asks_ids
        whole = {**body, "return_token_ids": True} if asks_ids else body
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(whole).encode(), self._headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                words = error.read(2000).decode(errors="replace")
            if error.code >= 500 or error.code in _PASSING:
                raise OSError(f"{error.code} {words}") from error
            if asks_ids and error.code in (400, 422):  # perhaps it knows no such field
                self._asks_ids = False
                return self._post(body)
            raise _Refused(f"{error.code} {' '.join(words.split())[:300]}") from error


def _reply(answer: object) -> Reply:
    """Raises KeyError, IndexError, TypeError or ValueError where the answer is none."""
    if not isinstance(answer, dict):
        raise TypeError("its answer is no JSON object")
    choice = answer["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    prompt_ids, token_ids = _ids(answer.get("prompt_token_ids")), _ids(choice.get("token_ids"))
    if reason not in ("stop", "length"):
        raise ValueError(f"an answer finished by {reason!r}")
    if token_ids is None and (message.get("reasoning_content") or message.get("reasoning")):
        raise _Refused("it takes the reasoning out of the answer and gives no token ids, so that the answer's tokens "
                       "are lost: serve without a reasoning parser")  # fmt: skip
    text = message.get("content")
    if not isinstance(text, str) and token_ids is None:
        raise TypeError("an answer without text")
    return Reply(text or "", reason, prompt_ids, token_ids)


def _ids(value: object) -> list[int] | None:
    if not isinstance(value, list) or not value:
        return None
    if not all(type(token) is int for token in value):
        raise TypeError("token ids that are no whole numbers")
    return value
