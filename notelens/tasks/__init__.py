"""Tasks: prompts in small grids that differ in one span. Data is JSON beside the code."""

from notelens.registry import Registry
from notelens.tasks.base import Cell, Instance, Task

TASKS: Registry[type] = Registry(
    "task",
    {
        "gated": "notelens.tasks.gated:GatedDecisions",
        "organism": "notelens.tasks.organism:OrganismLanguage",
    },
)

__all__ = ["TASKS", "Cell", "Instance", "Task"]
