"""Requests that contain skills, for an engine with the plug-in: what has to go ahead, and how the engine is told.

An engine takes rows of a skill only behind tokens it has cached, up to a block edge (:mod:`notelens.serving.skill_loads`).
So a prompt ``[text][skill][text]`` becomes a short request that ends at the edge in or in front of the skill, and the request
itself, which marks the skill. With ``align="head"`` the first request also runs the first rows of the skill, up to the edge, in
their place; with ``align="pad"`` the text is padded to the edge, and the skill is used whole. A skill right behind another one
is taken together with it.

Nothing here depends on an engine's library: requests are plain bodies of ``/v1/completions`` with token ids, sent by a
function.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from notelens.errors import EngineError, RequestTimeoutError, ServingError
from notelens.serving.client import LOCAL, base_url, need_httpx
from notelens.serving.skill_loads import PARAMS, SALT

if TYPE_CHECKING:
    from notelens.cache.library import SkillLibrary

Align = Literal["head", "pad"]
Send = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Sends the body of a completion request and returns the answer's."""


@dataclass(frozen=True)
class SkillText:
    """A skill as part of a prompt.

    Attributes:
        name: in the engine's library.
        token_ids: its tokens, as they were compiled.
    """

    name: str
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, library: "SkillLibrary", name: str) -> "SkillText":
        """From a library.

        Raises:
            UnknownNameError, ArtefactError: as ``library.get``.
        """
        return cls(name, library.get(name).header.token_ids)


Part = Sequence[int] | SkillText


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: token ids.
        skills: (name, index of the first token) of every skill that is whole in the prompt.
    """

    prompt: tuple[int, ...]
    skills: tuple[tuple[str, int], ...]

    def body(self, salt: str, **more: Any) -> dict[str, Any]:
        """As the body of a completion request."""
        marks = {PARAMS: {"skills": [{"name": n, "start": s} for n, s in self.skills]}}
        return {
            "prompt": list(self.prompt),
            "cache_salt": salt,
            **({"kv_transfer_params": marks} if self.skills else {}),
            **more,
        }


@dataclass(frozen=True)
class Plan:
    """Requests of one prompt, in order.

    Attributes:
        ahead: short ones that make the engine cache what stands in front of each skill.
        main: the one that is answered.
        computed_in_place: tokens of skills that ``ahead`` runs, in their places.
        padding: tokens added to the prompt.
    """

    ahead: tuple[Request, ...]
    main: Request
    computed_in_place: int
    padding: int


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        body: of the answer to the main request.
        kind: ``loaded``, ``cached`` (the engine had the rows), or why no rows were taken; ``unknown`` where the engine has
            no plug-in.
        loaded_tokens: whose rows came from skills.
        reason: one sentence where none were taken.
        n_ahead: requests that went ahead of it.
    """

    body: Mapping[str, Any]
    kind: str
    loaded_tokens: int
    reason: str | None
    n_ahead: int

    @property
    def text(self) -> str:
        """Of the completion."""
        return str(self.body["choices"][0]["text"])


def plan(parts: Sequence[Part], *, block_size: int, align: Align = "head", pad_id: int | None = None) -> Plan:
    """The requests of a prompt.

    Args:
        parts: token ids and skills, in order; the last one is text.
        block_size: tokens of one of the engine's blocks (``read_settings`` of :mod:`notelens.serving.metrics`).
        align: what is done where a skill does not begin at a block edge.
        pad_id: token that ``align="pad"`` repeats at the end of the text in front of a skill.

    Raises:
        EngineError: no parts, an empty one, a skill at the end, a block of no tokens, or padding without a token for it.
    """
    if block_size < 1 or not parts or isinstance(parts[-1], SkillText):
        raise EngineError(
            "a prompt needs a block size of at least 1, and text behind its last skill: its last token decides"
        )
    if align == "pad" and pad_id is None:
        raise EngineError("align='pad' needs pad_id, a token that says nothing (a newline)")
    prompt, skills, ahead = list[int](), list[tuple[str, int]](), list[Request]()
    in_place = padding = 0
    loading = False
    for part in parts:
        ids = list(part.token_ids if isinstance(part, SkillText) else part)
        if not ids:
            raise EngineError("a part of the prompt is empty; leave it out")
        if isinstance(part, SkillText) and loading:
            skills.append((part.name, len(prompt)))
        elif isinstance(part, SkillText):
            missing = -len(prompt) % block_size
            if align == "pad" and pad_id is not None:
                prompt += [pad_id] * missing
                padding += missing
                missing = 0
            start = len(prompt)
            loading = missing < len(ids)  # otherwise no row of it lies behind an edge, and it is text like any other
            if loading:
                if start + missing > 0:
                    ahead.append(Request((*prompt, *ids[:missing]), tuple(skills)))
                skills.append((part.name, start))
                in_place += missing
        else:
            loading = False
        prompt += ids
    return Plan(tuple(ahead), Request(tuple(prompt), tuple(skills)), in_place, padding)


def new_salt() -> str:
    """A cache salt for one approximate session; no other request can reach what is cached under it."""
    return SALT + uuid.uuid4().hex


class SkillSession:
    """Prompts with skills under one salt: what one of them has made the engine cache, the next ones find.

    Everything cached under the salt counts as approximate; exact requests use no salt of this kind.

    Args:
        send: see :data:`Send` (:func:`http_sender`).
        block_size, align, pad_id: as for :func:`plan`.
        salt: of the session; a new one by default.
    """

    def __init__(
        self,
        send: Send,
        *,
        block_size: int,
        align: Align = "head",
        pad_id: int | None = None,
        salt: str | None = None,
    ) -> None:
        self.send = send
        self.block_size = block_size
        self.align: Align = align
        self.pad_id = pad_id
        self.salt = new_salt() if salt is None else salt
        if not self.salt.startswith(SALT):
            raise EngineError(f"salt {self.salt!r}: blocks with rows of skills need one that begins with {SALT!r}")
        self._ahead: set[tuple[int, ...]] = set()

    def prepare(self, parts: Sequence[Part], **options: Any) -> int:
        """Make the engine cache what stands in front of the skills of a prompt; returns how many requests this took.

        Args:
            parts, options: as for :meth:`complete`, which does it where it has not been done.

        Raises:
            EngineError, ServingError: as :meth:`complete`.
        """
        sent = 0
        for request in self._plan(parts).ahead:
            if request.prompt not in self._ahead:
                self.send(request.body(self.salt, **{"temperature": 0.0, **options, "max_tokens": 1}))
                self._ahead.add(request.prompt)
                sent += 1
        return sent

    def complete(self, parts: Sequence[Part], *, max_tokens: int = 16, **options: Any) -> Answer:
        """Send a prompt, and ahead of it what the engine has not cached yet in this session.

        Args:
            parts: as for :func:`plan`.
            max_tokens: of the answer.
            options: further entries of the request's body; ``temperature`` is 0 unless given.

        Raises:
            EngineError: the parts cannot be sent.
            ServingError: what the sender raises.
        """
        sent = self.prepare(parts, **options)
        requests = self._plan(parts)
        common = {"temperature": 0.0, **options}
        answer = self.send(requests.main.body(self.salt, **common, max_tokens=max_tokens))
        told = (answer.get("kv_transfer_params") or {}).get(PARAMS, {})
        if told.get("kind") == "prefix":  # the engine has dropped it meanwhile
            self._ahead -= {r.prompt for r in requests.ahead}
        return Answer(
            answer, str(told.get("kind", "unknown")), int(told.get("loaded_tokens", 0)), told.get("reason"), sent
        )

    def _plan(self, parts: Sequence[Part]) -> Plan:
        return plan(parts, block_size=self.block_size, align=self.align, pad_id=self.pad_id)


def http_sender(url: str, model: str, *, timeout_s: float = 60.0) -> Send:
    """A :data:`Send` over HTTP.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: the engine's name for its model.
        timeout_s: for each request.

    Raises:
        MissingPackageError: httpx is not installed.
        InputError: ``url`` is no http address.

    The sender raises RequestTimeoutError where there is no answer in time, and ServingError where the engine cannot be reached
    or refuses the request.
    """
    httpx, at = need_httpx(), base_url(url)
    client = httpx.Client(timeout=timeout_s, trust_env=urlsplit(at).hostname not in LOCAL)

    def send(body: dict[str, Any]) -> Mapping[str, Any]:
        try:
            answer = client.post(f"{at}/v1/completions", json={"model": model, **body})
        except httpx.TimeoutException as e:
            raise RequestTimeoutError(f"the engine at {at} gave no answer within {timeout_s:g} s") from e
        except httpx.HTTPError as e:
            raise ServingError(f"the engine at {at} cannot be reached ({type(e).__name__})") from e
        if answer.status_code != 200:
            raise ServingError(f"the engine at {at} refused a request ({answer.status_code}): {answer.text[:300]}")
        return answer.json()

    return send


__all__ = [
    "Answer", "Plan", "Request", "SkillSession", "SkillText", "http_sender", "new_salt", "plan",
]  # fmt: skip
