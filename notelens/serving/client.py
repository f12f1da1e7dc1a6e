"""An asynchronous client of any OpenAI-compatible engine that keeps the time of every streamed chunk."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from notelens.errors import (
    EngineModelError,
    EngineUrlError,
    InputError,
    MissingPackageError,
    RequestTimeoutError,
    ServingError,
)
from notelens.serving.session import Message, PromptSession

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 60.0
CONNECT_S = 5.0
LOCAL = ("127.0.0.1", "localhost", "::1")
SLOWING = ("prompt_logprobs", "logprobs", "top_logprobs", "echo")
"""Options that make an engine skip its prefix cache or do more work than to answer; a timed request must not have them."""


@dataclass(frozen=True)
class Reply:
    """An answer and when its parts came.

    Attributes:
        text: of the answer.
        sent: clock (``time.perf_counter``) when the request was sent.
        chunks: seconds from sending to each chunk that carried text; where none did, to the end of the answer.
        total_s: seconds from sending to the end.
        n_prompt, n_output, n_cached: tokens as the engine counts them; ``None`` where it does not say.
        finish: why it ended, as the engine says.
    """

    text: str
    sent: float
    chunks: tuple[float, ...]
    total_s: float
    n_prompt: int | None
    n_output: int | None
    n_cached: int | None
    finish: str | None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0]

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between tokens after the first; ``None`` below two tokens (a chunk may carry several)."""
        n = self.n_output if self.n_output is not None else len(self.chunks)
        return (self.chunks[-1] - self.chunks[0]) / (n - 1) if n > 1 and len(self.chunks) > 1 else None


def need_httpx() -> Any:
    """The module ``httpx``.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise MissingPackageError(
            "speaking to an engine needs httpx; install it with: pip install 'notelens[serve]'"
        ) from None
    return httpx


def base_url(url: str) -> str:
    """The engine's address without a path (``http://host:port``); ``/v1`` at the end is taken off.

    Raises:
        InputError: it is no http address.
    """
    parts = urlsplit(url.strip())
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise InputError(f"{url!r} is not the address of an engine; write it as http://HOST:PORT")
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


class EngineClient:
    """Speaks to one engine; use as an asynchronous context manager.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: as the engine calls it; the only one that it serves when ``None``.
        timeout_s: seconds after which a request is given up, unless it says otherwise.
        headers: of every request, for instance an authorization.

    Raises:
        MissingPackageError: httpx is not installed.
        InputError: ``url`` is no http address.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._httpx = need_httpx()
        self.url, self.model, self.timeout_s = base_url(url), model, timeout_s
        self._http: httpx.AsyncClient = self._httpx.AsyncClient(
            timeout=self._httpx.Timeout(None, connect=CONNECT_S),
            limits=self._httpx.Limits(
                max_connections=None, max_keepalive_connections=None
            ),  # never queue in the client
            headers=dict(headers or {}),
            trust_env=urlsplit(self.url).hostname not in LOCAL,  # a proxy does not know this machine's own ports
        )

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def check(self) -> str:
        """Whether an OpenAI-compatible engine answers and serves the model; the model's name.

        Raises:
            EngineUrlError: nothing answers, or something else.
            EngineModelError: it serves another model, or several where none was named.
        """
        async with self._within(CONNECT_S * 2, "the list of models"):
            response = await self._http.get(f"{self.url}/v1/models")
        found = _json(response.content) if response.status_code == 200 else None
        try:
            names = [str(entry["id"]) for entry in cast(Any, found)["data"]]
        except (KeyError, TypeError):
            kind = response.headers.get("content-type", "no content type")
            raise EngineUrlError(
                f"{self.url} answers, but not like an OpenAI-compatible engine (GET /v1/models gave {response.status_code}, "
                f"{kind}); check the address"
            ) from None
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            wanted = "no model was named" if self.model is None else f"{self.model!r} was asked for"
            raise EngineModelError(f"the engine at {self.url} serves {', '.join(names) or 'nothing'}, but {wanted}")
        return self.model

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        salt: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Reply:
        """A chat completion, streamed, at temperature 0.

        Args:
            messages: with ``role`` and ``content``.
            max_tokens: of the answer.
            salt: cache salt: requests share cached prefixes only with requests of the same salt; ``""`` is none.
            timeout_s: instead of the client's.
            extra: further keys of the request's body, as the engine understands them.

        Raises:
            EngineUrlError: nothing answers.
            EngineModelError: the engine does not serve the model.
            RequestTimeoutError: no complete answer in time.
            ServingError: the engine refused the request, or its answer broke off or is not in OpenAI's format.
            InputError: ``extra`` asks for something that a timed request must not have (:data:`SLOWING`).
        """
        return await self._stream("chat/completions", {"messages": list(messages)}, max_tokens, salt, timeout_s, extra)

    async def complete(
        self,
        prompt: str,
        *,
        max_tokens: int,
        salt: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Reply:
        """A completion of plain text; arguments and errors as :meth:`chat`."""
        return await self._stream("completions", {"prompt": prompt}, max_tokens, salt, timeout_s, extra)

    async def metrics(self) -> str | None:
        """Text of the engine's ``/metrics``, or ``None`` where it has none or does not answer."""
        return await self._optional("metrics")

    async def version(self) -> str | None:
        """What the engine calls its version (``/version`` of vLLM), or ``None``."""
        text = await self._optional("version")
        found = _json(text.encode()) if text is not None else None
        return str(found["version"]) if isinstance(found, dict) and "version" in found else None

    async def _optional(self, path: str) -> str | None:
        try:
            response = await self._http.get(f"{self.url}/{path}", timeout=CONNECT_S)
        except self._httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def _stream(
        self, path: str, content: Mapping[str, Any], max_tokens: int, salt: str | None, timeout_s: float | None,
        extra: Mapping[str, Any] | None,
    ) -> Reply:  # fmt: skip
        if slow := sorted(set(extra or ()) & set(SLOWING)):
            raise InputError(
                f"a timed request must not ask for {slow[0]!r}: it changes how the engine works; score apart"
            )
        body: dict[str, Any] = {
            "model": self.model, **content, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **(extra or {}),
        }  # fmt: skip
        if salt:
            body["cache_salt"] = salt
        limit = self.timeout_s if timeout_s is None else timeout_s
        async with self._within(limit, "a complete answer"):
            sent = time.perf_counter()
            async with self._http.stream("POST", f"{self.url}/v1/{path}", json=body) as response:
                if response.status_code != 200:
                    self._refuse(response.status_code, await response.aread())
                return await _collect(response.aiter_lines(), sent, self.url)

    @asynccontextmanager
    async def _within(self, limit: float, what: str) -> AsyncIterator[None]:
        """Bound a request in time and turn what goes wrong into one sentence."""
        h = self._httpx
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            raise RequestTimeoutError(f"{self.url}: no answer to the end within {limit:g} s ({what})") from None
        except (h.ConnectError, h.ConnectTimeout) as e:
            raise EngineUrlError(
                f"nothing answers at {self.url} ({_flat(str(e)) or 'no connection'}); is the engine up, and is this its "
                "address?"
            ) from None
        except (h.HTTPError, h.InvalidURL) as e:
            why = _flat(str(e)) or type(e).__name__
            raise ServingError(f"{self.url}: the connection broke before {what} was there ({why})") from None

    def _refuse(self, status: int, content: bytes) -> None:
        found: Any = _json(content)
        error = found.get("error", found) if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if message is None:
            raise EngineUrlError(
                f"{self.url} answers, but not like an OpenAI-compatible engine (status {status}); check the address"
            )
        if status == 404 and "model" in str(message):
            raise EngineModelError(f"the engine at {self.url} does not serve {self.model!r} ({_flat(str(message))})")
        raise ServingError(f"the engine at {self.url} refused a request ({status}: {_flat(str(message))})")


async def _collect(lines: AsyncIterator[str], sent: float, url: str) -> Reply:
    """Read a stream of server-sent events to its end."""
    text: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    finish: str | None = None
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        now = time.perf_counter() - sent
        if data == "[DONE]":
            details = usage.get("prompt_tokens_details") or {}
            return Reply(
                "".join(text), sent, tuple(times) or (now,), now, usage.get("prompt_tokens"),
                usage.get("completion_tokens"), details.get("cached_tokens"), finish,
            )  # fmt: skip
        chunk: Any = _json(data.encode())
        if not isinstance(chunk, dict) or "choices" not in chunk:
            error = chunk.get("error") if isinstance(chunk, dict) else None
            said = error.get("message") if isinstance(error, dict) else None
            raise ServingError(f"{url}: a chunk of an answer is not in OpenAI's format ({_flat(str(said or data))})")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            piece = _piece(choice)
            if piece:
                text.append(piece)
                times.append(now)
            finish = choice.get("finish_reason") or finish
    raise ServingError(f"{url}: an answer broke off after {len(times)} chunks, without its end mark")


def _piece(choice: Mapping[str, Any]) -> str:
    """Text of a chunk, of a chat or of a plain completion."""
    delta = choice.get("delta")
    return str((delta.get("content") if isinstance(delta, dict) else choice.get("text")) or "")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _flat(text: str, limit: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


__all__ = ["EngineClient", "PromptSession", "Reply", "base_url", "need_httpx"]
