"""The type checker that conftest installs for annotated shapes."""

from beartype import BeartypeConf, FrozenDict, beartype

from notelens.models.base import NoteModel

# Checking a protocol on Python 3.11 evaluates all its properties, and ``bridge`` is an expensive one.
check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({NoteModel: object})))
