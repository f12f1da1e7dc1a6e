"""Linked: a few rows are run again, and how they changed tells, through a fitted map, how the others would have."""

from collections.abc import Iterable

from notelens.cache.kv import KVCache
from notelens.compose.base import Chunk, Composer, Placed, fits_here, shifted
from notelens.compose.link import Link, corrected
from notelens.errors import ComposeError
from notelens.models.base import NoteModel


class Linked(Composer):
    """Reposition, recompute a few link rows, and correct all other rows by a linear map of how the link rows changed.

    The map is fitted once per skill on calibration contexts (:func:`~notelens.compose.link.fit_link`), by least squares with
    a ridge and a low rank, without training. A chunk that does not come with the right past and has no link is refused.

    Args:
        links: fitted links, at most one per skill.

    Raises:
        ComposeError: two links for one skill.
    """

    name = "linked"
    paper_ref = "section on composing: correction between chunks (ours)"

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.links: dict[str, Link] = {}
        for link in links:
            if link.key in self.links:
                raise ComposeError(f"two links for skill {link.name!r}; fit one on all calibration contexts")
            self.links[link.key] = link

    def splice(self, model: NoteModel, before: KVCache | None, chunk: Chunk) -> Placed:
        """Move the rows, run the link rows, and correct the rest.

        Raises:
            ComposeError: the chunk has no link.
        """
        moved = shifted(model, before, chunk)
        if before is None or fits_here(before, chunk):
            return Placed(moved, 0.0)
        if chunk.skill is None or chunk.skill.key not in self.links:
            raise ComposeError(
                f"{chunk.label}: 'linked' needs a link fitted on calibration contexts for each skill; fit one with "
                f"notelens.compose.fit_link and pass Linked([link]) as the method (there are {len(self.links)})"
            )
        link = self.links[chunk.skill.key]
        cache, tokens = corrected(model, moved, len(chunk), link)
        history = (*moved.history, f"{chunk.label}: {link}")
        return Placed(cache.replace_tensors(cache.keys, cache.values, history=history), tokens)
