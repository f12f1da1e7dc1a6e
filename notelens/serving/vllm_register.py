"""Entry point ``vllm.general_plugins``: tells vLLM the name of the skill connector; imports nothing until it is used."""

NAME = "SkillConnector"


def register() -> None:
    """Make ``kv_connector: SkillConnector`` known to vLLM; called by every process of the engine, possibly twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # pyright: ignore[reportMissingImports]  # the engine's
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:  # it raises on a second registration and offers no other way to ask
        KVConnectorFactory.register_connector(NAME, "notelens.serving.vllm_plugin", NAME)


__all__ = ["NAME", "register"]
