"""The composing experiments on the hand-set decoder, on which what is lost and what is kept is known on paper.

A note is written on ``;`` from the field and the rule before it, and the decision reads notes only. So a chunk that is spliced
in front of the note loses nothing, and a note inside a spliced chunk knows what that chunk holds, no more.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import compose_cases, compose_fidelity, facts_rag, keystone, multi_skill, seam, tool_calls
from experiments.compose_cases import Pool, SkillCase, filled, sections
from experiments.compose_fidelity import Fidelity, FidelityConfig, policy_cases
from experiments.compose_harness import UNRELATED, measure_case
from experiments.compose_linked import LinkedChain, LinkedConfig, policies
from experiments.edit_cases import instance_cases
from experiments.edit_harness import Stage, run
from experiments.facts_rag import FactsConfig, FactsRag, facts_cases
from experiments.keystone import Keystone, KeystoneConfig
from experiments.multi_skill import MultiConfig, MultiSkill, multi_cases
from experiments.seam import SeamConfig, SeamSweep, seam_cases
from experiments.tool_calls import ToolCalls, ToolConfig, call_of, tool_cases, well_formed
from experiments.ttft import Ttft, TtftConfig, timed_cases
from notelens.compose import compose
from notelens.errors import ConfigError, TaskError
from notelens.models.load import wrap
from notelens.prompt import Prompt
from notelens.runs.tables import load_table
from notelens.tasks.base import Instance
from notelens.tasks.organism import OrganismLanguage
from notelens.zoo.organisms import organism_tokenizer
from tests.contracts.models import random_hf
from tests.tiny import FAMILIES, FORMS, tiny_instances, tiny_prompt

CONFIGS = sorted((Path(__file__).parents[1] / "experiments" / "configs").glob("*.yaml"))


class TinyOrders:
    """The tiny prompts as a task, record first or rule first; the note stands behind both."""

    def __init__(self, order: str = "value_first", **_: Any) -> None:
        self.order = order
        self.families = [SimpleNamespace(name=f, label=f) for f in FAMILIES[:4]]

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Instance]:
        found = tiny_instances(n, FORMS, seed=seed)
        return found if self.order == "value_first" else [self.turned(i) for i in found]

    def turned(self, instance: Instance) -> Instance:
        """The rule in front of the record."""

        def turn(prompt: Prompt) -> Prompt:
            labelled = list(zip(prompt.tokens, prompt.regions, strict=True))
            rule = [w for w in labelled if w[1] in ("rule", "trigger")]
            rest = [w for w in labelled[1:] if w[1] not in ("rule", "trigger")]
            return tiny_prompt([labelled[0], *rule, *rest], id=prompt.id)

        return replace(instance, cells={c: turn(p) for c, p in instance.cells.items()})


@pytest.fixture(autouse=True)
def tiny_task(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """``task: tiny`` in configurations."""
    real = compose_cases.task_of

    def task_of(name: str, **options: Any) -> Any:
        return TinyOrders(**options) if name == "tiny" else real(name, **options)

    for module in (compose_fidelity, seam, multi_skill, facts_rag, tool_calls):
        monkeypatch.setattr(module, "task_of", task_of)


def table(lines: Sequence[dict[str, Any]], **params: Any) -> dict[tuple[str, str], Any]:
    """Lines by metric and method, of the stage with these parameters."""
    return {(r["metric"], r["method"]): r for r in lines if all(r["params"].get(k) == v for k, v in params.items())}


COMMON: dict[str, Any] = {"name": "t", "model": "tiny", "task": "tiny", "n": 16, "margin": 0.05}


def test_a_policy_in_front_of_the_note_loses_nothing(tiny: Any, tmp_path: Path) -> None:
    config = FidelityConfig(**COMMON, methods=("shift", "no_shift", "seam@2"))
    lines = run(Fidelity(), config, tmp_path, tiny, source=policy_cases)
    found = table(lines, offset=0)
    for method in config.methods:
        for metric in ("agreement", "agreement_given_full_correct", "full_correct", "p_correct", "top1", "pgr"):
            assert found[metric, method]["value"] == 1.0, (metric, method)
        assert found["agreement", method]["n"] == 16 and found["agreement", method]["empty"] is False
        assert found["logit_cosine", method]["value"] == pytest.approx(1.0, abs=1e-6)
        assert found["logit_kl", method]["value"] <= 1e-9
    assert found["recompute_share", "shift"]["value"] == 0.0 < found["recompute_share", "seam@2"]["value"]
    assert found["noise_floor_kl", "full_prefill"]["value"] <= 1e-9
    # the unrelated policy turns about half of the answers; without a policy there is one answer for all
    assert found["agreement", UNRELATED]["value"] < 0.9
    assert found["agreement", "no_context"]["empty"] and "constant_answer" in found["agreement", "no_context"]["flags"]
    assert len(load_table(tmp_path).rows) == len(lines)


def test_distractors_stand_around_the_policy_in_one_skill(tiny: Any) -> None:
    config = FidelityConfig(**COMMON, methods=("shift",), policy_tokens=(60,))
    (stage,) = Fidelity().stages(config)
    cases = policy_cases(tiny, config, stage)
    assert all(40 < case.n_skill <= 60 for case in cases)
    for case in cases:
        rows = measure_case(tiny, case, ["shift"])
        assert rows[0]["answer"] == rows[0]["full"] and rows[0]["top1"]


def test_a_note_behind_the_record_comes_back_when_it_is_computed_again(tiny: Any, tmp_path: Path) -> None:
    config = SeamConfig(**COMMON, ks=(1, 40))
    lines = run(SeamSweep(), config, tmp_path, tiny, source=seam_cases)
    first = table(lines, arrangement="policy_first")
    assert all(first["pgr", m]["value"] == 1.0 for m in ("shift", "seam@1", "epic@40"))
    behind = table(lines, arrangement="record_first")
    for method, value in {"shift": 0.0, "seam@1": 0.0, "epic@1": 0.0, "seam@40": 1.0, "epic@40": 1.0}.items():
        assert behind["pgr", method]["value"] == value, method
    assert behind["recompute_share", "seam@40"]["value"] == 1.0


def test_many_skills_and_conflicts(tiny: Any, tmp_path: Path) -> None:
    config = MultiConfig(**COMMON, methods=("shift",), counts=(1, 3))
    lines = run(MultiSkill(), config, tmp_path, tiny, source=multi_cases)
    assert table(lines, skills=1, conflict=False)["p_correct", "shift"]["value"] == 1.0
    assert table(lines, skills=3, conflict=False)["agreement", "shift"]["value"] == 1.0
    found = table(lines, skills=3, conflict=True)
    assert ("full_correct", "shift") not in found and ("pgr", "shift") not in found  # no answer is right
    assert (
        found["agreement", "shift"]["value"] == 1.0 and found["agreement", "shift"]["n"] == 12
    )  # two_clause has one rule
    cases = multi_cases(tiny, config, Stage("x", {}, {"skills": 3, "conflict": True}))
    names = [[c.skill for c in case.chunks if c.skill] for case in cases]
    assert all(sorted(n) == ["opposite", "other0", "policy"] for n in names)
    assert all(n.index("policy") < n.index("opposite") for n in names) and len({tuple(n) for n in names}) >= 2
    with pytest.raises(TaskError, match="second rule"):
        multi_cases(
            tiny, config.model_copy(update={"n": 1}), Stage("x", {}, {"skills": 2, "conflict": True})
        )  # its only instance is two_clause


def test_facts_compose_and_references_across_them_do_not(tiny: Any, tmp_path: Path) -> None:
    config = FactsConfig(**COMMON, methods=("shift",), documents=(1,))
    lines = run(FactsRag(), config, tmp_path, tiny, source=facts_cases)
    fact, across, chain = (table(lines, arrangement=a) for a in ("fact", "across", "chain"))
    assert fact["p_correct", "shift"]["value"] == 1.0 and fact["agreement", UNRELATED]["value"] == 0.0
    for lost in (across, chain):
        assert lost["full_correct", "shift"]["value"] == 1.0 and lost["pgr", "shift"]["value"] == 0.0
        assert lost["agreement", "shift"]["empty"] and lost["equivalence", "shift"]["equivalent"] is False


def test_edits_inside_a_splice_are_those_of_a_prefilled_prompt(tiny: Any, tmp_path: Path) -> None:
    arms = (
        "stale",
        "in_place",
        "full_suffix",
        "full_prefill",
        "selective@1 ranking=effect",
        "auto",
        "transplant@1",
        "selective@999",
    )
    config = KeystoneConfig(name="k", model="tiny", task="tiny", n=8, order="value_first", arms=arms)

    def source(model: Any, config: Any, stage: Stage) -> Any:
        return instance_cases(tiny_instances(config.n, FORMS, seed=config.seed), config.seed)

    lines = run(Keystone(), config, tmp_path, tiny, source=source)
    for inside in ("record", "record_and_policy"):
        found = table(lines, inside=inside)
        assert found["competence", "ends"]["value"] == 1.0
        tolerance = (
            1e-3 if inside == "record" else 0.02
        )  # a note inside the skill was written without the sink in front
        for method, flips in dict(zip(arms, (0, 0, 8, 8, 8, 8, 8), strict=False)).items():
            assert found["flip_rate", method]["value"] == found["flip_rate_composed", method]["value"] == flips / 8, (
                method
            )
            assert found["recovery_gap", method]["flips"] == flips and found["recovery_gap", method]["n"] == 8
            assert found["recovery_gap", method]["value"] == pytest.approx(0.0, abs=tolerance)
            assert found["recovery", method]["value"] == pytest.approx(flips / 8, abs=1e-3)
        refused = found["recovery", "selective@999"]
        assert refused["n"] == 0 and refused["reasons"] == {"refused (BudgetError)": 8}


def test_a_field_that_the_splice_lost_is_no_case_of_an_edit(tiny: Any) -> None:
    """The policy with its note spliced behind the record: the composed context does not know the field at all."""
    from experiments.keystone import ComposedBench

    case = instance_cases(tiny_instances(1, ("polarity",)), 0)[0]
    original = keystone.composed_prompt

    def other(model: Any, prompt: Prompt, inside: Any, composer: str) -> Any:
        s = sections(prompt, "value_first")
        from notelens.compose import compile_skill

        return compose(model, [[*s.head, *s.first], compile_skill(model, s.second, name="p"), list(s.request)])

    keystone.composed_prompt = other
    try:
        bench = ComposedBench(tiny, case, "record", "shift")
    finally:
        keystone.composed_prompt = original
    assert bench.before.margin == pytest.approx(bench.after.margin, abs=1e-4) and bench.excluded is not None


# --- the organisms' language ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker() -> Any:
    """A random model with the organisms' tokenizer."""
    tokenizer = organism_tokenizer()
    hf = random_hf("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    return wrap(hf, tokenizer, name="speaker", gate=False)


ORGANISM: dict[str, Any] = {"name": "t", "model": "speaker", "task": "organism", "n": 10, "margin": 0.05}


def test_a_skill_can_be_filled_with_text_that_holds_no_rule(speaker: Any) -> None:
    config = FidelityConfig(**ORGANISM, methods=("shift",), policy_tokens=(200,))
    filled = config.model_copy(update={"padding": "filler"})
    (stage,) = Fidelity().stages(config)

    def rules(config: FidelityConfig) -> list[int]:
        return [speaker.tokenizer.decode(c.chunks[1].ids).count("rule") for c in policy_cases(speaker, config, stage)]

    cases = policy_cases(speaker, filled, stage)
    assert all(150 < case.n_skill <= 200 for case in cases)
    assert set(rules(filled)) == {1} and min(rules(config)) > 2
    assert all(case.control["policy"] != case.chunks[1].ids for case in cases)


def test_calls_are_written_behind_specifications(speaker: Any, tmp_path: Path) -> None:
    config = ToolConfig(**{**ORGANISM, "n": 3}, methods=("shift", "cacheblend@1"), toolsets=(2,))
    lines = run(ToolCalls(), config, tmp_path, speaker, source=tool_cases)
    found = table(lines, toolsets=2)
    # recomputing everything is full prefill; a random model is right about nothing and writes no call
    for metric in ("agreement", "call_agreement", "top1"):
        assert found[metric, "cacheblend@1"]["value"] == found[metric, "full_prefill"]["value"] == 1.0
    assert found["call_correct", "full_prefill"]["value"] == 0.0
    case = tool_cases(speaker, config, ToolCalls().stages(config)[0])[0]
    text = speaker.tokenizer.decode(case.token_ids)
    assert case.meta["call"].count("(") == 1 and text.count("=") == 4 and "call" in text
    assert well_formed(case.meta["call"]) and not well_formed("sign") and not well_formed("sign(seal)")


def test_a_call_is_what_greedy_decoding_writes(speaker: Any) -> None:
    config = ToolConfig(**ORGANISM, methods=("shift",))
    case = tool_cases(speaker, config, ToolCalls().stages(config)[0])[0]
    ids = list(case.token_ids)
    for _ in range(tool_calls.MOST_TOKENS):
        ids.append(int(torch.argmax(speaker.next_logits(speaker.prefill(ids).hidden))))
    wanted = tool_calls.squeezed(speaker.tokenizer.decode(ids[len(case.token_ids) :]))
    found = call_of(speaker, compose(speaker, case.parts(speaker, {}), method="full_prefill"))
    assert wanted.startswith(found) and found


@pytest.mark.parametrize(
    ("experiment", "config", "source"),
    [
        (
            Fidelity(),
            FidelityConfig(**ORGANISM, methods=("shift",), offsets=(0, 300), policy_tokens=(200,)),
            policy_cases,
        ),
        (SeamSweep(), SeamConfig(**ORGANISM, ks=(2,)), seam_cases),
        (MultiSkill(), MultiConfig(**ORGANISM, methods=("shift",), counts=(2,)), multi_cases),
        (FactsRag(), FactsConfig(**ORGANISM, methods=("shift",), documents=(2,)), facts_cases),
    ],
    ids=["fidelity", "seam", "multi", "facts"],
)
def test_every_experiment_cuts_the_organisms_language(speaker: Any, experiment: Any, config: Any, source: Any) -> None:
    """Chunks put together are a prompt of the language: policy, record and request of one family, the answer among its two."""
    for stage in experiment.stages(config):
        cases: list[SkillCase] = source(speaker, config, stage)
        assert len({c.id for c in cases}) == len(cases) >= 5
        for case in cases:
            text = speaker.tokenizer.decode(case.token_ids).lower()
            assert "<user>" in text and text.rstrip().endswith("<assistant>") and "rule :" in text and "act" in text
            assert case.right in (0, 1, None) and sum(bool(c.skill) for c in case.chunks) >= 1
            assert not case.control or set(case.control) <= {c.skill for c in case.chunks}
        rows = experiment.measure(speaker, config, stage, cases[0])
        assert {r["method"] for r in rows} >= {"shift", "no_context"}
    if isinstance(experiment, Fidelity):
        assert all(len(case.chunks[0].ids) > 300 for case in cases)


def test_the_language_has_the_sections(speaker: Any) -> None:
    for order in ("value_first", "rule_first"):
        instance = OrganismLanguage(order=order).instances(speaker.tokenizer, 1, 0)[0]
        prompt = instance.cells[0, 0]
        s = sections(prompt, order)
        assert (*s.head, *s.first, *s.second, *s.request) == prompt.token_ids
        rule, record = (s.first, s.second) if order == "rule_first" else (s.second, s.first)
        decode = speaker.tokenizer.decode
        assert decode(rule).lower().startswith("rule") and str(instance.meta["v0"]) in decode(record).split()
    with pytest.raises(TaskError, match="in this order"):
        sections(prompt, "value_first")
    with pytest.raises(TaskError, match="at least two families"):
        Pool([instance], "rule_first").others(instance, "x")


def test_filled_texts_have_the_length_and_hold_whole_sections() -> None:
    others = [(1,) * 5, (2,) * 7, (3,) * 4]
    for n in (None, 9, 30, 200):
        text = filled((9, 9, 9), others, n, "key")
        assert (text == (9, 9, 9)) if n is None else n - 4 < len(text) <= n
        rest = list(text)
        at = rest.index(9)
        del rest[at : at + 3]
        assert 9 not in rest


def test_the_first_token_is_timed_in_turns(speaker: Any, tmp_path: Path) -> None:
    config = TtftConfig(name="t", model="speaker", task="organism", lengths=(64, 256), rounds=3, clock="cpu")
    lines = run(Ttft(), config, tmp_path, speaker, source=timed_cases)
    for n in (64, 256):
        found = table(lines, n=n)
        ratio, full, short = (found[m, "shift"]["value"] for m in ("ttft_ratio", "full_ms", "compose_ms"))
        assert ratio > 0 and found["ttft_ratio", "shift"]["n"] == 3 and full > 0 and short > 0
        assert found["same_token", "shift"]["value"] in (0.0, 1.0)
    case = timed_cases(speaker, config, Ttft().stages(config)[1])[0]
    assert (len(case.head), len(case.body), len(case.request)) == (1, 239, 16)


def test_policies_keep_their_tokens_behind_many_contexts(speaker: Any) -> None:
    """Both values occur in both halves, no context twice, and what is cut is the rule."""
    config = LinkedConfig(
        **{**ORGANISM, "n": 2},
        methods=("shift", "seam@2"),
        calibration=4,
        evaluation=2,
        k=2,
        rank=2,
        forms=("polarity",),
    )
    (stage,) = LinkedChain().stages(config)
    found = policies(speaker, config, stage)
    for case in found:
        assert len(case.contexts) == 6 and len({c.before for c in case.contexts}) == 6
        assert len({c.policy for c in case.contexts}) == 1
        assert speaker.tokenizer.decode(case.contexts[0].policy).lower().startswith("rule")
        assert {c.right for c in case.contexts[:4]} == {c.right for c in case.contexts[4:]} == {0, 1}
    rows = LinkedChain().measure(speaker, config, stage, found[0])
    assert len(rows) == 2 * 4 and {r["method"] for r in rows} == {"shift", "seam@2", "linked", "no_context"}
    lines = table(LinkedChain().aggregate(config, stage, rows))
    assert lines["tokens_recomputed", "linked"]["value"] == lines["tokens_recomputed", "seam@2"]["value"] == 2.0
    assert lines["tokens_recomputed", "shift"]["value"] == 0.0 and lines["agreement", "linked"]["n"] == 2


KINDS: dict[str, Any] = {
    "compose_linked": LinkedConfig,
    "compose_fidelity": FidelityConfig, "seam": SeamConfig, "multi_skill": MultiConfig, "facts_rag": FactsConfig,
    "tool_calls": ToolConfig, "keystone": KeystoneConfig, "ttft": TtftConfig,
}  # fmt: skip


def test_every_configuration_can_be_read() -> None:
    """The first line of each says which experiment it is for; there is one per experiment for smollm2 and for organisms."""
    seen: set[tuple[str, str]] = set()
    for path in CONFIGS:
        module = path.read_text().splitlines()[0].partition("experiments.")[2].split()[:1]
        if module and module[0] in KINDS:
            config = KINDS[module[0]].read(path)
            seen.add((module[0], config.task))
    assert seen >= {(name, task) for name in KINDS for task in ("gated", "organism")}


def test_a_method_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: x\nmodel: tiny\nn: 1\nmargin: 0.1\nmethods: [nothing]\n")
    with pytest.raises(ConfigError, match="nothing"):
        FidelityConfig.read(tmp_path / "c.yaml")


def test_keystone_in_the_organisms_language_names_the_field_as_its_prompts_do() -> None:
    """Errata say the field's name; a word that no prompt has is not in that language's vocabulary."""
    from types import SimpleNamespace

    from notelens.zoo.organisms import organism_tokenizer

    config = KeystoneConfig(name="k", model="m", task="organism", n=6, seed=0, arms=("erratum",), margin=0.1)
    tokenizer = organism_tokenizer()
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    cases = keystone.keystone_cases(model, config, Keystone().stages(config)[0])
    assert len(cases) == 6
    for case in cases:
        assert f"- {case.name}: {case.values[0]}" in case.old.text and case.name in tokenizer.get_vocab()
