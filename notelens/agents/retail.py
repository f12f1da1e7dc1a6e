"""A retail support environment in which acting on a stale state is refused.

A store holds customers and orders. What may be done to an order depends on its status, and the status changes while the
conversation goes on: the warehouse ships, the carrier delivers. Tools look at the order itself, so an agent whose cache still
says ``pending`` calls ``cancel`` on a delivered order and is refused. All text is the project's own (``data/retail.json``).
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from notelens.errors import AgentError, RefusedError
from notelens.prompt import Prompt
from notelens.registry import nearest
from notelens.spans import Piece, make_prompt

DATA = Path(__file__).parent / "data" / "retail.json"
CLOSED = ("cancelled", "return requested", "exchange requested")
"""Statuses behind which nothing can be done to an order."""
N_EPISODES_AT_MOST = 100_000


@dataclass(frozen=True)
class World:
    """What the data file says.

    Attributes:
        policy: sections in order.
        statuses: an order's, while it is under way.
        actions: right action by intent and status.
        messages: what a customer with an intent writes.
        after: status of an order behind each action; ``None`` where it stays.
        progress: statuses that may follow each status by themselves.
        words: names, goods, cities.
    """

    policy: tuple[str, ...]
    statuses: tuple[str, ...]
    actions: Mapping[str, Mapping[str, str]]
    messages: Mapping[str, tuple[str, ...]]
    after: Mapping[str, str | None]
    progress: Mapping[str, tuple[str, ...]]
    words: Mapping[str, tuple[str, ...]]

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of all tools, sorted."""
        return tuple(sorted(self.after))


@cache
def world() -> World:
    """The data of the environment; read once a process."""
    raw: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    lists = ("goods", "final_sale", "first_names", "last_names", "cities")
    return World(
        tuple(raw["policy"]),
        tuple(raw["statuses"]),
        MappingProxyType({k: MappingProxyType(v) for k, v in raw["actions"].items()}),
        MappingProxyType({k: tuple(v) for k, v in raw["messages"].items()}),
        MappingProxyType(raw["after"]),
        MappingProxyType({k: tuple(v) for k, v in raw["progress"].items()}),
        MappingProxyType({k: tuple(raw[k]) for k in lists}),
    )


@dataclass(frozen=True)
class Customer:
    """Who writes."""

    id: str
    name: str
    city: str
    member: bool


@dataclass(frozen=True)
class Order:
    """An order; a value. ``log``: what was done to it."""

    id: str
    customer: str
    goods: tuple[str, ...]
    status: str
    log: tuple[str, ...] = ()


class Store:
    """Customers, orders, and the tools that change orders.

    Args:
        customers, orders: any number.

    Raises:
        AgentError: two have the same id, or an order belongs to nobody.
    """

    def __init__(self, customers: Sequence[Customer], orders: Sequence[Order]) -> None:
        self.customers = {c.id: c for c in customers}
        self.orders = {o.id: o for o in orders}
        if len(self.customers) != len(customers) or len(self.orders) != len(orders):
            raise AgentError("two customers or two orders have the same id")
        for order in orders:
            if order.customer not in self.customers:
                raise AgentError(f"order {order.id} belongs to {order.customer!r}, who is no customer")

    def snapshot(self) -> tuple[Order, ...]:
        """All orders, sorted by id."""
        return tuple(self.orders[i] for i in sorted(self.orders))

    def progress(self, order: str, status: str) -> None:
        """Warehouse or carrier: an order goes on.

        Raises:
            AgentError: no such order, or the status cannot follow.
        """
        found = self._order(order)
        if status not in world().progress[found.status]:
            raise AgentError(f"order {order} is {found.status}; {status!r} cannot follow by itself")
        self.orders[order] = replace(found, status=status, log=(*found.log, f"{found.status} -> {status}"))

    def execute(self, tool: str, *, customer: str, order: str, intent: str) -> Order:
        """Run a tool for a customer.

        Args:
            tool: its name.
            customer: who asks.
            order: which order.
            intent: what the customer wants; a tool that serves another one is refused.

        Returns:
            The order as it is then.

        Raises:
            RefusedError: somebody else's order, a status in which the tool may not be used, goods that do not come back, or a
                tool that does not serve the intent. Nothing is changed.
            AgentError: there is no such tool, order, customer or intent.
        """
        w = world()
        if tool not in w.after:
            raise AgentError(f"there is no tool {tool!r}; {nearest(tool, list(w.tools))}")
        if intent not in w.actions:
            raise AgentError(f"there is no intent {intent!r}; {nearest(intent, sorted(w.actions))}")
        if customer not in self.customers:
            raise AgentError(f"there is no customer {customer!r}")
        found = self._order(order)
        if found.customer != customer:
            raise RefusedError(f"{tool}: order {order} is not one of customer {customer}")
        if found.status in CLOSED and w.after[tool] is not None:
            raise RefusedError(f"{tool}: order {order} is {found.status}; nothing about it can be changed")
        allowed = [s for table in w.actions.values() for s, a in table.items() if a == tool]
        if found.status not in allowed:
            raise RefusedError(
                f"{tool}: order {order} is {found.status}; the tool needs {' or '.join(sorted(set(allowed)))}"
            )
        if tool not in w.actions[intent].values():
            raise RefusedError(f"{tool}: not what a customer with the intent {intent!r} can be given")
        if w.actions[intent][found.status] != tool:
            raise RefusedError(f"{tool}: not for the intent {intent!r} while the order is {found.status}")
        kept = [g for g in found.goods if g in w.words["final_sale"]]
        if tool in ("return", "exchange") and kept:
            raise RefusedError(f"{tool}: {kept[0]} is sold once and not taken back")
        after = w.after[tool]
        changed = replace(found, status=found.status if after is None else after, log=(*found.log, tool))
        self.orders[order] = changed
        return changed

    def _order(self, order: str) -> Order:
        if order not in self.orders:
            raise AgentError(f"there is no order {order!r}; {nearest(order, sorted(self.orders))}")
        return self.orders[order]


@dataclass(frozen=True)
class Episode:
    """One conversation: an order that goes on while the customer waits, then a message that has to be decided.

    Attributes:
        id: unique for a seed.
        customer: who writes.
        order: as it is at the beginning.
        others: further orders of the same customer and of somebody else.
        intent, message: what the customer wants and writes.
        events: statuses that the order takes before the agent decides; may be empty.
    """

    id: str
    customer: Customer
    order: Order
    others: tuple[Order, ...]
    stranger: Customer
    intent: str
    message: str
    events: tuple[str, ...]

    @property
    def statuses(self) -> tuple[str, ...]:
        """The order's, from the first to the last."""
        return (self.order.status, *self.events)

    @property
    def answers(self) -> tuple[str, ...]:
        """Right action for every status the order goes through."""
        return tuple(world().actions[self.intent][s] for s in self.statuses)

    @property
    def changed(self) -> bool:
        """Whether the right action at the end is another one than at the beginning."""
        return self.answers[0] != self.answers[-1]

    def store(self) -> Store:
        """A fresh store at the beginning of the episode."""
        return Store((self.customer, self.stranger), (self.order, *self.others))

    def prompt(
        self, tokenizer: Any, status: str | None = None, *, rendering: Any = "chat", policy: bool = True
    ) -> Prompt:
        """Policy, record and message as a prompt with the span ``field`` (the status).

        Args:
            tokenizer: of the model.
            status: in the record; that at the beginning when not given.
            rendering: ``chat`` or ``plain``.
            policy: with the policy in front; without, only the table of actions for the intent is stated.
        """
        w, shown = world(), status or self.order.status
        table = w.actions[self.intent]
        rules = "\n\n".join(w.policy) if policy else "Policy."
        steps = " ".join(f"If the order is {s}, the action is {table[s]}." for s in w.statuses)
        other = "".join(
            f"- other order {o.id}: {', '.join(o.goods)}\n" for o in self.others if o.customer == self.customer.id
        )
        pieces = [
            Piece("filler", f"{rules}\n\n"),
            Piece("record", f"Customer\n- name: {self.customer.name}\n- city: {self.customer.city}\n{other}"),
            Piece("record", f"Order {self.order.id}\n- goods: {', '.join(self.order.goods)}\n- status: "),
            Piece("field", shown, "field"),
            Piece("record", "\n\n"),
            Piece("rule", f"In short, for this message: {steps}", "rule"),
            Piece("record", "\n"),
            Piece("request", f"Customer: {self.message}\nWhich action? Answer with one word."),
        ]
        return make_prompt(tokenizer, pieces, id=f"{self.id}/{shown}", answer=table[shown], rendering=rendering)

    def attempt(self, store: Store, tool: str) -> str | None:
        """Run a tool as the agent says; returns why it was refused, ``None`` where it was done."""
        try:
            store.execute(tool, customer=self.customer.id, order=self.order.id, intent=self.intent)
        except RefusedError as e:
            return str(e)
        return None


def episodes(n: int, seed: int, *, changed: bool | None = True) -> list[Episode]:
    """The first ``n`` episodes of a seed; the same in every process.

    Args:
        n: how many.
        seed: of everything that is drawn.
        changed: only those in which the right action changes (``True``) or stays (``False``); ``None`` takes all.

    Raises:
        AgentError: ``n`` is below 1 or absurd.
    """
    if not 1 <= n <= N_EPISODES_AT_MOST:
        raise AgentError(f"{n} episodes cannot be had; ask for 1 to {N_EPISODES_AT_MOST}")
    found: list[Episode] = []
    index = 0
    while len(found) < n:
        episode = _episode(index, seed)
        index += 1
        if changed is None or episode.changed is changed:
            found.append(episode)
    return found


def _episode(index: int, seed: int) -> Episode:
    w, rng = world(), random.Random(f"retail/{seed}/{index}")
    first, last = rng.sample(w.words["first_names"], 2), rng.sample(w.words["last_names"], 2)
    people = [
        Customer(f"c{index:04d}{tag}", f"{a} {b}", rng.choice(w.words["cities"]), rng.random() < 0.3)
        for tag, a, b in zip("ab", first, last, strict=True)
    ]
    goods = rng.sample(w.words["goods"], 6)
    numbers = rng.sample(range(1000, 9999), 3)
    status = rng.choice(w.statuses[:2])
    order = Order(f"H{numbers[0]}", people[0].id, tuple(goods[: rng.randint(1, 3)]), status)
    others = tuple(Order(f"H{numbers[i]}", people[i - 1].id, (goods[2 + i],), rng.choice(w.statuses)) for i in (1, 2))
    intent = rng.choice(sorted(w.actions))
    events: list[str] = []
    for _ in range(rng.randint(0, 2)):
        follow = w.progress[events[-1] if events else status]
        if not follow:
            break
        events.append(rng.choice(follow))
    message = rng.choice(w.messages[intent])
    return Episode(f"retail/{seed}/{index:04d}", people[0], order, others, people[1], intent, message, tuple(events))


__all__ = ["Customer", "Episode", "Order", "Store", "World", "episodes", "world"]
