"""Requests that contain skills: what goes ahead, what is marked, and how sessions stay apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notelens.cache.library import SkillLibrary
from notelens.errors import EngineError, RequestTimeoutError, ServingError
from notelens.serving.skill_requests import SkillSession, SkillText, plan
from notelens.serving.skill_store import SkillStore
from tests.contracts.models import random_ids
from tests.skill_cases import BLOCK, SKILL, TOOL, FakeEngine, skill_library


@pytest.fixture
def library(tmp_path: Path) -> SkillLibrary:
    return skill_library(tmp_path / "skills")


# --- requests ---------------------------------------------------------------------------------------------------------


class TestRequests:
    BEFORE, AFTER = random_ids(19, seed=9), random_ids(3, seed=10)

    def test_a_ragged_head_is_run_ahead(self) -> None:
        found = plan([self.BEFORE, SkillText("policy", SKILL), self.AFTER], block_size=BLOCK)
        assert [len(r.prompt) for r in found.ahead] == [24] and found.ahead[0].skills == ()
        assert found.main.skills == (("policy", 19),) and found.main.prompt == (*self.BEFORE, *SKILL, *self.AFTER)
        assert found.computed_in_place == 5 and found.padding == 0

    def test_padding_brings_a_skill_to_an_edge(self) -> None:
        found = plan([self.BEFORE, SkillText("policy", SKILL), self.AFTER], block_size=BLOCK, align="pad", pad_id=1)
        assert found.main.prompt == (*self.BEFORE, 1, 1, 1, 1, 1, *SKILL, *self.AFTER)
        assert found.main.skills == (("policy", 24),) and found.padding == 5 and found.computed_in_place == 0
        assert found.ahead[0].prompt == found.main.prompt[:24]

    def test_every_skill_with_text_in_front_goes_ahead(self) -> None:
        parts = [SkillText("policy", SKILL), self.BEFORE, SkillText("tool", TOOL), SkillText("tool", TOOL), self.AFTER]
        found = plan(parts, block_size=BLOCK)
        assert [len(r.prompt) for r in found.ahead] == [40] and found.ahead[0].skills == (("policy", 0),)
        assert found.main.skills == (("policy", 0), ("tool", 40), ("tool", 49))

    def test_a_skill_within_one_block_is_text(self) -> None:
        found = plan([self.BEFORE, SkillText("small", (1, 2, 3)), self.AFTER], block_size=BLOCK)
        assert found.ahead == () and found.main.skills == () and "kv_transfer_params" not in found.main.body("s")

    @pytest.mark.parametrize(
        ("parts", "options", "text"),
        [
            ([], {}, "text behind its last skill"),
            ([(1,), SkillText("a", (1,))], {}, "text behind its last skill"),
            ([(), SkillText("a", (1,)), (2,)], {}, "empty"),
            ([(1,)], {"block_size": 0}, "block size"),
            ([(1,)], {"align": "pad"}, "pad_id"),
        ],
    )
    def test_what_cannot_be_sent(self, parts: list[Any], options: dict[str, Any], text: str) -> None:
        with pytest.raises(EngineError, match=text):
            plan(parts, **{"block_size": BLOCK, **options})

    @pytest.mark.parametrize("align", ["head", "pad"])
    def test_a_session_runs_only_what_is_no_skill(self, library: SkillLibrary, align: Any) -> None:
        fake = FakeEngine(SkillStore(library))
        session = SkillSession(fake.send, block_size=BLOCK, align=align, pad_id=1)
        parts = [self.BEFORE, SkillText.of(library, "policy"), self.AFTER, SkillText.of(library, "tool"), self.AFTER]
        answer = session.complete(parts)
        assert (answer.kind, answer.n_ahead, answer.text) == ("loaded", 2, "ok")
        # the text in front up to an edge; text between the skills, with the head of the second; the question
        assert fake.run == ([24, 8, 3] if align == "head" else [24, 3, 3])
        assert {b["cache_salt"] for b in fake.bodies} == {session.salt}
        again = session.complete([*parts[:-1], random_ids(6, seed=11)])
        assert again.n_ahead == 0 and fake.run[3:] == [6]

    def test_sessions_and_exact_requests_are_apart(self, library: SkillLibrary) -> None:
        fake = FakeEngine(SkillStore(library))
        parts = [self.BEFORE, SkillText.of(library, "policy"), self.AFTER]
        prompt = plan(parts, block_size=BLOCK).main.prompt
        first = SkillSession(fake.send, block_size=BLOCK)
        first.complete(parts)
        fake.send({"prompt": prompt, "max_tokens": 1})
        assert fake.run[-1] == len(prompt)  # nothing of it was reachable
        second = SkillSession(fake.send, block_size=BLOCK)
        assert second.complete(parts).n_ahead == 1 and second.salt != first.salt
        fake.send({"prompt": prompt, "cache_salt": first.salt, "max_tokens": 1})
        assert fake.run[-1] < BLOCK + len(self.AFTER)  # under its own salt it is

    def test_an_engine_that_forgot_the_text_in_front_is_told_again(self, library: SkillLibrary) -> None:
        fake = FakeEngine(SkillStore(library))
        session = SkillSession(fake.send, block_size=BLOCK)
        parts = [self.BEFORE, SkillText.of(library, "policy"), self.AFTER]
        session.complete(parts)
        fake.blocks.clear()
        lost = session.complete(parts)
        assert lost.kind == "prefix" and lost.reason is not None and "send them first" in lost.reason
        fake.blocks.clear()
        assert session.complete(parts).kind == "loaded"

    def test_an_engine_without_the_plugin_is_seen(self) -> None:
        session = SkillSession(lambda body: {"choices": [{"text": ""}]}, block_size=BLOCK)
        answer = session.complete([self.BEFORE, SkillText("policy", SKILL), self.AFTER])
        assert (answer.kind, answer.loaded_tokens) == ("unknown", 0)

    def test_a_salt_of_another_kind_is_refused(self) -> None:
        with pytest.raises(EngineError, match="begins with"):
            SkillSession(lambda body: {}, block_size=BLOCK, salt="mine")


def http_answers(monkeypatch: pytest.MonkeyPatch, handle: Callable[[Any], Any]) -> Any:
    import httpx

    from notelens.serving.skill_requests import http_sender

    client = httpx.Client(transport=httpx.MockTransport(handle))
    monkeypatch.setattr(httpx, "Client", lambda **options: client)
    return http_sender("http://engine", "m")


def test_a_sender_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    seen: list[Any] = []

    def handle(request: Any) -> Any:
        seen.append((str(request.url), json.loads(request.content)))
        return (
            httpx.Response(200, json={"choices": []}) if len(seen) == 1 else httpx.Response(404, text="no such model")
        )

    send = http_answers(monkeypatch, handle)
    assert send({"prompt": [1]}) == {"choices": []}
    assert seen == [("http://engine/v1/completions", {"model": "m", "prompt": [1]})]
    with pytest.raises(ServingError, match=r"404.*no such model"):
        send({"prompt": [1]})


def test_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def handle(request: Any) -> Any:
        raise found[0]

    send, found = http_answers(monkeypatch, handle), [httpx.ConnectError("refused")]
    with pytest.raises(ServingError, match="cannot be reached"):
        send({"prompt": [1]})
    found = [httpx.ReadTimeout("slow")]
    with pytest.raises(RequestTimeoutError, match="no answer within 60 s"):
        send({"prompt": [1]})
