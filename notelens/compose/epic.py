"""EPIC's link step (Hu et al., arXiv:2410.15332): the first rows of each chunk but the first, against misplaced sinks."""

from notelens.cache.kv import KVCache
from notelens.compose.seam import Seam


class Epic(Seam):
    """Reposition, then recompute the first ``k`` rows of every chunk except one that begins the context.

    A chunk compiled alone makes its first rows attention sinks; behind other text they must not be. The first chunk of a
    context is left alone, because there a sink is right. Differs from ``seam`` for a first chunk with a foreign past.
    """

    name = "epic"
    paper_ref = "section on composing: related methods (EPIC, LegoLink)"

    def repairs(self, before: KVCache | None) -> bool:
        """Every chunk but the first."""
        return before is not None
