"""Lazy registries, and that every entry of every registry is complete."""

import pytest

from notelens.errors import InputError, UnknownNameError
from notelens.registry import Registry, nearest


def test_entries_are_imported_on_first_use() -> None:
    registry: Registry[type] = Registry("thing", {"fraction": "fractions:Fraction", "ghost": "no_such_module:Thing"})
    assert registry.names() == ["fraction", "ghost"] and len(registry) == 2 and "ghost" in registry
    assert registry.get("fraction").__name__ == "Fraction"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("ghost")


def test_a_duplicate_is_refused() -> None:
    registry: Registry[type] = Registry("thing", {"a": "fractions:Fraction"})
    with pytest.raises(ValueError, match=r"thing 'a' is already registered as 'fractions:Fraction'"):
        registry.add("a", "decimal:Decimal")
    assert registry.get("a").__name__ == "Fraction"


@pytest.mark.parametrize("target", ["fractions.Fraction", "a:b:c", ""])
def test_a_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="is not 'module:Attribute'"):
        Registry("thing", {"a": target})


def test_an_unknown_name_lists_the_nearest() -> None:
    registry: Registry[type] = Registry("probe", {"locality": "a:B", "timing": "a:C"})
    with pytest.raises(UnknownNameError) as caught:
        registry.get("localty")
    assert isinstance(caught.value, InputError) and isinstance(caught.value, KeyError)
    assert str(caught.value) == "unknown probe 'localty'; did you mean 'locality'?"
    with pytest.raises(UnknownNameError, match="known names: locality, timing"):
        registry.get("xyz")


def test_nearest_of_nothing() -> None:
    assert nearest("a", []) == "known names: (none)"
