"""What the tests of the skill plug-in share: two skills in a library, blocks and rotary tables as vLLM keeps them."""

from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from notelens.cache.library import SkillLibrary
from notelens.compose import compile_skill
from notelens.serving.skill_loads import SALT
from notelens.serving.skill_scheduler import SchedulerSide
from notelens.serving.skill_store import SkillStore
from tests.contracts.models import note_model, random_ids

BLOCK = 8
SKILL = random_ids(21, seed=3)
TOOL = random_ids(9, seed=4)


class Blocks:
    """An attention layer that stores rows as vLLM's CPU backend does: keys and values of a block behind one another."""

    def __init__(self, n_blocks: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.kv_cache = torch.full((n_blocks, heads, BLOCK, 2 * width), 7.0, dtype=dtype)
        self.impl = self
        self.width = width

    def _halves(self) -> tuple[Tensor, Tensor]:
        n, heads, size, _ = self.kv_cache.shape
        keys, values = self.kv_cache.view(n, heads, 2 * size, self.width).chunk(2, dim=2)
        return keys, values

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        assert layer is self and kv_cache is self.kv_cache and key.is_contiguous()
        for half, rows in zip(self._halves(), (key, value), strict=True):
            half[slot_mapping // BLOCK, :, slot_mapping % BLOCK] = rows

    def read(self, block_ids: list[int], positions: range) -> tuple[Tensor, Tensor]:
        """Rows of a request ``[head, pos, width]``."""
        where = [(block_ids[p // BLOCK], p % BLOCK) for p in positions]
        keys, values = self._halves()
        return torch.stack([keys[b, :, s] for b, s in where], 1), torch.stack([values[b, :, s] for b, s in where], 1)


class Rope:
    """A rotary embedding as vLLM keeps it: cosines and sines by position."""

    def __init__(
        self, inv_freq: Tensor, *, neox: bool = True, size: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        angle = torch.arange(300)[:, None].float() * inv_freq
        self.cos_sin_cache = (size * torch.cat([angle.cos(), angle.sin()], 1)).to(dtype)
        self.is_neox_style = neox


class FakeEngine:
    """An engine that caches blocks by salt and tokens, and takes rows as the scheduler's half of the plug-in says.

    Its answer depends on the prompt and on whether any of its rows came from a skill.

    Args:
        store: of skills.
        leaky: blocks of approximate sessions are kept under exact keys.
    """

    def __init__(self, store: SkillStore, *, leaky: bool = False) -> None:
        self.side = SchedulerSide(store)
        self.blocks: dict[tuple[str | None, tuple[int, ...]], bool] = {}
        self.bodies: list[dict[str, Any]] = []
        self.run: list[int] = []
        self._leaky = leaky
        self._lock = Lock()

    def send(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            return self._send(body)

    def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, salt = tuple(body["prompt"]), body.get("cache_salt")
        key = None if self._leaky and salt is not None and salt.startswith(SALT) else salt
        self.bodies.append(body)
        n, approximate = 0, False
        while n + BLOCK < len(prompt) and (key, prompt[: n + BLOCK]) in self.blocks:
            n += BLOCK
            approximate = self.blocks[key, prompt[:n]]
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=list(prompt), cache_salt=salt, lora_request=None, mm_features=[],
            kv_transfer_params=body.get("kv_transfer_params"),
        )  # fmt: skip
        external = self.side.matched(request, n)
        self.side.allocated("r", list(range(999)), external)
        self.side.take_loads()
        self.side.ended({"r"}, [])
        self.run.append(len(prompt) - n - external)
        approximate = approximate or external > 0
        for k in range(n + BLOCK, len(prompt) + 1, BLOCK):
            self.blocks[key, prompt[:k]] = approximate
        choices = body.get("allowed_token_ids", range(50))
        tokens = [choices[(hash(prompt) + approximate) % len(choices)]] * body["max_tokens"]
        return {"choices": [{"text": "ok", "token_ids": tokens}], "kv_transfer_params": self.side.finished("r")}


def skill_library(folder: Path) -> SkillLibrary:
    """``policy``, compiled alone, and ``tool``, behind a neutral prefix and unrotated."""
    model, library = note_model("llama3"), SkillLibrary(folder)
    library.put(compile_skill(model, SKILL, name="policy").to_file())
    library.put(
        compile_skill(model, TOOL, name="tool", condition="neutral", prefix=TOOL[:3], scheme="unrotated").to_file()
    )
    return library
