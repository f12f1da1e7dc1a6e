"""Environments: what they refuse, that a refusal changes nothing, and that episodes are what they say."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from notelens.agents import tau2
from notelens.agents.desk import Call, Desk, attempt
from notelens.agents.retail import Customer, Order, Store, episodes, world
from notelens.errors import AgentError, CheckoutError, RefusedError
from notelens.models.load import default_cache_dir
from notelens.zoo.embedded import embedded_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """That of SmolLM2."""
    return embedded_tokenizer("smollm2", cache_dir=default_cache_dir())


# --- retail ----------------------------------------------------------------------------------------------------------------


def store(status: str = "pending", goods: tuple[str, ...] = ("dry bag",)) -> Store:
    people = (Customer("c1", "Ada Abel", "Lund", False), Customer("c2", "Leo Lind", "Graz", True))
    return Store(people, (Order("H1", "c1", goods, status), Order("H2", "c2", ("day pack",), "pending")))


def test_the_policy_is_long_and_names_every_tool_and_status() -> None:
    text = "\n\n".join(world().policy)
    assert len(text.split()) >= 900
    assert all(tool.upper() in text for tool in world().tools)
    assert all(status in text.lower() for status in world().statuses)


def test_the_policy_has_a_thousand_tokens(tokenizer: Any) -> None:
    assert len(tokenizer.encode("\n\n".join(world().policy))) >= 1000


@pytest.mark.parametrize("intent", sorted(world().actions))
@pytest.mark.parametrize("status", world().statuses)
def test_exactly_one_tool_is_right(intent: str, status: str) -> None:
    done = []
    for tool in world().tools:
        made = store(status)
        before = made.snapshot()
        try:
            after = made.execute(tool, customer="c1", order="H1", intent=intent)
        except RefusedError as e:
            assert made.snapshot() == before and tool in str(e)
        else:
            done.append(tool)
            assert after.status == (world().after[tool] or status) and after.log == (tool,)
    assert done == [world().actions[intent][status]]


def test_what_else_is_refused() -> None:
    ask: dict[str, Any] = {"customer": "c1", "order": "H1", "intent": "unwanted"}
    for words, made, tool, more in (
        ("not one of customer c1", store(), "cancel", {"order": "H2"}),
        ("taken back", store("delivered", ("dry bag", "climbing rope")), "return", {}),
        ("nothing about it", store("return requested"), "return", {}),
    ):
        before = made.snapshot()
        with pytest.raises(RefusedError, match=words):
            made.execute(tool, **{**ask, **more})
        assert made.snapshot() == before
    for words, tool, more in (
        ("no tool 'cancle'.*cancel", "cancle", {}), ("no order", "cancel", {"order": "H3"}),
        ("no customer", "cancel", {"customer": "c3"}), ("no intent", "cancel", {"intent": "unwant"}),
    ):  # fmt: skip
        with pytest.raises(AgentError, match=words) as caught:
            store().execute(tool, **{**ask, **more})
        assert not isinstance(caught.value, RefusedError)
    made = store()
    made.execute("cancel", **ask)
    with pytest.raises(RefusedError):
        made.execute("cancel", **ask)
    with pytest.raises(AgentError, match="cannot follow"):
        store().progress("H1", "delivered")
    with pytest.raises(AgentError, match="same id"):
        Store([*store().customers.values()] * 2, [])
    with pytest.raises(AgentError, match="no customer"):
        Store([], [Order("H1", "c1", (), "pending")])


def test_episodes_follow_their_seed() -> None:
    assert episodes(20, 3) == episodes(20, 3) == episodes(40, 3)[:20]
    assert episodes(20, 3) != episodes(20, 4)
    assert all(e.changed for e in episodes(50, 0)) and not any(e.changed for e in episodes(20, 0, changed=False))
    assert len(Counter(e.intent for e in episodes(60, 0))) == 3
    with pytest.raises(AgentError):
        episodes(0, 0)


def test_a_stale_agent_is_refused_and_an_informed_one_is_not() -> None:
    for episode in episodes(100, 1):
        for tool, refused in ((episode.answers[0], True), (episode.answers[-1], False)):
            made = episode.store()
            for status in episode.events:
                made.progress(episode.order.id, status)
            before = made.snapshot()
            assert (episode.attempt(made, tool) is not None) is refused
            assert made.snapshot() == before or not refused


def test_prompts_say_the_status_once_as_a_field(tokenizer: Any) -> None:
    episode = episodes(1, 0)[0]
    prompt = episode.prompt(tokenizer)
    assert len(prompt) >= 1000 and len(prompt.spans["field"]) == 1
    a, b = (episode.prompt(tokenizer, s, policy=False) for s in episode.statuses[:2])
    assert a.answer == episode.answers[0] and b.answer == episode.answers[1] and len(a) < 400


# --- desk --------------------------------------------------------------------------------------------------------------------


def test_the_desk_looks_at_its_own_state() -> None:
    desk = Desk("seal", "Open", {"open": "deny", "red": "sign"})
    assert attempt(desk, "deny(seal = open)") is None and desk.done == [Call("deny", "seal", "open")]
    desk.change("red")
    for text, words in (
        ("deny ( seal = open )", "stale state"), ("deny(seal = red)", "not allowed"), ("sign(badge = red)", "no 'badge'"),
        ("sign seal", "no call"), ("sign(seal = open)", "stale state"),
    ):  # fmt: skip
        assert words in (attempt(desk, text) or ""), text
    assert len(desk.done) == 1
    assert attempt(desk, "sign ( seal = red ) and more") is None
    assert attempt(desk, " sign", ("deny", "sign")) is None and "not allowed" in (
        attempt(desk, "deny", ("deny", "sign")) or ""
    )
    with pytest.raises(AgentError, match="says nothing"):
        desk.change("blue")


# --- tau2 --------------------------------------------------------------------------------------------------------------------


def checkout(folder: Path, **files: Any) -> Path:
    """A retail domain of our own making, in their format."""
    actions = [
        {"name": "cancel_pending_order", "arguments": {"order_id": "#1"}},
        {"name": "return_delivered_order_items", "arguments": {"order_id": "#2"}},
        {"name": "get_order_details", "arguments": {"order_id": "#1"}},
        {"name": "cancel_pending_order", "arguments": {"order_id": "#9"}},
    ]
    db = {"orders": {f"#{i}": {"status": "pending", "items": [{"name": "lamp"}]} for i in (1, 2)}, "users": {"u": {}}}
    tasks = [{"id": "0", "evaluation_criteria": {"actions": actions}}, {"id": "1", "evaluation_criteria": None}]
    content = {"policy.md": "Be kind.", "db.json": json.dumps(db), "tasks.json": json.dumps(tasks), **files}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_checkout_is_read(tmp_path: Path, tokenizer: Any) -> None:
    checkout(tmp_path / tau2.INSIDE)
    found = tau2.read(tmp_path)
    assert found == tau2.read(tmp_path / tau2.INSIDE)
    assert tau2.steps(found) == [
        tau2.Step("0", "cancel_pending_order", "#1"), tau2.Step("0", "return_delivered_order_items", "#2")
    ]  # fmt: skip
    drawn = tau2.pairs(found, 2, 0)
    assert drawn == tau2.pairs(found, 2, 0) and all(step.needs in statuses for step, statuses in drawn)
    with pytest.raises(CheckoutError, match="hold 2"):
        tau2.pairs(found, 3, 0)
    step = tau2.steps(found)[0]
    prompt = tau2.decision(found, step, "delivered", tokenizer)
    assert prompt.answer == "refuse" and "Be kind." in prompt.text and len(prompt.spans["field"]) == 1
    assert tau2.decision(found, step, "pending", tokenizer).answer == "cancel"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"policy.md": None}, "no policy.md"),
        ({"policy.md": " "}, "empty"),
        ({"db.json": "{"}, "no JSON"),
        ({"db.json": "{}"}, "another domain"),
        ({"db.json": json.dumps({"orders": {"#1": {}}, "users": {"u": {}}})}, "no status"),
        ({"tasks.json": "{}"}, "no list"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckoutError, match=words):
        tau2.read(checkout(tmp_path / "retail", **files))


def test_no_folder_and_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match="no folder"):
        tau2.read(tmp_path / "nowhere")
    with pytest.raises(CheckoutError, match="no task"):
        tau2.steps(tau2.read(checkout(tmp_path / "a", **{"tasks.json": "[]"})))
