"""The worker's half of the plug-in: rows of skills into blocks, and what could not be loaded."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from notelens.cache.artefact import SkillFile
from notelens.errors import NotelensError, UnsupportedModelError
from notelens.rope import Pairing
from notelens.serving.engine_facts import EngineFacts, table_pairing
from notelens.serving.paged import rows_at, slots, write_rows
from notelens.serving.skill_loads import Load
from notelens.serving.skill_scheduler import Failure
from notelens.serving.skill_store import SkillStore

logger = logging.getLogger(__name__)


class WorkerSide:
    """Loads what the scheduler chose.

    Args:
        facts: of the engine.
        store: the same skills that the scheduler chooses from.
        layers: gives the engine's attention layers by name.
        ropes: gives the engine's rotary embeddings.
    """

    def __init__(
        self,
        facts: EngineFacts,
        store: SkillStore,
        layers: Callable[[], Any],
        ropes: Callable[[], Sequence[Any]],
    ) -> None:
        self.facts = facts
        self.store = store
        self._layers = layers
        self._ropes = ropes
        self._pairings: dict[str, tuple[Pairing, ...]] = {}
        self._done: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failures: list[Failure] = []

    def run(self, loads: Sequence[Load]) -> None:
        """Write the rows of every load. What fails is reported, and the engine computes those tokens itself.

        Cost: one rotation of the keys and one copy of the rows.
        """
        for load in loads:
            try:
                self._write(load)
            except (NotelensError, OSError, RuntimeError) as e:  # RuntimeError: what torch raises while writing
                logger.warning(
                    "request %s: a skill could not be loaded and is computed instead: %s", load.request_id, e
                )
                self._bad_blocks |= load.touched(self.facts.block_size)
                signatures = tuple(p.signature for p in load.pieces)
                self._failures.append(
                    Failure(load.request_id, signatures, str(e), isinstance(e, UnsupportedModelError))
                )
            self._done.add(load.request_id)

    def take_done(self) -> set[str]:
        """Requests whose loads have ended, well or not; asking empties it."""
        done, self._done = self._done, set()
        return done

    def take_bad_blocks(self) -> set[int]:
        """Blocks whose rows were not written; asking empties it."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def take_failures(self) -> tuple[Failure, ...]:
        """What failed; asking empties it."""
        failures, self._failures = tuple(self._failures), []
        return failures

    def _write(self, load: Load) -> None:
        layers = self._layers()
        for piece in load.pieces:
            skill = self.store.rows(piece.name, piece.signature)
            pairings = self._pairing(piece.signature, skill)
            where = slots(load.block_ids, self.facts.block_size, piece.position, piece.n)
            for layer, name in enumerate(self.facts.layer_names):
                rows = rows_at(skill, layer, piece.first, piece.n, piece.position, pairings[layer])
                write_rows(layers[name], *rows, where)

    def _pairing(self, signature: str, skill: SkillFile) -> tuple[Pairing, ...]:
        """Of every layer; checked against the engine's rotary tables once per skill."""
        if signature not in self._pairings:
            model, ropes = skill.header.model, self._ropes()
            found: dict[int | None, Pairing] = {None: "half"}  # nothing turns in layers without RoPE
            for layer, table in enumerate(model.tables):
                if table is not None and table not in found:
                    found[table] = table_pairing(model.frequencies[table], ropes, layer)
            self._pairings[signature] = tuple(found[t] for t in model.tables)
        return self._pairings[signature]


__all__ = ["WorkerSide"]
