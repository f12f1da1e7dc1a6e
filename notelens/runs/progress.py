"""How a run shows where it is."""

from typing import Any, Protocol


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


class Bars:
    """A bar per stage, and a line per finished probe above them."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.current: Any = None

    def stage(self, probe: str, stage: str, total: int, done: int) -> None:
        """Start the next bar."""
        if self.current is not None:
            self.bars.remove_task(self.current)
        self.current = self.bars.add_task(f"{probe} ({stage})", total=total, completed=done)

    def item(self) -> None:
        """Move the bar."""
        self.bars.advance(self.current)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self.bars.console.print(text, markup=False, highlight=False)
