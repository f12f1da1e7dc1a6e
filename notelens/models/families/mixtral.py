"""Mixtral: Mistral's attention, a mixture of experts in place of the MLP."""

from notelens.models.families.mistral import Mistral


class Mixtral(Mistral):
    """Mixtral checkpoints. Routing may differ between batch shapes by rounding; the gate measures how far."""

    model_types = ("mixtral",)
