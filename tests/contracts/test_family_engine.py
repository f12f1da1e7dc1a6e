"""The patch engine on every supported family, on models made from the library's own random configs, against the slow loop.

``test_models.py`` has the contracts and their broken members. Here the models are others (the families' own default
rotations, two thetas, sinks, low caps) and prompts are longer and shorter than the window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from notelens.cache.kv import KVCache
from notelens.circuits.heads import head_effects
from notelens.errors import NonFiniteError, PatchError, UnsupportedModelError
from notelens.intervene import engine
from notelens.intervene.engine import Reader, Site, swap_effects
from notelens.intervene.kernel import KERNEL
from notelens.intervene.recompute import recompute_effects
from notelens.models.random import random_config
from tests.contracts.models import SWAP_TOLERANCE, random_ids
from tests.oracle.swap import Rows, prefill_rows, read, swapped_rows
from tests.tiny import VOCABULARY, wrapped

WINDOW = 8
ANSWERS = (5, 17)
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 3, "initializer_range": 0.25,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
         "query_pre_attn_scalar": 8},
    ),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 8,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}}),
}  # fmt: skip
NAMES = tuple(CASES)
MIXTURES = ("mixtral", "gpt_oss")
"""Experts run the tokens they are sent as one batch, so rows depend on the rest of the prompt by rounding."""


def family_hf(name: str) -> Any:
    kind, settings = CASES[name]
    config = random_config(kind, len(VOCABULARY), **{**_SMALL, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4321)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for key, parameter in hf.named_parameters():
            if "norm" in key:
                parameter.data += 0.2 * torch.randn_like(parameter)
            if key.endswith("sinks"):
                parameter.data = 1.0 + torch.randn_like(parameter)
    return hf.eval()


@cache
def model_of(name: str) -> Any:
    return wrapped(family_hf(name), name, gate=False)


@cache
def case(name: str, n: int) -> tuple[list[tuple[int, ...]], list[Rows], list[KVCache]]:
    """Ids, oracle rows and library caches of a recipient and two donors of ``n`` tokens."""
    ids = [random_ids(n, 3), random_ids(n, 3, changed=[1]), random_ids(n, 3, changed=[2, n // 2])]
    model = model_of(name)
    return ids, [prefill_rows(model.hf, i) for i in ids], [model.prefill(i).cache for i in ids]


def slow(model: Any, rows: Sequence[Rows], site: Site, reader: Reader) -> Tensor:
    base, donor = (
        [(k[:, : reader.start], v[:, : reader.start]) for k, v in r] for r in (rows[0], rows[1 + site.donor])
    )
    patched = swapped_rows(base, donor, site.positions, site.layers, site.kv_heads, site.parts)
    return read(model.hf, patched, reader.token_ids, reader.answer_ids)


def gaps(model: Any, rows: Sequence[Rows], sites: Sequence[Site], readers: Sequence[Reader], found: Any) -> list[float]:
    return [
        float((logits - slow(model, rows, site, readers[site.reader])).abs().max())
        for site, logits in zip(sites, found.logits, strict=True)
    ]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """One family; its model must come out as it went in."""
    model = model_of(request.param)
    kernel = model.attention_kernel
    yield request.param
    assert model.attention_kernel == kernel != KERNEL
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.hf.modules())


@pytest.mark.parametrize("n", [6, 20])
def test_every_position_equals_the_loop(name: str, n: int) -> None:
    model = model_of(name)
    _, rows, caches = case(name, n)
    reader = Reader.last(caches[0], ANSWERS)
    sites = [Site((p,)) for p in range(n - 1)] + [Site((p,), donor=1) for p in range(2, n - 1, 4)]
    found = swap_effects(model, caches[0], caches[1:], sites, reader)
    assert max(gaps(model, rows, sites, [reader], found)) <= SWAP_TOLERANCE
    same = all(
        torch.equal(x[:, 0], y[:, 0])
        for i in ("keys", "values")
        for x, y in zip(*(getattr(c, i) for c in caches[:2]), strict=True)
    )
    assert same or name in MIXTURES, "row 0 has the same tokens in front of it on both sides"
    assert float((found.logits[0] - found.baseline).abs().max()) <= (0.0 if same else 1e-5)
    assert float((found.logits - found.baseline).abs().max()) > 1e-2


def test_bands_heads_parts_and_sets_equal_the_loop(name: str) -> None:
    model = model_of(name)
    _, rows, caches = case(name, 20)
    reader = Reader.last(caches[0], ANSWERS)
    some = (1, 4, 11, 12, 18)
    sites = [Site(some, layers=(low, high)) for low in range(3) for high in range(low + 1, 4)]
    sites += [Site(some, parts=part, donor=d) for part in ("k", "v") for d in (0, 1)]
    sites += [Site(some, kv_heads=(h,), layers=band) for h in (0, 1) for band in (None, (1, 3))]
    sites += [Site(some, kv_heads=(1,), parts="k", layers=(2, 3)), Site(tuple(range(19))), Site(some, kv_heads=(0, 1))]
    found = swap_effects(model, caches[0], caches[1:], sites, reader)
    assert max(gaps(model, rows, sites, [reader], found)) <= SWAP_TOLERANCE
    for size in (1, 3):
        parts = swap_effects(model, caches[0], caches[1:], sites, reader, max_chunk=size)
        assert float((parts.logits - found.logits).abs().max()) <= 1e-5


def test_several_readers_and_longer_ones_equal_the_loop(name: str) -> None:
    """Other answers, other tokens, several tokens, another start; all in one call."""
    model = model_of(name)
    ids, rows, caches = case(name, 20)
    readers = [
        Reader.last(caches[0], ANSWERS),
        Reader.last(caches[0], (9, 30)),
        Reader(19, (ids[0][19], 7, 8), ANSWERS),
        Reader.last(caches[0], ANSWERS, WINDOW + 3),
        Reader(20, (11,), (3, 4)),
    ]
    sites = [Site((p,), donor=d, reader=r) for r in range(5) for p, d in ((1, 0), (5, 0), (7, 1))]
    sites += [Site((2, 5, 8), layers=(1, 2), reader=r) for r in range(5)]
    found = swap_effects(model, caches[0], caches[1:], sites, readers)
    assert max(gaps(model, rows, sites, readers, found)) <= SWAP_TOLERANCE
    for one, logits in zip(readers, found.baselines, strict=True):
        assert float((slow(model, rows, Site(()), one) - logits).abs().max()) <= SWAP_TOLERANCE


@pytest.mark.parametrize("low", [1, 2])
def test_layers_below_the_band_run_once_and_change_nothing(
    name: str, low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    _, _, caches = case(name, 20)
    reader = Reader.last(caches[0], ANSWERS)
    sites = [Site((p,), layers=(low, 3)) for p in (3, 12, 15, 17)]
    batches: list[int] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        batches.append(len(output[0] if isinstance(output, tuple) else output))

    handles = [layer.register_forward_hook(note) for layer in model.hf.model.layers]
    shared = swap_effects(model, caches[0], caches[1:2], sites, reader)
    for handle in handles:
        handle.remove()
    assert shared.n_readers >= 2
    assert batches == [1] * low + [shared.n_readers] * (3 - low), "one run of all sites and of the unpatched reader"
    real = engine.run_readers

    def unshared(*args: Any, first_layer: int = 0, **options: Any) -> Tensor:
        return real(*args, **options)

    monkeypatch.setattr(engine, "run_readers", unshared)
    alone = swap_effects(model, caches[0], caches[1:2], sites, reader)
    assert float((alone.logits - shared.logits).abs().max()) <= 1e-5


def test_attention_is_restored_after_a_failure(name: str) -> None:
    model = model_of(name)
    _, _, caches = case(name, 6)
    keys = [k.clone() for k in caches[1].keys]
    keys[1][0, 3] = float("nan")
    bad = caches[1].replace_tensors(keys, caches[1].values, history=("poisoned",))
    kernel = model.attention_kernel
    with pytest.raises(NonFiniteError):
        swap_effects(model, caches[0], [bad], [Site((3,))], Reader.last(caches[0], ANSWERS))
    assert model.attention_kernel == kernel


# --- refusals ---------------------------------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    """Attention of its own, which never asks transformers' interface."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.mix(hidden_states), None


@pytest.mark.parametrize("replaced", [(0, 1, 2), (1,)])
def test_a_model_with_its_own_attention_is_refused_everywhere(replaced: tuple[int, ...]) -> None:
    """Patches would have no effect there, and a map of zeros would look like a finding."""
    _, _, caches = case("llama", 6)
    hf = family_hf("llama")
    for layer in replaced:
        hf.model.layers[layer].self_attn = OwnAttention(32)
    model = wrapped(hf, "own", gate=False)
    reader = Reader.last(caches[0], ANSWERS)
    ids = caches[1].token_ids
    calls = [
        lambda: swap_effects(model, caches[0], caches[1:2], [Site((3,))], reader),
        lambda: swap_effects(model, caches[0], caches[1:2], [Site((3,))], reader, mode="in_forward"),
        lambda: head_effects(model, caches[0], caches[1], [[(0, 0)]], reader),
        lambda: recompute_effects(model, caches[0], ids, [(3,)], ANSWERS, edited=(1,)),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match="does not go through transformers' attention interface"):
            call()
        assert model.attention_kernel == "sdpa"


def test_donors_of_another_prefix_are_refused() -> None:
    """Rows from a prompt that begins differently carry more than the field; the message says what to do."""
    model = model_of("llama")
    ids, _, caches = case("llama", 6)
    other = model.prefill((1 + ids[0][0] % 30, *ids[0][1:])).cache
    reader = Reader.last(caches[0], ANSWERS)
    with pytest.raises(
        PatchError, match=r"different prefixes: token 0 is \d+ in one and \d+ in the other.*same beginning"
    ):
        swap_effects(model, caches[0], [caches[1], other], [], reader)
    field_first = swap_effects(model, caches[0], [other], [Site((2,))], reader, prefix=0)
    assert float((field_first.logits - field_first.baseline).abs().max()) > 0
    swap_effects(model, caches[0], caches[1:2], [], reader, prefix=1)
    with pytest.raises(PatchError, match=r"token 1 is .*the first 2 must be the same"):
        swap_effects(model, caches[0], caches[1:2], [], reader, prefix=2)
    with pytest.raises(PatchError, match="different prefixes"):
        head_effects(model, caches[0], other, [[(0, 0)]], reader)


def test_a_placebo_of_another_filler_is_allowed() -> None:
    """Donors may differ anywhere behind the common beginning; that is what placebo donors are for."""
    model = model_of("llama")
    ids, _, caches = case("llama", 6)
    other = model.prefill((ids[0][0], *(1 + i % 30 for i in ids[0][1:4]), *ids[0][4:])).cache
    found = swap_effects(model, caches[0], [other], [Site((4,))], Reader.last(caches[0], ANSWERS))
    assert float((found.logits - found.baseline).abs().max()) > 0


def test_two_calls_are_the_same_bit_for_bit(name: str) -> None:
    model = model_of(name)
    _, _, caches = case(name, 20)
    reader = Reader.last(caches[0], ANSWERS)
    sites = [Site((p,)) for p in (1, 9, 18)] + [Site((4,), layers=(2, 3))]
    a, b = (swap_effects(model, caches[0], caches[1:], sites, reader) for _ in range(2))
    assert torch.equal(a.logits, b.logits)
    turned = swap_effects(model, caches[0], caches[:0:-1], [replace(s, donor=1) for s in sites], reader)
    assert float((turned.logits - a.logits).abs().max()) <= 1e-5
