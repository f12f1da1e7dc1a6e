"""What the tests of the skill plug-in share: two skills in a library, blocks and rotary tables as vLLM keeps them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from notelens.cache.library import SkillLibrary
from notelens.compose import compile_skill
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


def skill_library(folder: Path) -> SkillLibrary:
    """``policy``, compiled alone, and ``tool``, behind a neutral prefix and unrotated."""
    model, library = note_model("llama3"), SkillLibrary(folder)
    library.put(compile_skill(model, SKILL, name="policy").to_file())
    library.put(
        compile_skill(model, TOOL, name="tool", condition="neutral", prefix=TOOL[:3], scheme="unrotated").to_file()
    )
    return library
