"""What a compiled skill is worth on a real engine: ``python -m experiments.serve_skill CONFIG`` (vLLM; ``make serve-env``).

Hypothesis: for [unique prefix][skill][question] the plug-in of :mod:`notelens.serving.vllm_plugin` brings the first token at
least 3 times sooner than the engine alone, the request that goes ahead for the prefix included, and at least 5 times sooner
where the prefix is cached already; decisions agree with full prefill (at least 0.95 where it is right); and no exact request
is ever answered from approximate blocks.

Falsifiers: smaller ratios; agreement below 0.95, or no higher than with an unrelated skill (``unrelated``); an exact request
among mixed ones whose tokens change although they do not change without skilled requests beside them (``changed_alone``).

Three stages. ``ttft``: the time of a request for one token, both arms in turns on the same prompt in one engine; ``cached``
arms find the prefix in the cache and are compared with each other. ``pollution``: exact and skilled requests over the same
prompts at random, several at once. An exact answer is changed when its tokens are not those of a prefill under a salt of its
own, made before any skilled request; half of the prompts are not asked exactly without a salt until skilled requests have been
there. ``decisions``: gated decisions with a long policy of distractors, read among the answers' first tokens; last, because
that takes longest.
"""

import argparse
import json
import random
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from experiments.compose_cases import SkillCase, neutral_ids
from experiments.compose_fidelity import FidelityConfig, policy_cases
from experiments.compose_harness import FULL, NO_CONTEXT, UNRELATED
from experiments.edit_harness import Line, Row, Stage, Sums, run, show
from notelens.cache.library import SkillLibrary
from notelens.compose import compile_skill
from notelens.errors import EngineError
from notelens.models.base import NoteModel
from notelens.models.load import load
from notelens.serving.client import need_httpx
from notelens.serving.engine import EngineCommand, attach, running
from notelens.serving.metrics import read_settings
from notelens.serving.skill_requests import Send, SkillSession, SkillText, http_sender
from notelens.spans import encode
from notelens.stats import agreement, cluster_bootstrap, cluster_rate

METRICS = (
    "skill_ttft_ratio", "ttft_ms", "agreement_given_full_correct", "p_correct", "changed", "changed_alone", "loaded_share",
)  # fmt: skip
SKILL, CACHED, ALONE = "skill", "cached", "engine_alone"


class ServeSkillConfig(FidelityConfig):
    """Configuration of this experiment.

    Attributes:
        methods: not used here; the plug-in's way is that of ``shift``, or ``seam`` for the ragged head.
        python: of the engine's environment.
        url: of an engine that runs already, with the plug-in and the library of ``folder``; nothing is started then.
        folder: where the model and the skills are written for the engine.
        dtype: of the engine, and of the skills.
        block_size: of the engine; skills begin at its edges.
        arguments: further ones of the engine's server.
        env: variables of its environment.
        prefix_tokens, skill_tokens, request_tokens: lengths of the timed prompt.
        rounds: how often it is timed; each with a prefix of its own.
        mixed, prompts, at_once: requests of the pollution stage, over how many prompts, and how many of them at a time.
        mixed_skill_tokens: length of its skill.
        answer_tokens: of exact answers that are compared.
        timeout_s: of a request.
    """

    methods: tuple[str, ...] = ("shift",)
    margin: float = 0.05
    python: str = ".venv-serve/bin/python"
    url: str | None = None
    folder: Path = Path("runs/serve-skill-model")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    block_size: int = Field(default=32, ge=1)
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=lambda: {"VLLM_CPU_KVCACHE_SPACE": "4"})
    prefix_tokens: int = Field(default=200, ge=1)
    skill_tokens: int = Field(default=2000, ge=1)
    request_tokens: int = Field(default=16, ge=1)
    rounds: int = Field(default=10, ge=1)
    mixed: int = Field(default=1000, ge=1)
    mixed_skill_tokens: int = Field(default=500, ge=1)
    prompts: int = Field(default=20, ge=2)
    at_once: int = Field(default=4, ge=1)
    answer_tokens: int = Field(default=16, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)


@dataclass(frozen=True)
class Timed:
    """A prompt to time: unique prefix, skill, question."""

    id: str
    prefix: tuple[int, ...]
    skill: tuple[int, ...]
    request: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        """All of it."""
        return [*self.prefix, *self.skill, *self.request]


@dataclass(frozen=True)
class Mixed:
    """The prompts of the pollution stage."""

    id: str
    prompts: tuple[Timed, ...]


class ServeSkill:
    """Times, decisions and pollution on one engine.

    Args:
        send: to the engine.
        library: of its plug-in.
    """

    name = "serve_skill"

    def __init__(self, send: Send, library: SkillLibrary) -> None:
        self.send = send
        self.library = library

    def stages(self, config: ServeSkillConfig) -> list[Stage]:
        """Times, pollution, decisions."""
        sizes = {"prefix": config.prefix_tokens, "skill": config.skill_tokens}
        source = {"offset": config.prefix_tokens, "policy_tokens": config.skill_tokens}
        return [
            Stage("ttft", sizes, {}),
            Stage("pollution", {"mixed": config.mixed, "skill": config.mixed_skill_tokens}, {}),
            Stage("decisions", sizes, source),
        ]

    def measure(self, model: NoteModel, config: ServeSkillConfig, stage: Stage, case: Any) -> list[Row]:
        """Rows of a case of any stage."""
        if isinstance(case, Timed):
            return self._times(model, config, case)
        if isinstance(case, Mixed):
            return self._pollution(model, config, case)
        return self._decisions(model, config, case)

    # --- times ------------------------------------------------------------------------------------------------------------

    def _times(self, model: NoteModel, config: ServeSkillConfig, case: Timed) -> list[Row]:
        parts = [case.prefix, self._skill(model, case.skill), case.request]
        arms = [(SKILL, "whole"), (ALONE, "whole"), (SKILL, CACHED), (ALONE, CACHED)]
        rows: list[Row] = []
        for arm, prefix in arms if case.id[-1] in "02468" else reversed(arms):
            session, salt = self._session(config), f"exact-{uuid.uuid4().hex}"
            if prefix == CACHED and arm == SKILL:
                session.prepare(parts)
            elif prefix == CACHED:
                self._exact(case.prefix, 1, salt)
            began = time.perf_counter()
            kind, loaded = "computed", 0
            if arm == SKILL:
                answer = session.complete(parts, max_tokens=1)
                kind, loaded = answer.kind, answer.loaded_tokens
            else:
                self._exact(case.prompt, 1, salt)
            ms = 1e3 * (time.perf_counter() - began)
            lost = f"no rows of the skill were taken ({kind})" if arm == SKILL and kind != "loaded" else None
            rows.append({
                "item": case.id, "family": case.id, "method": f"{arm}/{prefix}", "excluded": lost, "ms": ms,
                "loaded_tokens": loaded, "skill_tokens": len(case.skill),
            })  # fmt: skip
        return rows

    # --- decisions --------------------------------------------------------------------------------------------------------

    def _decisions(self, model: NoteModel, config: ServeSkillConfig, case: SkillCase) -> list[Row]:
        base: Row = {"item": case.id, "family": case.family, "form": case.form, "excluded": None, "right": case.right}
        choose: dict[str, Any] = {"allowed_token_ids": list(case.answer_ids), "return_token_ids": True}

        def index(tokens: Sequence[int]) -> int:
            return case.answer_ids.index(tokens[0])

        full = index(self._exact(case.token_ids, 1, **choose))
        rows: list[Row] = [{**base, "method": FULL, "full": full, "answer": full}]
        bare = index(self._exact(case.without_skills(), 1, **choose))
        rows.append({**base, "method": NO_CONTEXT, "full": full, "answer": bare})
        for method in (SKILL, UNRELATED):
            parts = [
                self._skill(model, case.control.get(c.skill, c.ids) if method == UNRELATED else c.ids)
                if c.skill
                else c.ids
                for c in case.chunks
            ]
            answer = self._session(config).complete(parts, max_tokens=1, **choose)
            lost = None if answer.kind == "loaded" else f"no rows of the skill were taken ({answer.kind})"
            rows.append({
                **base, "method": method, "full": full, "answer": index(_tokens(answer.body)), "excluded": lost,
                "loaded_tokens": answer.loaded_tokens,
            })  # fmt: skip
        return rows

    # --- pollution --------------------------------------------------------------------------------------------------------

    def _pollution(self, model: NoteModel, config: ServeSkillConfig, case: Mixed) -> list[Row]:
        """Exact answers of half of the prompts alone, of all of them among skilled requests, and afterwards.

        The other half is asked with skills first, when nothing exact of it is cached, so that what leaks is reached.
        """
        n = config.answer_tokens
        more: dict[str, Any] = {"return_token_ids": True}
        skill = self._skill(model, case.prompts[0].skill)
        sessions = [self._session(config) for _ in case.prompts]
        rng = random.Random(f"{config.seed}/mixed")

        def exact(at: int) -> tuple[int, str, list[int]]:
            return at, ALONE, self._exact(case.prompts[at].prompt, n, **more)

        def skilled(at: int) -> tuple[int, str, list[int]]:
            prompt = case.prompts[at]
            answer = sessions[at].complete([prompt.prefix, skill, prompt.request], max_tokens=n, **more)
            return at, answer.kind, _tokens(answer.body)

        every = range(len(case.prompts))
        known = every[: len(every) // 2]
        truth = [self._exact(p.prompt, n, f"exact-{uuid.uuid4().hex}", **more) for p in case.prompts]
        draws = max(len(known), config.mixed // 10)
        with ThreadPoolExecutor(config.at_once) as pool:
            alone = list(pool.map(exact, [rng.choice(known) for _ in range(draws)]))
            drawn = [(skilled, at) for at in every[len(known) :]]
            drawn += [(rng.choice([exact, skilled]), rng.choice(every)) for _ in range(config.mixed - len(drawn))]
            mixed = list(pool.map(lambda d: d[0](d[1]), drawn))
        after = [exact(at) for at in every]
        rows: list[Row] = []
        for when, found in (("alone", alone), ("mixed", mixed), ("after", after)):
            rows += [
                {
                    "item": case.id, "family": f"prompt{at}", "excluded": None, "method": kind, "when": when, "prompt": at,
                    "changed": tokens != truth[at], "seen_before": at in known,
                }
                for at, kind, tokens in found
            ]  # fmt: skip
        return rows

    # --- aggregates -------------------------------------------------------------------------------------------------------

    def aggregate(self, config: ServeSkillConfig, stage: Stage, rows: Sequence[Row]) -> list[Line]:
        """Ratios, agreement, or rates of change."""
        sums = Sums(self.name, config, stage, rows)
        {"ttft": self._time_lines, "decisions": self._decision_lines, "pollution": self._change_lines}[stage.name](sums)
        return sums.lines

    def _time_lines(self, sums: Sums) -> None:
        for prefix in ("whole", CACHED):
            (skilled, lost), (alone, _) = (sums.of(f"{arm}/{prefix}") for arm in (SKILL, ALONE))
            other = {r["item"]: r["ms"] for r in alone}
            ratios = [other[r["item"]] / r["ms"] for r in skilled]
            e = cluster_bootstrap(ratios, None, "median", seed=sums.config.seed)
            sums.add("skill_ttft_ratio", SKILL, e, excluded=lost, unit="ratio", params={"state": prefix})
            for arm, found in ((SKILL, skilled), (ALONE, alone)):
                e = cluster_bootstrap([r["ms"] for r in found], None, "median", seed=sums.config.seed)
                sums.add("ttft_ms", arm, e, unit="ms", params={"state": prefix})
            shares = [r["loaded_tokens"] / r["skill_tokens"] for r in skilled]
            e = cluster_bootstrap(shares, None, seed=sums.config.seed)
            sums.add("loaded_share", SKILL, e, excluded=lost, unit="share of the skill", params={"state": prefix})

    def _decision_lines(self, sums: Sums) -> None:
        for method in (FULL, NO_CONTEXT, SKILL, UNRELATED):
            rows, lost = sums.of(method)
            if not rows:
                continue
            full, answers, right, clusters = ([r[key] for r in rows] for key in ("full", "answer", "right", "family"))
            found = agreement(full, answers, right, clusters)
            sums.add("agreement", method, found.overall, excluded=lost, by_chance=found.by_chance, empty=found.empty)
            wrong = ["full prefill wrong"] * (found.overall.n - found.given_right.n)
            sums.add(
                "agreement_given_full_correct", method, found.given_right, excluded=[*lost, *wrong], empty=found.empty
            )
            sums.add("p_correct", method, found.method_right, excluded=lost)

    def _change_lines(self, sums: Sums) -> None:
        """Exact requests only; how many skilled ones ran beside them stands in the line."""
        beside = [r for r in sums.rows if r["when"] == "mixed" and r["method"] != ALONE]
        loaded = sum(r["method"] == "loaded" for r in beside)
        for metric, when in (("changed_alone", ("alone",)), ("changed", ("mixed", "after"))):
            rows = [r for r in sums.rows if r["method"] == ALONE and r["when"] in when]
            e = cluster_rate([r["changed"] for r in rows], [r["family"] for r in rows])
            sums.add(
                metric, ALONE, e, n_changed=sum(r["changed"] for r in rows), n_skilled=len(beside), n_loaded=loaded
            )

    # --- the engine -------------------------------------------------------------------------------------------------------

    def _session(self, config: ServeSkillConfig) -> SkillSession:
        return SkillSession(self.send, block_size=config.block_size)

    def _exact(self, prompt: Sequence[int], n: int, salt: str | None = None, **more: Any) -> list[int]:
        body = {"prompt": list(prompt), "max_tokens": n, "temperature": 0.0, "return_token_ids": True, **more}
        return _tokens(self.send(body if salt is None else {**body, "cache_salt": salt}))

    def _skill(self, model: NoteModel, ids: tuple[int, ...]) -> SkillText:
        """Compiled and in the library, under a name that only its tokens decide."""
        name = f"skill-{uuid.uuid5(uuid.NAMESPACE_OID, repr(ids)).hex}"
        if name not in self.library:
            self.library.put(compile_skill(model, ids, name=name).to_file())
        return SkillText(name, ids)


def _tokens(body: Any) -> list[int]:
    return [int(i) for i in body["choices"][0]["token_ids"]]


def serve_cases(model: NoteModel, config: ServeSkillConfig, stage: Stage) -> list[Any]:
    """Cases of a stage."""
    if stage.name == "decisions":
        return list(policy_cases(model, config, stage))
    n = config.rounds if stage.name == "ttft" else config.prompts
    body = neutral_ids(model.tokenizer, config.skill_tokens if stage.name == "ttft" else config.mixed_skill_tokens)
    prompts: list[Timed] = []
    for i in range(n):
        prefix = neutral_ids(model.tokenizer, config.prefix_tokens)
        random.Random(f"{config.seed}/{stage.name}/{i}").shuffle(prefix)  # a prefix that no other prompt shares
        question = list(encode(model.tokenizer, f"What was the weather like in week {i}? ", templated=True))
        question = (question * config.request_tokens)[: config.request_tokens]
        prompts.append(Timed(f"{stage.name}{i}", tuple(prefix), tuple(body), tuple(question)))
    return list(prompts) if stage.name == "ttft" else [Mixed("mixed", tuple(prompts))]


def write_model(model: NoteModel, folder: Path) -> None:
    """The model as a folder that the engine loads; left alone where it is there."""
    if not (folder / "config.json").exists():
        model.hf.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)


def command(config: ServeSkillConfig, model: Path, skills: Path) -> tuple[str, ...]:
    """How the engine is started with the plug-in.

    By its module: ``vllm serve`` of the CPU build 0.32.0 looks for a package named vllm, which it is not.
    """
    connector = {
        "kv_connector": "SkillConnector", "kv_connector_module_path": "notelens.serving.vllm_plugin",
        "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"skill_library": str(skills.resolve())},
    }  # fmt: skip
    return (
        config.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve()),
        "--served-model-name", config.model, "--host", "{host}", "--port", "{port}",
        "--dtype", config.dtype, "--block-size", str(config.block_size), "--enable-prefix-caching",
        "--kv-transfer-config", json.dumps(connector), *config.arguments,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Command line: starts the engine, or attaches to one, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="folder; runs/<name> when not given")
    parser.add_argument("--n", type=int, help="decisions, instead of the configuration's")
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command continues")
    given = parser.parse_args(arguments)
    config = ServeSkillConfig.read(given.config, n=given.n)
    out = given.out or Path("runs") / config.name
    out.mkdir(parents=True, exist_ok=True)
    model = load(config.model, dtype=config.dtype)
    library = SkillLibrary(config.folder / "skills")
    folder = config.folder / f"{config.model}-{config.dtype}"
    write_model(model, folder)
    with ExitStack() as stack:
        if config.url is None:
            spec = EngineCommand(command(config, folder, library.folder), variables=config.env)
            engine = stack.enter_context(running(spec, out / "engine.log"))
        else:
            engine = attach(config.url)
        size = read_settings(need_httpx().get(f"{engine.url}/metrics", trust_env=False).text).block_size
        if size != config.block_size:
            raise EngineError(f"the engine has blocks of {size} tokens, the configuration says {config.block_size}")
        experiment = ServeSkill(http_sender(engine.url, config.model, timeout_s=config.timeout_s), library)
        lines = run(experiment, config, out, model, seconds=given.seconds, source=serve_cases, tell=_tell)
    sys.stdout.write(show(lines, METRICS))


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
