"""GLM-4-9B in its first transformers form: half of every key rotates, adjacent channels in pairs."""

from notelens.models.base import FamilySpec


class Glm(FamilySpec):
    """GLM checkpoints of type ``glm``."""

    model_types = ("glm",)
    pairing = "adjacent"
