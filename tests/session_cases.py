"""Sessions on the hand-set decoder, for the tests of agents."""

from typing import Any

from notelens.agents import Session, ToolResult
from tests.tiny import TOKEN_IDS

TEXT = "start parcel is {{a}} , w0 w1 , if {{t}} then , ; w2 w3 , "
REQUEST = "please decide . : ?"
LINE = {"template": " is {value} , "}
ANSWERS = ("deny", "approve")


def new(model: Any, method: str = "full_suffix", **more: Any) -> Session:
    more = {"request": REQUEST, "rendering": "raw", **more}
    return Session(model, TEXT, {"a": "f1", "t": "t1"}, method=method, **more)


def picture(session: Session) -> tuple[Any, ...]:
    """Everything that a call could leave half done, down to the bytes of every row."""
    c = session.context
    return (
        c.rows.join().digest(), c.hidden.numpy().tobytes(), c.tokens.ids, c.text, c.exact_rows, c.touched, c.history, c.key,
        dict(session.values), session.report().rows(), session._state,
    )  # fmt: skip


def margin(session: Session) -> float:
    logits = session.ask().logits
    return float(logits[TOKEN_IDS["approve"]] - logits[TOKEN_IDS["deny"]])


def overflow(tiny: Any) -> str:
    return "w0 " * tiny.geometry.max_positions


def broken() -> None:
    raise RuntimeError("no connection")


TOOLS = {
    "ship": lambda: ToolResult("w5 w6 ,", {"a": "f0"}),
    "say": lambda: "w7 ,",
    "broken": broken,
    "odd": lambda: 7,
    "unknown_field": lambda: ToolResult("w5 ,", {"b": "f0"}),
    "long": lambda: ToolResult("w0 " * 600, {"a": "f0"}),
}
