"""Train the competence adapter for long prompts: it goes on from the shipped one, on prompts with up to 1,000 tokens of filler.

    python -m experiments.train_long --seed 0 --out notelens/zoo/adapters

Claim it serves: editing and composing pay at 600 and 2,000 tokens, where the shipped adapter of SmolLM2, trained on prompts of
at most 220, is right with both values of a field in a third of the prompts. What would falsify it: held-out accuracy at those
lengths no better than before, or worse on short prompts. Only ordinary, freshly prefilled prompts; several share a beginning
(:mod:`experiments.long_data`), which changes the cost and nothing else.
"""

import hashlib
import json
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.competence_data import ACTION_WEIGHT, KINDS, Example, make_example
from experiments.long_data import SHARES, Groups, pack
from experiments.train_competence import ALPHA, PROJECTIONS, RANK, accuracy, load_adapter_, save_adapter
from notelens.models.load import default_cache_dir
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.scenarios import BUILTIN, load_families
from notelens.zoo.embedded import EMBEDDED, load_embedded, merge_adapter_

logger = logging.getLogger("train_long")

BEGIN, NAME = "smollm2", "smollm2-long"
LEARNING_RATE, WARM_UP, SIZE = 4e-4, 10, 6
LINES = (((0, 5), 0.2), ((5, 45), 0.65), ((60, 90), 0.15))
"""Fewest and most filler lines (of about 11 tokens), and the share of steps with them."""
HELDOUT = ((None, 8), (600, 6), (2000, 6))
"""Tokens of the held-out prompts (``None``: a few filler lines) and how many in each cell of form, kind and order."""


def steps_of(tokenizer: Any, seed: int, steps: int) -> list[tuple[list[Example], list[Example]]]:
    """Two groups for every step."""
    rng = random.Random(f"{seed}/lines")
    sources = [Groups(tokenizer, seed * 10 + i, lines, SIZE) for i, (lines, _) in enumerate(LINES)]
    return [rng.choices(sources, [share for _, share in LINES])[0].pair() for _ in range(steps)]


def loss_of(model: Any, examples: Sequence[Example]) -> tuple[torch.Tensor, float]:
    """Mean loss of the supervised tokens of a group, by weight, and the share of action tokens that were right."""
    packed = pack(examples)
    hidden = model.model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False
    ).last_hidden_state[0]
    where = packed.weights[0] > 0
    ids, weights = packed.ids[0][where], packed.weights[0][where]
    logits = model.lm_head(hidden[packed.previous[0][where]])
    losses = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    right = (logits.argmax(-1) == ids)[weights == ACTION_WEIGHT].float().mean().item()
    return (losses * weights).sum() / weights.sum(), right


def train(seed: int, steps: int, out: Path, checkpoint_dir: Path | None, every: int) -> Path:
    """Train and save; returns the adapter's path."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # extra `train`

    base, tokenizer = load_embedded(BEGIN, competence=False, cache_dir=default_cache_dir())
    started = time.perf_counter()
    groups = steps_of(tokenizer, seed, steps)
    beginning = EMBEDDED[BEGIN].adapter_path
    if beginning is None:
        raise typer.BadParameter(f"no competence adapter of {BEGIN} to begin with")
    every_id = [[e.ids for e in group] for pair in groups for group in pair]
    meta: dict[str, Any] = {
        "alpha": ALPHA, "r": RANK, "seed": seed, "steps": steps, "prompts": sum(map(len, every_id)), "model": NAME,
        "learning_rate": LEARNING_RATE, "base_sha256": EMBEDDED[BEGIN].sha256,
        "begins_with_sha256": hashlib.sha256(beginning.read_bytes()).hexdigest(),
        "train_families": [f.name for f in load_families() if f.split == "train"],
        "eval_families": [f.name for f in load_families() if f.split == "eval"],
        "families_sha256": hashlib.sha256(BUILTIN.read_bytes()).hexdigest(),
        "data_sha256": hashlib.sha256(repr(every_id).encode()).hexdigest(),
        "prompt_tokens": sum(len(ids) for group in every_id for ids in group),
        "run_tokens": sum(pack(group).ids.shape[1] for pair in groups for group in pair),
    }  # fmt: skip
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=PROJECTIONS, bias="none")
    peft_model: Any = get_peft_model(base, config)
    load_adapter_(peft_model, beginning)
    inner = peft_model.get_base_model()
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min((s + 1) / WARM_UP, max(0.0, (steps - s) / max(1, steps - WARM_UP)))
    )
    recent: list[tuple[float, float]] = []
    for step, pair in enumerate(groups, start=1):
        for group in pair:
            loss, right = loss_of(inner, group)
            (loss / len(pair)).backward()
            recent.append((loss.item(), right))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 5 == 0:
            last = recent[-10:]
            shown = sum(a for a, _ in last) / len(last), sum(b for _, b in last) / len(last)
            spent = time.perf_counter() - started
            logger.info("step %d loss %.3f action tokens right %.2f (%.0f s)", step, *shown, spent)
        meta["train_seconds"] = round(time.perf_counter() - started)
        if checkpoint_dir is not None and step % every == 0:
            save_adapter(peft_model, checkpoint_dir / f"long-step{step}.safetensors", meta)
    path = out / EMBEDDED[NAME].adapter_file
    save_adapter(peft_model, path, meta)
    return path


def evaluate(path: Path, seed: int) -> list[dict[str, Any]]:
    """Held-out accuracy of the saved file merged into a fresh base model, by length, kind and order."""
    base, tokenizer = load_embedded(BEGIN, competence=False, cache_dir=default_cache_dir())
    merge_adapter_(base, path)
    rows: list[dict[str, Any]] = []
    for length, n in HELDOUT:
        kinds = KINDS if length != 2000 else {"direct": 1.0}
        rng = random.Random(f"{seed}/heldout/{length}")
        for order in ("value_first", "rule_first"):
            task = GatedDecisions(split="eval", order=order, length=length)
            draws = task.draws(tokenizer, n * len(task.forms), seed + 1000)
            for kind in kinds:
                examples = [make_example(tokenizer, task, d, kind, rng.choice(d.cells), rng) for d in draws]
                for _, (a, count) in accuracy(base, examples, ["kind"]).items():
                    rows.append({"tokens": length, "mode": kind, "order": order, "accuracy": a, "n": count})
                    logger.info("%s", rows[-1])
    return rows


def write_card(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Card beside the adapter, for people (Markdown) and for programs (JSON)."""
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    card = {**meta, "sha256": sha, "mix": {"lines": LINES, "part_at": SHARES, "size": SIZE}, "heldout": rows}
    path.with_suffix(".json").write_text(json.dumps(card, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    table = "\n".join(
        f"| {r['tokens'] or 'about 120'} | {r['mode']} | {r['order']} | {r['accuracy']:.3f} | {r['n']} |" for r in rows
    )
    lines = "; ".join(f"{a} to {b} filler lines {share:.0%}" for (a, b), share in LINES)
    parts = ", ".join(f"at the {k} {v:.0%}" for k, v in SHARES.items())
    text = f"""# Competence adapter of `{NAME}`

Written by `experiments/train_long.py`; retrain with `python -m experiments.train_long --seed {meta["seed"]}`.

- Base: {EMBEDDED[BEGIN].source}; adapter: LoRA r={RANK}, alpha={ALPHA} on all seven projections, float16,
  {path.stat().st_size / 1e6:.1f} MB, sha256 `{sha}`. It goes on from the adapter of `{BEGIN}`
  (sha256 `{meta["begins_with_sha256"][:16]}`) and replaces it.
- Training: {meta["steps"]} steps, {meta["prompts"]:,} prompts of {meta["prompt_tokens"]:,} tokens, of which
  {meta["run_tokens"]:,} were run ({SIZE} prompts share a beginning, and see only what they would see alone), AdamW
  {LEARNING_RATE}, float32, {meta["train_seconds"] / 60:.1f} minutes on {meta["threads"]} CPU threads. Loss on answers only.
- Data: gated decisions of `notelens/tasks/data/families.json`, ordinary prompts, never a patched or stale cache. {lines}
  of all steps; prompts part {parts}. Hash of all training ids: `{meta["data_sha256"][:16]}`.
- Families trained on ({len(meta["train_families"])}): {", ".join(meta["train_families"])}.
- Families never trained on ({len(meta["eval_families"])}): {", ".join(meta["eval_families"])}.

## Accuracy on families never trained on

Greedy; right means that the first token of the action word, and in a chain every token up to there, is the expected one. All
four rule forms alike.

| tokens | mode | order | accuracy | n |
| --- | --- | --- | --- | --- |
{table}

Not for use beyond these tasks.
"""
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def main(
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder of the adapter and its card")] = Path("notelens/zoo/adapters"),
    steps: int = 100,
    threads: int = 2,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="keep intermediate adapters here")] = None,
    checkpoint_every: int = 25,
) -> None:
    """Train, save, evaluate the saved file on held-out families, write the card."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(threads)
    path = train(seed, steps, out, checkpoint_dir, checkpoint_every)
    write_saved_card(path, seed, threads)


def write_saved_card(path: Path, seed: int, threads: int) -> None:
    """Evaluate a saved adapter and write its card."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        meta = json.loads(file.metadata()["notelens"]) | {"threads": threads}
    write_card(path, meta, evaluate(path, seed))
    logger.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
