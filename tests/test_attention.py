"""Moving rows: contracts over the whole registry of representations, each also on broken members, and one case per pitfall."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from notelens.attention import ADAPTERS, LayerFacts
from notelens.attention.move import adapters, move_rows
from notelens.cache.hf import from_transformers
from notelens.cache.ops import concat, select_rows
from notelens.errors import CacheError, UnsupportedModelError
from notelens.models.gate import run_gate
from notelens.models.load import family_for, wrap
from notelens.models.model import HFNoteModel
from notelens.rope import rotate
from tests.contracts import attention as moves
from tests.contracts import models as contract
from tests.tiny import new_tokenizer, wrapped


def broken_model(name: str) -> HFNoteModel:
    subject, family = moves.BROKEN[name]
    right = contract.note_model(subject)
    return HFNoteModel(right.hf, new_tokenizer(), family, name=subject)


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_representation_is_under_contract() -> None:
    movable = {n for n in ADAPTERS if ADAPTERS.get(n).support != "refused"}
    assert movable - set(moves.SUBJECTS) == {"mla_expanded", "alibi"}, "these two have their own tests below"
    for name, subjects in moves.SUBJECTS.items():
        for subject in subjects:
            kinds = {type(a) for a in adapters(contract.note_model(subject))}
            assert ADAPTERS.get(name) in kinds, (name, subject)


def test_every_entry_says_what_it_is() -> None:
    for name in ADAPTERS:
        adapter = ADAPTERS.get(name)
        assert adapter.support in ("free", "adapter", "partial", "refused")
        assert (adapter.__doc__ or "").strip() and adapter.moves and "::" in adapter.proof
        assert adapter.limits or adapter.support in ("free", "adapter"), name


@pytest.mark.parametrize("check", moves.CONTRACTS)
@pytest.mark.parametrize("name", moves.MOVABLE)
def test_a_moved_span_equals_a_recomputed_one(name: str, check: str) -> None:
    assert moves.CONTRACTS[check](contract.note_model(name)) == []


@pytest.mark.parametrize("name", moves.BROKEN)
def test_a_broken_member_fails_a_contract(name: str) -> None:
    assert moves.all_problems(broken_model(name)) != []


@pytest.mark.parametrize("name", moves.BROKEN)
def test_the_gate_catches_every_broken_member(name: str) -> None:
    report = run_gate(broken_model(name), bridge=False)
    assert not report.passed, "\n".join(report.lines())
    right = run_gate(contract.note_model(moves.BROKEN[name][0]), bridge=False)
    assert right.passed, "\n".join(right.lines())


def test_there_are_enough_broken_members() -> None:
    assert len(moves.BROKEN) >= 12


@pytest.mark.parametrize("name", ["llama", "llama3", "glm4", "gemma3_text", "deepseek_v2", "falcon_h1"])
def test_bfloat16_rows_match_within_its_rounding(name: str) -> None:
    model = wrapped(contract.random_hf(name, dtype=torch.bfloat16), name, gate=False)
    assert moves.span_problems(model, first=moves.BF16_STEPS, deep=float("inf")) == [], "layer 0"


# --- pairing, width, frequencies --------------------------------------------------------------------------------------


def test_a_wrong_pairing_passes_near_zero_and_fails_far_away() -> None:
    """Why the gate goes far: at few positions the slow channels of a wrong pairing have hardly turned."""
    keys, slow = torch.randn(2, 5, 16), 1e4 ** -(torch.arange(8, 16, 2) / 16)
    small = moves.gap(rotate(keys, 1, slow), rotate(keys, 1, slow, pairing="adjacent"))
    large = moves.gap(rotate(keys, 200, slow), rotate(keys, 200, slow, pairing="adjacent"))
    assert small < 0.05 < 0.3 < large


def test_cohere_pairs_adjacent_channels() -> None:
    settings = {**contract._SMALL, "rope_parameters": contract._DEFAULT_ROPE}
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **settings)).eval()

    def rows(start: int) -> torch.Tensor:
        store, ids = DynamicCache(), torch.tensor([contract.random_ids(8)])
        with torch.no_grad():
            hf(ids, position_ids=torch.arange(start, start + 8)[None], past_key_values=store)
        return store.layers[0].keys[0]

    for at in (1, 200):
        moved = rotate(rows(0), at, hf.model.rotary_emb.inv_freq, pairing="adjacent")
        assert moves.gap(moved, rows(at)) <= moves.TOLERANCE
    assert moves.gap(rotate(rows(0), 200, hf.model.rotary_emb.inv_freq), rows(200)) > 0.1


def test_glm_turns_the_first_half_of_a_key_in_adjacent_pairs() -> None:
    """No factor given: the model class's own default counts, not the raw file."""
    model = contract.note_model("glm")
    cache = moves.span(model)
    moved = move_rows(model, cache, 9)
    for before, after in zip(cache.keys, moved.keys, strict=True):
        assert torch.equal(before[..., 8:], after[..., 8:])
        for pair in range(4):
            norms = [t[..., 2 * pair : 2 * pair + 2].norm(dim=-1) for t in (before, after)]
            assert float((norms[0] - norms[1]).abs().max()) <= 1e-5
        assert not torch.allclose(before[..., :8], after[..., :8])


@pytest.mark.parametrize("at", [0, 1, 700])
def test_partial_width_counts_from_the_rotary_width(at: int) -> None:
    """head_dim 256, rotary width 64: channel i turns with i + 32, and the exponent divides by 64."""
    keys = torch.randn(1, 1, 256, dtype=torch.float64)
    inv_freq = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    out = rotate(keys, at, inv_freq)
    for i in (0, 5, 31):
        a, b, angle = float(keys[0, 0, i]), float(keys[0, 0, i + 32]), at * 1e4 ** (-2 * i / 64)
        turned = a * math.cos(angle) - b * math.sin(angle)
        assert abs(float(out[0, 0, i]) - turned) <= 1e-9
    assert torch.equal(out[..., 64:], keys[..., 64:])


def test_bfloat16_keys_are_turned_in_full_precision() -> None:
    keys = torch.randn(2, 4, 64).to(torch.bfloat16)
    inv_freq = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    exact = rotate(keys.double(), 3001, inv_freq.double())
    found = rotate(keys, 3001, inv_freq)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).abs().max() / exact.abs().max()) <= 2.0**-8


def test_yarn_moves_are_pure_rotations() -> None:
    model = contract.note_model("yarn")
    assert model.hf.model.rotary_emb.attention_scaling > 1.1
    cache = moves.span(model)
    moved = move_rows(model, cache, 17)
    for before, after in zip(cache.keys, moved.keys, strict=True):
        pairs = [torch.stack([t[..., :8], t[..., 8:]]).norm(dim=0) for t in (before, after)]
        assert float((pairs[0] - pairs[1]).abs().max() / pairs[0].max()) <= 1e-6


def test_a_configured_attention_factor_is_honoured() -> None:
    rope = {**contract._SCALED, "rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0}
    model = wrapped(contract.random_hf("yarn", rope_parameters=rope), "yarn", gate=False)
    assert model.hf.model.rotary_emb.attention_scaling == 1.0
    assert moves.span_problems(model) == []


def test_gemma3_layers_move_by_their_own_kind() -> None:
    model = contract.note_model("gemma3_text")
    local, world, _ = (a.facts.inv_freq for a in adapters(model))
    d = model.geometry.layers[0].d_key
    assert torch.allclose(local, 1e4 ** -(torch.arange(0, d, 2) / d))
    assert torch.allclose(world, 1e6 ** -(torch.arange(0, d, 2) / d) / 8.0)
    assert moves.span_problems(model) == []


def test_layers_without_rope_are_left_alone() -> None:
    model = contract.note_model("smollm3")
    cache = moves.span(model)
    moved = move_rows(model, cache, 20)
    same = [torch.equal(a, b) for a, b in zip(cache.keys, moved.keys, strict=True)]
    assert same == [False, False, False, True]


def test_the_flag_of_no_rope_layers_is_1_where_a_layer_rotates() -> None:
    """[1, 1, 1, 0] reads like "layer 3 rotates"; the keys say otherwise, and the gate goes by the keys."""
    hf = contract.random_hf("smollm3", no_rope_layers=[1, 1, 1, 0])
    model = wrapped(hf, "smollm3", gate=False)
    here, there = moves.span(model, 3), moves.span(model, 40)
    probed = [moves.gap(a, b) > 1e-2 for a, b in zip(here.keys, there.keys, strict=True)]
    assert probed == [True, True, True, False]
    assert [g.rope_theta is not None for g in model.geometry.layers] == probed


@pytest.mark.parametrize(
    "keys", [{"rope_theta": 500000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}]
)
def test_theta_is_read_under_both_spellings(keys: dict[str, Any]) -> None:
    config = AutoConfig.for_model(
        "llama", **{k: v for k, v in contract._SMALL.items() if k != "rope_parameters"}, **keys
    )
    assert family_for(config).geometry(config).layers[0].rope_theta == 500000.0


def test_a_missing_theta_is_never_guessed() -> None:
    config = AutoConfig.for_model("llama", **contract._SMALL)
    config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(UnsupportedModelError, match="no rope_theta for layer 0; it is never guessed"):
        family_for(config)


# --- tables that depend on the length ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "end"), [("dynamic", 256), ("longrope", 250)])
def test_length_dependent_tables_are_refused_beyond_their_end(name: str, end: int) -> None:
    model = contract.note_model(name)
    assert model.geometry.max_positions == end and "another frequency table" in model.geometry.limit
    cache = moves.span(model)
    assert moves.span_problems(model) == []
    with pytest.raises(CacheError, match=rf"beyond the {end} of {name} \(from {end} on its RoPE"):
        move_rows(model, cache, end - 3)
    with pytest.raises(CacheError, match="another frequency table"):
        model.prefill(contract.random_ids(N_LONG := 30), start=end - N_LONG + 1)
    late = cache.__class__(cache.keys, cache.values, cache.positions + end, cache.token_ids, ("from elsewhere",))
    with pytest.raises(CacheError, match="rows of two tables cannot be joined: keep the prompt below"):
        move_rows(model, late, -end)


def test_a_table_that_a_longer_call_left_behind_is_not_used() -> None:
    """A caller runs the transformers model itself past the end; rows and moves of ours stay those of the first table."""
    model = wrapped(contract.random_hf("longrope"), "longrope", gate=False)
    before = moves.span(model)
    with torch.no_grad():
        model.hf(torch.tensor([contract.random_ids(260)]), use_cache=False)
    after = moves.span(model)
    assert before.digest() == after.digest()
    with torch.no_grad():
        model.hf(torch.tensor([contract.random_ids(260)]), use_cache=False)
    assert moves.gap(move_rows(model, before, 200).keys[0], moves.span(model, 203).keys[0]) <= moves.TOLERANCE


# --- positions of rows ------------------------------------------------------------------------------------------------


def test_gaps_close_and_offsets_add_up() -> None:
    """Tokens 0-9, kept 0-1, 5-6 and 8-9: the second span lands at 2-3, the third at 4-5, and nothing is lost."""
    model = contract.note_model("llama")
    cache = model.prefill(contract.random_ids(10)).cache
    kept = select_rows(cache, [0, 1, 5, 6, 8, 9])
    closed = move_rows(model, kept, torch.arange(6))
    assert closed.positions.tolist() == list(range(6)) and len(closed) == 6 and closed.next_position == 6
    again = move_rows(model, move_rows(model, kept, kept.positions + 20), torch.arange(6))
    assert max(moves.gap(a, b) for a, b in zip(again.keys, closed.keys, strict=True)) <= moves.TOLERANCE
    assert "moved by -4..0" in closed.history[-1]


def test_a_span_behind_a_prefix_decodes_like_rows_computed_there() -> None:
    """Layer 0 of a spliced span equals a full prefill; deeper layers differ by what the span has not read."""
    model = contract.note_model("llama3")
    prefix = model.prefill(contract.random_ids(9)).cache
    alone = model.prefill(contract.random_ids(9, seed=1)).cache
    joined = concat(prefix, move_rows(model, alone, 9), history=("spliced",))
    full = model.prefill((*prefix.token_ids, *alone.token_ids)).cache
    assert moves.gap(joined.keys[0], full.keys[0]) <= moves.TOLERANCE


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(3), "12 rows but"),
        (torch.zeros(12).long(), "strictly increase"),
        (-4, "cannot be negative"),
        (250, "beyond the 256"),
    ],
)
def test_impossible_positions_are_refused(positions: Any, message: str) -> None:
    model = contract.note_model("llama")
    with pytest.raises(CacheError, match=message):
        move_rows(model, moves.span(model), positions)


def test_a_cache_of_another_model_is_refused() -> None:
    llama, qwen3, gemma2 = (contract.note_model(n) for n in ("llama", "qwen3", "gemma2"))
    for use in (lambda m, c: move_rows(m, c, 5), lambda m, c: m.prefill([3], c)):
        with pytest.raises(
            CacheError, match=r"layer 0: the cache stores 2 heads of key width 16 .*llama stores 2 of 8 and 8"
        ):
            use(llama, moves.span(qwen3))
        with pytest.raises(CacheError, match="the cache has 4 layers, llama has 3; use a cache of this model"):
            use(llama, moves.span(gemma2))


# --- representations without a family of their own --------------------------------------------------------------------


def test_alibi_rows_carry_no_position() -> None:
    settings = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": contract._SMALL["vocab_size"]}
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **settings)).eval()
    ids = contract.random_ids(8)

    def rows(n_pad: int) -> Any:
        store = DynamicCache()
        mask = torch.tensor([[0] * n_pad + [1] * len(ids)])
        with torch.no_grad():
            hf(torch.tensor([[0] * n_pad + list(ids)]), attention_mask=mask, past_key_values=store)
        return [layer.keys[0][:, n_pad:] for layer in store.layers]

    adapter = ADAPTERS.get("alibi")(LayerFacts())
    for a, b in zip(rows(0), rows(7), strict=True):
        assert adapter.move(a, a, torch.full((8,), 7))[0] is a
        assert float((a - b).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", [n for n in ADAPTERS if ADAPTERS.get(n).support == "refused"])
def test_refused_rows_say_why(name: str) -> None:
    adapter = ADAPTERS.get(name)(LayerFacts())
    with pytest.raises(UnsupportedModelError, match=r"rows cannot be moved: \w+.*(;|so) .*"):
        adapter.move(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.ones(2))


def test_a_gguf_order_of_rows_is_seen() -> None:
    """Rows of query and key weights left in the order of a GGUF file compute another model; put back, they are the same."""
    hf = contract.random_hf("llama")
    for layer in hf.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            w = projection.weight.data
            projection.weight.data = w.view(-1, 2, 4, w.shape[1]).transpose(1, 2).reshape(w.shape).contiguous()
    permuted, right = wrapped(hf, "llama", gate=False), contract.note_model("llama")
    ids = contract.random_ids()
    assert float((permuted.prefill(ids).hidden - right.prefill(ids).hidden).abs().max()) > 1e-2
    w = right.hf.model.layers[0].self_attn.k_proj.weight
    undone = hf.model.layers[0].self_attn.k_proj.weight.view(-1, 4, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
    assert torch.equal(undone, w)


def test_length_is_a_counter_not_content() -> None:
    """Token 1 has a zero embedding: its rows are zeros in layer 0, and they count."""
    hf = contract.random_hf("llama")
    hf.model.embed_tokens.weight.data[1] = 0.0
    model = wrap(hf, new_tokenizer(), name="zero", gate=False)
    cache = model.prefill([1, 5, 6]).cache
    assert len(cache) == 3 and float(cache.keys[0][:, 0].abs().max()) == 0.0
    store = DynamicCache()
    hf(torch.tensor([[1, 5, 6]]), past_key_values=store)
    assert len(from_transformers(store, [1, 5, 6])) == 3
