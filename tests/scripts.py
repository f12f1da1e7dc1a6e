"""Scripts of ``paper_figures``, which is no package, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

FIGURES = Path(__file__).parents[1] / "paper_figures"


def load_script(name: str) -> ModuleType:
    """The script ``paper_figures/NAME.py``."""
    spec = importlib.util.spec_from_file_location(name, FIGURES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
