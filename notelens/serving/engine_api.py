"""The part of an engine's connector interface that the plug-in is written for, and a check that an engine has it."""

import inspect
import re
from collections.abc import Mapping

from notelens.errors import EngineError

SERIES = ("0.32",)
"""Series of vLLM that the plug-in is tested with."""
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "wait_for_layer_load": ("self", "layer_name"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": ("self",),
    "get_finished": ("self", "finished_req_ids"),
    "get_block_ids_with_load_errors": ("self",),
    "get_kv_connector_stats": ("self",),
    "build_connector_worker_meta": ("self",),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "update_connector_output": ("self", "connector_output"),
    "request_finished": ("self", "request", "block_ids"),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "reset_cache": ("self",),
    "_get_connector_metadata": ("self",),
}
"""Methods of ``KVConnectorBase_V1`` that the plug-in overrides or calls, with their parameters."""


def check_version(version: str) -> None:
    """Refuse an engine of another series.

    Raises:
        EngineError: the message names the series that are known.
    """
    found = re.match(r"(\d+\.\d+)(\.|$|\+|rc|a|b)", version)
    if found is None or found[1] not in SERIES:
        raise EngineError(
            f"the skill plug-in is written for vLLM {', '.join(SERIES)}.x and this is {version}; its connector interface "
            "changes between releases, so install a release of that series"
        )


def check_signatures(base: type, wanted: Mapping[str, tuple[str, ...]] = SIGNATURES) -> None:
    """Compare the methods of a connector's base class with those that the plug-in is written for.

    Raises:
        EngineError: a method is missing, or takes other parameters.
    """
    for name, parameters in wanted.items():
        method = getattr(base, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != parameters:
            raise EngineError(
                f"{base.__name__}.{name} has parameters {found}, the skill plug-in is written for {parameters}; this release "
                "of the engine has another connector interface"
            )


__all__ = ["SERIES", "SIGNATURES", "check_signatures", "check_version"]
