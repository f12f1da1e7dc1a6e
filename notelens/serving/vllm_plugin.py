"""Skills in vLLM: rows of a compiled skill instead of its prefill, at any place of a prompt (paper, section on composing).

Start an engine with the plug-in::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SkillConnector",
        "kv_connector_module_path": "notelens.serving.vllm_plugin", "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"skill_library": "/path/to/skills"}}'

The module path can be left out where the package is installed beside the engine: its entry point registers the name.
Requests are made by :mod:`notelens.serving.skill_requests`; what may be loaded is said in :mod:`notelens.serving.skill_loads`.

Loads are announced as asynchronous although they end within the step that begins them: the engine then runs no token of the
request before the load is known to be good, and a failed load costs nothing but the prefill that it would have saved.

This module and what it imports need torch and safetensors besides the engine.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version  # pyright: ignore[reportMissingImports]  # the engine's environment
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # pyright: ignore[reportMissingImports]  # as above
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]  # as above
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.model_executor.layers import rotary_embedding  # pyright: ignore[reportMissingImports]  # as above
from vllm.v1.metrics.utils import create_metric_per_engine  # pyright: ignore[reportMissingImports]  # as above

from notelens.cache.artefact import SkillHeader
from notelens.cache.library import SkillLibrary
from notelens.errors import EngineError
from notelens.serving.engine_api import check_signatures, check_version
from notelens.serving.engine_facts import EngineFacts, Options, engine_facts
from notelens.serving.folder_hash import weights_hash
from notelens.serving.skill_loads import Load
from notelens.serving.skill_scheduler import COUNTERS, Failure, SchedulerSide, added
from notelens.serving.skill_store import MEMORY_BYTES, SkillStore
from notelens.serving.skill_worker import WorkerSide

check_version(vllm_version)
check_signatures(base.KVConnectorBase_V1)

logger = logging.getLogger(__name__)


@dataclass
class Loads(base.KVConnectorMetadata):
    """From scheduler to worker: what to load in this step."""

    loads: tuple[Load, ...] = ()


@dataclass
class Failures(base.KVConnectorWorkerMetadata):
    """From worker to scheduler: what could not be loaded."""

    failures: tuple[Failure, ...] = ()

    def aggregate(self, other: "Failures") -> "Failures":
        """Those of both."""
        return Failures((*self.failures, *other.failures))


class SkillStats(KVConnectorStats):
    """Counts since the last report; names as in ``COUNTERS``."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts together."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return {f"skills: {name}": n for name, n in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class SkillMetrics(KVConnectorPromMetrics):
    """The counts at the engine's ``/metrics``, as ``vllm:notelens_skill_<name>_total``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:notelens_skill_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, n in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(n)


class SkillConnector(base.KVConnectorBase_V1):
    """The connector; each engine process that needs it makes one, for the scheduler or for the worker.

    Raises:
        UnsupportedModelError: the model keeps its rows in a way that skills cannot be written into (sliding windows, MLA, ...).
        EngineError: the engine's configuration does not allow skills; the message says what to set.
        ArtefactError: the weights of the engine's model cannot be identified.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        facts = engine_facts(vllm_config, kv_cache_config)
        options = Options.read(self._kv_transfer_config.kv_connector_extra_config)
        library = SkillLibrary(options.skill_library)
        memory = MEMORY_BYTES if options.memory_bytes is None else options.memory_bytes
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == base.KVConnectorRole.SCHEDULER:
            weights = options.weights_sha256 or _weights_hash(vllm_config.model_config, facts)
            check = functools.partial(_check, facts, weights)
            self._scheduler = SchedulerSide(SkillStore(library, check, memory_bytes=0))
            logger.info("skills of %s for weights %s, blocks of %d", library.folder, weights[:12], facts.block_size)
        else:
            layers = vllm_config.compilation_config.static_forward_context
            ropes = rotary_embedding._ROPE_DICT  # the engine keeps its rotary tables nowhere else
            store = SkillStore(library, memory_bytes=memory)
            self._worker = WorkerSide(facts, store, lambda: layers, lambda: list(ropes.values()))

    # --- scheduler ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that come from skills behind the cached ones."""
        n = self._of_scheduler.matched(request, num_computed_tokens)
        return n, n > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that rows go into."""
        if num_external_tokens > 0:
            self._of_scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What the worker is to load in this step."""
        return Loads(self._of_scheduler.take_loads())

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in which loads have ended, and which of them failed."""
        meta = connector_output.kv_connector_worker_meta
        failures = meta.failures if isinstance(meta, Failures) else ()
        self._of_scheduler.ended(connector_output.finished_recving or (), failures)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell the client what became of its skills; blocks may be freed."""
        return False, self._of_scheduler.finished(request.request_id)

    # --- worker -------------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write rows into blocks."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, Loads), meta
        self._of_worker.run(meta.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended."""
        return None, self._of_worker.take_done() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the engine has to compute itself."""
        return self._of_worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> Failures | None:
        """What could not be loaded."""
        failures = self._of_worker.take_failures()
        return Failures(failures) if failures else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads have ended when the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: skills are compiled by the library."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # --- counts -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> SkillStats | None:
        """Counts since the last call; the scheduler's half keeps them all."""
        counts = self._scheduler.take_counts() if self._scheduler is not None else {}
        return SkillStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> SkillStats:
        """Counts from plain data."""
        return SkillStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> SkillMetrics:
        """The counters at ``/metrics``."""
        return SkillMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Nothing to reset: skills are files, and are looked at for every request."""
        return True

    @property
    def _of_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise EngineError("the engine asked the worker's half of the plug-in what only the scheduler's half knows")
        return self._scheduler

    @property
    def _of_worker(self) -> WorkerSide:
        if self._worker is None:
            raise EngineError("the engine asked the scheduler's half of the plug-in what only the worker's half knows")
        return self._worker


def _check(facts: EngineFacts, weights: str, header: SkillHeader) -> None:
    facts.check(header, weights)


def _weights_hash(model_config: Any, facts: EngineFacts) -> str:
    """Of the engine's model; a hub's name is looked up among what the engine has already downloaded."""
    folder = Path(facts.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(facts.model, revision=model_config.revision, local_files_only=True))
    return weights_hash(folder, facts.dtype)


__all__ = ["SkillConnector"]
