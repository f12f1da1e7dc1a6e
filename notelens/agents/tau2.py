"""A reader for the retail domain of a tau2-bench checkout, where a user has one; none of its text is part of this library.

tau2-bench (Sierra Research, MIT licence) keeps policy, database and tasks per domain. The policy ties what may be done to an
order to its status, which makes the status a field with notes. :func:`read` takes the folder that holds ``policy.md``,
``db.json`` and ``tasks.json``, or a checkout that has it at ``data/tau2/domains/retail``.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notelens.errors import CheckoutError
from notelens.prompt import Prompt
from notelens.spans import Piece, make_prompt

INSIDE = Path("data") / "tau2" / "domains" / "retail"
FILES = ("policy.md", "db.json", "tasks.json")
WRITES = {
    "cancel_pending_order": ("pending", "cancel"),
    "modify_pending_order_items": ("pending", "modify"),
    "modify_pending_order_address": ("pending", "modify"),
    "modify_pending_order_payment": ("pending", "modify"),
    "return_delivered_order_items": ("delivered", "return"),
    "exchange_delivered_order_items": ("delivered", "exchange"),
}
"""Tools of the domain that change an order: the status that they need, and a word for what they do."""
STATUSES = ("pending", "delivered", "processed", "cancelled")
REFUSE = "refuse"


@dataclass(frozen=True)
class Retail:
    """What a checkout holds.

    Attributes:
        policy: text.
        orders, users: by id, as in the database.
        tasks: as in the file.
    """

    policy: str
    orders: Mapping[str, Mapping[str, Any]]
    users: Mapping[str, Mapping[str, Any]]
    tasks: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Step:
    """A write of a task's reference solution, taken as a decision.

    Attributes:
        task: its id.
        tool: name of the tool.
        order: id of the order.
    """

    task: str
    tool: str
    order: str

    @property
    def needs(self) -> str:
        """The status without which the policy refuses."""
        return WRITES[self.tool][0]

    @property
    def word(self) -> str:
        """The word for the action."""
        return WRITES[self.tool][1]

    def answer(self, status: str) -> str:
        """What the policy gives while the order has a status."""
        return self.word if status == self.needs else REFUSE


def read(path: str | Path) -> Retail:
    """Read the retail domain of a checkout.

    Raises:
        CheckoutError: no such folder, a file is missing, or a file does not hold what this reader knows.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckoutError(f"{root} is no folder; give a tau2-bench checkout, or the folder of its retail domain")
    folder = root / INSIDE if (root / INSIDE).is_dir() else root
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise CheckoutError(f"{folder} holds no {', '.join(missing)}; a retail domain has {', '.join(FILES)}")
    policy = (folder / FILES[0]).read_text(encoding="utf-8")
    db, tasks = (_json(folder / name) for name in FILES[1:])
    if not policy.strip():
        raise CheckoutError(f"{folder / FILES[0]} is empty")
    if not isinstance(db, dict) or any(not isinstance(db.get(k), dict) or not db[k] for k in ("orders", "users")):
        raise CheckoutError(f"{folder / FILES[1]} has no orders and users; it is the database of another domain")
    for name, order in db["orders"].items():
        if (
            not isinstance(order, dict)
            or not isinstance(order.get("status"), str)
            or not isinstance(order.get("items"), list)
        ):
            raise CheckoutError(f"{folder / FILES[1]}: order {name} has no status and items")
    if not isinstance(tasks, list) or not all(isinstance(t, dict) and "evaluation_criteria" in t for t in tasks):
        raise CheckoutError(f"{folder / FILES[2]} is no list of tasks with evaluation criteria")
    return Retail(policy, db["orders"], db["users"], tuple(tasks))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise CheckoutError(f"{path} is no JSON: {e}") from e


def steps(retail: Retail) -> list[Step]:
    """Every write to an order in the tasks' reference solutions, once per order and tool, in file order.

    Raises:
        CheckoutError: there is none.
    """
    found: dict[tuple[str, str], Step] = {}
    for task in retail.tasks:
        for action in (task["evaluation_criteria"] or {}).get("actions") or ():
            name, order = action.get("name"), (action.get("arguments") or {}).get("order_id")
            if isinstance(name, str) and isinstance(order, str) and name in WRITES and order in retail.orders:
                found.setdefault((order, name), Step(str(task.get("id")), name, order))
    if not found:
        raise CheckoutError("no task changes an order of the database; these are tasks of another domain")
    return list(found.values())


def decision(retail: Retail, step: Step, status: str, tokenizer: Any, *, rendering: Any = "chat") -> Prompt:
    """Policy, record and wish as a prompt with the span ``field`` (the order's status)."""
    order = retail.orders[step.order]
    goods = ", ".join(str(item.get("name", "article")) for item in order["items"])
    wish = {"cancel": "cancel it", "modify": "modify it", "return": "return it", "exchange": "exchange an item of it"}[
        step.word
    ]
    pieces = [
        Piece("filler", f"{retail.policy.strip()}\n\n"),
        Piece("record", f"## Current order\n\n- order id: {step.order}\n- items: {goods}\n- status: "),
        Piece("field", status, "field"),
        Piece("record", "\n\n"),
        Piece(
            "rule",
            f"The user is authenticated, has confirmed, and wants to {wish}. The policy allows this only for a {step.needs} "
            f"order; otherwise the answer is {REFUSE}.",
            "rule",
        ),
        Piece("record", "\n"),
        Piece("request", f"Which one: {step.word} or {REFUSE}? Answer with one word."),
    ]
    return make_prompt(
        tokenizer, pieces, id=f"{step.task}/{step.tool}/{status}", answer=step.answer(status), rendering=rendering
    )


def pairs(retail: Retail, n: int, seed: int) -> list[tuple[Step, tuple[str, str]]]:
    """``n`` decisions with the statuses between which the order changes; direction and other status are drawn.

    Raises:
        CheckoutError: the tasks hold fewer.
    """
    every: Sequence[Step] = steps(retail)
    if n > len(every):
        raise CheckoutError(f"{n} decisions were asked for; the tasks of this checkout hold {len(every)}")
    rng = random.Random(f"tau2/{seed}")
    found: list[tuple[Step, tuple[str, str]]] = []
    for step in rng.sample(every, n):
        other = rng.choice([s for s in STATUSES if s != step.needs])
        found.append((step, (step.needs, other) if rng.random() < 0.5 else (other, step.needs)))
    return found


__all__ = ["FILES", "Retail", "Step", "decision", "pairs", "read", "steps"]
