"""The skill plug-in without an engine: what is chosen, where rows go, and what scheduler and worker tell each other."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notelens.attention.move import adapters
from notelens.cache.library import SkillLibrary
from notelens.compose import Skill, compile_skill
from notelens.errors import CacheError, EngineError, UnknownNameError, UnsupportedModelError
from notelens.serving.engine_facts import EngineFacts, table_pairing
from notelens.serving.paged import rows_at, slots, write_rows
from notelens.serving.skill_loads import SALT, Known, Load, Mark, Piece, RefusedLoadError, check_salt, choose, marks_of
from notelens.serving.skill_requests import new_salt
from notelens.serving.skill_scheduler import Failure, SchedulerSide
from notelens.serving.skill_store import SkillStore
from notelens.serving.skill_worker import WorkerSide
from tests.contracts.models import note_model, random_ids
from tests.skill_cases import BLOCK, SKILL, TOOL, Blocks, Rope, skill_library


@pytest.fixture
def library(tmp_path: Path) -> SkillLibrary:
    return skill_library(tmp_path / "skills")


def known(name: str) -> Known:
    skills = {"policy": SKILL, "tool": TOOL}
    if name not in skills:
        raise UnknownNameError(name)
    return Known(skills[name], name)


# --- what is chosen ---------------------------------------------------------------------------------------------------


class TestChoice:
    PREFIX, QUESTION = random_ids(16, seed=5), random_ids(4, seed=6)

    def test_rows_follow_what_is_cached(self) -> None:
        prompt, mark = (*self.PREFIX, *SKILL, *self.QUESTION), Mark("policy", 16)
        assert choose([mark], prompt, 16, known) == (Piece("policy", "policy", 0, 21, 16),)
        assert choose([mark], prompt, 24, known) == (Piece("policy", "policy", 8, 13, 24),)  # the ragged head is there
        assert choose([mark], prompt, 40, known) == () == choose([mark], prompt, 37, known)

    def test_the_last_token_is_always_run(self) -> None:
        prompt = (*self.PREFIX, *SKILL)
        assert choose([Mark("policy", 16)], prompt, 16, known)[0].n == 20

    def test_skills_side_by_side_come_together_and_others_do_not(self) -> None:
        marks = [Mark("policy", 16), Mark("tool", 37)]
        prompt = (*self.PREFIX, *SKILL, *TOOL, *self.QUESTION)
        pieces = choose(marks, prompt, 24, known)
        assert pieces == (Piece("policy", "policy", 8, 13, 24), Piece("tool", "tool", 0, 9, 37))
        apart = (*self.PREFIX, *SKILL, 1, *TOOL, *self.QUESTION)
        assert choose([marks[0], Mark("tool", 38)], apart, 16, known) == (Piece("policy", "policy", 0, 21, 16),)
        assert choose([marks[0], Mark("tool", 38)], apart, 40, known) == (Piece("tool", "tool", 2, 7, 40),)

    @pytest.mark.parametrize(
        ("marks", "n_computed", "kind", "text"),
        [
            ([Mark("policy", 16)], 8, "prefix", "tokens 8..15"),
            ([Mark("policy", 17)], 16, "tokens", "token 0 of 21 differs"),
            ([Mark("policy", 30)], 16, "tokens", "differs or is missing"),
            ([Mark("policy", 16), Mark("policy", 20)], 16, "marks", "overlaps"),
        ],
    )
    def test_what_cannot_be_taken_is_refused(self, marks: list[Mark], n_computed: int, kind: str, text: str) -> None:
        with pytest.raises(RefusedLoadError, match=text) as e:
            choose(marks, (*self.PREFIX, *SKILL, *self.QUESTION), n_computed, known)
        assert e.value.kind == kind

    def test_marks_are_read_or_refused(self) -> None:
        assert marks_of(None) == marks_of({"do_remote_prefill": True}) == ()
        params = {"notelens": {"skills": [{"name": "b", "start": 9}, {"name": "a", "start": 1}]}}
        assert marks_of(params) == (Mark("a", 1), Mark("b", 9))
        for bad in (
            {}, {"skills": []}, {"skills": [{"name": "a"}]}, {"skills": [{"name": "a", "start": -1}]}, "x",
            {"skills": [{"name": "a", "start": 1, "n": 2}]}, {"skills": [{"name": "a", "start": True}]}, {"skills": 3},
        ):  # fmt: skip
            with pytest.raises(RefusedLoadError, match="must be"):
                marks_of({"notelens": bad})

    def test_a_salt_of_its_own_is_needed(self) -> None:
        check_salt(new_salt())
        for salt in (None, "", "tenant-1", SALT):
            with pytest.raises(RefusedLoadError, match="cache_salt"):
                check_salt(salt)
        assert len({new_salt() for _ in range(100)}) == 100
        assert all(
            len(new_salt()) <= 128 and not set(new_salt()) & set("@/\\\0") for _ in range(5)
        )  # the engine's limits


# --- where rows go ----------------------------------------------------------------------------------------------------


class TestRows:
    @pytest.mark.parametrize("name", ["policy", "tool"])
    @pytest.mark.parametrize("start", [0, 5, 64])
    def test_rows_are_those_of_the_library(self, library: SkillLibrary, name: str, start: int) -> None:
        model, file = note_model("llama3"), library.get(name)
        wanted = Skill.from_file(file, model).at(model, start)
        for layer in range(3):
            for first in (0, 4):
                n = len(file.header.token_ids) - first
                keys, values = rows_at(file, layer, first, n, start + first)
                assert torch.equal(keys, wanted.keys[layer][:, first:])
                assert torch.equal(values, wanted.values[layer][:, first:])

    def test_adjacent_pairs_and_layers_without_rope(self, tmp_path: Path) -> None:
        for family in ("glm", "smollm3"):
            model = note_model(family)
            skill = compile_skill(model, SKILL, name="a")
            wanted, file = skill.at(model, 40), skill.to_file()
            for layer, adapter in enumerate(adapters(model)):
                keys, _ = rows_at(file, layer, 0, len(SKILL), 40, adapter.facts.pairing)
                assert torch.equal(keys, wanted.keys[layer]), (family, layer)

    def test_rows_that_are_not_there(self, library: SkillLibrary) -> None:
        for first, n, position in ((0, 22, 0), (-1, 2, 0), (3, 0, 0), (0, 2, -1)):
            with pytest.raises(CacheError, match="of skill 'policy'"):
                rows_at(library.get("policy"), 0, first, n, position)

    def test_slots(self) -> None:
        assert slots([5, 2, 9], BLOCK, 6, 4).tolist() == [46, 47, 16, 17]
        for position, n in ((0, 25), (24, 1), (-1, 2), (0, 0)):
            with pytest.raises(CacheError, match="3 blocks of 8"):
                slots([5, 2, 9], BLOCK, position, n)

    def test_a_write_touches_its_own_slots_only(self) -> None:
        layer = Blocks(6, 2, 4)
        keys, values = torch.randn(2, 11, 4), torch.randn(2, 11, 4)
        write_rows(layer, keys, values, slots([5, 2, 0], BLOCK, 6, 11))
        found = layer.read([5, 2, 0], range(6, 17))
        assert torch.equal(found[0], keys) and torch.equal(found[1], values)
        assert int((layer.kv_cache == 7.0).sum()) == layer.kv_cache.numel() - 2 * keys.numel()

    def test_a_backend_without_a_writer_is_refused(self) -> None:
        rows = torch.zeros(1, 1, 4)
        with pytest.raises(UnsupportedModelError, match="do_kv_cache_update"):
            write_rows(SimpleNamespace(impl=object(), kv_cache=torch.zeros(1)), rows, rows, torch.zeros(1))
        with pytest.raises(UnsupportedModelError, match=r"blocks hold torch\.bfloat16"):
            write_rows(Blocks(1, 1, 4, torch.bfloat16), rows, rows, torch.zeros(1))


class TestTables:
    FREQ = 1e4 ** -(torch.arange(0, 16, 2) / 16)

    def test_the_engines_table_decides_and_says_how_channels_pair(self) -> None:
        freq = self.FREQ.tolist()
        other = Rope(self.FREQ * 0.9)
        for dtype in (torch.float32, torch.bfloat16):
            assert table_pairing(freq, [other, Rope(self.FREQ, dtype=dtype)], 0) == "half"
            assert table_pairing(freq, [Rope(self.FREQ, neox=False, size=1.3, dtype=dtype)], 0) == "adjacent"

    @pytest.mark.parametrize(
        "rope", [Rope(5e4 ** -(torch.arange(0, 16, 2) / 16)), Rope(FREQ / 4), Rope(FREQ[:4]), object()]
    )
    def test_another_table_is_refused(self, rope: Any) -> None:
        with pytest.raises(UnsupportedModelError, match="another RoPE table"):
            table_pairing(self.FREQ.tolist(), [rope], 3)


def test_a_load_names_the_blocks_it_touches() -> None:
    load = Load("r", (Piece("a", "s", 0, 3, 14), Piece("b", "t", 0, 1, 17)), (4, 6, 8))
    assert load.touched(BLOCK) == {6, 8} and load.n_tokens == 4


# --- both halves ------------------------------------------------------------------------------------------------------


def request(prompt: tuple[int, ...], start: int, name: str = "policy", **more: Any) -> Any:
    params = {"notelens": {"skills": [{"name": name, "start": start}]}}
    settings = {
        "request_id": "r", "prompt_token_ids": list(prompt), "cache_salt": SALT + "s", "kv_transfer_params": params,
        "lora_request": None, "mm_features": [], **more,
    }  # fmt: skip
    return SimpleNamespace(**settings)


class TestHalves:
    PROMPT = (*random_ids(19, seed=7), *SKILL, *random_ids(4, seed=8))

    @pytest.fixture
    def facts(self) -> EngineFacts:
        model = note_model("llama3")
        shapes = tuple((g.n_kv_heads, g.d_key, g.d_value) for g in model.geometry.layers)
        return EngineFacts(
            "served", torch.float32, BLOCK, tuple(f"model.layers.{i}.self_attn.attn" for i in range(3)), shapes
        )

    @pytest.fixture
    def layers(self, facts: EngineFacts) -> dict[str, Blocks]:
        heads, width, _ = facts.shapes[0]
        return {name: Blocks(12, heads, width) for name in facts.layer_names}

    @pytest.fixture
    def worker(self, library: SkillLibrary, facts: EngineFacts, layers: dict[str, Blocks]) -> WorkerSide:
        inv_freq = note_model("llama3").family.inv_freq(note_model("llama3").hf, 0)
        assert inv_freq is not None
        return WorkerSide(facts, SkillStore(library), lambda: layers, lambda: [Rope(inv_freq)])

    def test_a_request_gets_the_rows_of_the_library(
        self, library: SkillLibrary, worker: WorkerSide, layers: dict[str, Blocks]
    ) -> None:
        side, blocks = SchedulerSide(SkillStore(library, memory_bytes=0)), [7, 3, 11, 0, 5, 2]
        marked = request(self.PROMPT, 19)
        assert (
            side.matched(marked, 24) == side.matched(marked, 24) == 16
        )  # asked twice; the head of 5 rows was run ahead
        side.allocated("r", blocks, 16)
        loads = pickle.loads(pickle.dumps(side.take_loads()))  # they go to another process
        assert side.take_loads() == () and loads[0].touched(BLOCK) == {0, 5}
        worker.run(loads)
        assert worker.take_done() == {"r"} and worker.take_bad_blocks() == set() == worker.take_done()
        side.ended({"r"}, worker.take_failures())
        model = note_model("llama3")
        wanted = Skill.from_file(library.get("policy"), model).at(model, 19)
        for i, layer in enumerate(layers.values()):
            keys, values = layer.read(blocks, range(24, 40))
            assert torch.equal(keys, wanted.keys[i][:, 5:]) and torch.equal(values, wanted.values[i][:, 5:])
            assert int((layer.kv_cache == 7.0).sum()) == layer.kv_cache.numel() - 2 * keys.numel()
        assert side.finished("r") == {"notelens": {"kind": "loaded", "loaded_tokens": 16, "reason": None}}
        assert side.take_counts() == {"loads": 1, "tokens_loaded": 16} and side.take_counts() == {}

    def test_requests_without_marks_are_left_alone(self, library: SkillLibrary) -> None:
        side = SchedulerSide(SkillStore(library))
        assert side.matched(request(self.PROMPT, 0, kv_transfer_params=None, cache_salt=None), 16) == 0
        side.allocated("r", [1, 2], 0)
        assert side.take_loads() == () and side.finished("r") is None and side.take_counts() == {}

    @pytest.mark.parametrize(
        ("change", "kind", "text"),
        [
            ({"cache_salt": None}, "salt", "needs a cache_salt"),
            ({"cache_salt": "tenant"}, "salt", "needs a cache_salt"),
            ({"lora_request": object()}, "request", "no adapter"),
            ({"mm_features": [1]}, "request", "images"),
            ({"prompt_token_ids": None}, "request", "embeddings"),
            ({"kv_transfer_params": {"notelens": {}}}, "marks", "must be"),
            (
                {"kv_transfer_params": {"notelens": {"skills": [{"name": "gone", "start": 19}]}}},
                "skill",
                "no skill 'gone'",
            ),
            ({"kv_transfer_params": {"notelens": {"skills": [{"name": "../x", "start": 19}]}}}, "skill", "skill name"),
        ],
    )
    def test_a_refusal_is_told_and_counted_once(
        self, library: SkillLibrary, change: dict[str, Any], kind: str, text: str
    ) -> None:
        side = SchedulerSide(SkillStore(library))
        marked = request(self.PROMPT, 19, **change)
        assert side.matched(marked, 24) == side.matched(marked, 24) == 0
        side.allocated("r", [1], 0)
        told = side.finished("r")
        assert told is not None and told["notelens"]["kind"] == kind and text in told["notelens"]["reason"]
        assert side.take_counts() == {"refused": 1} and side.take_loads() == ()

    def test_rows_that_the_engine_does_not_take_are_told(self, library: SkillLibrary) -> None:
        side = SchedulerSide(SkillStore(library))
        assert side.matched(request(self.PROMPT, 19), 24) == 16
        side.allocated("r", [1], 0)
        told = side.finished("r")
        assert told is not None and told["notelens"]["kind"] == "unused" and told["notelens"]["loaded_tokens"] == 0
        assert side.take_counts() == {"refused": 1} and side.take_loads() == ()

    def test_rows_that_the_engine_has_are_not_loaded_again(self, library: SkillLibrary) -> None:
        side = SchedulerSide(SkillStore(library))
        assert side.matched(request(self.PROMPT, 19), 40) == 0
        told = side.finished("r")
        assert told is not None and told["notelens"]["kind"] == "cached" and side.take_counts() == {"cached": 1}

    @staticmethod
    def no_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    @pytest.mark.parametrize("how", ["deleted", "replaced", "table", "write"])
    def test_a_failed_load_is_reported_block_by_block(
        self, library: SkillLibrary, worker: WorkerSide, layers: dict[str, Blocks], how: str
    ) -> None:
        side = SchedulerSide(SkillStore(library, memory_bytes=0))
        assert side.matched(request(self.PROMPT, 19), 24) == 16
        side.allocated("r", [7, 3, 11, 0, 5, 2], 16)
        if how == "deleted":
            library.remove("policy")
        elif how == "replaced":
            library.put(compile_skill(note_model("llama3"), TOOL, name="policy").to_file(), replace=True)
        elif how == "table":
            worker._ropes = list
        else:
            layers[worker.facts.layer_names[2]].impl = SimpleNamespace(do_kv_cache_update=self.no_memory)
        worker.run(side.take_loads())
        failures = worker.take_failures()
        assert worker.take_bad_blocks() == {0, 5} and worker.take_done() == {"r"}
        assert [f.lasting for f in failures] == [how == "table"]
        side.ended({"r"}, pickle.loads(pickle.dumps(failures)))
        told = side.finished("r")
        assert told is not None and told["notelens"]["kind"] == "failed" and told["notelens"]["loaded_tokens"] == 0
        assert side.take_counts() == {"loads_failed": 1}
        again = side.matched(request(self.PROMPT, 19), 24)
        assert again == (16 if how == "write" else 0)  # what will always fail is not tried again

    def test_the_engine_must_count_on_what_was_chosen(self, library: SkillLibrary) -> None:
        side = SchedulerSide(SkillStore(library))
        side.matched(request(self.PROMPT, 19), 24)
        with pytest.raises(EngineError, match="counts on 15 tokens of 16"):
            side.allocated("r", [1], 15)

    def test_a_failure_of_a_request_that_is_gone_is_counted(self, library: SkillLibrary) -> None:
        side = SchedulerSide(SkillStore(library))
        side.ended({"x"}, [Failure("x", ("s",), "why", False)])
        assert side.take_counts() == {"loads_failed": 1}
