"""Composing: exact where it must be, repositioned as recomputation would, honest about the rest, and strict about its parts."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notelens.cache.kv import KVCache
from notelens.cache.ops import max_difference, select_rows
from notelens.compose import Skill, compile_skill, compose, composer
from notelens.compose.fidelity import compare
from notelens.context import prefill
from notelens.errors import ArtefactError, CacheError, ComposeError, UnknownNameError
from tests.contracts.models import WINDOW, note_model, random_hf, random_ids
from tests.tiny import TOKEN_IDS, ids_of, new_tokenizer, tiny_instance, wrapped

TOLERANCE = 1e-5
BEFORE, SKILL, AFTER = (list(random_ids(n, seed=s)) for n, s in ((7, 1), (11, 2), (4, 3)))
run_model = settings(max_examples=12, deadline=None, derandomize=True, database=None)


# --- skills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["rotated", "unrotated"])
def test_a_skill_placed_anywhere_equals_one_computed_there(any_model: Any, scheme: str) -> None:
    """Compiled alone, moved by 23: the rows that the text alone writes at 23 (the shift check)."""
    ids = SKILL if any_model.name != "tiny" else list(ids_of(["start", "w1", "w2", ",", "w3", ";"]))
    skill = compile_skill(any_model, ids, name="s", scheme=scheme)
    there = any_model.prefill(ids, start=23).cache
    found = skill.at(any_model, 23)
    assert max_difference(found, there) <= TOLERANCE * 5 and found.positions.tolist() == there.positions.tolist()
    assert max_difference(skill.in_place(any_model), any_model.prefill(ids).cache) <= TOLERANCE


def test_unrotated_keys_do_not_depend_on_the_place_of_compiling() -> None:
    model = note_model("llama3")
    alone = compile_skill(model, SKILL, name="s", scheme="unrotated")
    behind = compile_skill(model, SKILL, name="s", scheme="unrotated", condition="neutral", prefix=BEFORE)
    assert torch.allclose(alone.cache.keys[0], behind.cache.keys[0], atol=TOLERANCE)
    assert not torch.allclose(alone.cache.keys[2], behind.cache.keys[2], atol=1e-2)  # it saw something there


def test_the_mark_says_what_a_skill_attended_to() -> None:
    model = note_model("llama")
    isolated, neutral, prefix = (
        compile_skill(model, SKILL, name="s", condition=c, prefix=p)
        for c, p in (("isolated", None), ("neutral", BEFORE[:3]), ("prefix", model.prefill(BEFORE).cache))
    )
    assert isolated.cache.exact and isolated.compile_tokens == 11 and "exact" in repr(isolated)
    assert neutral.cache.history == ("attended to 3 neutral tokens",) and neutral.compile_tokens == 14
    assert prefix.cache.history == ("attended to 7 tokens of a prefix",) and prefix.prefix_ids == tuple(BEFORE)
    whole = model.prefill([*BEFORE, *SKILL]).cache
    assert max_difference(prefix.cache, select_rows(whole, range(7, 18))) <= TOLERANCE
    assert len({s.key for s in (isolated, neutral, prefix)}) == 3


def test_text_and_ids_give_the_same_skill(tiny: Any) -> None:
    words = "if t0 then , ;"
    by_text, by_ids = compile_skill(tiny, words, name="s"), compile_skill(tiny, ids_of(words.split()), name="s")
    assert by_text.cache.digest() == by_ids.cache.digest() and by_text.text_sha256 == by_ids.text_sha256


# --- compositions -----------------------------------------------------------------------------------------------------


def test_where_repositioning_matters() -> None:
    """Layer 0: rows of ``shift`` are right at every distance, those of ``no_shift`` at none."""
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s")
    gaps: dict[str, list[float]] = {"shift": [], "no_shift": []}
    for n in (1, 16, 120):
        before = list(random_ids(n, seed=9))
        full = compose(model, [before, skill], method="full_prefill").cache.keys[0]
        for method in gaps:
            found = compose(model, [before, skill], method=method).cache.keys[0]
            gaps[method].append(float((found - full).abs().max()))
    assert max(gaps["shift"]) <= TOLERANCE
    assert min(gaps["no_shift"]) > 0.1


def test_without_a_chain_between_the_parts_nothing_is_lost(tiny: Any) -> None:
    """The tiny model reads notes only; a note written inside a skill is read wherever the skill stands."""
    instance = tiny_instance()
    prompt = instance.cells[0, 0]
    cut = prompt.anchors["before_request"] + 1
    skill = compile_skill(tiny, prompt.token_ids[:cut], name="s")
    filler = [TOKEN_IDS["start"], TOKEN_IDS["w1"], TOKEN_IDS["w2"]]
    for method in ("shift", "no_shift", "seam@2"):
        found = compare(tiny, [filler, skill, prompt.token_ids[cut:]], instance.answer_ids, [method])
        decision = found.decisions[method]
        assert decision.answer == found.full.answer == instance.conclusion[0, 0]
        assert decision.distance.top1 and found.floor.kl <= 1e-9


def test_a_conclusion_that_needs_both_parts_is_lost_without_repair(tiny: Any) -> None:
    """Field before the skill, rule inside: the skill's note was written without the field. ``shift`` and a short seam fail,
    recomputing up to the note repairs it."""
    instance = tiny_instance()
    for cell in ((0, 0), (1, 0)):
        prompt = instance.cells[cell]
        start, stop = prompt.spans["rule"][0].start, prompt.anchors["before_request"] + 1
        skill = compile_skill(
            tiny, prompt.token_ids[start:stop], name="s", condition="neutral", prefix=ids_of(["start"])
        )
        parts = [prompt.token_ids[:start], skill, prompt.token_ids[stop:]]
        methods = ["shift", "seam@1", f"seam@{stop - start}", "cacheblend@1", "prefix_conditioned"]
        found = compare(tiny, parts, instance.answer_ids, methods)
        assert found.full.answer == instance.conclusion[cell]
        margin = {m: d.margins[instance.conclusion[cell]] for m, d in found.decisions.items()}
        for lost in ("shift", "seam@1"):
            assert margin[lost] < 0.5 * found.full.margins[instance.conclusion[cell]]
        for kept in methods[2:]:
            assert margin[kept] == pytest.approx(found.full.margins[instance.conclusion[cell]], abs=1e-4)


def test_a_context_and_a_composition_are_parts(any_model: Any) -> None:
    if any_model.name == "tiny":
        context = prefill(any_model, tiny_instance().cells[0, 0])
    else:
        first = compose(any_model, [BEFORE, SKILL])
        context = first.context(any_model, id="first", answer="yes")
        assert context.prompt.spans.keys() == {"text0", "text1"} and context.prompt.answer == "yes"
        assert torch.equal(context.hidden, first.read(any_model))
    inner = compose(any_model, [context, AFTER])
    outer = compose(any_model, [inner, AFTER])
    assert outer.exact and outer.token_ids == (*context.prompt.token_ids, *AFTER, *AFTER)
    assert max_difference(outer.cache, any_model.prefill(outer.token_ids).cache) <= TOLERANCE
    moved = compose(any_model, [AFTER, inner])
    assert not moved.exact and moved.cache.positions.tolist() == list(range(len(moved)))


@run_model
@given(
    order=st.lists(st.sampled_from(["a", "b", "text", "cache"]), min_size=1, max_size=5),
    method=st.sampled_from(["shift", "no_shift", "seam@2", "epic@1", "cacheblend@0.4", "prefix_conditioned"]),
    nest=st.booleans(),
)
def test_any_mix_keeps_its_invariants(order: list[str], method: str, nest: bool) -> None:
    model = note_model("gemma3_text")
    parts = {
        "a": compile_skill(model, SKILL, name="a"),
        "b": compile_skill(model, AFTER, name="b", scheme="unrotated"),
        "text": BEFORE,
        "cache": model.prefill(AFTER).cache,
    }
    ids = {"a": SKILL, "b": AFTER, "text": BEFORE, "cache": AFTER}
    chosen: Any = [parts[o] for o in order]
    found = compose(model, [chosen[:1], chosen[1:]] if nest and len(chosen) > 1 else chosen, method=method)
    assert list(found.token_ids) == [i for o in order for i in ids[o]]
    assert found.cache.positions.tolist() == list(range(len(found)))
    text = sum(len(BEFORE) for o in order if o == "text")
    assert found.cost.tokens_text == text and found.cost.n_spliced == len(found) - text
    full = model.prefill(found.token_ids).cache
    assert found.exact == (max_difference(found.cache, full) <= TOLERANCE) or not found.exact
    repositioned = method != "no_shift"
    assert not repositioned or float((found.cache.keys[0] - full.keys[0]).abs().max()) <= TOLERANCE
    assert found.read(model).isfinite().all()


def test_costs_and_when_compiling_pays() -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s", condition="neutral", prefix=BEFORE[:3])
    shift, seam, full = (
        compose(model, [BEFORE, skill, AFTER], method=m).cost for m in ("shift", "seam@4", "full_prefill")
    )
    assert (shift.tokens_run, seam.tokens_run, full.tokens_run) == (11, 15, 22)
    assert (shift.recompute_share, seam.recompute_share, full.recompute_share) == (0.0, 4 / 11, 1.0)
    assert shift.pays_after == 14 / 11 and seam.pays_after == 14 / 7 and full.pays_after == float("inf")
    two = compose(model, [BEFORE, skill, skill]).cost
    assert two.n_spliced == 22 and two.tokens_compiled == 28


def test_epic_leaves_the_first_chunk_alone() -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s", condition="neutral", prefix=BEFORE[:3])
    seam, epic = (compose(model, [skill, skill], method=m).cost.tokens_recomputed for m in ("seam@2", "epic@2"))
    assert (seam, epic) == (4, 2)


def test_history_names_what_was_done() -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="policy")
    found = compose(model, [BEFORE, skill, skill, AFTER], method="seam@2")
    assert [p.label for p in found.pieces] == ["text0", "policy", "policy#2", "text3"]
    text = " | ".join(found.cache.history)
    assert "policy: 11 rows from elsewhere, moved by 7" in text and "policy#2: its first 2 rows recomputed" in text


def test_borders_that_the_tokenizer_would_join_are_reported(
    smollm2_tokenizer_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = smollm2_tokenizer_model
    with caplog.at_level(logging.WARNING):
        assert compose(model, ["The pass", "word is long."]).merged == (2,)
    assert "would join text0 and text1" in caplog.text
    assert compose(model, ["The gate is open.", " Close it."]).merged == ()


@pytest.fixture(scope="module")
def smollm2_tokenizer_model() -> Any:
    """A random model with the embedded tokenizer, for which text merges across borders."""
    import notelens

    return notelens.load("smollm2", dry_run=True)


def test_a_chunk_longer_than_the_window_is_allowed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = note_model("mistral")
    skill = compile_skill(model, SKILL, name="policy")
    with caplog.at_level(logging.WARNING):
        found = compose(model, [BEFORE, skill, AFTER])
    assert len(SKILL) > WINDOW and f"policy has 11 rows, more than the window of {WINDOW}" in caplog.text
    assert all(k.shape[1] == len(found) for k in found.cache.keys)


# --- bad input --------------------------------------------------------------------------------------------------------


def with_bos() -> Any:
    from tokenizers.processors import TemplateProcessing

    from notelens.models.load import wrap

    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "start"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="start $A", special_tokens=[("start", TOKEN_IDS["start"])]
    )
    return wrap(random_hf("llama"), tokenizer, name="bos", gate=False)


def test_a_beginning_of_sequence_token_stands_first_only() -> None:
    model = with_bos()
    start = TOKEN_IDS["start"]
    assert compose(model, ["w1 w2", "w3"]).token_ids == ids_of(["start", "w1", "w2", "w3"])
    assert compile_skill(model, "w1 w2", name="s").token_ids == ids_of(["w1", "w2"])
    for bad in ("start w1", [start, 5], [5, start]):
        with pytest.raises(ComposeError, match="skill 's' holds the beginning-of-sequence token"):
            compile_skill(model, bad, name="s")
    cache = model.prefill([start, 5, 6]).cache
    assert compose(model, [cache, "w1"]).exact
    for parts in (["w1", cache], ["w1", "start w2"], ["w1", [start]], [[5, start]]):
        with pytest.raises(ComposeError, match="holds the beginning-of-sequence token"):
            compose(model, parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "there are no parts"),
        ([""], "part 0 is empty"),
        ([BEFORE, []], "a part is an empty list"),
        ([BEFORE, [[]]], "a part is an empty list"),
        ([BEFORE, 3.5], "part 1 is a float"),
        ([BEFORE, None], "part 1 is a NoneType"),
        ([[5, 10_000]], "id 10000 is outside the vocabulary"),
        ([[5, -1]], "id -1 is outside the vocabulary"),
        ([list(random_ids(200)), list(random_ids(57))], "257 tokens exceed the 256 positions"),
    ],
)
def test_bad_parts(parts: Any, message: str) -> None:
    with pytest.raises(ComposeError, match=message):
        compose(note_model("llama"), parts)


def test_parts_of_another_model() -> None:
    llama, gemma, wide = note_model("llama"), note_model("gemma2"), note_model("qwen3")
    with pytest.raises(ComposeError, match="has 4 layers, llama has 3"):
        compose(llama, [BEFORE, gemma.prefill(SKILL).cache])
    with pytest.raises(ComposeError, match="layer 0 stores"):
        compose(llama, [BEFORE, wide.prefill(SKILL).cache])
    with pytest.raises(ArtefactError, match="was made by model 'gemma2'"):
        compose(llama, [BEFORE, compile_skill(gemma, SKILL, name="s")])
    half = wrapped(random_hf("llama", dtype=torch.bfloat16), "half", gate=False)
    with pytest.raises(ComposeError, match=r"is torch.float32 on cpu, half torch.bfloat16"):
        compose(half, [BEFORE, llama.prefill(SKILL).cache])


def test_splices_beyond_the_context() -> None:
    model = note_model("llama")
    skill = compile_skill(model, SKILL, name="s")
    for scheme in ("rotated", "unrotated"):
        with pytest.raises(CacheError, match=r"positions|beyond"):
            compile_skill(model, SKILL, name="s", scheme=scheme).at(model, 250)
    with pytest.raises(ComposeError, match="exceed the 256 positions"):
        compose(model, [list(random_ids(250)), skill])
    with pytest.raises(ComposeError, match="exceed the 256 positions"):
        compile_skill(model, list(random_ids(257)), name="s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ""}, "skill 's' is empty"),
        ({"text": []}, "skill 's' is empty"),
        ({"condition": "alone"}, "condition 'alone'"),
        ({"scheme": "turned"}, "scheme 'turned'"),
        ({"condition": "prefix"}, "needs the prefix"),
        ({"prefix": BEFORE}, "attends to no prefix"),
        ({"condition": "prefix", "prefix": []}, "the prefix of skill 's' is empty"),
    ],
)
def test_bad_skills(options: Any, message: str) -> None:
    with pytest.raises(ComposeError, match=message):
        compile_skill(note_model("llama"), **{"text": SKILL, "name": "s", **options})


def test_a_prefix_with_a_gap_is_refused() -> None:
    model = note_model("llama")
    gappy = select_rows(model.prefill(BEFORE).cache, [0, 2, 3])
    with pytest.raises(ComposeError, match="without gaps"):
        compile_skill(model, SKILL, name="s", condition="prefix", prefix=gappy)
    found = compose(model, [gappy, AFTER])  # as a part its gaps are closed, and it is not exact
    assert found.cache.positions.tolist() == list(range(7)) and not found.exact


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("shfit", UnknownNameError, "did you mean 'shift'"),
        ("shift@2", ComposeError, "takes no parameter"),
        ("seam@0", ComposeError, "whole number of rows"),
        ("seam@x", ComposeError, "whole number of rows"),
        ("epic@-1", ComposeError, "whole number of rows"),
        ("cacheblend@0", ComposeError, "above 0 and at most 1"),
        ("cacheblend@1.5", ComposeError, "above 0 and at most 1"),
        ("cacheblend@nan", ComposeError, "above 0 and at most 1"),
        ("cacheblend@x", ComposeError, "must be a number"),
        (3, ComposeError, "named by text"),
    ],
)
def test_bad_methods(method: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        composer(method)


def test_compare_needs_something_to_decide() -> None:
    model = note_model("llama")
    with pytest.raises(ComposeError, match="leave nothing to decide"):
        compare(model, [BEFORE, AFTER], (5, 5))
    with pytest.raises(ComposeError, match="the last part must be text"):
        compare(model, [BEFORE, compile_skill(model, SKILL, name="s")], (5, 6))


def test_no_part_is_ever_half_changed_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = note_model("llama")
    skill: Skill = compile_skill(model, SKILL, name="s")
    cache: KVCache = model.prefill(AFTER).cache
    digests = skill.cache.digest(), cache.digest()
    with pytest.raises(ComposeError):
        compose(model, [skill, cache, BEFORE, ""])
    assert (skill.cache.digest(), cache.digest()) == digests
