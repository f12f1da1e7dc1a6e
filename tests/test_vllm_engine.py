"""The skill plug-in inside a real vLLM, on a small random model: the library's decisions, and exact requests left alone.

The engine lives in its own environment (``make serve-env``). It is started once, as a program of that environment
(``vllm_skill_program.py``), which runs all requests; here they are compared with what the library computes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from notelens.cache.kv import KVCache
from notelens.cache.library import SkillLibrary
from notelens.cache.ops import slice_rows
from notelens.compose import Skill, compile_skill, compose
from tests.contracts.models import random_hf, random_ids
from tests.tiny import new_tokenizer, wrapped

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("NOTELENS_SERVE_PYTHON", ROOT / ".venv-serve/bin/python"))
needs_engine = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not there (make serve-env)")
BLOCK, N, SECONDS = 32, 6, 300.0

SMALL: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 512, "num_hidden_layers": 3}
"""vLLM's CPU kernels begin at heads of 32."""


@pytest.fixture(scope="module")
def model() -> Any:
    return wrapped(random_hf("llama", **SMALL), "served", gate=False)


@pytest.fixture(scope="module")
def skills(model: Any) -> dict[str, Skill]:
    policy = compile_skill(model, random_ids(100, seed=1), name="policy")
    tool = compile_skill(
        model, random_ids(70, seed=2), name="tool", condition="neutral", prefix=random_ids(4), scheme="unrotated"
    )
    return {"policy": policy, "tool": tool}


CASES: list[list[Any]] = [
    [list(random_ids(64, seed=10)), "policy", list(random_ids(10, seed=11))],  # at an edge
    [list(random_ids(75, seed=20)), "policy", list(random_ids(10, seed=21))],  # between edges
    [list(random_ids(40, seed=30)), "tool", list(random_ids(9, seed=31))],  # stored unrotated, compiled behind newlines
    [list(random_ids(33, seed=40)), "policy", list(random_ids(50, seed=41)), "tool", list(random_ids(5, seed=42))],
    [list(random_ids(32, seed=50)), "policy", "tool", list(random_ids(12, seed=51))],  # side by side
    ["policy", list(random_ids(20, seed=60))],  # nothing in front
]


def _ids(parts: list[Any], skills: dict[str, Skill]) -> list[int]:
    return [i for p in parts for i in (skills[p].token_ids if isinstance(p, str) else p)]


def _greedy(model: Any, cache: KVCache, hidden: torch.Tensor) -> list[int]:
    tokens: list[int] = []
    while True:
        tokens.append(int(model.next_logits(hidden).argmax()))
        if len(tokens) == N:
            return tokens
        out = model.prefill(tokens[-1:], cache)
        cache, hidden = out.cache, out.hidden


def _full(model: Any, ids: list[int]) -> list[int]:
    out = model.prefill(ids)
    return _greedy(model, out.cache, out.hidden)


def _composed(model: Any, parts: list[Any], skills: dict[str, Skill]) -> tuple[list[int], int]:
    """What the library decides on the same composition, and how many of its rows come from skills."""
    chunks: list[Any] = []
    n = spliced = 0
    adjacent = False
    for part in parts:
        if isinstance(part, str):
            rows = skills[part].in_place(model)
            head = 0 if adjacent else -n % BLOCK
            if head:  # rows up to the next block edge are run where they stand
                chunks.append(list(skills[part].token_ids[:head]))
            chunks.append(slice_rows(rows, head, len(rows)))
            n, spliced, adjacent = n + len(rows), spliced + len(rows) - head, True
        else:
            chunks.append(part)
            n, adjacent = n + len(part), False
    composed = compose(model, chunks, method="shift")
    return _greedy(model, composed.cache, composed.read(model)), spliced


@pytest.fixture(scope="module")
def results(model: Any, skills: dict[str, Skill], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engine")
    model.hf.save_pretrained(folder / "model")
    new_tokenizer().save_pretrained(folder / "model")
    library = SkillLibrary(folder / "skills")
    for skill in skills.values():
        library.put(skill.to_file())
    other = wrapped(random_hf("llama", **SMALL, initializer_range=0.2), "another", gate=False)
    library.put(compile_skill(other, skills["policy"].token_ids, name="foreign").to_file())
    job = {
        "folder": str(folder / "model"), "library": str(library.folder), "block_size": BLOCK, "max_model_len": 512,
        "max_tokens": N, "dtype": "float32", "skills": {name: list(s.token_ids) for name, s in skills.items()},
        "cases": [{"parts": parts} for parts in CASES],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    program = ROOT / "tests/vllm_skill_program.py"
    done = subprocess.run(
        [str(PYTHON), str(program), str(folder / "job.json"), str(folder / "out.json")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    out: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    if keep := os.environ.get("NOTELENS_KEEP_RESULTS"):
        Path(keep).write_text(json.dumps(out, indent=1), encoding="utf-8")
    return out


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [a["tokens"] for a in answers]


@needs_engine
@pytest.mark.slow
class TestEngine:
    def test_the_plugin_brings_nothing_into_the_engines_process(self, results: dict[str, Any]) -> None:
        assert results["imports"] == ["notelens"]

    def test_decisions_are_the_librarys(self, results: dict[str, Any], model: Any, skills: dict[str, Skill]) -> None:
        wanted = [_composed(model, parts, skills) for parts in CASES]
        assert _tokens(results["skilled"]) == [tokens for tokens, _ in wanted]
        assert [a["kind"] for a in results["skilled"]] == ["loaded"] * len(CASES)
        # The fourth prompt's first skill was loaded by a request that went ahead, so the last one reports the second only.
        loaded = [n for _, n in wanted]
        loaded[3] = len(skills["tool"]) - (-(33 + 100 + 50) % BLOCK)
        assert [a["loaded_tokens"] for a in results["skilled"]] == loaded
        assert [a["n_ahead"] for a in results["skilled"]] == [1, 1, 1, 2, 1, 0]
        # Rows of skills did not see what precedes them, so a random model decides otherwise: this is no accident of agreement.
        exact = [_full(model, _ids(parts, skills)) for parts in CASES]
        assert sum(a != b for a, b in zip(_tokens(results["skilled"]), exact, strict=True)) >= 3

    def test_the_same_prompt_again_finds_its_rows_in_the_cache(self, results: dict[str, Any]) -> None:
        assert _tokens(results["again"]) == _tokens(results["skilled"])
        assert all(a["cached"] >= BLOCK for a in results["again"])
        assert all(a["n_ahead"] == 0 for a in results["again"])

    def test_exact_requests_do_not_reach_approximate_blocks(
        self, results: dict[str, Any], model: Any, skills: dict[str, Skill]
    ) -> None:
        exact = [_full(model, _ids(parts, skills)) for parts in CASES]
        half = len(CASES) // 2
        assert _tokens(results["exact_before"]) == exact[:half]
        for when in ("exact_after", "other_salt", "exact_fresh"):
            assert _tokens(results[when]) == exact, when
        # Those that were never run exactly before found nothing of theirs in the cache; nor does another salt.
        assert [a["cached"] for a in results["exact_after"]][half:] == [0] * (len(CASES) - half)
        assert [a["cached"] for a in results["other_salt"]] == [0] * len(CASES)

    def test_approximate_blocks_are_there_to_be_reached_under_their_own_salt(
        self, results: dict[str, Any], model: Any, skills: dict[str, Skill]
    ) -> None:
        assert all(a["cached"] >= BLOCK for a in results["same_salt"])
        for i in (0, 1, 2, 5):  # those with one skill: whole blocks of its rows are found, the rest is run
            *before, name, question = CASES[i]
            n, head = len(_ids(before, skills)), -len(_ids(before, skills)) % BLOCK
            ids, stop = _ids(CASES[i], skills), results["same_salt"][i]["cached"]
            rows = slice_rows(skills[name].in_place(model), head, stop - n)
            parts: list[Any] = [ids[: n + head], rows, ids[stop:]] if n else [rows, ids[stop:]]
            composed = compose(model, parts, method="shift")
            assert results["same_salt"][i]["tokens"] == _greedy(model, composed.cache, composed.read(model)), question
        exact = _tokens(results["exact_fresh"])
        assert sum(a != b for a, b in zip(_tokens(results["same_salt"]), exact, strict=True)) >= 2

    def test_exact_and_skilled_requests_in_one_batch(self, results: dict[str, Any]) -> None:
        skilled, exact = _tokens(results["skilled"]), _tokens(results["exact_fresh"])
        assert _tokens(results["mixed"]) == [skilled[0], exact[0], skilled[1], exact[1]]

    @pytest.mark.parametrize(
        ("what", "kind", "text"),
        [
            ("no_prefix", "prefix", "send them first"),
            ("no_salt", "salt", "needs a cache_salt"),
            ("foreign", "skill", "made by model 'another'"),
            ("unknown", "skill", "no skill 'gone'"),
        ],
    )
    def test_what_is_refused_is_computed_exactly(
        self, results: dict[str, Any], what: str, kind: str, text: str
    ) -> None:
        told = results[what]["kv_transfer_params"]["notelens"]
        assert told["kind"] == kind and told["loaded_tokens"] == 0 and text in told["reason"], told
        assert results[what]["tokens"] == results["exact_fresh"][0]["tokens"]

    def test_a_load_that_fails_is_computed_instead_and_counted(self, results: dict[str, Any]) -> None:
        exact = results["exact_fresh"][0]["tokens"]
        failed = results["failed"]
        assert failed["tokens"] == exact and failed["kind"] == "failed" and failed["loaded_tokens"] == 0
        assert "taken away under load" in failed["reason"]
        name = "vllm:notelens_skill_loads_failed"
        assert results["after_failure"][name] - results["before_failure"].get(name, 0.0) == 1.0
        assert (
            results["after_failure"]["vllm:notelens_skill_loads"]
            == results["before_failure"]["vllm:notelens_skill_loads"]
        )
        assert results["recovered"]["kind"] == "loaded"
        assert results["recovered"]["tokens"] == results["skilled"][0]["tokens"]

    def test_a_skill_that_is_deleted_is_not_served_from_memory(self, results: dict[str, Any]) -> None:
        assert results["deleted"]["kind"] == "skill" and "no skill 'policy'" in results["deleted"]["reason"]
        assert results["deleted"]["tokens"] == results["exact_fresh"][0]["tokens"]

    def test_loads_are_counted(self, results: dict[str, Any]) -> None:
        # One per case, and one for the request ahead of the fourth's second skill; again, where the last block of the skill was
        # shared with the question (not in the fourth, whose second skill is all cached); two in the batch; one that recovered.
        assert results["counters"]["vllm:notelens_skill_loads"] == len(CASES) + 1 + (len(CASES) - 1) + 2 + 1
        assert results["counters"]["vllm:notelens_skill_refused"] == 5
