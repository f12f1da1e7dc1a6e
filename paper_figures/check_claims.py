"""Recompute every number that the documentation quotes from committed tables.

    python paper_figures/check_claims.py

Each entry of ``claims.yaml`` names a sentence of a file and the table row it was read from. A claim holds when the file
contains the text, exactly one row of the table matches, and the row's number is within the tolerance of the quoted one.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = Path(__file__).with_name("claims.yaml")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Selector(_Closed):
    """Which row of a table: all given keys must agree, ``params`` exactly."""

    experiment: str
    metric: str
    method: str = "both"
    model: str | None = None
    params: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether this is the row."""
        same = all(row.get(key) == getattr(self, key) for key in ("experiment", "metric", "method", "params"))
        return same and self.model in (None, row.get("model"))


class Claim(_Closed):
    """One quoted number.

    Attributes:
        id: unique.
        file: where it is quoted, from the root of the repository.
        text: verbatim part of that file which holds the number.
        records: table written by ``notelens table RUN --format json``, from the root of the repository.
        row: which row.
        column: which number of the row.
        value: as quoted.
        tolerance: how far the table may be from it: half a unit of the last quoted digit, more only with a reason.
        reason: why the tolerance is larger.
    """

    id: str
    file: str
    text: str
    records: str
    row: Selector
    column: Literal["value", "lo", "hi", "n", "n_excluded"] = "value"
    value: float
    tolerance: float = Field(ge=0)
    reason: str = ""


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file.

    Raises:
        ValueError: an entry is malformed or an id is used twice; the message names it.
    """
    entries = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("claims") or []
    claims: list[Claim] = []
    for number, entry in enumerate(entries, start=1):
        try:
            claims.append(Claim.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path.name}, claim {number}: {where}: {first['msg']}") from None
    twice = sorted({c.id for c in claims if sum(c.id == other.id for other in claims) > 1})
    if twice:
        raise ValueError(f"{path.name}: id {twice[0]!r} is used twice")
    return claims


def problem(claim: Claim, root: Path = ROOT) -> str | None:
    """Why a claim does not hold, or ``None``."""
    document, table = root / claim.file, root / claim.records
    for path in (document, table):
        if not path.is_file():
            return f"{path.relative_to(root).as_posix()} does not exist"
    if " ".join(claim.text.split()) not in " ".join(document.read_text(encoding="utf-8").split()):
        return f"{claim.file} does not contain {claim.text!r}"
    rows = [row for row in json.loads(table.read_text(encoding="utf-8")) if claim.row.matches(row)]
    if len(rows) != 1:
        return f"{len(rows)} rows of {claim.records} match {claim.row.model_dump(exclude_none=True)}"
    measured = rows[0].get(claim.column)
    if not isinstance(measured, int | float):
        return f"{claim.column} is {measured!r} in {claim.records}"
    if abs(measured - claim.value) > claim.tolerance + 1e-12:
        return f"quoted {claim.value}, but {claim.records} has {measured} (tolerance {claim.tolerance})"
    return None


def main() -> int:
    """Check all claims; the number of those that do not hold."""
    claims = load_claims()
    failed = 0
    for claim in claims:
        found = problem(claim)
        failed += found is not None
        print(f"{'FAILED' if found else 'ok':>6}  {claim.id}{f': {found}' if found else ''}")
    print(f"{len(claims) - failed} of {len(claims)} claims hold")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
