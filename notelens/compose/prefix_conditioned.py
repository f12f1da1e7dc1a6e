"""Chunks that attended to the text which every context begins with, though not to what stands between."""

from dataclasses import replace

from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.compose.base import Chunk, Composer, Placed, shifted
from notelens.compose.skill import Skill, compile_skill
from notelens.compose.tag import model_tag
from notelens.models.base import NoteModel


class PrefixConditioned(Composer):
    """Splice rows that were compiled behind the shared beginning of the context.

    The shared beginning is everything in front of the first spliced chunk (a system text). A skill compiled behind exactly
    these ids is used as it is; any other chunk is compiled behind them first, once per composer object: that counts as
    compiling, not as recomputing. Without anything in front it is ``shift``. The first chunk is then exact, later ones miss
    the chunks between.
    """

    name = "prefix_conditioned"
    paper_ref = "section on composing: context-aware chunks"

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Skill] = {}

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Take or compile the conditioned rows, move them, and put them behind ``before``."""
        if before is None or chunk.shared == 0:
            return Placed(shifted(model, before, chunk), 0.0)
        prefix, skill = slice_rows(before, 0, chunk.shared), chunk.skill
        if skill is None or skill.condition == "isolated" or skill.prefix_ids != prefix.token_ids:
            key = (model_tag(model).weights_sha256, prefix.token_ids, chunk.token_ids)
            if key not in self._compiled:
                self._compiled[key] = compile_skill(
                    model, chunk.token_ids, name="conditioned", condition="prefix", prefix=prefix
                )
            skill = self._compiled[key]
        own = replace(chunk, stored=skill.cache, skill=skill)
        return Placed(shifted(model, before, own), 0.0, compiled=float(len(chunk)))
