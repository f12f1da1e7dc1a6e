"""How a run shows where it is."""

from typing import Protocol


class Progress(Protocol):
    """What the runner tells whoever watches."""

    def stage(self, probe: str, stage: str, total: int, done: int) -> None:
        """A stage of a probe begins; ``done`` of ``total`` items are on record already."""
        ...

    def item(self) -> None:
        """One more item of the stage is on record."""
        ...

    def note(self, text: str) -> None:
        """One line for people."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, probe: str, stage: str, total: int, done: int) -> None:
        """Nothing."""

    def item(self) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
