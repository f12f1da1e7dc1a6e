"""Acting on a stale state is refused by the environment: ``python -m experiments.tool_env CONFIG``.

Hypothesis (arXiv:2606.17107, section on tool use): an agent whose cache was not repaired calls the tool that was right before
the world changed, and is refused; a recommended edit succeeds as often as a full prefill at a fraction of its tokens.

Falsifier: ``stale`` succeeds in more than 0.1 of the episodes whose state changed; ``full_prefill`` in less than 0.95 of them;
the recommended edit more than 0.02 below full prefill, or at more than 30 % of its tokens.

Environments: ``organism`` is a desk in the organisms' language (:mod:`notelens.agents.desk`): the model writes the whole call,
``action(label = value)``, and the desk refuses an action based on another state than its own. ``retail`` is the store of
:mod:`notelens.agents.retail` with its policy of more than 1,000 tokens: the model chooses one of the tools that serve the
customer's wish, the store executes or refuses it. ``decisions`` puts a desk behind any other task.

Success: the environment executed the call. The gate is the success of full prefill at the state *before* the change and behind
it (oracle accuracy); episodes in which full prefill fails are in ``success_all`` but not in ``success``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.agent_cases import FULL, AgentConfig, SessionCase
from experiments.agent_harness import Starts, equivalence, oracle_line, paired
from experiments.edit_arms import Row
from experiments.edit_cases import Case, gated_cases, instance_cases
from experiments.edit_harness import Line, Stage, Sums, main
from experiments.organism_cases import of_length, scene_case
from notelens.agents import Session
from notelens.agents.desk import Desk, attempt
from notelens.agents.retail import episodes, world
from notelens.errors import AnswerError, ComposeError, EditError
from notelens.models.base import NoteModel
from notelens.spans import answer_token
from notelens.stats import cluster_bootstrap, wilson
from notelens.tasks import TASKS
from notelens.tasks.organism import OrganismLanguage

METRICS = (
    "oracle_accuracy",
    "success",
    "success_all",
    "refused_stale",
    "difference_to_full",
    "tokens_share",
    "sessions_minus_full",
)
CALL_TOKENS = 8
"""Tokens that a call may have; ``action(label = value)`` has six."""


class ToolConfig(AgentConfig):
    """Configuration of this experiment.

    Attributes:
        environment: see the module.
        policy: of ``retail``: with the whole policy in front.
    """

    environment: Literal["organism", "retail", "decisions"] = "organism"
    policy: bool = True


@dataclass(frozen=True)
class Episode:
    """A session in an environment.

    Attributes:
        case: prompts, one per state, and the order in which states come.
        choices: tools to choose among; empty where the model writes the call.
        world: a fresh environment at the first state: a function that changes its state, and one that attempts a call.
    """

    case: SessionCase
    choices: tuple[str, ...]
    world: Callable[[], tuple[Callable[[str], None], Callable[[str], str | None]]]

    @property
    def id(self) -> str:
        """Of the case."""
        return self.case.id


def desk_episode(case: Case, choices: tuple[str, ...]) -> Episode:
    """An episode at a desk: the field changes once, then the agent acts."""
    session = SessionCase(
        case.id, case.family, (case.old, case.new), case.name, case.values, case.answers, case.answer_ids, (0, 1)
    )
    label, rule = case.name.replace("_", " "), dict(zip(case.values, case.answers, strict=True))

    def world() -> tuple[Callable[[str], None], Callable[[str], str | None]]:
        desk = Desk(label, case.values[0], rule)
        return desk.change, lambda text: attempt(desk, text, choices)

    return Episode(session, choices, world)


def tool_episodes(model: NoteModel, config: ToolConfig, stage: Stage) -> list[Episode]:
    """Episodes of a stage in which the right call changes."""
    tokenizer = model.tokenizer
    if config.environment == "retail":
        return [_retail(tokenizer, e, config.policy) for e in episodes(config.n, config.seed)]
    if config.environment == "organism":
        task = OrganismLanguage(
            split=config.split, kinds=config.kinds or ("gated",), forms=config.forms, order=config.order, mode="call"
        )
        found: list[Episode] = []
        for scene in task.scenes(config.n, config.seed):
            length = stage.params["length"]
            if length is not None:
                scene = of_length(
                    tokenizer, task, scene, length, 0.5 if config.between is None else config.between, config.seed
                )
            rng = random.Random(f"{config.seed}/{scene.id}/episode")
            rule = rng.randrange(2) if (0, 1) in scene.cells else 0
            found.append(desk_episode(scene_case(tokenizer, task, scene, rng.randrange(2), rule, "call"), ()))
        return found
    if config.task == "gated":
        cases = gated_cases(
            tokenizer, config.n, config.seed, split=config.split, forms=config.forms, order=config.order,
            length=stage.params["length"], between=config.between,
        )  # fmt: skip
    else:
        other: Any = TASKS.get(config.task)()
        cases = instance_cases(other.instances(tokenizer, config.n, config.seed), config.seed)
    return [desk_episode(case, case.answers) for case in cases]


def _retail(tokenizer: Any, episode: Any, policy: bool) -> Episode:
    statuses = tuple(dict.fromkeys(episode.statuses))
    prompts = tuple(episode.prompt(tokenizer, s, policy=policy) for s in statuses)
    answers = tuple(p.answer for p in prompts)
    ids = tuple(answer_token(tokenizer, prompts[0], word, "chat") for word in answers)
    case = SessionCase(
        episode.id,
        episode.intent,
        prompts,
        "status",
        statuses,
        answers,
        ids,
        tuple(statuses.index(s) for s in episode.statuses),
    )
    choices = tuple(dict.fromkeys(world().actions[episode.intent].values()))

    def fresh() -> tuple[Callable[[str], None], Callable[[str], str | None]]:
        store = episode.store()
        return (
            lambda status: store.progress(episode.order.id, status),
            lambda tool: episode.attempt(store, tool.strip().lower()),
        )

    return Episode(case, choices, fresh)


def play(episode: Episode, text: str, starts: Starts) -> Row:
    """One episode with one arm: changes of the world become updates, then the agent calls.

    ``full_prefill`` prefills the corrected prompt at every change. A refusal by the edit method is a row with its reason.
    """
    case = episode.case
    row: Row = {"item": case.id, "family": case.id, "domain": case.family, "method": text, "turn": 0}
    try:
        session = starts.session(text)
        change, call = episode.world()
        for v in case.order[1:]:
            change(case.values[v])
            session.update(**{case.name: case.values[v]})
        said, reply = speak(session, episode)
    except (EditError, AnswerError, ComposeError) as e:
        return {**row, "excluded": f"refused ({type(e).__name__})", "message": str(e)}
    refused = call(said)
    spent = session.report().turns[1:]
    return {
        **row, "excluded": None, "right": refused is None, "refused": refused, "said": said,
        "stale": said.strip().lower().startswith(case.answers[case.order[0]].lower()) and refused is not None,
        "tokens": sum(t.total_tokens - t.decoded_tokens for t in spent), "decoded": reply, "exact": session.exact,
        "full_tokens": sum(len(case.prompts[v]) for v in case.order[1:]), "n_tokens": len(session),
    }  # fmt: skip


def speak(session: Session, episode: Episode) -> tuple[str, int]:
    """What the agent says, and how many tokens it decoded."""
    if episode.choices:
        answer = session.ask(answers=episode.choices).answer
        assert answer is not None
        return answer, 0
    reply = session.ask(max_tokens=CALL_TOKENS)
    return reply.text, reply.turn.decoded_tokens


class ToolEnv:
    """All arms over episodes."""

    name = "tool_env"

    def stages(self, config: ToolConfig) -> list[Stage]:
        """One per length."""
        more = {"environment": config.environment}
        return [Stage(f"length{n}", {"length": n, **more}, {}) for n in config.lengths]

    def measure(self, model: NoteModel, config: ToolConfig, stage: Stage, case: Episode) -> list[Row]:
        """Full prefill first, before and behind the change; then the arms."""
        starts = Starts.of(model, case.case)
        last = play(case, FULL, starts)
        start = Episode(_still(case.case), case.choices, case.world)
        first = play(start, FULL, starts)
        oracle = (bool(first.get("right")) + bool(last.get("right"))) / 2
        last |= {"oracle": oracle, "right_all": bool(last.get("right"))}
        if last["excluded"] is None and oracle < 1:
            last["excluded"] = "full prefill wrong"
        rows = [last]
        for arm in config.arms:
            row = play(case, arm, starts)
            row["right_all"] = bool(row.get("right"))
            if row["excluded"] is None and oracle < 1:
                row["excluded"] = "full prefill wrong"
            rows.append(row)
        return rows

    def aggregate(self, config: ToolConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Success, refusals, equivalence, tokens, paired tests."""
        sums = Sums(self.name, config, stage, rows)
        oracle_line(sums, config.gate)
        methods = list(dict.fromkeys(r["method"] for r in rows))
        for method in methods:
            every = [r for r in rows if r["method"] == method]
            own = [r for r in every if r["excluded"] is None]
            whole = Sums(self.name, config, stage, [{**r, "excluded": None} for r in every])
            whole.rate("success_all", method, "right_all")
            sums.lines += whole.lines
            lost = [r["excluded"] for r in every if r["excluded"] is not None]
            self._rate(sums, "success", method, own, "right", lost)
            if own:
                self._rate(sums, "refused_stale", method, own, "stale", lost)
                equivalence(
                    sums, method, [float(r["right"]) - 1.0 for r in own], [r["item"] for r in own], config.margin
                )
                self._share(sums, method, own, lost)
        paired(sums, [m for m in methods if m != FULL])
        return sums.lines

    def _rate(self, sums: Sums, metric: str, method: str, rows: Sequence[Row], key: str, lost: Sequence[str]) -> None:
        sums.add(metric, method, wilson(sum(bool(r[key]) for r in rows), len(rows)), excluded=lost)

    def _share(self, sums: Sums, method: str, rows: Sequence[Row], lost: Sequence[str]) -> None:
        e = cluster_bootstrap(
            [r["tokens"] / r["full_tokens"] for r in rows], [r["item"] for r in rows], seed=sums.config.seed
        )
        sums.add("tokens_share", method, e, excluded=lost, unit="of prefilling at every change; decoding left out")


def _still(case: SessionCase) -> SessionCase:
    """The session before anything changes."""
    return SessionCase(
        case.id, case.family, case.prompts, case.name, case.values, case.answers, case.answer_ids, case.order[:1]
    )


if __name__ == "__main__":
    main(ToolEnv(), ToolConfig, METRICS, source=tool_episodes)
