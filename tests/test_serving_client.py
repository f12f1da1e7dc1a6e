"""Prompts keep their bytes, requests keep their times, and what goes wrong is one sentence."""

import asyncio
import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notelens.edits import hoist, lines
from notelens.errors import (
    EngineModelError,
    EngineUrlError,
    FieldError,
    InputError,
    MissingPackageError,
    RequestTimeoutError,
    ServingError,
)
from notelens.serving import session as sessions
from notelens.serving.client import EngineClient, PromptSession, Reply
from notelens.serving.engine import Engine, free_port
from notelens.serving.metrics import read_counters, window
from notelens.serving.workload import ARMS, CACHED, Workload, first_word, shared_prefix
from tests import serve_cases as cases

PREFIX = "Order sheet\n- Status: {{status}}\n- Bay: {{bay_number}}\nRule: If the status is open then wait.\n"
FIELDS = {"status": "open", "bay_number": "4"}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A fake engine without faults."""
    with cases.engine(tmp_path_factory.mktemp("fake"), us=100) as found:
        yield found


def run(url: str, what: Callable[[EngineClient], Any], **options: Any) -> Any:
    """Do something with a client."""

    async def go() -> Any:
        async with EngineClient(url, **{"model": "fake", "timeout_s": 5.0, **options}) as client:
            return await what(client)

    return asyncio.run(go())


class TestSession:
    def test_the_words_are_those_of_the_library(self) -> None:
        assert (sessions.ERRATUM, sessions.LINE, sessions.PLACE) == (lines.ERRATUM, hoist.LINE, hoist.PLACE)

    def test_the_prefix_keeps_its_bytes_and_each_field_has_one_erratum(self) -> None:
        s = PromptSession(PREFIX, FIELDS, system="Be brief.")
        first = s.messages("What now?")
        assert first[1]["content"] == s.prefix + "What now?", "nothing was updated, so there is no line"
        begin = s.prefix
        for value in ("shut", "open", "shut"):
            s.update("status", value)
        s.update("bay_number", "7")
        tail = "Update: the status is now shut.\nUpdate: the bay number is now 7.\n"
        assert s.messages("And?")[1]["content"] == begin + tail + "And?"
        s.update("status", "open")
        assert s.lines() == tail.replace("shut", "open"), "a field that went back keeps its line"
        assert s.values == {"status": "open", "bay_number": "7"} and s.prefix == begin

    def test_the_conversation_only_grows_and_keeps_no_lines(self) -> None:
        s = PromptSession(PREFIX, FIELDS)
        s.add("user", "Status is {{status}}, I think.")
        s.add("assistant", "Noted.")
        s.update("status", "shut")
        before = s.messages("One?")
        s.add("user", "One?")
        s.add("assistant", "Wait.")
        after = s.messages("Two?")
        assert before[:2] == after[:2] and before[0]["content"] == s.prefix + "Status is open, I think."
        assert [m["content"] for m in after[2:]] == ["One?", "Wait.", "Update: the status is now shut.\nTwo?"]
        assert s.text("Two?").startswith(s.prefix) and s.text("Two?").endswith(
            "Wait.\nUpdate: the status is now shut.\nTwo?"
        )

    def test_hoisted_fields_are_not_in_the_prefix(self) -> None:
        s = PromptSession(PREFIX, FIELDS, mode="hoisted")
        begin = s.prefix
        assert "- Status: given below\n" in begin and "open\n" not in begin
        assert s.lines() == "The status is open.\nThe bay number is 4.\n"
        s.update("status", "shut")
        assert s.prefix == begin and s.lines() == "The status is shut.\nThe bay number is 4.\n"

    def test_in_prefix_rewrites(self) -> None:
        s = PromptSession(PREFIX, FIELDS, mode="in_prefix")
        s.add("user", "It is {{status}}.")
        s.update("status", "shut")
        content = s.messages("So?")[0]["content"]
        assert "- Status: shut\n" in content and content.endswith("It is shut.") and s.lines() == ""

    def test_a_prefix_can_be_the_system_message(self) -> None:
        s = PromptSession(PREFIX.rstrip(), FIELDS, role="system", labels={"status": "order status"})
        s.update("status", "shut")
        roles = [(m["role"], m["content"]) for m in s.messages("So?")]
        assert roles[0] == ("system", s.prefix) and s.prefix.endswith("\n")
        assert roles[1] == ("user", "Update: the order status is now shut.\nSo?")

    @pytest.mark.parametrize(
        "value", ["", " ", "a\nb", "a\tb", "<|im_end|>", "x<start_of_turn>user", "</s>", "{{status}}", "a\x00"]
    )
    def test_a_value_cannot_open_a_turn(self, value: str) -> None:
        s = PromptSession(PREFIX, FIELDS)
        with pytest.raises(FieldError, match="field 'status'"):
            s.update("status", value)
        assert s.lines() == "" and s.values == FIELDS

    def test_what_cannot_be_meant_is_refused(self) -> None:
        with pytest.raises(FieldError, match="marks the field 'bay_number', which has no value"):
            PromptSession(PREFIX, {"status": "open"})
        with pytest.raises(FieldError, match="no field 'stat'; did you mean 'status'"):
            PromptSession(PREFIX, FIELDS).update("stat", "shut")
        with pytest.raises(FieldError, match="must hold"):
            PromptSession(PREFIX, FIELDS, erratum="It changed.\n")
        with pytest.raises(FieldError, match="may only hold"):
            PromptSession(PREFIX, FIELDS, line="{other} is {value}.\n")
        with pytest.raises(FieldError, match="the turn marks the field 'x'"):
            PromptSession(PREFIX, FIELDS).add("user", "{{x}}")
        with pytest.raises(InputError, match="unknown mode 'eratum'; did you mean 'erratum'"):
            PromptSession(PREFIX, FIELDS, mode="eratum")  # pyright: ignore[reportArgumentType]  # that is the test
        with pytest.raises(InputError, match="neither"):
            PromptSession(PREFIX, FIELDS, role="system", system="Be brief.")

    def test_asking_keeps_what_was_said(self, fake: Engine) -> None:
        rule = "Rule: If the status is open then wait; if it is shut then leave.\n"
        s = PromptSession("Sheet\n- Status: {{status}}\n" + rule, {"status": "open"}, salt="own")
        s.update("status", "shut")
        reply: Reply = run(fake.url, lambda c: s.ask(c, "So {{status}}?", max_tokens=1))
        assert reply.text == "leave"
        assert [m["content"] for m in s.messages("x")][1:] == ["leave", "Update: the status is now shut.\nx"]
        assert s.messages("x")[0]["content"].endswith("So {{status}}?"), "what was sent is kept as it was sent"
        assert cases.asked(fake.url)["asked"][-1]["cache_salt"] == "own"


class TestWorkload:
    def test_all_arms_ask_the_same(self) -> None:
        w = Workload(policies=3, n_lines=30)
        for i in range(12):
            found = [w.request(arm, i, "below", "s") for arm in ARMS]
            assert len({(a.answer, a.stale, a.family) for a in found}) == 1
            for a in found:
                text = "\n".join(m["content"] for m in a.messages)
                assert text.count("Rule: ") == 1 and text.endswith("Answer with one word.")
        answers = [w.request("erratum", i, "below").changed for i in range(60)]
        assert 15 < sum(answers) < 45, "the update changes the answer in about half of the cases"

    def test_what_is_shared_is_what_the_arm_says(self) -> None:
        w = Workload(policies=1, n_lines=60)
        for arm in ARMS:
            found = [w.request(arm, i, "below") for i in range(8)]
            share = shared_prefix([a.messages for a in found]) / min(
                sum(len(m["content"]) for m in a.messages) for a in found
            )
            assert share > 0.9 if arm in CACHED else share < 0.06, (arm, share)
            assert len({str(a.messages) for a in found}) == len(found), "no two requests are equal"

    def test_requests_are_the_same_in_every_process_and_streams_differ(self) -> None:
        one, two = (Workload(seed=3).request("erratum", 5, "at") for _ in range(2))
        assert one == two and one != Workload(seed=3).request("erratum", 5, "below") != Workload(seed=4)

    def test_the_field_in_a_turn_of_its_own(self) -> None:
        w = Workload(policies=1, n_lines=10, conversation=True)
        a, b = (w.request("erratum_mid", i, "below").messages for i in (0, 1))
        assert [m["role"] for m in a] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert a[:-1] == b[:-1] and a[-1] != b[-1] and a[-1]["content"].startswith("Update: the ")

    def test_salts_can_be_text(self) -> None:
        w = Workload(policies=1, n_lines=10, prompt_salt=True)
        a, b = ("".join(m["content"] for m in w.request("erratum", 0, "x", s).messages) for s in "ab")
        assert a != b and a.replace("Session a. ", "") == b.replace("Session b. ", "")

    def test_answers_are_read_by_their_first_word(self) -> None:
        asked = Workload().request("full", 0, "x")
        for text in (asked.answer, f" {asked.answer.upper()}. Because", f"**{asked.answer}**"):
            assert asked.is_right(text)
        assert not asked.is_right(f"not {asked.answer}") and not asked.is_right("") and first_word("...") == ""

    def test_impossible_workloads(self) -> None:
        with pytest.raises(InputError, match="99 policies"):
            Workload(policies=99)
        with pytest.raises(InputError, match="unknown arm 'errata'; did you mean 'erratum'"):
            Workload().request("errata", 0, "x")  # pyright: ignore[reportArgumentType]  # that is the test


class TestClient:
    def test_times_and_counts(self, fake: Engine) -> None:
        reply: Reply = run(fake.url, lambda c: c.complete(" ".join(["word"] * 500), max_tokens=2))
        assert reply.text == "unknown." and reply.finish == "stop" and (reply.n_prompt, reply.n_output) == (500, 2)
        assert 0.05 <= reply.ttft_s < reply.total_s and len(reply.chunks) == 2, "the chunk with a role only is no token"
        assert reply.itl_s == reply.chunks[1] - reply.chunks[0] >= 0
        one: Reply = run(fake.url, lambda c: c.complete("x", max_tokens=1))
        assert one.itl_s is None

    def test_salts_keep_prompts_apart_and_an_empty_one_is_none(self, fake: Engine) -> None:
        async def hits(client: EngineClient) -> list[float]:
            found = []
            for salt in ("a", "a", "b", "", None):
                before = read_counters(await client.metrics())
                await client.complete(" ".join(map(str, range(200))), max_tokens=1, salt=salt)
                found.append(window(before, read_counters(await client.metrics())).hit_rate)
            return found

        first, again, other, empty, none = run(fake.url, hits)
        assert first == other == empty == 0 and again == none and again > 0.9

    def test_the_model_is_the_only_one_there_is(self, fake: Engine) -> None:
        assert run(fake.url + "/v1/", lambda c: c.check(), model=None) == "fake"
        assert run(fake.url, lambda c: c.version()) == "fake-1"
        with pytest.raises(EngineModelError, match="serves fake, but 'other' was asked for"):
            run(fake.url, lambda c: c.check(), model="other")
        with pytest.raises(EngineModelError, match="does not serve 'other'"):
            run(fake.url, lambda c: c.complete("x", max_tokens=1), model="other")

    def test_nothing_answers(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        for what in (lambda c: c.check(), lambda c: c.complete("x", max_tokens=1)):
            with pytest.raises(EngineUrlError, match=f"nothing answers at {url}"):
                run(url, what)
        assert run(url, lambda c: c.metrics()) is None
        with pytest.raises(InputError, match="'nonsense' is not the address of an engine"):
            EngineClient("nonsense")

    def test_something_else_answers(self, tmp_path: Path) -> None:
        with (
            cases.engine(tmp_path) as engine,
            pytest.raises(EngineUrlError, match="not like an OpenAI-compatible engine"),
        ):
            run(engine.url, lambda c: c._stream("nothing", {}, 1, None, None, None))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with pytest.raises(EngineUrlError, match=r"GET /v1/models gave 501, text/html.*check the address"):
                run(f"http://127.0.0.1:{server.server_port}", lambda c: c.check())
            server.shutdown()

    def test_an_answer_that_breaks_off(self, tmp_path: Path) -> None:
        with (
            cases.engine(tmp_path, die_mid_stream=1) as engine,
            pytest.raises(ServingError, match="broke off after 0 chunks"),
        ):
            run(engine.url, lambda c: c.complete("x", max_tokens=2))

    def test_a_request_that_takes_too_long(self, tmp_path: Path) -> None:
        with cases.engine(tmp_path, hang_after=1) as engine:
            with pytest.raises(RequestTimeoutError, match=r"no answer to the end within 0.3 s"):
                run(engine.url, lambda c: c.complete("x", max_tokens=1, timeout_s=0.3))
            assert run(engine.url, lambda c: c.complete("x", max_tokens=1)).text == "unknown"

    def test_timed_requests_never_ask_for_prompt_logprobs(self, fake: Engine) -> None:
        with pytest.raises(InputError, match="must not ask for 'prompt_logprobs'"):
            run(fake.url, lambda c: c.complete("x", max_tokens=1, extra={"prompt_logprobs": 1}))
        run(fake.url, lambda c: c.complete("x", max_tokens=1, extra={"ignore_eos": True}))
        assert cases.asked(fake.url)["asked"][-1]["ignore_eos"] is True

    def test_httpx_is_an_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "httpx", None)
        with pytest.raises(MissingPackageError, match=r"pip install 'notelens\[serve\]'"):
            EngineClient("http://127.0.0.1:1")
