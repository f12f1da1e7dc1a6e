"""Runs in the engine's environment: the skill plug-in inside vLLM, on a small random model. Prints nothing; writes JSON.

Usage: ``python vllm_skill_program.py JOB.json RESULT.json`` (``tests/test_vllm_engine.py`` makes the job).
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.inputs import TokensPrompt


def imported_by_the_plugin() -> list[str]:
    """Top names of what the plug-in imports beyond the engine's own connector interface."""
    import vllm.distributed.kv_transfer.kv_connector.v1.metrics
    import vllm.model_executor.layers.rotary_embedding  # noqa: F401

    before = set(sys.modules)
    import notelens.serving.vllm_plugin  # noqa: F401

    return sorted({name.split(".")[0] for name in set(sys.modules) - before})


class Engine:
    """The engine, spoken to with bodies of completion requests."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.llm = LLM(
            job["folder"],
            dtype=job["dtype"],
            block_size=job["block_size"],
            max_model_len=job["max_model_len"],
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            max_num_seqs=4,
            max_num_batched_tokens=job["max_model_len"],
            kv_transfer_config={
                "kv_connector": "SkillConnector",
                "kv_connector_module_path": "notelens.serving.vllm_plugin",
                "kv_role": "kv_consumer",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"skill_library": job["library"]},
            },
        )

    def batch(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Requests that run together."""
        prompts = [TokensPrompt(prompt_token_ids=b["prompt"]) for b in bodies]
        for prompt, body in zip(prompts, bodies, strict=True):
            if body.get("cache_salt"):
                prompt["cache_salt"] = body["cache_salt"]
        sampling = []
        for b in bodies:
            extra = {"kv_transfer_params": b["kv_transfer_params"]} if "kv_transfer_params" in b else None
            sampling.append(
                SamplingParams(temperature=0.0, max_tokens=b["max_tokens"], extra_args=extra, ignore_eos=True)
            )
        outs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [
            {
                "choices": [{"text": o.outputs[0].text}],
                "tokens": list(o.outputs[0].token_ids),
                "cached": o.num_cached_tokens,
                "kv_transfer_params": o.kv_transfer_params,
            }
            for o in outs
        ]

    def send(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request."""
        return self.batch([body])[0]

    def exact(self, prompt: list[int], n: int, salt: str | None = None) -> dict[str, Any]:
        """A request without skills."""
        return self.send({"prompt": prompt, "max_tokens": n, "cache_salt": salt})

    def counters(self) -> dict[str, float]:
        """The plug-in's."""
        return {m.name: m.value for m in self.llm.get_metrics() if "notelens" in m.name}


def shown(answer: Any) -> dict[str, Any]:
    """An answer of a session, as plain data."""
    return {
        "tokens": answer.body["tokens"],
        "cached": answer.body["cached"],
        "kind": answer.kind,
        "loaded_tokens": answer.loaded_tokens,
        "reason": answer.reason,
        "n_ahead": answer.n_ahead,
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Everything the test asks for."""
    out: dict[str, Any] = {"imports": imported_by_the_plugin()}
    from notelens.serving.skill_requests import SkillSession, SkillText

    engine, n, size = Engine(job), job["max_tokens"], job["block_size"]
    skills = {name: SkillText(name, tuple(ids)) for name, ids in job["skills"].items()}

    def parts(case: dict[str, Any]) -> list[Any]:
        return [skills[p] if isinstance(p, str) else p for p in case["parts"]]

    def ids(case: dict[str, Any]) -> list[int]:
        return [i for p in parts(case) for i in (p.token_ids if isinstance(p, SkillText) else p)]

    cases, half = job["cases"], len(job["cases"]) // 2
    # Exact requests before, for half of the cases; all cases with skills; exact requests after, for all of them.
    out["exact_before"] = [engine.exact(ids(c), n) for c in cases[:half]]
    sessions = [SkillSession(engine.send, block_size=size) for _ in cases]
    out["skilled"] = [shown(s.complete(parts(c), max_tokens=n)) for s, c in zip(sessions, cases, strict=True)]
    out["again"] = [shown(s.complete(parts(c), max_tokens=n)) for s, c in zip(sessions, cases, strict=True)]
    out["exact_after"] = [engine.exact(ids(c), n) for c in cases]
    out["other_salt"] = [engine.exact(ids(c), n, "notelens-approximate-another") for c in cases]
    out["same_salt"] = [engine.exact(ids(c), n, s.salt) for s, c in zip(sessions, cases, strict=True)]
    engine.llm.reset_prefix_cache()
    out["exact_fresh"] = [engine.exact(ids(c), n) for c in cases]

    # Exact and skilled requests in one batch.
    engine.llm.reset_prefix_cache()
    mixed = []
    for c in cases[:2]:
        session = SkillSession(lambda body: mixed.append(body) or {}, block_size=size)
        session.complete(parts(c), max_tokens=n)
    for body in [b for b in mixed if b["max_tokens"] == 1]:
        engine.send(body)
    mains = [b for b in mixed if b["max_tokens"] == n]
    plain = [{"prompt": ids(c), "max_tokens": n} for c in cases[:2]]
    out["mixed"] = engine.batch([mains[0], plain[0], mains[1], plain[1]])

    # What is refused, and what fails.
    case, body = cases[0], mains[0]
    engine.llm.reset_prefix_cache()
    out["no_prefix"] = engine.send(body)
    engine.llm.reset_prefix_cache()
    out["no_salt"] = engine.send({**body, "cache_salt": None})
    engine.llm.reset_prefix_cache()
    name, start = case["parts"][1], len(case["parts"][0])

    def marked(skill: str) -> dict[str, Any]:
        params = {"notelens": {"skills": [{"name": skill, "start": start}]}}
        return {**body, "kv_transfer_params": params}

    out["foreign"] = engine.send(marked("foreign"))
    out["unknown"] = engine.send(marked("gone"))
    engine.llm.reset_prefix_cache()
    store = get_kv_transfer_group()._worker.store
    found = store.rows

    def broken(name: str, signature: str) -> Any:
        from notelens.errors import ArtefactError

        raise ArtefactError(f"skill {name!r} was taken away under load")

    store.rows = broken
    out["before_failure"] = engine.counters()
    out["failed"] = shown(SkillSession(engine.send, block_size=size).complete(parts(case), max_tokens=n))
    out["after_failure"] = engine.counters()
    store.rows = found
    out["recovered"] = shown(SkillSession(engine.send, block_size=size).complete(parts(case), max_tokens=n))
    (store.library.path(name)).unlink()
    out["deleted"] = shown(SkillSession(engine.send, block_size=size).complete(parts(case), max_tokens=n))
    out["counters"] = engine.counters()
    return out


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        found = main(json.load(file))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(found, file)
