"""Contexts: one prefill per prompt, residuals at anchors, a byte budget, and values that reading does not change."""

from typing import Any

import pytest
import torch

from notelens.context import ContextStore, prefill
from notelens.errors import SpanError
from notelens.prompt import Prompt
from tests.oracle import timing
from tests.tiny import tiny_instance, tiny_instances, tiny_pair


@pytest.fixture
def prompt() -> Prompt:
    return tiny_pair().old


def test_prefill_equals_plain_hooks(any_model: Any, prompt: Prompt) -> None:
    context = prefill(any_model, prompt)
    expected = timing.residuals(any_model.hf, prompt.token_ids, [prompt.anchors[a] for a in sorted(prompt.anchors)])
    assert set(context.residuals) == set(prompt.anchors)
    for i, anchor in enumerate(sorted(prompt.anchors)):
        assert context.residual(anchor).shape == (any_model.geometry.n_layers + 1, any_model.geometry.d_model)
        torch.testing.assert_close(context.residual(anchor), expected[:, i], atol=2e-5, rtol=1e-5)
    assert context.cache.token_ids == prompt.token_ids and context.cache.exact
    answers = (5, 9)
    lens = any_model.lens_logits(context.residual("decision"), answers)
    torch.testing.assert_close(lens[-1], any_model.answer_logits(context.hidden, answers), atol=2e-5, rtol=1e-5)
    slow = timing.lens_margins(any_model.hf, expected[:, sorted(prompt.anchors).index("decision")], answers)
    torch.testing.assert_close((lens[:, 1] - lens[:, 0]).tolist(), slow, atol=1e-4, rtol=1e-4)


def test_a_missing_anchor_is_named(tiny: Any, prompt: Prompt) -> None:
    with pytest.raises(SpanError, match=r"no anchor 'end'; it has before_decision, before_request, decision"):
        prefill(tiny, prompt).residual("end")


def test_each_prompt_is_run_once(tiny: Any) -> None:
    store = ContextStore(tiny)
    cells = tiny_instance().cells
    for _ in range(3):
        for cell in cells.values():
            store.get(cell)
    assert (store.n_prefills, store.n_prefill_tokens) == (4, sum(len(c) for c in cells.values()))


def test_same_tokens_share_a_prefill_and_keep_their_own_prompt(tiny: Any, prompt: Prompt) -> None:
    twin = Prompt(
        "twin", prompt.text, prompt.token_ids, prompt.tokens, prompt.spans, prompt.regions, prompt.anchors, "deny"
    )
    fewer = Prompt(
        "fewer", prompt.text, prompt.token_ids, prompt.tokens, prompt.spans, prompt.regions, {"decision": 1}, "deny"
    )
    store = ContextStore(tiny)
    a, b = store.get(prompt), store.get(twin)
    assert store.n_prefills == 1 and b.prompt.id == "twin" and a.prompt is prompt and b.cache is a.cache
    assert set(store.get(fewer).residuals) == {"decision"} and store.n_prefills == 2


def test_the_least_recently_used_context_goes_first(tiny: Any) -> None:
    prompts = [i.cells[0, 0] for i in tiny_instances(3)]
    sizes = [prefill(tiny, p).nbytes for p in prompts]
    store = ContextStore(tiny, budget_bytes=sum(sizes) - 1)
    store.get(prompts[0]), store.get(prompts[1]), store.get(prompts[0]), store.get(prompts[2])
    assert store.n_prefills == 3
    store.get(prompts[0]), store.get(prompts[2])
    assert store.n_prefills == 3
    store.get(prompts[1])
    assert store.n_prefills == 4


def test_one_context_larger_than_the_budget_is_kept(tiny: Any, prompt: Prompt) -> None:
    store = ContextStore(tiny, budget_bytes=1)
    assert store.get(prompt).cache is store.get(prompt).cache
    assert store.n_prefills == 1


def test_dropping_contexts_does_not_change_results(tiny: Any) -> None:
    prompts = [i.cells[0, 0] for i in tiny_instances(4)]
    generous, stingy = ContextStore(tiny), ContextStore(tiny, budget_bytes=1)
    for prompt in [*prompts, *prompts]:
        assert generous.get(prompt).cache.digest() == stingy.get(prompt).cache.digest()
    assert (generous.n_prefills, stingy.n_prefills) == (4, 8)
