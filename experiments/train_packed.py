"""Train a competence adapter on prompts that share their beginning: one command, one seed.

    python -m experiments.train_packed --model smollm2-long --seed 0 --out notelens/zoo/adapters

``smollm2-long`` goes on from the shipped adapter of ``smollm2``, on prompts with up to 1,900 tokens of filler. Claim it serves:
a probe of a model that cannot do the task measures nothing, and edits and splices pay at 600 and 2,000 tokens, where the one
trained on short prompts is right with both values of a field in a third of the prompts. What would falsify an adapter: held-out
accuracy below 0.95, as at 2,000 tokens (its card). Only ordinary, freshly prefilled prompts; that several share a beginning
(:mod:`experiments.packed_data`) changes the cost and nothing else.

Tried and dropped: a fresh adapter for gemma3-270m by 150 steps of easy, then all, then longer prompts at 1e-3. Rules with the
field first were right at 0.82 behind 60 steps; with all forms it stayed at 0.6. Its shipped adapter had 700 steps, most
at lower rates (:mod:`experiments.train_competence`), and saw every prompt alone, since packed prompts know no window.
"""

import hashlib
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open

from experiments.competence_data import ACTION_WEIGHT, KINDS, Example, make_example
from experiments.packed_data import Groups, Phase, pack
from experiments.train_competence import ALPHA, PROJECTIONS, RANK, accuracy, load_adapter_, save_adapter
from notelens.models.load import default_cache_dir
from notelens.tasks.gated import GatedDecisions
from notelens.tasks.scenarios import BUILTIN, load_families
from notelens.zoo.embedded import EMBEDDED, load_embedded, merge_adapter_

logger = logging.getLogger("train_packed")

WARM_UP = 10


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained.

    Attributes:
        base: embedded model whose weights it changes.
        begin: embedded model whose shipped adapter it goes on from; none: a fresh one.
        legs: learning rate, which falls to zero over the leg, and phases. A leg begins with the adapter rounded to float16.
        heldout: tokens of the held-out prompts (``None``: a few filler lines), how many of each form, kind and order, kinds.
    """

    base: str
    begin: str | None
    legs: tuple[tuple[float, tuple[Phase, ...]], ...]
    heldout: tuple[tuple[int | None, int, tuple[str, ...]], ...]

    @property
    def phases(self) -> list[Phase]:
        """Of all legs."""
        return [phase for _, phases in self.legs for phase in phases]


RECIPES = {
    "smollm2-long": Recipe(
        "smollm2", "smollm2",
        (
            (4e-4, (Phase(100, (((0, 5), 0.2), ((5, 45), 0.65), ((60, 90), 0.15))),)),
            (3e-4, (Phase(24, (((5, 45), 0.25), ((90, 170), 0.75)), part=(("rule", 0.4), ("request", 0.2), ("field", 0.4))),)),
        ),
        ((None, 8, tuple(KINDS)), (600, 4, ("direct", "update")), (2000, 3, ("direct",))),
    ),
}  # fmt: skip


Pairs = list[tuple[list[Example], list[Example]]]


def legs_of(tokenizer: Any, seed: int, recipe: Recipe) -> list[Pairs]:
    """Two groups for every step of every leg."""
    rng = random.Random(f"{seed}/lines")
    legs: list[Pairs] = []
    number = 0
    for _, phases in recipe.legs:
        legs.append([])
        for phase in phases:
            seeds = range(seed * 10 + 100 * number, 10**9)
            sources = [Groups(tokenizer, at, lines, phase) for at, (lines, _) in zip(seeds, phase.lines, strict=False)]
            shares = [share for _, share in phase.lines]
            legs[-1] += [rng.choices(sources, shares)[0].pair() for _ in range(phase.steps)]
            number += 1
    return legs


def data_hash(legs: Sequence[Pairs]) -> str:
    """Of all training ids."""
    return hashlib.sha256(repr([[e.ids for e in g] for leg in legs for pair in leg for g in pair]).encode()).hexdigest()


def loss_of(model: Any, examples: Sequence[Example]) -> tuple[torch.Tensor, float]:
    """Mean loss of the supervised tokens of a group, by weight, and the share of action tokens that were right."""
    packed = pack(examples)
    hidden = model.model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False
    ).last_hidden_state[0]
    at = (packed.weights[0] > 0).nonzero()[:, 0]
    ids, weights = packed.ids[0][at], packed.weights[0][at]
    logits = model.lm_head(hidden[at - 1])
    losses = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    right = (logits.argmax(-1) == ids)[weights == ACTION_WEIGHT].float().mean().item()
    return (losses * weights).sum() / weights.sum(), right


def train(
    name: str, seed: int, out: Path, checkpoint_dir: Path | None, begin: tuple[int, Path, float] | None = None
) -> Path:
    """Train and save; returns the adapter's path.

    Args:
        name: of the recipe and of the model whose adapter it is.
        seed: of everything drawn.
        out: folder.
        checkpoint_dir: where the adapter is kept behind every leg.
        begin: leg to begin with, the adapter that the leg before it ended with, and the seconds spent so far.
    """
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # extra `train`

    recipe = RECIPES[name]
    base, tokenizer = load_embedded(recipe.base, competence=False, cache_dir=default_cache_dir())
    started = time.perf_counter() - (begin[2] if begin else 0.0)
    legs = legs_of(tokenizer, seed, recipe)
    beginning = EMBEDDED[recipe.begin].adapter_path if recipe.begin else None
    groups = [group for leg in legs for pair in leg for group in pair]
    meta: dict[str, Any] = {
        "alpha": ALPHA, "r": RANK, "seed": seed, "steps": sum(map(len, legs)), "threads": torch.get_num_threads(),
        "prompts": sum(map(len, groups)), "model": name, "began_with_leg": begin[0] if begin else 0,
        "learning_rates": [rate for rate, _ in recipe.legs], "base_sha256": EMBEDDED[name].sha256,
        "begins_with_sha256": hashlib.sha256(beginning.read_bytes()).hexdigest() if beginning else None,
        "train_families": [f.name for f in load_families() if f.split == "train"],
        "eval_families": [f.name for f in load_families() if f.split == "eval"],
        "families_sha256": hashlib.sha256(BUILTIN.read_bytes()).hexdigest(), "data_sha256": data_hash(legs),
        "prompt_tokens": sum(len(e.ids) for group in groups for e in group),
        "run_tokens": sum(pack(group).ids.shape[1] for group in groups),
    }  # fmt: skip
    window = getattr(base.config, "sliding_window", None)
    if window and (longest := max(len(e.ids) for group in groups for e in group)) > window:
        raise ValueError(
            f"a prompt of {longest} tokens; packed prompts know no window, and that of {recipe.base} is {window}"
        )
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=PROJECTIONS, bias="none")
    peft_model: Any = get_peft_model(base, config)
    if path := begin[1] if begin else beginning:
        load_adapter_(peft_model, path)
    for number, (pairs, (rate, _)) in enumerate(zip(legs, recipe.legs, strict=True)):
        if begin is None or number >= begin[0]:
            optimise(peft_model, pairs, rate, f"leg {number}")
            with torch.no_grad():
                for parameter in (p for p in peft_model.parameters() if p.requires_grad):
                    parameter.copy_(parameter.half().float())
            meta["train_seconds"] = round(time.perf_counter() - started)
            if checkpoint_dir is not None:
                save_adapter(peft_model, checkpoint_dir / f"{name}-leg{number}.safetensors", meta)
    path = out / EMBEDDED[name].adapter_file
    save_adapter(peft_model, path, meta)
    return path


def optimise(peft_model: Any, pairs: Pairs, rate: float, name: str) -> None:
    """One pass over ``pairs``; changes ``peft_model``."""
    inner = peft_model.get_base_model()
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    steps, warm_up = len(pairs), min(WARM_UP, len(pairs) // 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min((s + 1) / max(1, warm_up), max(0.0, (steps - s) / max(1, steps - warm_up)))
    )
    started = time.perf_counter()
    recent: list[tuple[float, float]] = []
    for step, pair in enumerate(pairs, start=1):
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
            logger.info("%s step %d loss %.3f action tokens right %.2f (%.0f s)", name, step, *shown, spent)


def evaluate(path: Path, name: str, seed: int) -> list[dict[str, Any]]:
    """Held-out accuracy of the saved file merged into a fresh base model, by length, kind and order."""
    base, tokenizer = load_embedded(RECIPES[name].base, competence=False, cache_dir=default_cache_dir())
    merge_adapter_(base, path)
    rows: list[dict[str, Any]] = []
    for length, n, kinds in RECIPES[name].heldout:
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
    name = meta["model"]
    recipe = RECIPES[name]
    card = {**meta, "sha256": sha, "mix": [asdict(p) for p in recipe.phases], "heldout": rows}
    path.with_suffix(".json").write_text(json.dumps(card, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    table = "\n".join(
        f"| {r['tokens'] or 'about 120'} | {r['mode']} | {r['order']} | {r['accuracy']:.3f} | {r['n']} |" for r in rows
    )
    began = (
        f"It goes on from the adapter of\n  `{recipe.begin}` (sha256 `{meta['begins_with_sha256'][:16]}`) and replaces it."
        if recipe.begin
        else "It begins with a fresh one."
    )
    rates = ", ".join(f"{rate:g}" for rate in meta["learning_rates"])
    apart = f" (legs before leg {meta['began_with_leg']} by commands of their own)" if meta["began_with_leg"] else ""
    text = f"""# Competence adapter of `{name}`

Written by `experiments/train_packed.py`; retrain with
`python -m experiments.train_packed --model {name} --seed {meta["seed"]}`.

- Base: {EMBEDDED[recipe.base].source}; adapter: LoRA r={RANK}, alpha={ALPHA} on all seven projections, float16,
  {path.stat().st_size / 1e6:.1f} MB, sha256 `{sha}`. {began}
- Training: {meta["steps"]} steps, {meta["prompts"]:,} prompts of {meta["prompt_tokens"]:,} tokens, of which
  {meta["run_tokens"]:,} were run (prompts of a group share a beginning, and see only what they would see alone), AdamW
  {rates}, float32, {meta["train_seconds"] / 60:.1f} minutes on {meta["threads"]} CPU threads{apart}. Loss on answers.
- Data: gated decisions of `notelens/tasks/data/families.json`, ordinary prompts, never a patched or stale cache. Hash of all
  training ids: `{meta["data_sha256"][:16]}`.
{"".join(f"  - {_described(p)}" + chr(10) for p in recipe.phases).rstrip()}
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


def _described(phase: Phase) -> str:
    lines = ", ".join(f"{a} to {b} filler lines {share:.0%}" for (a, b), share in phase.lines)
    parts = ", ".join(f"{where} {share:.0%}" for where, share in phase.part)
    forms = ", ".join(f"{f} {phase.forms.count(f) / len(phase.forms):.0%}" for f in dict.fromkeys(phase.forms))
    return f"{phase.steps} steps: {lines}; prompts part at {parts}; {forms}; any words {phase.free_words:.0%}."


def write_saved_card(path: Path, name: str, seed: int) -> None:
    """Evaluate a saved adapter and write its card."""
    with safe_open(str(path), framework="pt") as file:
        meta = json.loads(file.metadata()["notelens"])
    write_card(path, meta, evaluate(path, name, seed))
    logger.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(RECIPES)}")] = "smollm2-long",
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder of the adapter and its card")] = Path("notelens/zoo/adapters"),
    threads: int = 2,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="keep the adapter of every leg here")] = None,
    begin_leg: Annotated[int, typer.Option(help="continue with this leg, from the adapter of --begin-from")] = 0,
    begin_from: Annotated[Path | None, typer.Option(help="adapter that the leg before ended with")] = None,
    begin_seconds: Annotated[float, typer.Option(help="what the legs before took, for the card")] = 0.0,
) -> None:
    """Train, save, evaluate the saved file on held-out families, write the card."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if model not in RECIPES:
        raise typer.BadParameter(f"no recipe for {model!r}; known: {', '.join(RECIPES)}")
    if (begin_leg > 0) != (begin_from is not None):
        raise typer.BadParameter("give --begin-leg and --begin-from together")
    torch.set_num_threads(threads)
    path = train(model, seed, out, checkpoint_dir, begin_from and (begin_leg, begin_from, begin_seconds))
    write_saved_card(path, model, seed)


if __name__ == "__main__":
    typer.run(main)
