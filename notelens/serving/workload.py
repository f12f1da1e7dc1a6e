"""The requests of a serving benchmark: gated decisions under a long generated policy, with the field in five places.

| arm | where the field is | what an engine can reuse |
| --- | --- | --- |
| ``in_prefix`` | rewritten at the top of the policy (baseline) | next to nothing |
| ``hoisted`` | behind the policy | the policy |
| ``erratum`` | as it once was at the top, corrected behind the policy | the policy, field included |
| ``erratum_mid`` | as it once was in the conversation behind the policy, corrected behind that | both |
| ``full`` | at the top of a policy that no other request has | nothing |

Every request is another case: besides the field it has a reference number of its own, which stands beside the field and is
corrected with it, so that two requests with the same value of the field still differ there. All arms tell the model the same.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

from notelens.errors import InputError
from notelens.registry import nearest
from notelens.serving.session import Message, Mode, PromptSession
from notelens.tasks.render import DIRECT_CUE, SYSTEM, Draw, pieces
from notelens.tasks.scenarios import Family, load_families

Arm = Literal["in_prefix", "hoisted", "erratum", "erratum_mid", "full"]
ARMS: tuple[Arm, ...] = get_args(Arm)
BASELINE: Arm = "in_prefix"
CACHED: tuple[Arm, ...] = ("hoisted", "erratum", "erratum_mid")
"""Arms whose prefix is the same in every request."""
FIELD, REFERENCE = "field", "reference"
MID_SHARE = 0.8
"""Of the policy's lines, how many stand before the field of ``erratum_mid``."""
FIRST, REFERENCES = 100, range(101, 1000)
"""Reference number in a prefix that is not rewritten, and those of requests, each used once in a stream; then longer ones."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Asked:
    """One request and what is right for it.

    Attributes:
        arm: its arm.
        family: scenario family, by which intervals are clustered.
        messages: of the chat.
        answer: the right action word.
        stale: the action word that the first value of the field would call for.
        changed: whether field and first value call for different actions.
    """

    arm: Arm
    family: str
    messages: tuple[Message, ...]
    answer: str
    stale: str
    changed: bool

    def is_right(self, text: str) -> bool:
        """Whether the first word of an answer is the right action."""
        return first_word(text) == self.answer.casefold()


def first_word(text: str) -> str:
    """The first word of a text, in small letters; empty where it has none."""
    found = _WORD.search(text)
    return found[0].casefold() if found else ""


@dataclass(frozen=True)
class Workload:
    """Requests by arm and number, the same in every process.

    Attributes:
        policies: scenario families with one policy each; requests take them in turns.
        n_lines: filler lines of a policy, by which its length is set.
        seed: of everything that is drawn.
        split: families to draw from.
        form: rule form.
        conversation: put the field of ``erratum_mid`` into a turn of its own instead of later text of the one message.
        prompt_salt: write the cache salt into the prompt, for engines that know no salts.

    Raises:
        InputError: out of range, or more policies than there are families.
    """

    policies: int = 2
    n_lines: int = 150
    seed: int = 0
    split: str = "eval"
    form: str = "two_clause"
    conversation: bool = False
    prompt_salt: bool = False

    def __post_init__(self) -> None:
        n = len(self._all())
        if not 1 <= self.policies <= n:
            raise InputError(
                f"{self.policies} policies, but split {self.split!r} has {n} families with rules {self.form!r}"
            )
        if self.n_lines < 2:
            raise InputError(f"{self.n_lines} lines for a policy; it takes at least 2")

    def _all(self) -> list[Family]:
        return [f for f in load_families() if self.split in ("all", f.split) and self.form in f.rules]

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """One per policy."""
        return tuple(self._all()[: self.policies])

    def request(self, arm: Arm, index: int, stream: str, salt: str = "") -> Asked:
        """Request ``index`` of a stream; other streams have other reference numbers.

        Raises:
            InputError: unknown arm.
        """
        if arm not in ARMS:
            raise InputError(f"unknown arm {arm!r}; {nearest(str(arm), list(ARMS))}")
        family = self.families[index % len(self.families)]
        rng = random.Random(f"{self.seed}/{stream}/{index}")
        draw = self._draw(family, f"{stream}/{index}" if arm == "full" else "")
        value = draw.values[rng.randrange(2)]
        used = random.Random(f"{self.seed}/{stream}/references").sample(REFERENCES, len(REFERENCES))
        reference = str(used[index] if index < len(used) else 100_000 + index)
        session = self._session(arm, draw, value, reference, salt)
        answer, stale = draw.action(value, 0), draw.action(draw.values[0], 0)
        request = f"{draw.request} {DIRECT_CUE}"
        return Asked(arm, family.name, tuple(session.messages(request)), answer, stale, answer != stale)

    def _draw(self, family: Family, own: str) -> Draw:
        """The policy of a family; ``own`` gives a request one that no other has."""
        rng = random.Random(f"{self.seed}/{family.name}")
        values = tuple(rng.sample(family.values, 2))
        actions = (rng.choice(family.restrictive), rng.choice(family.permissive))
        restrictive = rng.randrange(2)
        lines = family.lines(random.Random(f"{self.seed}/{family.name}/lines{own}"))
        return Draw(
            family=family, form=self.form, index=0, values=(values[0], values[1]),
            actions=actions if restrictive == 0 else (actions[1], actions[0]), restrictive=restrictive,
            template=rng.choice(family.rules[self.form]), request=rng.choice(family.requests),
            filler=tuple(islice(lines, self.n_lines)), between=self.n_lines // 2, order="value_first", distractor="",
        )  # fmt: skip

    def _session(self, arm: Arm, draw: Draw, value: str, reference: str, salt: str) -> PromptSession:
        modes: dict[str, Mode] = {"in_prefix": "in_prefix", "full": "in_prefix", "hoisted": "hoisted"}
        mode = modes.get(arm, "erratum")
        first = {FIELD: draw.values[0], REFERENCE: str(FIRST)}
        labels = {FIELD: draw.family.label, REFERENCE: "reference number"}
        system = f"Session {salt}. {SYSTEM}" if self.prompt_salt and salt else SYSTEM
        if arm == "erratum_mid":
            policy, record = _parts(replace(draw, order="rule_first", between=round(MID_SHARE * self.n_lines)))
            if self.conversation:
                session = PromptSession(policy, first, mode=mode, system=system, labels=labels)
                session.add("user", "Please keep these rules in mind.")
                session.add("assistant", "I will follow them.")
                session.add("user", record)
                session.add("assistant", "I have read the record.")
            else:
                session = PromptSession(policy + record, first, mode=mode, system=system, labels=labels)
        else:
            session = PromptSession("".join(_parts(draw)), first, mode=mode, system=system, labels=labels)
        session.update(FIELD, value)
        session.update(REFERENCE, reference)
        return session


def _parts(draw: Draw) -> tuple[str, str]:
    """The text in front of the record and the text from it on, up to the request, with marks for field and reference."""
    made = [p for p in pieces(draw, (0, 0), "direct", ()) if p.region != "request"]
    at = next(i for i, p in enumerate(made) if p.region == "record")
    texts = [
        p.text if p.region != "field" else f"{{{{{FIELD}}}}}\n- Reference number: {{{{{REFERENCE}}}}}" for p in made
    ]
    return "".join(texts[:at]), "".join(texts[at:])


def shared_prefix(chats: Sequence[Sequence[Message]]) -> int:
    """Characters that all chats begin with; those of messages in front count."""
    texts = ["\n".join(m["content"] for m in messages) for messages in chats]
    shortest = min(map(len, texts), default=0)
    return next((i for i in range(shortest) if len({t[i] for t in texts}) > 1), shortest)


__all__ = ["ARMS", "BASELINE", "CACHED", "Arm", "Asked", "Workload", "first_word", "shared_prefix"]
