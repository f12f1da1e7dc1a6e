"""What every movable representation must fulfil, as functions that return the problems they find, and broken members."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from notelens.attention.base import AttentionAdapter, LayerFacts
from notelens.attention.move import adapters, move_rows, readable_rows
from notelens.cache.kv import KVCache
from notelens.errors import CacheError
from notelens.models import FAMILIES
from tests.contracts import models as contract

TOLERANCE = 1e-5
"""Moved against recomputed keys at layer 0 in float32, relative to the largest entry: seen 4e-6 (transformers rounds angles of
up to 211 positions to float32)."""
DEEP = 5e-5
"""The same in deeper layers, whose inputs differ by the rounding of those below: seen 9e-6."""
BF16_STEPS = 2 * 2.0**-7
"""Two steps of bfloat16 at the largest entry. Ours is a float64 rotation with one cast, half a step; transformers rotates in
bfloat16 at both places, which differ from each other by up to 1.3 steps (seen)."""
N, START, NEAR, FAR = 12, 3, 37, 211

SUBJECTS: dict[str, tuple[str, ...]] = {
    "gqa": (
        "llama", "llama3", "yarn", "linear", "proportional", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "olmo2", "glm",
        "glm4",
    ),
    "no_rope": ("smollm3",),
    "one_table": ("dynamic", "longrope"),
    "sliding": ("mistral", "gemma2", "gemma3_text", "gpt_oss"),
    "mla": ("deepseek_v2", "deepseek_v3"),
    "mrope": ("qwen2_5_vl", "qwen3_vl"),
    "hybrid": ("falcon_h1",),
}  # fmt: skip
"""Representation to the random models that have it in some layer."""
MOVABLE = tuple(name for names in SUBJECTS.values() for name in names)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def span(model: Any, start: int = START, n: int = N) -> KVCache:
    return model.prefill(contract.random_ids(n), start=start).cache


def zero_problems(model: Any) -> list[str]:
    """Moving by nothing is nothing."""
    cache = span(model)
    if move_rows(model, cache, 0) is not cache or move_rows(model, cache, cache.positions) is not cache:
        return ["moving by 0 made another cache"]
    zero, out = torch.zeros(N, dtype=torch.int64), list[str]()
    for layer, adapter in enumerate(adapters(model)):
        k, v = adapter.move(cache.keys[layer], cache.values[layer], zero)
        if not (torch.equal(k, cache.keys[layer]) and torch.equal(v, cache.values[layer])):
            out.append(f"layer {layer}: a turn by 0 changes rows")
    return out


def sum_problems(model: Any) -> list[str]:
    """Moving by a and then by b is moving by a + b; moving there and back is nothing."""
    cache, out = span(model), list[str]()
    for a, b in ((5, 29), (NEAR, FAR - NEAR), (FAR, -100)):
        steps, once = move_rows(model, move_rows(model, cache, a), b), move_rows(model, cache, a + b)
        back = move_rows(model, move_rows(model, cache, a + b), -a - b)
        for layer in range(cache.n_layers):
            for name in ("keys", "values"):
                x, y, z = (getattr(c, name)[layer] for c in (steps, once, back))
                if not gap(x, y) <= TOLERANCE:
                    out.append(f"layer {layer}: {a} then {b} is not {a + b} ({gap(x, y):.2g})")
                if not gap(z, getattr(cache, name)[layer]) <= TOLERANCE:
                    out.append(f"layer {layer}: there and back by {a + b} is not the same")
    return out


def span_problems(model: Any, *, first: float = TOLERANCE, deep: float = DEEP, n: int = N) -> list[str]:
    """A span run alone at p and moved to q equals the span run at q, near and far, in every layer."""
    out: list[str] = []
    for delta in (1, NEAR, FAR):
        here, there = span(model, n=n), span(model, START + delta, n=n)
        moved = move_rows(model, here, delta)
        if moved.positions.tolist() != there.positions.tolist() or moved.exact:
            out.append(f"by {delta}: positions or history are wrong")
        for layer in range(here.n_layers):
            for name in ("keys", "values"):
                found = gap(getattr(moved, name)[layer], getattr(there, name)[layer])
                if not found <= (first if layer == 0 else deep):
                    out.append(f"by {delta}, layer {layer}: {name} differ by {found:.2g}")
    return out


def untouched_problems(model: Any) -> list[str]:
    """What carries no position is the same, bit for bit: values, or the latent of a latent cache; the argument stays too."""
    cache = span(model)
    before, out = cache.digest(), list[str]()
    moved = move_rows(model, cache, FAR)
    latent = model.family.adapter == "mla"
    for layer in range(cache.n_layers):
        same, other = ("keys", "values") if latent else ("values", "keys")
        if not torch.equal(getattr(moved, same)[layer], getattr(cache, same)[layer]):
            out.append(f"layer {layer}: {same} were touched")
        rotated = model.geometry.layers[layer].rope_theta is not None
        if torch.equal(getattr(moved, other)[layer], getattr(cache, other)[layer]) == rotated:
            out.append(f"layer {layer}: {other} {'did not move' if rotated else 'moved'}")
    if cache.digest() != before:
        out.append("the argument was changed")
    return out


def window_problems(model: Any) -> list[str]:
    """All rows of a span of three windows are kept and move; the mask of the adapter is that of the model's attention."""
    n = 3 * contract.WINDOW
    out = span_problems(model, n=n) if n + FAR + START < model.geometry.max_positions else []
    cache = model.prefill(contract.random_ids(n)).cache
    if any(k.shape[1] != n for k in cache.keys):
        out.append("rows were dropped")
    seen = readable_rows(model, cache, n - 1)
    for layer, claimed in enumerate(seen):
        found = attended(model, layer, n)
        if found != claimed.tolist():
            out.append(
                f"layer {layer}: the last token attends to {sum(found)} rows, the adapter says {int(claimed.sum())}"
            )
    return out


def attended(model: Any, layer: int, n: int) -> list[bool]:
    """Which rows the last of ``n`` tokens has attention weight on, from the model's own eager attention."""
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model.hf(torch.tensor([contract.random_ids(n)]), use_cache=False, output_attentions=True)
    finally:
        model.hf.set_attn_implementation(before)
    return (out.attentions[layer][0, :, -1, :n] > 0).any(0).tolist()


def axes_problems(model: Any) -> list[str]:
    """A span whose three axes differ, moved along one of them, equals the span run there by the model itself."""
    facts = [adapter.facts for adapter in adapters(model)]
    if all(f.axes is None for f in facts):
        return []
    steps, out = torch.arange(N), list[str]()
    start = torch.stack([torch.full((N,), 5), 5 + steps // 4, 5 + steps % 4])

    def rows(axes: Tensor) -> Any:
        store, ids = DynamicCache(), torch.tensor([contract.random_ids(N)])
        with torch.no_grad():
            model.hf.model.language_model(input_ids=ids, position_ids=axes[:, None], past_key_values=store)
        return [(layer.keys[0], layer.values[0]) for layer in store.layers]

    base = rows(start)
    for axis in range(3):
        delta = torch.zeros(3, N, dtype=torch.int64)
        delta[axis] = FAR
        for layer, (adapter, (k, v), there) in enumerate(zip(adapters(model), base, rows(start + delta), strict=True)):
            moved = adapter.move(k, v, delta)
            if not gap(moved[0], there[0]) <= DEEP or not torch.equal(moved[1], v):
                out.append(f"layer {layer}: moved along axis {axis}, keys differ by {gap(moved[0], there[0]):.2g}")
    return out


CONTRACTS: dict[str, Callable[[Any], list[str]]] = {
    "zero": zero_problems,
    "sum": sum_problems,
    "span": span_problems,
    "untouched": untouched_problems,
    "window": window_problems,
    "axes": axes_problems,
}


# --- broken members ---------------------------------------------------------------------------------------------------


def plain(width: int, theta: float) -> Tensor:
    """Unscaled inverse frequencies."""
    return theta ** -(torch.arange(0, width, 2) / width)


def family_of(name: str, **attributes: Any) -> Any:
    """The family of a random model with something about it replaced."""
    base = FAMILIES.get(contract.RANDOM[name][0])
    return type(f"Broken{base.__name__}", (base,), attributes)()


def with_facts(name: str, change: Callable[[Any, int, LayerFacts], dict[str, Any]]) -> Any:
    """A family whose adapters are told something wrong."""
    base = FAMILIES.get(contract.RANDOM[name][0])

    def attention(self: Any, model: Any, layer: int) -> AttentionAdapter:
        right = base.attention(self, model, layer)
        facts = {f: getattr(right.facts, f) for f in LayerFacts.__dataclass_fields__}
        return type(right)(LayerFacts(**{**facts, **change(model, layer, right.facts)}))

    return family_of(name, attention=attention)


def with_move(name: str, move: Callable[[AttentionAdapter, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A family whose adapters move wrongly."""
    base = FAMILIES.get(contract.RANDOM[name][0])

    def attention(self: Any, model: Any, layer: int) -> AttentionAdapter:
        right = base.attention(self, model, layer)
        broken = type("Broken", (type(right),), {"move": lambda a, k, v, d: move(right, k, v, d)})
        return broken(right.facts)

    return family_of(name, attention=attention)


def _turned(adapter: AttentionAdapter, keys: Tensor, values: Tensor, delta: Tensor) -> Tensor:
    return adapter.move(keys, values, delta)[0]


def _head_forgotten(a: AttentionAdapter, k: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([_turned(a, k, v, d)[:-1], k[-1:]]), v


def _latent_turned(a: AttentionAdapter, k: Tensor, d: Tensor) -> Tensor:
    return torch.cat([a.move(k, k[..., :8], d)[1], k[..., 8:]], -1)


def _coarse(a: AttentionAdapter, k: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    half = k.shape[-1] // 2
    angle = (d[:, None] * a.facts.inv_freq).to(torch.bfloat16)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([k[..., :half] * cos - k[..., half:] * sin, k[..., half:] * cos + k[..., :half] * sin], -1).to(
        k.dtype
    ), v


BROKEN: dict[str, tuple[str, Any]] = {
    "plain theta for llama3": ("llama3", with_facts("llama3", lambda m, i, f: {"inv_freq": plain(16, 1e4)})),
    "linear factor ignored": ("linear", with_facts("linear", lambda m, i, f: {"inv_freq": plain(8, 1e4)})),
    "yarn ignored": ("yarn", with_facts("yarn", lambda m, i, f: {"inv_freq": plain(16, 1e4)})),
    "proportional taken as default": ("proportional", with_facts("proportional", lambda m, i, f: {"inv_freq": plain(16, 1e4)})),
    "second table of longrope": ("longrope", with_facts("longrope", lambda m, i, f: {"inv_freq": f.inv_freq / 4})),
    "adjacent pairs for llama": ("llama", family_of("llama", pairing="adjacent")),
    "half-split pairs for glm": ("glm", family_of("glm", pairing="half")),
    "partial width taken as whole": ("phi3", with_facts("phi3", lambda m, i, f: {"inv_freq": plain(16, 1e4)})),
    "yarn magnitude applied twice": ("yarn", with_move("yarn", lambda a, k, v, d: (1.1386 * _turned(a, k, v, d), v))),
    "global theta on local layers": (
        "gemma3_text",
        with_facts("gemma3_text", lambda m, i, f: {"inv_freq": m.model.rotary_emb.full_attention_inv_freq}),
    ),
    "local theta on global layers": (
        "gemma3_text",
        with_facts("gemma3_text", lambda m, i, f: {"inv_freq": m.model.rotary_emb.sliding_attention_inv_freq}),
    ),
    "layer without RoPE rotated": (
        "smollm3",
        family_of(
            "smollm3",
            inv_freq=lambda self, model, layer: model.model.rotary_emb.inv_freq,
            rope_theta=lambda self, config, layer: 1e4,
        ),
    ),
    "rotated layer left alone": ("llama", family_of("llama", inv_freq=lambda self, model, layer: None)),
    "neighbour's rows": ("llama", with_move("llama", lambda a, k, v, d: (_turned(a, k, v, d).roll(1, 1), v))),
    "off by one": ("llama", with_move("llama", lambda a, k, v, d: (_turned(a, k, v, d + d.sign()), v))),
    "wrong direction": ("llama", with_move("llama", lambda a, k, v, d: (_turned(a, k, v, -d), v))),
    "turned twice": ("llama", with_move("llama", lambda a, k, v, d: (_turned(a, _turned(a, k, v, d), v, d), v))),
    "values turned too": ("llama", with_move("llama", lambda a, k, v, d: (_turned(a, k, v, d), _turned(a, v, v, d)))),
    "one head forgotten": ("llama", with_move("llama", _head_forgotten)),
    "angles in bfloat16": ("llama", with_move("llama", _coarse)),
    "latent turned": ("deepseek_v3", with_move("deepseek_v3", lambda a, k, v, d: (_latent_turned(a, k, d), v))),
    "stored pairs taken from rope_interleave": ("deepseek_v3", family_of("deepseek_v3", pairing="adjacent")),
    "stored pairs of V3 for V2": ("deepseek_v2", family_of("deepseek_v2", pairing="half")),
    "interleaved axes read as blocks": ("qwen3_vl", family_of("qwen3_vl", layout="sectioned")),
    "window ignored": ("mistral", family_of("mistral", window=lambda self, config, layer: None)),
    "window one too wide": ("mistral", family_of("mistral", window=lambda self, config, layer: contract.WINDOW + 1)),
}  # fmt: skip
"""Deliberate faults: name to (random model, family that has it)."""


def all_problems(model: Any) -> list[str]:
    """Every contract on one model, by name of the contract."""
    out: list[str] = []
    for name, check in CONTRACTS.items():
        try:
            out += [f"{name}: {p}" for p in check(model)]
        except CacheError as e:
            out.append(f"{name}: {e}")
    return out
