"""The experiment on skills in an engine, on an engine that is a table of blocks: what it finds, and what it does not miss."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import serve_skill
from experiments.compose_cases import Chunk, SkillCase
from experiments.edit_harness import Stage, run
from experiments.serve_skill import METRICS, Mixed, ServeSkill, ServeSkillConfig, Timed, command
from notelens.cache.library import SkillLibrary
from notelens.serving.skill_store import SkillStore
from tests.contracts.models import note_model, random_ids
from tests.skill_cases import BLOCK, FakeEngine

ROOT = Path(__file__).parents[1]
SKILL = random_ids(60, seed=1)


def config(**change: Any) -> ServeSkillConfig:
    small = {
        "n": 4,
        "rounds": 3,
        "mixed": 60,
        "prompts": 4,
        "block_size": BLOCK,
        "answer_tokens": 2,
        "at_once": 2,
        "skill_tokens": 60,
    }
    return ServeSkillConfig.model_validate({"name": "t", "model": "llama3", **small, **change})


def cases(model: Any, config: ServeSkillConfig, stage: Stage) -> list[Any]:
    if stage.name == "decisions":
        return [
            SkillCase(
                id=f"d{i}", family=f"f{i % 2}", form="x", answer_ids=(7, 9), right=i % 2,
                chunks=(Chunk(random_ids(21, seed=i)), Chunk(SKILL, "policy"), Chunk(random_ids(5, seed=i))),
                control={"policy": random_ids(60, seed=2)},
            )
            for i in range(config.n)
        ]  # fmt: skip
    n = config.rounds if stage.name == "ttft" else config.prompts
    prompts = [
        Timed(
            f"{stage.name}{i}", random_ids(21, seed=1000 + 100 * len(stage.name) + i), SKILL, random_ids(5, seed=99 + i)
        )
        for i in range(n)
    ]
    return list(prompts) if stage.name == "ttft" else [Mixed("mixed", tuple(prompts))]


def lines_of(tmp_path: Path, *, leaky: bool = False) -> tuple[list[dict[str, Any]], FakeEngine]:
    library = SkillLibrary(tmp_path / "skills")
    engine = FakeEngine(SkillStore(library), leaky=leaky)
    lines = run(ServeSkill(engine.send, library), config(), tmp_path / "run", note_model("llama3"), source=cases)
    return lines, engine


def line(lines: list[dict[str, Any]], metric: str, **params: Any) -> dict[str, Any]:
    return next(
        r for r in lines if r["metric"] == metric and params.items() <= {**r["params"], "method": r["method"]}.items()
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], FakeEngine]:
    return lines_of(tmp_path_factory.mktemp("serve"))


def test_every_arm_runs_what_it_says(found: tuple[list[dict[str, Any]], FakeEngine]) -> None:
    # the first prompt: ahead of it 21 tokens with a head of 3, then the question; alone everything; ahead again, question
    # alone; 16 cached tokens of the prefix in front of the rest
    n = 21 + 60 + 5
    assert found[1].run[:7] == [24, 5, n, 24, 5, 21, n - 16]


def test_times_have_a_ratio_for_either_state_of_the_prefix(found: tuple[list[dict[str, Any]], FakeEngine]) -> None:
    for prefix in ("whole", "cached"):
        ratio, share = (line(found[0], m, state=prefix) for m in ("skill_ttft_ratio", "loaded_share"))
        assert ratio["n"] == share["n"] == 3 and ratio["value"] > 0 and share["value"] == pytest.approx(57 / 60)
        assert ratio["n_excluded"] == 0


def test_decisions_are_compared_with_full_prefill(found: tuple[list[dict[str, Any]], FakeEngine]) -> None:
    # the answer of this engine turns over where rows came from a skill
    assert line(found[0], "agreement", method="skill")["value"] == 0.0
    assert line(found[0], "agreement", method="full_prefill")["value"] == 1.0
    assert line(found[0], "agreement", method="unrelated")["n"] == 4


def test_an_engine_that_keeps_salts_apart_is_clean(found: tuple[list[dict[str, Any]], FakeEngine]) -> None:
    changed = line(found[0], "changed")
    assert changed["value"] == 0.0 and changed["n_loaded"] > 0 and changed["n"] + changed["n_skilled"] == 60 + 4
    assert line(found[0], "changed_alone")["value"] == 0.0


def test_an_engine_that_keeps_approximate_blocks_under_exact_keys_is_found_out(tmp_path: Path) -> None:
    lines, _ = lines_of(tmp_path, leaky=True)
    assert line(lines, "changed")["value"] > 0.3 and line(lines, "changed_alone")["value"] == 0.0


def test_the_engine_is_started_with_the_plugin(tmp_path: Path) -> None:
    words = command(config(), tmp_path / "m", tmp_path / "skills")
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert given["kv_connector_extra_config"] == {"skill_library": str((tmp_path / "skills").resolve())}
    assert given["kv_load_failure_policy"] == "recompute" and "{port}" in words
    module = ROOT / (given["kv_connector_module_path"].replace(".", "/") + ".py")
    assert re.search(rf"^class {given['kv_connector']}\b", module.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_shipped_configuration() -> None:
    found = ServeSkillConfig.read(ROOT / "experiments/configs/serve-skill-smollm2.yaml")
    assert (found.prefix_tokens, found.skill_tokens, found.mixed) == (200, 2000, 1000)
    assert set(METRICS) >= {"skill_ttft_ratio", "changed"} and serve_skill.__doc__ is not None
