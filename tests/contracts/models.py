"""What every model must fulfil, as functions that return the problems they find, and the models they are run on.

A contract is run on every member and on a deliberately broken one (``test_models.py``); returning problems instead of
asserting lets the second run say that it was *this* contract that noticed.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from notelens.cache.kv import KVCache
from notelens.cache.ops import max_difference
from notelens.intervene.engine import Reader, Site, SwapEffects, swap_effects
from notelens.models.random import build_config, build_model
from notelens.zoo.cast import cast_
from tests.oracle.swap import loop_in_forward_swap, prefill_rows, read, swapped_rows
from tests.tiny import VOCABULARY, tiny_model, wrapped

SWAP_TOLERANCE = 1e-4
"""Logits of size 1 to 6 go through two to four float32 layers in another order of summation: seen 6e-6."""
ROW_TOLERANCE = 2e-5
"""Rows of size 1 to 10, one token at a time against all at once: seen 7e-6."""
WINDOW = 8
N_TOKENS = 20
"""More than twice the window, so that a sliding layer really loses rows."""
Swap = Callable[..., SwapEffects]

_SMALL: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SCALED = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": _DEFAULT_ROPE}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 16}),
    "qwen3": ("qwen3", {"rope_parameters": _DEFAULT_ROPE, "head_dim": 16}),
    "mistral": ("mistral", {"rope_parameters": _DEFAULT_ROPE, "sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            "rope_parameters": _DEFAULT_ROPE,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,  # low enough to bend the scores of random weights
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "mixtral": (
        "mixtral",
        {"rope_parameters": _DEFAULT_ROPE, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("qwen2", {"rope_parameters": _DEFAULT_ROPE}),
    "yarn": ("qwen2", {"rope_parameters": {**_SCALED, "rope_type": "yarn", "factor": 4.0}, "head_dim": 16}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "proportional": (
        "llama",
        {
            "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "head_dim": 16,
        },
    ),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [4.0, 5.0, 6.0, 7.0],
                "original_max_position_embeddings": 250,
            },
            "original_max_position_embeddings": 250,
            "max_position_embeddings": 512,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"rope_parameters": _DEFAULT_ROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi3": ("phi3", {"rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.75}, "head_dim": 16}),
    "smollm3": ("smollm3", {"rope_parameters": _DEFAULT_ROPE, "num_hidden_layers": 4}),
    "olmo2": ("olmo2", {"rope_parameters": _DEFAULT_ROPE}),
    "glm": ("glm", {"rope_parameters": _DEFAULT_ROPE, "head_dim": 16}),
    "glm4": ("glm4", {"rope_parameters": _DEFAULT_ROPE, "head_dim": 16}),
    "deepseek_v2": (
        "deepseek_v2",
        {"rope_parameters": _DEFAULT_ROPE, **_MLA, "q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": _DEFAULT_ROPE, **_MLA, "q_lora_rank": 12}),
    "falcon_h1": (
        "falcon_h1",
        {
            "rope_parameters": _DEFAULT_ROPE,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "key_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
        },
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [2, 1, 1]}}),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [4, 2, 2]}, "head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        {
            "rope_parameters": _DEFAULT_ROPE,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Name to (model type, config entries) of small random models, one per family and per kind of rotation."""
NAMES = ("tiny", *RANDOM)
MIXTURES = ("mixtral", "gpt_oss", "qwen3_moe", "deepseek_v2", "deepseek_v3")
SLIDING = ("mistral", "gemma2", "gemma3_text", "gpt_oss")


def random_hf(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A fresh random transformers model; the same weights every time."""
    kind, settings = RANDOM[name]
    config = build_config(kind, {**_SMALL, **settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        hf = build_model(config)
        for key, parameter in hf.named_parameters():
            if "norm" in key:  # an all-ones norm would hide a norm that is skipped
                parameter.data += 0.2 * torch.randn_like(parameter)
            if key.endswith("sinks"):  # sinks near zero would hide that they are forgotten
                parameter.data = 1.0 + torch.randn_like(parameter)
    hf.config.architectures = [type(hf).__name__]  # as checkpoints have it; models made in memory do not
    return cast_(hf, dtype).eval()


@cache
def note_model(name: str) -> Any:
    """A shared, read-only model by name; random ones without the gate, which has its own tests."""
    return tiny_model() if name == "tiny" else wrapped(random_hf(name), name, gate=False)


def random_ids(n: int = N_TOKENS, seed: int = 0, changed: Sequence[int] = ()) -> tuple[int, ...]:
    """Random token ids; those at ``changed`` are replaced by the next id of the vocabulary."""
    rng = random.Random(f"ids/{seed}")
    ids = [rng.randrange(1, len(VOCABULARY)) for _ in range(n)]
    for pos in changed:
        ids[pos] = 1 + ids[pos] % (len(VOCABULARY) - 1)
    return tuple(ids)


ANSWERS = (5, 17, 23)


def contract_ids(name: str) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Ids of a recipient and of two donors. The tiny model needs real prompts for anything to depend on anything."""
    if name != "tiny":
        return random_ids(), [random_ids(changed=[3]), random_ids(changed=[5, 6])]
    from tests.tiny import tiny_instance

    cells = tiny_instance("polarity", n_notes=3).cells
    return cells[0, 0].token_ids, [cells[1, 0].token_ids, cells[0, 1].token_ids]


def contract_answers(name: str) -> tuple[int, ...]:
    """Ids whose logits are compared."""
    return ANSWERS if name != "tiny" else (VOCABULARY.index("deny"), VOCABULARY.index("approve"), 5)


def row_problems(found: KVCache, expected: KVCache) -> list[str]:
    """Rows of two caches that should be the same."""
    if found.token_ids != expected.token_ids:
        return [f"{len(found)} rows for {len(expected)} tokens, or other tokens"]
    if not torch.equal(found.positions, expected.positions):
        return ["rows stand at other positions"]
    gap = max_difference(found, expected)
    return [] if gap <= ROW_TOLERANCE else [f"rows differ by {gap:.2g}"]


def decode_problems(model: Any, ids: Sequence[int]) -> list[str]:
    """Cached decode at every cut, and prefill in chunks, against the logits of a plain forward without a cache."""
    with torch.no_grad():
        plain = model.hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    whole = model.prefill(ids)
    problems: list[str] = []

    def compare(what: str, hidden: torch.Tensor, at: int, cache_: KVCache | None = None) -> None:
        gap = float((model.next_logits(hidden) - plain[at]).abs().max())
        if not gap <= SWAP_TOLERANCE:
            problems.append(f"{what}: logits at {at} differ by {gap:.2g}")
        if cache_ is not None:
            problems.extend(f"{what}: {p}" for p in row_problems(cache_, whole.cache))

    compare("one go", whole.hidden, len(ids) - 1)
    for cut in (1, 3, len(ids) // 2, len(ids) - 1):
        first = model.prefill(ids[:cut])
        compare(f"first {cut}", first.hidden, cut - 1)
        rest = model.prefill(ids[cut:], first.cache)
        compare(f"{cut} and the rest", rest.hidden, len(ids) - 1, rest.cache)
    past = model.prefill(ids[:1]).cache
    for at in range(1, len(ids)):
        out = model.prefill(ids[at : at + 1], past)
        compare("one by one", out.hidden, at)
        past = out.cache
    return problems + [f"one by one: {p}" for p in row_problems(past, whole.cache)]


def contract_sites(n_tokens: int, n_layers: int, n_kv: int, n_reader: int) -> list[Site]:
    """Every single position, and combinations of bands, parts, heads and donors."""
    rows = range(n_tokens - n_reader)
    some = tuple(range(3, n_tokens - n_reader, 2))
    sites = [Site((p,)) for p in rows] + [Site((p,), donor=1) for p in (5, 6, 7, max(rows))]
    sites += [Site(tuple(rows)), Site(some), Site(tuple(rows), donor=1), Site(())]
    bands = [(low, high) for low in range(n_layers) for high in range(low + 1, n_layers + 1)]
    sites += [Site(some, layers=band) for band in bands] + [Site((max(rows),), layers=band) for band in bands]
    sites += [Site(some, parts=parts, donor=d) for parts in ("k", "v") for d in (0, 1)]
    sites += [Site(some, kv_heads=(h,)) for h in range(n_kv)]
    sites += [
        Site(some, layers=(n_layers - 1, n_layers), kv_heads=(h,), parts=p) for h in range(n_kv) for p in ("k", "v")
    ]
    return sites


def swap_problems(
    model: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[Sequence[int]],
    answers: Sequence[int],
    *,
    n_reader: int = 1,
    swap: Swap = swap_effects,
    sites: Sequence[Site] | None = None,
) -> list[str]:
    """Sites whose answer logits differ from the slow loop, and a warning when nothing had an effect."""
    recipient = model.prefill(recipient_ids).cache
    donors = [model.prefill(ids).cache for ids in donor_ids]
    geometry = model.geometry
    if sites is None:
        sites = contract_sites(len(recipient_ids), geometry.n_layers, geometry.layers[0].n_kv_heads, n_reader)
    found = swap(model, recipient, donors, sites, Reader.last(recipient, answers, n_reader))
    problems: list[str] = []

    start = len(recipient_ids) - n_reader
    base, *others = (
        [(k[:, :start], v[:, :start]) for k, v in prefill_rows(model.hf, i)] for i in (recipient_ids, *donor_ids)
    )

    def slow(site: Site) -> torch.Tensor:
        patched = swapped_rows(base, others[site.donor], site.positions, site.layers, site.kv_heads, site.parts)
        return read(model.hf, patched, recipient_ids[start:], answers, recipient_ids[:start])

    rows = [("baseline", Site(()), found.baseline), *((f"{s}", s, r) for s, r in zip(sites, found.logits, strict=True))]
    for label, site, logits in rows:
        gap = float((logits - slow(site)).abs().max())
        if not gap <= SWAP_TOLERANCE:
            problems.append(f"{label}: off by {gap:.2g}")
    if float((found.logits - found.baseline).abs().max()) < 1e-2:
        problems.append("no site had an effect")
    return problems


def in_forward_problems(
    model: Any,
    recipient_ids: Sequence[int],
    donor_ids: Sequence[Sequence[int]],
    answers: Sequence[int],
    *,
    n_reader: int = 1,
    swap: Swap = swap_effects,
) -> list[str]:
    """In-forward swaps that differ from a whole forward pass in which the rows are replaced as they are computed."""
    recipient = model.prefill(recipient_ids).cache
    donors = [model.prefill(ids).cache for ids in donor_ids]
    end, n_layers = len(recipient_ids) - n_reader, model.geometry.n_layers
    sites = [Site((p,)) for p in range(end)] + [Site((p,), donor=1) for p in (5, 6, end - 1)]
    sites += [Site(rows) for rows in ((3, 4), (3, end - 1), tuple(range(3, end)), tuple(range(end)), (end - 2, 5))]
    sites += [Site((3, 7), layers=(low, low + 1)) for low in range(n_layers)] + [
        Site((7, end - 1), layers=(1, n_layers))
    ]
    found = swap(model, recipient, donors, sites, Reader.last(recipient, answers, n_reader), mode="in_forward")
    problems: list[str] = []
    for site, logits in zip(sites, found.logits, strict=True):
        ids = donor_ids[site.donor]
        slow = loop_in_forward_swap(model.hf, recipient_ids, ids, site.positions, answers, site.layers)
        gap = float((logits - slow).abs().max())
        if not gap <= SWAP_TOLERANCE:
            problems.append(f"{site}: off by {gap:.2g}")
    if found.mode != "in_forward":
        problems.append(f"mode is {found.mode!r}")
    return problems


def noop_problems(model: Any, ids: Sequence[int], answers: Sequence[int], *, swap: Swap = swap_effects) -> list[str]:
    """Patching rows with themselves, or with equal rows, is nothing, bit for bit."""
    recipient, twin = (model.prefill(ids).cache for _ in range(2))
    rows = tuple(range(len(ids) - 1))
    sites = [Site(()), Site(rows), Site((2,)), Site(rows, donor=1, parts="v"), Site((1, 4), layers=(0, 1))]
    found = swap(model, recipient, [recipient, twin], sites, Reader.last(recipient, answers))
    return [
        f"{s} moves the logits" for s, r in zip(sites, found.logits, strict=True) if not torch.equal(r, found.baseline)
    ]


def _hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())


def side_effect_problems(
    model: Any, ids: Sequence[int], donor: Sequence[int], *, swap: Swap = swap_effects
) -> list[str]:
    """Running from a cache and swapping leave caches, weights, attention implementation and hooks as they were."""
    before, other = model.prefill(ids).cache, model.prefill(donor).cache
    hooks_before = _hooks(model)  # transformers leaves some of its own where hidden states were asked for
    kernel, digests = model.hf.config._attn_implementation, (before.digest(), other.digest())
    weights = [p.sum().item() for p in model.hf.parameters()]
    first = model.prefill([7, 8], before)
    second = model.prefill([9], before)
    swap(model, before, [other], [Site((3, 4)), Site((3,), layers=(1, 2))], Reader.last(before, (1, 2)))
    problems: list[str] = []
    if (before.digest(), other.digest()) != digests or len(before) != len(ids):
        problems.append("a stored cache was changed")
    if len(first.cache) != len(ids) + 2 or len(second.cache) != len(ids) + 1:
        problems.append(f"lengths {len(first.cache)} and {len(second.cache)} behind {len(ids)} tokens")
    if model.hf.config._attn_implementation != kernel:
        problems.append(f"attention is {model.hf.config._attn_implementation!r}, was {kernel!r}")
    if weights != [p.sum().item() for p in model.hf.parameters()]:
        problems.append("weights were changed")
    hooks = _hooks(model) - hooks_before
    if hooks:
        problems.append(f"{hooks} hooks were left behind")
    if any(t.requires_grad for c in (first.cache, second.cache) for t in (*c.keys, *c.values)):
        problems.append("cached rows carry gradients")
    return problems


def bridge_problems(model: Any, ids: Sequence[int]) -> list[str]:
    """The bridge computes what the plain model computes, on the same parameter tensors."""
    with torch.no_grad():
        hooked = model.bridge(torch.tensor([list(ids)]))[0].float()
        plain = model.hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    gap = float((hooked - plain).abs().max())
    problems = [] if gap <= SWAP_TOLERANCE else [f"logits differ by {gap:.2g}"]
    storages = {p.data_ptr() for p in model.bridge.parameters()}
    apart = [name for name, p in model.hf.named_parameters() if p.data_ptr() not in storages]
    return problems + [f"parameter {name} is a copy" for name in apart[:3]]
