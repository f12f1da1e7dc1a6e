"""What the skill plug-in reads of an engine and of a library: configurations, layouts, versions, weights, files."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notelens.cache.library import SkillLibrary
from notelens.compose import compile_skill
from notelens.compose.tag import model_tag
from notelens.errors import ArtefactError, EngineError, UnknownNameError, UnsupportedModelError
from notelens.serving import engine_api
from notelens.serving.engine_facts import EngineFacts, Options, engine_facts, layer_index
from notelens.serving.folder_hash import weights_hash
from notelens.serving.skill_store import SkillStore
from tests.contracts.models import note_model, random_hf
from tests.skill_cases import SKILL, TOOL, skill_library
from tests.tiny import wrapped


@pytest.fixture
def library(tmp_path: Path) -> SkillLibrary:
    return skill_library(tmp_path / "skills")


class TestStore:
    def test_a_file_is_read_once_and_looked_at_every_time(
        self, library: SkillLibrary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, reads = SkillStore(library), list[Path]()
        read_bytes = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or read_bytes(self))
        found = store.find("policy")
        assert found.token_ids == SKILL and len(reads) == 1
        first = store.rows("policy", found.signature)
        assert len(reads) == 2
        library.touch("policy")  # somebody else used it
        assert store.rows("policy", store.find("policy").signature) is first and len(reads) == 2

    def test_what_is_removed_is_gone_and_what_is_replaced_is_read(self, library: SkillLibrary) -> None:
        store = SkillStore(library)
        old = store.find("policy").signature
        store.rows("policy", old)
        library.put(compile_skill(note_model("llama3"), TOOL, name="policy").to_file(), replace=True)
        with pytest.raises(ArtefactError, match="replaced since"):
            store.rows("policy", old)
        assert store.find("policy").token_ids == TOOL
        library.remove("policy")
        with pytest.raises(UnknownNameError, match="no skill 'policy'"):
            store.find("policy")

    def test_a_damaged_file_is_refused_and_a_mended_one_is_not(self, library: SkillLibrary) -> None:
        path, store = library.path("policy"), SkillStore(library)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ArtefactError, match="digest"):
            store.find("policy")
        path.write_bytes(whole)
        assert store.find("policy").token_ids == SKILL

    def test_the_least_recently_used_rows_leave_memory(self, library: SkillLibrary) -> None:
        sizes = {n: library.get(n).nbytes for n in ("policy", "tool")}
        store = SkillStore(library, memory_bytes=sizes["policy"])
        signatures = {n: store.find(n).signature for n in sizes}
        store.rows("tool", signatures["tool"])
        store.rows("policy", signatures["policy"])
        assert list(store._rows) == [signatures["policy"]]
        assert SkillStore(library, memory_bytes=0).rows("tool", signatures["tool"]).header.name == "tool"

    def test_another_model_is_refused_in_one_sentence(
        self, library: SkillLibrary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = note_model("llama3")
        tag = model_tag(model)
        facts = EngineFacts("/models/served", torch.float32, 16, (), tag.shapes)
        SkillStore(library, lambda h: facts.check(h, tag.weights_sha256)).find("policy")
        cases: list[tuple[EngineFacts, str, str]] = [
            (
                facts,
                "0" * 64,
                "was made by model 'llama3'.*this is '/models/served' \\(000000000000\\); compile the text again",
            ),
            (EngineFacts("m", torch.bfloat16, 16, (), tag.shapes), tag.weights_sha256, "rows are float32.*bfloat16"),
            (EngineFacts("m", torch.float32, 16, (), tag.shapes[:2]), tag.weights_sha256, "its layers store"),
        ]
        for other, weights, text in cases:
            store = SkillStore(library, lambda h, f=other, w=weights: f.check(h, w))
            with pytest.raises(ArtefactError, match=text):
                store.find("policy")
            monkeypatch.setattr(store, "_read", None)  # the second time costs no reading
            with pytest.raises(ArtefactError, match=text):
                store.find("policy")
            monkeypatch.undo()


# --- the engine -------------------------------------------------------------------------------------------------------


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def spec(kind: type = FullAttentionSpec, **change: Any) -> Any:
    settings = {
        "block_size": 16, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8, "sliding_window": None,
        "attention_chunk_size": None, "num_head_slots": None, "tokens_per_state": 1, "kv_quant_mode": 0, **change,
    }  # fmt: skip
    return kind(**settings)


def engine(*specs: Any, **change: Any) -> tuple[Any, Any]:
    names = ["model.layers.10.self_attn.attn", *(f"model.layers.{i}.self_attn.attn" for i in range(10))]
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=s) for s in specs or (spec(),)]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        model_config=SimpleNamespace(model="m", dtype=torch.float32, quantization=None),
        parallel_config=SimpleNamespace(world_size=1),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )
    for where, value in change.items():
        part, name = where.split("__")
        setattr(getattr(config, f"{part}_config"), name, value)
    return config, SimpleNamespace(kv_cache_groups=groups)


class TestEngine:
    def test_what_is_read_from_an_engine(self) -> None:
        facts = engine_facts(*engine())
        assert facts.layer_names[9:] == ("model.layers.9.self_attn.attn", "model.layers.10.self_attn.attn")
        assert facts.shapes == ((2, 8, 8),) * 11 and facts.block_size == 16
        several = {f"model.layers.{i}.self_attn.attn": spec(head_size_v=i + 1) for i in range(11)}
        assert engine_facts(*engine(SimpleNamespace(kv_cache_specs=several))).shapes[4] == (2, 8, 5)

    @pytest.mark.parametrize(
        ("specs", "text"),
        [
            ([spec(MLAAttentionSpec)], "MLA stores one latent row"),
            ([spec(SlidingWindowSpec)], "leave the window"),
            ([spec(sliding_window=512)], "sees 512 tokens back.*leave the window"),
            ([spec(attention_chunk_size=64)], "sees 64 tokens back"),
            ([spec(), spec(SlidingWindowSpec)], "2 groups of layers .*leave the window"),
            ([spec(kv_quant_mode=1)], "packs its rows"),
            ([spec(num_head_slots=1)], "packs its rows"),
        ],
    )
    def test_layouts_that_are_refused(self, specs: list[Any], text: str) -> None:
        with pytest.raises(UnsupportedModelError, match=text):
            engine_facts(*engine(*specs))

    @pytest.mark.parametrize(
        ("change", "error", "text"),
        [
            ({"cache__enable_prefix_caching": False}, EngineError, "prefix caching enabled"),
            ({"kv_transfer__kv_load_failure_policy": "fail"}, EngineError, "kv_load_failure_policy to 'recompute'"),
            ({"parallel__world_size": 2}, EngineError, "one worker; 2"),
            ({"model__quantization": "awq"}, UnsupportedModelError, "runs with awq weights"),
            ({"cache__cache_dtype": "fp8"}, UnsupportedModelError, "caches in fp8"),
        ],
    )
    def test_configurations_that_are_refused(self, change: dict[str, Any], error: type, text: str) -> None:
        with pytest.raises(error, match=text):
            engine_facts(*engine(**change))

    def test_layers_are_told_by_their_number(self) -> None:
        assert layer_index("model.layers.3.self_attn.attn") == 3
        for name in ("model.attn", "blocks.1.layers.2.attn"):
            with pytest.raises(UnsupportedModelError, match="exactly one number"):
                layer_index(name)

    def test_options(self) -> None:
        assert Options.read({"skill_library": "/s", "memory_bytes": 0}) == Options("/s", None, 0)
        for bad in ({}, {"skill_library": "/s", "weigths": 1}, {"skill_library": "/s", "weights_sha256": "abc"}):
            with pytest.raises(EngineError, match="kv_connector_extra_config"):
                Options.read(bad)

    def test_versions_and_signatures(self) -> None:
        for version in ("0.32.0", "0.32.1+cpu", "0.32.0rc1"):
            engine_api.check_version(version)
        for version in ("0.31.9", "0.33.0", "0.320.1", "dev"):
            with pytest.raises(EngineError, match=r"written for vLLM 0\.32"):
                engine_api.check_version(version)

        class Base:
            def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
            def wait_for_save(self, timeout: float) -> None: ...

        engine_api.check_signatures(Base, {"start_load_kv": engine_api.SIGNATURES["start_load_kv"]})
        for name in ("wait_for_save", "reset_cache"):
            with pytest.raises(EngineError, match=f"Base.{name} has parameters"):
                engine_api.check_signatures(Base, {name: engine_api.SIGNATURES[name]})

    @pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"dtype": torch.bfloat16}])
    def test_the_hash_of_a_folder_is_that_of_the_model(self, tmp_path: Path, change: dict[str, Any]) -> None:
        hf = random_hf("llama", **change)
        hf.save_pretrained(tmp_path / "m", max_shard_size="20KB")
        assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
        wanted = wrapped(hf, "m", gate=False).weights_hash
        assert weights_hash(tmp_path / "m", hf.dtype) == wanted
        assert weights_hash(tmp_path / "m", torch.float16) != wanted
        with pytest.raises(ArtefactError, match=r"no model\*.safetensors"):
            weights_hash(tmp_path, hf.dtype)

    def test_the_engines_half_imports_nothing_of_ours_but_torch(self) -> None:
        code = (
            "import json, sys; sys.modules['jaxtyping'] = None\n"  # the engine's environment does not have it
            "import notelens.serving.skill_worker, notelens.serving.skill_scheduler, notelens.serving.folder_hash\n"
            "import notelens.serving.vllm_register, notelens.serving.engine_api, notelens.serving.skill_requests\n"
            "print(json.dumps([m for m in sys.modules if sys.modules[m] is not None]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        names = {name.split(".")[0] for name in json.loads(done.stdout)}
        assert {"torch", "safetensors", "notelens"} <= names
        ours = {"transformers", "transformer_lens", "pydantic", "jaxtyping", "yaml", "scipy", "typer", "httpx", "vllm"}
        assert not names & ours
