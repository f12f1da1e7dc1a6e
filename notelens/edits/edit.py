"""One edit while it is being made: the old rows at their new places, and a meter that everything runs through."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from notelens.attention.move import move_rows
from notelens.cache.kv import KVCache
from notelens.cache.ops import slice_rows
from notelens.cache.rows import Rows, Segment, merge
from notelens.edits.dependencies import Dependencies, Recorder
from notelens.edits.report import Errata, Meter, Outcome
from notelens.edits.text import Alignment, Tokens, align, common_prefix
from notelens.errors import EditError, LengthChangeError, WindowError
from notelens.intervene.run_rows import RowsRun, run_rows
from notelens.models.base import NoteModel

if TYPE_CHECKING:
    from notelens.edits.context import EditableContext


class Edit:
    """One edit while it is being made.

    Args:
        context: stays unchanged.
        name: the field.
        value: its new value.
        method: name of the method, for messages.
        errata: what the method does with a line that already updates the field.

    Attributes:
        old, new: tokens before and after; ``text`` is the text with the new value.
        alignment: how rows match.
        meter: what has been run so far.
    """

    def __init__(
        self, context: "EditableContext", name: str, value: str, method: str, errata: Errata = "refuse"
    ) -> None:
        self.context, self.name, self.method = context, name, method
        self.model: NoteModel = context.model
        self.text = context.text.with_value(self.model.tokenizer, name, value)
        self.value = self.text.values[name]
        if context.values[name] == self.value:
            raise EditError(f"field {name!r} already is {self.value!r}; there is nothing to edit")
        drop = name in context.text.updates and errata == "drop"
        if name in context.text.updates and errata == "refuse":
            raise EditError(
                f"{method}: a line of the prompt already updates field {name!r} to {context.values[name]!r} and would "
                "contradict the new value. Use erratum, which replaces the line, or full_suffix, which leaves it out"
            )
        if drop:
            self.text = self.text.without_updates(name)
        self.old: Tokens = context.tokens
        self.new: Tokens = self.text.tokenise(self.model.tokenizer)
        if drop:
            cut = common_prefix(self.old.ids, self.new.ids)
            kept = ((0, cut, 0),) if cut else ()
            self.alignment = Alignment(self.new.positions(name), kept, (len(self.new) - len(self.old),))
            self.__dict__["first"] = min(cut, self.new.positions(name)[0])
        else:
            self.alignment = align(self.old, self.new, name)
        self.meter = Meter()
        self._donor: RowsRun | None = None
        self._booked = False

    @property
    def n(self) -> int:
        """Rows of the new prompt."""
        return len(self.new)

    @property
    def last(self) -> int:
        """The last row: the reader of every repair."""
        return self.n - 1

    @cached_property
    def edited(self) -> tuple[int, ...]:
        """Rows of the field in the new prompt, ascending."""
        return tuple(sorted(self.alignment.edited))

    @cached_property
    def first(self) -> int:
        """The first row whose token changed; rows in front of it are the same in a fresh prefill."""
        if self.alignment.length_changes:
            return self.edited[0]
        return next((p for p in self.edited if self.old.ids[p] != self.new.ids[p]), self.edited[0])

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Rows behind the first row of the field that are not the field's, without the last row, ascending."""
        own = set(self.edited)
        return tuple(p for p in range(self.edited[0] + 1, self.last) if p not in own)

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """Kept rows that stand elsewhere than before."""
        return tuple(p for a, b, c in self.alignment.kept if a != c for p in range(c, c + b - a))

    @cached_property
    def base(self) -> tuple[Segment, ...]:
        """Kept rows at their new positions, by reference; the field's rows are missing. Moving rotates keys, runs nothing."""
        found: list[Segment] = []
        for start, stop, new_start in self.alignment.kept:
            for segment in self.context.rows.between(start, stop):
                if new_start == start:
                    found.append(segment)
                else:
                    part = slice_rows(segment.source, segment.start, segment.stop)
                    moved = move_rows(self.model, part, new_start - start)
                    found.append(Segment(moved, 0, len(moved)))
        return tuple(found)

    def require_equal_length(self) -> None:
        """Check that the new value has as many tokens as the old one.

        Raises:
            LengthChangeError: it has not; the message names methods that can do it.
        """
        if self.alignment.length_changes:
            raise LengthChangeError(
                f"{self.method}: the new value of field {self.name!r} has {max(self.alignment.deltas, key=abs):+d} tokens, and "
                "this method keeps rows one by one. Use in_place, full_suffix, auto or erratum"
            )

    @cached_property
    def new_row(self) -> dict[int, int]:
        """Row of the new prompt for every kept row of the old one."""
        return {p: c + p - a for a, b, c in self.alignment.kept for p in range(a, b)}

    @cached_property
    def old_row(self) -> dict[int, int]:
        """Row of the old prompt for every kept row of the new one."""
        return {new: old for old, new in self.new_row.items()}

    def run(
        self,
        rows: Iterable[int],
        *,
        base: Sequence[Segment] | None = None,
        with_field: bool = True,
        planning: bool = False,
        note: str = "",
    ) -> Outcome:
        """Run the field's rows, the given rows and the last row in one pass, in order, on the kept rows.

        Args:
            rows: rows of the new prompt.
            base: other kept rows than :attr:`base`.
            with_field: run the field's rows too; without, ``base`` holds those that are not in ``rows``.
            planning: book the tokens as planning.
            note: entry of the history where the result is approximate.

        Raises:
            WindowError: the last row could see none of the other rows that are run, in any layer.
        """
        at = tuple(sorted({*rows, *(self.edited if with_field else ()), self.last}))
        self.check_window(at)
        kept = self.base if base is None else tuple(base)
        done, record = self.forward(kept, at, planning=planning)
        history = (*self.context.rows.history, note or f"{self.method}: {self.name}")
        made = placed(kept, done.rows, history)
        return Outcome(made, done.hidden, self.text, self.new, at, moved=self._still_moved(at), dependencies=record)

    def forward(
        self,
        kept: Sequence[Segment],
        at: Sequence[int],
        *,
        tokens: Tokens | None = None,
        known: Dependencies | None = None,
        planning: bool = False,
    ) -> tuple[RowsRun, Dependencies | None]:
        """Run rows ``at`` of ``tokens`` (the new prompt) on kept rows, metered, and keep the record of reads up to date.

        Args:
            known: the record in the coordinates of ``tokens``; :attr:`dependencies` when ``None``.
        """
        wanted = tokens or self.new
        record = self.dependencies if known is None else known
        recorder = None if record is None else Recorder(self.model.geometry.n_layers, len(wanted), record)
        base = Rows(tuple(kept)) if kept else None
        done = run_rows(self.model, base, [wanted.ids[p] for p in at], at, watch=recorder)
        if planning:
            self.meter.planning += done.n_tokens
        else:
            self.meter.repair += done.n_tokens
        return done, recorder.done() if recorder is not None else None

    @cached_property
    def dependencies(self) -> Dependencies | None:
        """The context's record of reads with rows where they are now; a changed field reads and is read as its old rows."""
        known = self.context.dependencies
        if known is None or not self.alignment.length_changes:
            return known
        where = [-1] * len(self.old)
        for start, stop, new_start in self.alignment.kept:
            where[start:stop] = range(new_start, new_start + stop - start)
        spans = zip(self.old.mentions[self.name], self.new.mentions[self.name], strict=True)
        for before, after in spans:
            for p in before.positions:
                where[p] = min(after.start + p - before.start, after.stop - 1)
        return known.moved(where, self.n)

    def donor(self, *, planning: bool = True) -> RowsRun:
        """A fresh prefill of the new prompt. Cost: all its tokens, the first time."""
        if self._donor is None:
            self._donor = run_rows(self.model, None, self.new.ids, range(self.n))
        if not self._booked:
            self._booked = True
            if planning:
                self.meter.planning += self._donor.n_tokens
            else:
                self.meter.repair += self._donor.n_tokens
        return self._donor

    def lend(self, donor: RowsRun) -> None:
        """Take a fresh prefill of the new prompt that the caller has; its tokens are still booked when it is asked for.

        Raises:
            EditError: it is not a prefill of the new prompt.
        """
        if tuple(donor.rows.token_ids) != self.new.ids or donor.rows.history:
            raise EditError(f"{self.method}: the donor is not an exact prefill of the new prompt")
        self._donor = donor

    def check_window(self, rows: Iterable[int]) -> None:
        """Check that the last row can see one of the other rows that are run, in some layer.

        Raises:
            WindowError: it cannot, so running them has no effect on any later token.
        """
        windows = [layer.window for layer in self.model.geometry.layers]
        others = [p for p in rows if p != self.last]
        if others and all(w is not None and self.last - p >= w for p in others for w in windows):
            raise WindowError(
                f"{self.method}: rows {others[0]}..{others[-1]} have left every layer's window "
                f"({max(w for w in windows if w is not None)} positions, the prompt has {self.n}), so running them again "
                "changes nothing that follows. Use full_suffix or erratum"
            )

    def _still_moved(self, run: Sequence[int]) -> tuple[int, ...]:
        own = set(run)
        return tuple(p for p in self.moved if p not in own)


def placed(kept: Sequence[Segment], new: KVCache, history: tuple[str, ...]) -> Rows:
    """Kept rows with new ones in their places; there may be no kept row at all."""
    if not kept:
        return Rows(merge((), new), history)
    return Rows(tuple(kept)).replaced(new, history=history)


def deviation(a: KVCache, b: KVCache) -> Tensor:
    """Size of the difference of every row of two aligned caches relative to the rows' size, ``[pos]``, mean over layers."""
    total = torch.zeros(len(a))
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        gap = (x.float() - y.float()).norm(dim=(0, 2))
        total += (gap / y.float().norm(dim=(0, 2)).clamp(min=1e-6)).cpu()
    return total / (2 * len(a.keys))
