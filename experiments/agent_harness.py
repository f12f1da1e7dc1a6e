"""What the experiments on agents share: sessions as cases, arms, baselines, and the pre-registered statistics.

**Arms** are written as in the editing experiments (``method[@K] [option=value ...]``) with two more options:
``reanchor=every:10`` or ``reanchor=drift:0.05`` (default: never), and ``composed=seam@4``: the longest run of filler (the
policy) is compiled once and spliced; what compiling costs is paid once for all sessions and is not in their accounts.

**Baselines** prefill at every turn: the *corrected* prompt (the value in its place), and the prompt with the *same appended
errata*. Both have as many distinct prompts as the field has values; each is prefilled once, and its time and tokens are charged
at every turn at which an agent without edits would prefill it.

**Statistics**, fixed in the configuration before anything is run: a session counts if full prefill of the corrected prompt is
right at each of its values (its *oracle accuracy* is the first line of the table, and a model below ``gate`` is marked);
intervals resample sessions; equivalence is TOST with ``margin`` on paired differences, sessions as clusters; paired success of
whole sessions is tested with McNemar, adjusted by Holm across arms.
"""

from collections.abc import Callable, Sequence

from experiments.agent_cases import FULL, AgentConfig, Baselines, SessionCase
from experiments.edit_arms import Arm, Row
from experiments.edit_harness import Line, Stage, Sums
from notelens.agents import EveryTurns, Never, OnDrift, Session, break_even
from notelens.agents.anchor import Policy
from notelens.compose import Skill, compile_skill
from notelens.edits.context import EditableContext
from notelens.errors import AnswerError, ComposeError, ConfigError, EditError
from notelens.models.base import NoteModel
from notelens.prompt import Prompt
from notelens.stats import Estimate, cluster_bootstrap, cluster_slope, holm, logit_distance, mcnemar_exact, tost_paired

ERRATA = "full_prefill_errata"


# --- arms -------------------------------------------------------------------------------------------------------------------


def policy_of(text: str | None) -> Policy:
    """From ``every:10``, ``drift:0.05`` or ``never``.

    Raises:
        ConfigError: it cannot be read.
    """
    name, _, value = (text or "never").partition(":")
    try:
        if name == "every":
            return EveryTurns(int(value))
        if name == "drift":
            return OnDrift(float(value))
    except ValueError as e:
        raise ConfigError(f"re-anchoring {text!r}: {value!r} is no number") from e
    if name != "never" or value:
        raise ConfigError(f"re-anchoring {text!r} is none of never, every:N, drift:BOUND")
    return Never()


def policy_skill(model: NoteModel, prompt: Prompt) -> Skill:
    """The longest run of filler in a prompt, compiled.

    Raises:
        ComposeError: the prompt has no filler.
    """
    runs: list[tuple[int, int]] = []
    for i, region in enumerate(prompt.regions):
        if region == "filler":
            if runs and runs[-1][1] == i:
                runs[-1] = (runs[-1][0], i + 1)
            else:
                runs.append((i, i + 1))
    if not runs:
        raise ComposeError(f"prompt {prompt.id!r} has no filler that could be compiled as its policy")
    start, stop = max(runs, key=lambda r: r[1] - r[0])
    return compile_skill(model, prompt.token_ids[start:stop], name="policy")


class Starts:
    """The first prefill of a case, shared by the sessions of all arms; each is charged for it."""

    def __init__(self, model: NoteModel, prompt: Prompt, name: str) -> None:
        self.model, self.prompt, self.name = model, prompt, name
        self._known: dict[bool, EditableContext] = {}

    def context(self, record: bool) -> EditableContext:
        """With or without a record of reads. Cost the first time: a prefill."""
        if record not in self._known:
            self._known[record] = EditableContext.from_prompt(
                self.model, self.prompt, {"field": self.name}, record=record
            )
        return self._known[record]

    def session(self, text: str) -> Session:
        """The session of an arm."""
        arm = Arm.parse(text)
        options = dict(arm.options)
        reanchor, composed = options.pop("reanchor", None), options.pop("composed", None)
        return Session.from_prompt(
            self.model, self.prompt, {"field": self.name},
            method=f"{arm.method}@{arm.k}" if arm.k else arm.method, options=options,
            skills=() if composed is None else (policy_skill(self.model, self.prompt),), composer=composed or "seam@4",
            reanchor=policy_of(reanchor), context=None if composed is not None else self.context(arm.method == "auto"),
        )  # fmt: skip

    @classmethod
    def of(cls, model: NoteModel, case: SessionCase) -> "Starts":
        """At the first value of a case."""
        return cls(model, case.prompts[case.order[0]], case.name)


def arm_rows(case: SessionCase, text: str, base: Baselines, starts: Starts) -> list[Row]:
    """One row per turn of an arm; a refusal is a row with its reason."""
    rows: list[Row] = []
    try:
        session = starts.session(text)
        for turn, v in enumerate(case.order):
            seen = len(session.report().turns) if turn else 0
            if turn and session.values[case.name] != case.values[v]:
                session.update(**{case.name: case.values[v]})
            reply = session.ask()
            spent = session.report().turns[seen:]
            other = base.corrected[v]
            errata = base.with_errata(case, turn)
            rows.append({
                **facts(case), "method": text, "turn": turn, "value": v, "right": reply.token_id == case.answer_ids[v],
                "same": reply.token_id == other.top, "same_errata": None if errata is None else reply.token_id == errata.top,
                "cosine": logit_distance(other.logits, reply.logits.float().cpu().numpy()).cosine,
                "tokens": sum(t.total_tokens for t in spent), "ms": sum(t.ms for t in spent), "full_tokens": other.tokens,
                "full_ms": other.ms, "errata_ms": None if errata is None else errata.ms, "exact": session.exact,
                "drift": next((t.drift for t in spent if t.drift is not None and t.drift != float("inf")), None),
                "reanchored": any(t.reanchored for t in spent), "nbytes": max(t.nbytes for t in spent),
                "prompt_tokens": len(session), "excluded": None,
            })  # fmt: skip
    except (EditError, AnswerError, ComposeError) as e:
        return [{**facts(case), "method": text, "excluded": f"refused ({type(e).__name__})", "message": str(e)}]
    return rows


def facts(case: SessionCase) -> Row:
    """What all rows of a case have in common; ``family`` is what intervals resample: the session."""
    return {"item": case.id, "family": case.id, "domain": case.family, "n_tokens": len(case.prompts[0])}


def measure_session(model: NoteModel, case: SessionCase, arms: Sequence[str]) -> list[Row]:
    """Baselines first; arms only where the corrected prompt is answered right at every value."""
    base = Baselines.of(model, case)
    oracle = base.right(case)
    first: Row = {
        **facts(case), "method": FULL, "oracle": sum(oracle) / len(oracle),
        "excluded": None if all(oracle) else "full prefill wrong",
    }  # fmt: skip
    if first["excluded"] is not None:
        return [first]
    rows = [first]
    for turn, v in enumerate(case.order):
        if base.errata:
            other = base.with_errata(case, turn)
            assert other is not None
            rows.append({
                **facts(case), "method": ERRATA, "turn": turn, "value": v, "right": other.top == case.answer_ids[v],
                "same": other.top == base.corrected[v].top, "same_errata": True, "tokens": other.tokens, "ms": other.ms,
                "cosine": logit_distance(base.corrected[v].logits, other.logits).cosine, "excluded": None,
                "full_tokens": base.corrected[v].tokens, "full_ms": base.corrected[v].ms, "errata_ms": other.ms, "drift": None,
                "exact": True, "reanchored": False, "nbytes": 0, "prompt_tokens": other.tokens,
            })  # fmt: skip
    starts = Starts.of(model, case)
    for arm in arms:
        rows += arm_rows(case, arm, base, starts)
    return rows


# --- aggregates -------------------------------------------------------------------------------------------------------------


def by_session(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each session in order of turns."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["item"], r["turn"])):
        found.setdefault(row["item"], []).append(row)
    return found


def oracle_line(sums: Sums, gate: float) -> None:
    """Oracle accuracy of full prefill, and whether it passes the gate."""
    rows = [r for r in sums.rows if r["method"] == FULL]
    rate = cluster_bootstrap([float(r["oracle"]) for r in rows], [r["family"] for r in rows], seed=sums.config.seed)
    passed = rate.value is not None and rate.value >= gate
    lost = [r["excluded"] for r in rows if r["excluded"] is not None]
    sums.add("oracle_accuracy", FULL, rate, excluded=lost, gate_value=gate, competent=passed)


def per_session(sums: Sums, metric: str, method: str, of: Callable[[list[Row]], float | None], *, unit: str) -> None:
    """Median over sessions of something that a session has once; sessions without it are counted as excluded."""
    rows, lost = sums.of(method)
    values = {item: of(own) for item, own in by_session(rows).items()}
    kept = [(item, v) for item, v in values.items() if v is not None]
    e = cluster_bootstrap([float(v) for _, v in kept], [i for i, _ in kept], "median", seed=sums.config.seed)
    sums.add(metric, method, e, excluded=[*lost, *(["none"] * (len(values) - len(kept)))], unit=unit)


def session_lines(sums: Sums, config: AgentConfig, methods: Sequence[str]) -> None:
    """Every line of the table of sessions."""
    oracle_line(sums, config.gate)
    for method in methods:
        rows, _ = sums.of(method)
        if not rows:
            sums.rate("correctness", method, "right")
            continue
        sums.mean("agreement", method, lambda r: float(r["same"]), unit="rate")
        if all(r["same_errata"] is not None for r in rows):
            sums.mean("agreement_errata", method, lambda r: float(r["same_errata"]), unit="rate")
        sums.mean("correctness", method, lambda r: float(r["right"]), unit="rate")
        sums.mean("logit_cosine", method, lambda r: r["cosine"], unit="cosine")
        sums.mean("exact_rate", method, lambda r: float(r["exact"]), unit="rate")
        equivalence(sums, method, [float(r["right"]) - 1.0 for r in rows], [r["item"] for r in rows], config.margin)
        per_session(
            sums, "ttft_ratio", method, lambda s: total(s, "full_ms") / total(s, "ms"), unit="prefill / arm, cumulative"
        )
        if all(r["errata_ms"] is not None for r in rows):
            per_session(
                sums, "ttft_ratio_errata", method, lambda s: total(s, "errata_ms") / total(s, "ms"),
                unit="prefill with errata / arm, cumulative",
            )  # fmt: skip
        per_session(
            sums, "tokens_share", method, lambda s: total(s, "tokens") / total(s, "full_tokens"), unit="of prefills"
        )
        per_session(sums, "mib", method, lambda s: max(r["nbytes"] for r in s) / 2**20, unit="MiB, peak")
        for key in ("ms", "tokens"):
            per_session(
                sums, f"break_even_{key}", method,
                lambda s, key=key: break_even([r[key] for r in s], [r[f"full_{key}"] for r in s]), unit="turn",
            )  # fmt: skip
    paired(sums, methods)


def total(rows: Sequence[Row], key: str) -> float:
    """Sum over the turns of a session."""
    return float(sum(r[key] for r in rows))


def equivalence(sums: Sums, method: str, diffs: Sequence[float], clusters: Sequence[str], margin: float) -> None:
    """TOST of a mean paired difference to full prefill."""
    e = tost_paired(diffs, margin, clusters)
    estimate = Estimate(e.value, e.lo, e.hi, e.n, e.n_clusters, "tost", 1 - 2 * e.alpha, e.flags)
    sums.add("difference_to_full", method, estimate, p=e.p, equivalent=e.equivalent, margin=margin)


def trends(sums: Sums, method: str) -> None:
    """Slope per turn of agreement, correctness and cosine."""
    rows, lost = sums.of(method)
    for metric, key in (("slope_agreement", "same"), ("slope_correctness", "right"), ("slope_cosine", "cosine")):
        e = cluster_slope(
            [float(r["turn"]) for r in rows],
            [float(r[key]) for r in rows],
            [r["item"] for r in rows],
            seed=sums.config.seed,
        )
        sums.add(metric, method, e, excluded=lost, unit="per turn")
    sums.mean("reanchored", method, lambda r: float(r["reanchored"]), unit="share of turns")
    drifts = [(r["drift"], r["item"]) for r in rows if r["drift"] is not None]
    if drifts:
        e = cluster_bootstrap([d for d, _ in drifts], [i for _, i in drifts], "median", seed=sums.config.seed)
        sums.add("drift", method, e, unit="largest relative difference of a checked row")


def paired(sums: Sums, methods: Sequence[str], key: str = "right") -> None:
    """McNemar of whole sessions (right at every turn) against full prefill, Holm across arms.

    Sessions count where full prefill is right throughout, so only the arm can fail: ``only_method`` is 0 by design.
    """
    found: list[tuple[str, int, int, float]] = []
    for method in methods:
        own = by_session(sums.of(method)[0])
        if own:
            failed = sum(not all(r[key] for r in rows) for rows in own.values())
            found.append((method, len(own), failed, mcnemar_exact(failed, 0)))
    for (method, n, failed, p), adjusted in zip(found, holm([p for *_, p in found]) if found else [], strict=True):
        e = Estimate(-failed / n, None, None, n, n, "mcnemar")
        sums.add("sessions_minus_full", method, e, p=p, p_holm=adjusted, only_full=failed, only_method=0)


def lines_of(name: str, config: AgentConfig, stage: Stage, rows: Sequence[Row], *, slopes: bool = False) -> list[Line]:
    """Aggregates of one stage."""
    sums = Sums(name, config, stage, rows)
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m != FULL]
    session_lines(sums, config, methods)
    if slopes:
        for method in methods:
            trends(sums, method)
    return sums.lines


__all__ = [
    "ERRATA",
    "Starts",
    "arm_rows",
    "by_session",
    "equivalence",
    "lines_of",
    "measure_session",
    "oracle_line",
    "paired",
    "per_session",
    "policy_of",
]
