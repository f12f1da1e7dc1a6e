"""What a registry entry must bring, as functions that return the problems they find."""

import inspect
import re
from typing import Any

PAPER_REF = re.compile(r"\b(section|appendix|figure|table)\b|\b(sec|app|fig|tab)[:.]", re.IGNORECASE)
METHODS = ("items", "measure", "aggregate")


def probe_problems(name: str, probe: Any) -> list[str]:
    """A probe names its claim, what would contradict it and its place in the paper, and implements every method."""
    problems = _documented(probe)
    if getattr(probe, "name", None) != name:
        problems.append(f"registered as {name!r} but is called {getattr(probe, 'name', None)!r}")
    for attribute in ("claim", "falsifier"):
        text = getattr(probe, attribute, "")
        if len(text.split()) < 4:
            problems.append(f"{attribute} is not a sentence: {text!r}")
    if getattr(probe, "claim", "") == getattr(probe, "falsifier", ""):
        problems.append("claim and falsifier are the same text")
    if not PAPER_REF.search(getattr(probe, "paper_ref", "")):
        problems.append(f"paper_ref names no place in the paper: {getattr(probe, 'paper_ref', '')!r}")
    if getattr(probe, "swap", None) not in ("isolated", "none"):
        problems.append(f"swap is {getattr(probe, 'swap', None)!r}; it must name the kind of swap")
    stages = getattr(probe, "stages", ())
    if not stages or len(set(stages)) != len(stages):
        problems.append(f"stages {stages!r} are empty or repeat")
    abstract = sorted(getattr(probe, "__abstractmethods__", ()))
    problems += [f"{m} is not implemented" for m in METHODS if m in abstract or not callable(getattr(probe, m, None))]
    return problems


def task_problems(name: str, task: Any) -> list[str]:
    """A task has its registered name, a docstring, and ``instances(tokenizer, n, seed)``."""
    problems = _documented(task)
    if getattr(task, "name", None) != name:
        problems.append(f"registered as {name!r} but is called {getattr(task, 'name', None)!r}")
    instances = getattr(task, "instances", None)
    if instances is None:
        return [*problems, "instances is missing"]
    parameters = list(inspect.signature(instances).parameters)
    if parameters[:4] != ["self", "tokenizer", "n", "seed"]:
        problems.append(f"instances takes {parameters}")
    return problems


def family_problems(name: str, family: Any) -> list[str]:
    """A family handles the model type it is registered as."""
    problems = _documented(family)
    if name not in getattr(family, "model_types", ()):
        problems.append(f"registered as {name!r} but handles {getattr(family, 'model_types', ())}")
    return problems


def _documented(entry: Any) -> list[str]:
    text = (vars(entry).get("__doc__") or "").strip()  # vars: a docstring of its own, not the base class's
    first = text.splitlines()[0] if text else ""
    problems = [] if len(first.split()) >= 2 and first[-1] in ".?" else [f"docstring's first line is {first!r}"]
    module = inspect.getmodule(entry)
    if module is None or not (module.__doc__ or "").strip():
        problems.append("its module has no docstring")
    return problems
