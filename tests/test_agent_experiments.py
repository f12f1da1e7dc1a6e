"""The experiments on agents, on the hand-set decoder whose answers are known, and on an untrained organism for their shape."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.agent import Agent
from experiments.agent_cases import AgentConfig, Baselines, SessionCase, session_case, session_cases
from experiments.agent_harness import Starts, arm_rows, measure_session, policy_of
from experiments.edit_cases import instance_cases
from experiments.edit_harness import Stage, run
from experiments.horizon import Horizon
from experiments.memory import Blocks, MemoryConfig, MemoryExperiment, memory_cases
from experiments.memory_cases import lay_out, memories
from experiments.organism_models import ARCHITECTURES, build
from experiments.tau2_retail import Tau2Config, Tau2Retail, tau2_cases
from experiments.tool_env import Episode, ToolConfig, ToolEnv, desk_episode, play, tool_episodes
from notelens.agents import EveryTurns, Never, OnDrift
from notelens.agents.retail import episodes
from notelens.edits.lines import ERRATUM, fill
from notelens.errors import CheckoutError, ConfigError, TaskError
from notelens.models.load import default_cache_dir, wrap
from notelens.stats import mcnemar_exact
from notelens.zoo.embedded import embedded_tokenizer
from notelens.zoo.organisms import organism_tokenizer
from tests.tiny import FORMS, broken_blind, tiny_instances

CONFIGS = Path(__file__).parents[1] / "experiments" / "configs"
KINDS: dict[str, type[AgentConfig]] = {
    "agent-smollm2": AgentConfig, "agent-organism": AgentConfig, "horizon-organism": AgentConfig,
    "horizon-smollm2": AgentConfig, "horizon-long-organism": AgentConfig, "memory-organism": MemoryConfig,
    "memory-smollm2": MemoryConfig, "tool-env-organism": ToolConfig, "tool-env-smollm2": ToolConfig,
    "tool-env-retail-smollm2": ToolConfig, "tau2-retail-smollm2": Tau2Config,
}  # fmt: skip
CONFIG = AgentConfig(
    name="t", model="tiny", task="tiny", n=8, turns=6, pattern="toggle",
    arms=("stale", "in_place", "full_suffix", "selective@1", "in_place reanchor=every:2", "selective@999"),
)  # fmt: skip


def tiny_sessions(model: Any, config: AgentConfig, stage: Stage) -> list[SessionCase]:
    cases = instance_cases(tiny_instances(config.n, FORMS, seed=config.seed), config.seed)
    return [session_case(c, config.turns, config.pattern, config.seed) for c in cases]


def tiny_episodes(model: Any, config: ToolConfig, stage: Stage) -> list[Episode]:
    cases = instance_cases(tiny_instances(config.n, FORMS, seed=config.seed), config.seed)
    return [desk_episode(c, c.answers) for c in cases]


@pytest.fixture(scope="module")
def organism() -> Any:
    """An untrained model of an organism's shape."""
    torch.manual_seed(0)
    tokenizer = organism_tokenizer()
    hf = build(ARCHITECTURES["qwen3"].config(len(tokenizer)), "sdpa").eval().requires_grad_(False)
    return wrap(hf, tokenizer, name="organism-untrained", gate=False)


def values(lines: list[dict[str, Any]], metric: str) -> dict[str, float]:
    return {line["method"]: line["value"] for line in lines if line["metric"] == metric}


@pytest.mark.parametrize("name", KINDS)
def test_configs_can_be_read(name: str) -> None:
    config = KINDS[name].read(CONFIGS / f"{name}.yaml")
    assert config.margin == 0.02 and config.gate == 0.8 and config.n >= 26
    with pytest.raises(ConfigError):
        KINDS[name].read(CONFIGS / f"{name}.yaml", marginal=1)


# --- sessions ----------------------------------------------------------------------------------------------------------------


def test_arms_do_over_many_turns_what_one_edit_does(tiny: Any, tmp_path: Path) -> None:
    lines = run(Horizon(), CONFIG, tmp_path, tiny, source=tiny_sessions)
    right = values(lines, "correctness")
    assert right["full_suffix"] == right["selective@1"] == 1.0
    assert right["stale"] == right["in_place"] == 0.5, "right at every other turn, because the value comes back"
    assert values(lines, "oracle_accuracy") == {"full_prefill": 1.0}
    assert values(lines, "agreement") == {m: v for m, v in right.items() if v is not None}
    assert values(lines, "exact_rate")["full_suffix"] == 1.0
    # every second update is followed by a prefill: turns 2 and 4 are right anyway, so it changes nothing at turns 1, 3 and 5
    assert values(lines, "reanchored")["in_place reanchor=every:2"] == pytest.approx(2 / 6)
    slopes = {x["method"]: x for x in lines if x["metric"] == "slope_agreement"}
    assert slopes["full_suffix"]["value"] == 0.0 and slopes["stale"]["value"] < 0
    # every session of the hand-set decoder fails alike
    paired = {x["method"]: x for x in lines if x["metric"] == "sessions_minus_full"}
    n = paired["stale"]["n"]
    assert n == 8 and paired["stale"]["value"] == -1.0 and paired["stale"]["p"] == mcnemar_exact(8, 0)
    assert paired["full_suffix"]["p_holm"] == 1.0 and paired["stale"]["p_holm"] >= paired["stale"]["p"]
    tost = {x["method"]: x for x in lines if x["metric"] == "difference_to_full"}
    assert tost["full_suffix"]["equivalent"] and not tost["stale"]["equivalent"] and tost["stale"]["margin"] == 0.02
    refused = next(x for x in lines if x["method"] == "selective@999")
    assert refused["n"] == 0 and refused["reasons"] == {"refused (BudgetError)": 8}
    assert run(Horizon(), CONFIG, tmp_path, tiny, source=tiny_sessions) == lines, (
        "a finished run is read, not measured again"
    )


def test_tokens_of_a_session_are_those_that_ran(tiny: Any) -> None:
    case = tiny_sessions(tiny, CONFIG, Stage("", {}, {}))[0]
    base = Baselines.of(tiny, case)
    n = len(case.prompts[0])
    assert [p.tokens for p in base.corrected] == [n, n] and [p.tokens for p in base.errata] == [n + 6, n + 6]
    starts = Starts.of(tiny, case)
    assert base.with_errata(case, 0) is base.corrected[0] and base.with_errata(case, 2) is base.errata[0]
    rows = arm_rows(case, "in_place", base, starts)
    assert [r["tokens"] for r in rows] == [n, 2, 2, 2, 2, 2]
    assert [r["value"] for r in rows] == [0, 1, 0, 1, 0, 1] and all(r["full_tokens"] == n for r in rows)
    every = arm_rows(case, "in_place reanchor=every:2", base, starts)
    assert [r["tokens"] for r in every] == [n, 2, 2 + n, 2, 2 + n, 2]
    assert rows[0]["cosine"] == pytest.approx(1.0)


def test_a_model_that_is_wrong_is_not_measured(tiny: Any, tmp_path: Path) -> None:
    lines = run(Agent(), CONFIG, tmp_path, broken_blind(), source=tiny_sessions)
    oracle = next(x for x in lines if x["metric"] == "oracle_accuracy")
    assert oracle["value"] == 0.0 and not oracle["competent"] and oracle["reasons"] == {"full prefill wrong": 8}
    assert all(x["n"] == 0 for x in lines if x["metric"] == "correctness")


def test_sessions_in_the_organisms_language(organism: Any) -> None:
    config = AgentConfig.read(CONFIGS / "agent-organism.yaml", n=1).model_copy(update={"lengths": (120,), "turns": 3})
    stage = Agent().stages(config)[0]
    case = session_cases(organism, config, stage)[0]
    base = Baselines.of(organism, case)
    line = len(organism.tokenizer.encode(fill(ERRATUM, case.name, case.values[0]), add_special_tokens=False))
    assert len(base.errata) == 2 and base.errata[0].tokens == base.corrected[0].tokens + line
    starts = Starts.of(organism, case)
    assert measure_session(organism, case, config.arms)[0]["method"] == "full_prefill"
    for arm in config.arms:
        rows = arm_rows(case, arm, base, starts)
        assert len(rows) == 3 and rows[0]["excluded"] is None, rows
        if arm == "erratum":
            assert all(r["same_errata"] and r["exact"] for r in rows), "an erratum is exact for its own prompt"
            assert max(abs(r["cosine"]) for r in rows) <= 1.0


def test_policies_of_arms() -> None:
    assert policy_of(None) == policy_of("never") == Never()
    assert policy_of("every:3") == EveryTurns(3) and policy_of("drift:0.5") == OnDrift(0.5)
    for text in ("every:x", "often", "never:3"):
        with pytest.raises(ConfigError):
            policy_of(text)


# --- tools -------------------------------------------------------------------------------------------------------------------


def test_a_stale_agent_fails_at_the_desk(tiny: Any, tmp_path: Path) -> None:
    config = ToolConfig(
        name="t",
        model="tiny",
        task="tiny",
        n=8,
        environment="decisions",
        arms=("stale", "in_place", "selective@1"),
    )
    lines = run(ToolEnv(), config, tmp_path, tiny, source=tiny_episodes)
    assert values(lines, "success") == {"stale": 0.0, "in_place": 0.0, "selective@1": 1.0, "full_prefill": 1.0}
    assert values(lines, "success_all") == values(lines, "success")
    assert values(lines, "refused_stale")["stale"] == 1.0 and values(lines, "refused_stale")["selective@1"] == 0.0
    share = values(lines, "tokens_share")
    assert share["stale"] == 0.0 and share["full_prefill"] == 1.0 and 0 < share["in_place"] < 0.2
    assert share["selective@1"] > 1, "planning is charged: its donor is a prefill"
    assert next(x for x in lines if x["metric"] == "oracle_accuracy")["competent"]


def test_organisms_write_their_calls(organism: Any) -> None:
    config = ToolConfig.read(CONFIGS / "tool-env-organism.yaml", n=2).model_copy(update={"lengths": (None,)})
    episode = tool_episodes(organism, config, ToolEnv().stages(config)[0])[0]
    assert episode.choices == () and " call" in episode.case.prompts[0].text
    change, call = episode.world()
    label, (old, new) = episode.case.name.replace("_", " "), episode.case.values
    assert call(f"{episode.case.answers[0]}({label} = {old})") is None
    change(new)
    assert "stale state" in str(call(f"{episode.case.answers[0]}({label} = {old})"))
    assert call(f"{episode.case.answers[1]} ( {label} = {new} )") is None
    row = play(episode, "erratum", Starts.of(organism, episode.case))
    assert row["excluded"] is None and row["decoded"] <= 8 and row["tokens"] > 0


def test_retail_episodes_are_sessions() -> None:
    tokenizer = embedded_tokenizer("smollm2", cache_dir=default_cache_dir())
    config = ToolConfig.read(CONFIGS / "tool-env-retail-smollm2.yaml", n=12)

    class Only:
        pass

    model: Any = Only()
    model.tokenizer = tokenizer
    for episode, plain in zip(tool_episodes(model, config, ToolEnv().stages(config)[0]), episodes(12, 0), strict=True):
        case = episode.case
        assert tuple(case.values[v] for v in case.order) == plain.statuses and set(case.answers) <= set(episode.choices)
        assert len({*case.answer_ids}) == len({*case.answers}) and all(len(p) >= 1000 for p in case.prompts)
        change, call = episode.world()
        for v in case.order[1:]:
            change(case.values[v])
        assert (
            call(case.answers[case.order[0]]) is not None and call(f" {case.answers[case.order[-1]].upper()}") is None
        )


# --- memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["independent", "cross"])
@pytest.mark.parametrize("language", ["organism", "plain"])
def test_memories_say_what_their_answers_are(language: str, kind: Any) -> None:
    for m in memories(language, 8, 0, kind=kind, n_facts=24, n_queries=1 if kind == "cross" else 4, n_filler=4):
        assert len(m.facts) == len(m.changed) == 24
        for query, (label, other) in zip(m.queries, m.values, strict=True):
            old = m.facts[query.fact].rpartition(": ")[2].strip()
            assert m.facts[query.fact].startswith(f"- {label}: ") and m.changed[query.fact] == f"- {label}: {other}\n"
            assert old != other and query.answers[0] != query.answers[1] and set(query.answers) <= set(query.choices)
            if kind == "independent":
                assert query.answers == (old, other)
            else:
                assert query.other == 23 and old in m.facts[-1] and query.answers[0] in m.facts[-1]
    with pytest.raises(TaskError):
        memories(language, 1, 0, kind=kind, n_facts=4, n_queries=9, n_filler=0)


def test_blocks_are_the_prompt() -> None:
    tokenizer = organism_tokenizer()
    m = memories("organism", 1, 0, kind="independent", n_facts=24, n_queries=2, n_filler=3)[0]
    for place in ("early", "late"):
        for blocks in (1, 5, 16, 24):
            first, moved = (lay_out(tokenizer, m, m.queries[0], place=place, blocks=blocks, turn=t) for t in (0, 2))  # type: ignore[arg-type]
            assert first.blocks == moved.blocks and len(first.blocks) == blocks and len(moved.head) > len(first.head)
            assert first.ids == tuple(tokenizer.encode(first.text, add_special_tokens=False))
            assert first.text[first.request_at :].startswith(m.queries[0].text)
    with pytest.raises(TaskError, match="blocks"):
        lay_out(tokenizer, m, m.queries[0], place="early", blocks=25)


def test_memory_runs_and_exact_arms_agree(organism: Any, tmp_path: Path) -> None:
    config = MemoryConfig(
        name="t", model="x", n=2, facts=8, filler=2, turns=2, places=("late",), blocks=(1, 3), kinds_of_facts=("independent",),
        arms=("seam@999", "seam@1"), edits=("stale", "in_place", "full_suffix", "recompile"),
    )  # fmt: skip
    experiment = MemoryExperiment()
    stage = experiment.stages(config)[1]
    rows = experiment.measure(organism, config, stage, memory_cases(organism, config, stage)[0])
    full = [r for r in rows if r["method"] == "seam@999"]
    assert len(full) == 2 and all(r["same"] and r["exact"] and r["tokens"] == r["full_tokens"] for r in full)
    seam = [r for r in rows if r["method"] == "seam@1"]
    assert all(r["tokens"] < r["full_tokens"] and not r["exact"] for r in seam)
    edits = {r["method"]: r for r in rows if r["method"].startswith("edit ")}
    assert set(edits) == {f"edit {e}" for e in config.edits} and all("answer" in r for r in edits.values())
    assert edits["edit stale"]["tokens"] == 0 < edits["edit in_place"]["tokens"] < edits["edit recompile"]["tokens"]
    assert values(experiment.aggregate(config, stage, rows), "tokens_share").keys() <= set(config.arms)
    with pytest.raises(ValueError, match="baseline"):
        MemoryConfig(name="t", model="x", n=1, arms=("full_prefill",))
    with pytest.raises(ValueError, match="baseline"):
        AgentConfig(name="t", model="x", n=1, arms=("full_prefill",))


def test_rows_of_the_rule_are_run_again_where_it_refers(organism: Any) -> None:
    """``references`` runs the rule's tokens, its control as many others; neither exists where nothing refers."""
    config = MemoryConfig(
        name="t", model="x", n=1, facts=8, filler=2, turns=2, places=("early",), blocks=(3,),
        arms=("references", "other_rows", "shift"), kinds_of_facts=("independent", "cross"), edits=("stale",),
    )  # fmt: skip
    experiment = MemoryExperiment()
    independent, cross = (
        [
            r
            for r in experiment.measure(organism, config, stage, memory_cases(organism, config, stage)[0])
            if r.get("turn") == 0
        ]
        for stage in experiment.stages(config)
    )
    assert {r["method"] for r in independent} == {"shift"}
    tokens = {r["method"]: r["tokens"] for r in cross}
    memory = memory_cases(organism, config, experiment.stages(config)[1])[0].memory
    rule = len(organism.tokenizer.encode(memory.facts[-1], add_special_tokens=False))
    assert tokens["references"] == tokens["other_rows"] == tokens["shift"] + rule
    laid = lay_out(organism.tokenizer, memory, memory.queries[0], place="early", blocks=3)
    blocks = Blocks(organism, "isolated")
    made = {m: blocks.composed(laid, m, memory.facts[-1], "seed").cache for m in config.arms}
    stop = len(laid.ids) - len(laid.tail)
    changed = {
        m: (made[m].values[0] - made["shift"].values[0], made[m].values[-1] - made["shift"].values[-1]) for m in made
    }
    rows = {m: set((last.abs().amax((0, 2)) > 1e-6).nonzero()[:, 0].tolist()) for m, (_, last) in changed.items()}
    assert all(float(first.abs().max()) < 1e-5 for first, _ in changed.values()), "the first layer knows no context"
    assert {r for r in rows["references"] if r < stop} == set(range(stop - rule, stop))
    assert not set(range(stop - rule, stop)) & rows["other_rows"]
    again = blocks.composed(laid, "other_rows", memory.facts[-1], "seed").cache
    assert again.digest() == made["other_rows"].digest()
    with pytest.raises(ValueError, match="must not be references"):
        MemoryConfig(name="t", model="x", n=1, arms=("shift", "references"))


# --- tau2 --------------------------------------------------------------------------------------------------------------------


def test_tau2_shows_agreement_where_nothing_is_competent(tmp_path: Path, organism: Any) -> None:
    config = Tau2Config(name="t", model="x", n=1, turns=2, arms=("full_suffix",), checkout=tmp_path)
    experiment = Tau2Retail()
    where = {"item": "a", "family": "a", "domain": "cancel", "n_tokens": 9}
    turn = {
        "value": 0, "right": False, "same": True, "same_errata": None, "cosine": 1.0, "tokens": 3, "ms": 1.0, "full_tokens": 9,
        "full_ms": 2.0, "errata_ms": None, "exact": True, "drift": None, "reanchored": False, "nbytes": 8, "prompt_tokens": 9,
    }  # fmt: skip
    wrong = "full prefill wrong"
    rows = [
        {**where, "method": "full_prefill", "oracle": 0.5, "excluded": wrong},
        *({**where, **turn, "method": "full_suffix", "turn": t, "excluded": wrong} for t in (0, 1)),
    ]
    lines = experiment.aggregate(config, experiment.stages(config)[0], rows)
    assert values(lines, "agreement_all") == {"full_suffix": 1.0} and values(lines, "oracle_accuracy") == {
        "full_prefill": 0.5
    }
    assert next(x for x in lines if x["metric"] == "correctness")["n"] == 0
    with pytest.raises(CheckoutError):
        tau2_cases(organism, config, experiment.stages(config)[0])
