"""Train the competence adapter of an embedded model: gated decisions as ordinary prompts, one command, one seed.

    python -m experiments.train_competence --model smollm2 --seed 0 --out notelens/zoo/adapters

Claim it serves: a probe of a model that cannot do the task measures nothing. What would falsify the adapter: accuracy below
0.97 on families it never saw. It is a LoRA on all projections, trained on the answer tokens of complete, freshly prefilled
prompts; it never sees a patched or stale cache, so what the probes find is not built in. About 20 minutes on two idle cores
without AMX for smollm2, 50 on one with bfloat16 for gemma3-270m (``--half``); the card of an adapter says how long it took.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.competence_data import (
    ACTION_WEIGHT,
    DISTRACTOR_SHARE,
    KINDS,
    RECIPES,
    Example,
    heldout_examples,
    training_batches,
)
from notelens.models.load import default_cache_dir
from notelens.tasks.render import Order
from notelens.tasks.scenarios import BUILTIN, FORMS, load_families
from notelens.zoo.embedded import EMBEDDED, load_embedded, merge_adapter_

logger = logging.getLogger("train_competence")

RANK, ALPHA, WARM_UP = 8, 16, 20
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def padded(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and weights; with causal attention nothing real can see the padding."""
    width = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    weights = torch.zeros(len(examples), width)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        weights[row, : len(e.ids)] = torch.tensor(e.weights)
    return ids, weights


def supervised_logits(model: Any, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Logits that predict the tokens at ``where`` ([batch, pos], true where supervised); no other row of the head.

    Below the head products are in bfloat16 where a model is stored so (:func:`halve_`).
    """
    half = any(p.dtype == torch.bfloat16 for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, :-1][where[:, 1:]].float())


def halve_(model: Any) -> None:
    """Store the frozen projections as bfloat16, in which they are multiplied; everything else stays float32."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in PROJECTIONS:
            module.weight.data = module.weight.data.to(torch.bfloat16)


@torch.no_grad()
def right_answers(model: Any, examples: Sequence[Example]) -> list[bool]:
    """Whether greedy decoding writes exactly the supervised text up to the first token of the action word."""
    right = [False] * len(examples)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
    for at in range(0, len(order), 16):
        rows = order[at : at + 16]
        ids, _ = padded([examples[i] for i in rows])
        where = torch.zeros_like(ids, dtype=torch.bool)
        for row, i in enumerate(rows):
            where[row, examples[i].n_prompt : examples[i].action_at + 1] = True
        hit = supervised_logits(model, ids, where).argmax(-1) == ids[where]
        parts = hit.split(where.sum(1).tolist())
        for i, part in zip(rows, parts, strict=True):
            right[i] = bool(part.all())
    return right


def accuracy(model: Any, examples: Sequence[Example], keys: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Accuracy and n by the named attributes of the examples."""
    cells: dict[str, list[bool]] = {}
    for e, ok in zip(examples, right_answers(model, examples), strict=True):
        cells.setdefault(" ".join(str(getattr(e, k)) for k in keys), []).append(ok)
    return {k: (sum(v) / len(v), len(v)) for k, v in sorted(cells.items())}


def save_adapter(peft_model: Any, path: Path, meta: dict[str, Any]) -> None:
    """Write the adapter in the layout ``notelens.zoo.embedded.merge_adapter_`` reads (float16)."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in peft_model.named_parameters():
        for part in ("lora_A", "lora_B"):
            if f".{part}.default.weight" in name:
                key = name.removeprefix("base_model.model.").replace(f".{part}.default.weight", f".{part}")
                tensors[key] = value.detach().to(torch.float16).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"notelens": json.dumps(meta, sort_keys=True)})


def load_adapter_(peft_model: Any, path: Path) -> None:
    """Put a saved adapter into a model that is being trained."""
    parameters = dict(peft_model.named_parameters())
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118  # a safetensors file is no mapping
            target, part = key.rsplit(".", 1)
            parameters[f"base_model.model.{target}.{part}.default.weight"].copy_(file.get_tensor(key))


def train(
    model: str, seed: int, out: Path, checkpoint_dir: Path | None, every: int, begin: tuple[int, Path, float] | None,
    trial: int | None = None, half: bool = False,
) -> tuple[Path, dict[str, Any]]:  # fmt: skip
    """Train and save; returns the adapter's path and its metadata.

    Args:
        half: multiply in bfloat16 below the head; the adapter's own parameters stay float32.
        trial: so many steps in all, to see that it works.
        begin: leg to begin with, the adapter that the leg before it ended with, and the seconds spent so far.
    """
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # extra `train`

    base, tokenizer = load_embedded(model, competence=False, cache_dir=default_cache_dir())
    splits = {s: [f.name for f in load_families() if f.split == s] for s in ("train", "eval")}
    started = time.perf_counter()
    recipe = RECIPES[model]
    n_legs = len(recipe.legs) if trial is None else 1
    legs = [training_batches(tokenizer, seed, recipe, leg, trial) for leg in range(n_legs)]
    meta: dict[str, Any] = {
        "alpha": ALPHA, "r": RANK, "seed": seed, "steps": sum(map(len, legs)),
        "prompts": sum(len(b) for leg in legs for b in leg),
        "learning_rates": recipe.rates, "model": model, "dtype": "bfloat16" if half else "float32",
        "threads": torch.get_num_threads(), "base_sha256": EMBEDDED[model].sha256,
        "train_families": splits["train"], "eval_families": splits["eval"],
        "families_sha256": hashlib.sha256(BUILTIN.read_bytes()).hexdigest(),
        "data_sha256": hashlib.sha256(repr([[[e.ids for e in b] for b in leg] for leg in legs]).encode()).hexdigest(),
        "trained_tokens": sum(len(e.ids) for leg in legs for b in leg for e in b),
    }  # fmt: skip
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=PROJECTIONS, bias="none")
    torch.manual_seed(seed)
    if half:
        halve_(base)
    peft_model = get_peft_model(base, config)
    path = out / EMBEDDED[model].adapter_file
    spent = 0.0
    meta["began_with_leg"] = 0 if begin is None else begin[0]
    if begin is not None:
        load_adapter_(peft_model, begin[1])
        spent = begin[2]
    for number, (batches, rate) in enumerate(zip(legs, recipe.rates[:n_legs], strict=True)):
        if begin is None or number >= begin[0]:
            optimise(peft_model, tokenizer, batches, rate, f"leg {number}", seed, checkpoint_dir, every, meta)
            meta["train_seconds"] = round(spent + time.perf_counter() - started)
            with torch.no_grad():  # what is saved, and what the next leg begins with, is float16
                for parameter in (p for p in peft_model.parameters() if p.requires_grad):
                    parameter.copy_(parameter.half().float())
            if checkpoint_dir is not None:
                save_adapter(peft_model, checkpoint_dir / f"leg{number}.safetensors", meta)
    save_adapter(peft_model, path, meta)
    return path, meta


def rate_share(step: int, steps: int, last: float) -> float:
    """Share of a leg's learning rate: up over the warm-up, then down in a line to ``last`` behind the last step."""
    return min((step + 1) / WARM_UP, last + (1 - last) * max(0.0, (steps - step) / max(1, steps - WARM_UP)))


def optimise(
    peft_model: Any,
    tokenizer: Any,
    batches: Sequence[Sequence[Example]],
    rate: tuple[float, float],
    name: str,
    seed: int,
    checkpoint_dir: Path | None,
    every: int,
    meta: dict[str, Any],
) -> None:
    """One pass over ``batches``, logging loss and, with ``checkpoint_dir``, held-out accuracy; changes ``peft_model``."""
    inner = peft_model.get_base_model()
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=rate[0], weight_decay=0.0)
    steps, last = len(batches), rate[1] / rate[0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: rate_share(s, steps, last))
    started = time.perf_counter()
    running: list[float] = []
    hits: list[float] = []
    for step in track(range(1, steps + 1), description="training"):
        ids, weights = padded(batches[step - 1])
        where = weights > 0
        logits = supervised_logits(inner, ids, where)
        losses = torch.nn.functional.cross_entropy(logits, ids[where], reduction="none")
        actions = (logits.argmax(-1) == ids[where])[weights[where] == ACTION_WEIGHT]
        hits.append(actions.float().mean().item())
        loss = (losses * weights[where]).sum() / weights[where].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        running.append(loss.item())
        if step % 10 == 0:
            spent = time.perf_counter() - started
            shown = (sum(running[-10:]) / 10, sum(hits[-10:]) / 10, spent, spent / step)
            logger.info("%s step %d loss %.3f action tokens right %.2f (%.1f s, %.2f s a step)", name, step, *shown)
        if checkpoint_dir is not None and step % every == 0:
            cells = accuracy(
                inner, heldout_examples(tokenizer, seed, 2, ("value_first", "rule_first")), ["kind", "order"]
            )
            logger.info(
                "%s step %d held-out %s", name, step, ", ".join(f"{k} {a:.2f}/{n}" for k, (a, n) in cells.items())
            )
            save_adapter(peft_model, checkpoint_dir / f"{name.replace(chr(32), chr(45))}-step{step}.safetensors", meta)


def evaluate(model: str, path: Path, seed: int, n: int) -> list[dict[str, Any]]:
    """Held-out accuracy of the saved file merged into a fresh base model: by form, kind and order; long ones by kind and order.

    ``n`` draws, a third as many of long prompts, each in every form, kind and order. None is one that training was watched by.
    """
    base, tokenizer = load_embedded(model, competence=False, cache_dir=default_cache_dir())
    merge_adapter_(base, path)
    recipe, orders = RECIPES[model], get_args(Order)
    seed += 1
    examples = heldout_examples(tokenizer, seed, n, orders)
    asked: list[tuple[int | None, list[Example]]] = [(None, examples)]
    if recipe.ask_long:
        long = heldout_examples(tokenizer, seed, max(1, n // 3), orders, recipe.long_tokens, ("direct", "update"))
        asked.append((recipe.long_tokens, [replace(e, form="all") for e in long]))
    rows: list[dict[str, Any]] = []
    for tokens, found in asked:
        for key, (value, count) in accuracy(base, found, ["kind", "form", "order"]).items():
            mode, form, order = key.split()
            rows.append({"mode": mode, "form": form, "order": order, "accuracy": value, "n": count})
            rows[-1] |= {"tokens": tokens} if tokens else {}
    rows.sort(
        key=lambda r: (r.get("tokens", 0), list(KINDS).index(r["mode"]), (*FORMS, "all").index(r["form"]), r["order"])
    )
    return rows


def _weights(weights: dict[str, float]) -> str:
    return ", ".join(f"{k} {v:.0%}" for k, v in weights.items())


def write_card(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Card beside the adapter, for people (Markdown) and for programs (JSON)."""
    recipe = RECIPES[meta["model"]]
    mix = {**asdict(recipe), "distractor_updates": DISTRACTOR_SHARE}
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    card = {**meta, "sha256": sha, "mix": mix, "heldout": rows}
    path.with_suffix(".json").write_text(json.dumps(card, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    short = [r for r in rows if "tokens" not in r]
    by_mode = {
        m: sum(r["accuracy"] * r["n"] for r in short if r["mode"] == m) / sum(r["n"] for r in short if r["mode"] == m)
        for m in KINDS
    }
    tokens = [f", {r['tokens']} tokens" if "tokens" in r else "" for r in rows]
    table = "\n".join(
        f"| {r['mode']} | {r['form']}{length} | {r['order']} | {r['accuracy']:.3f} | {r['n']} |"
        for r, length in zip(rows, tokens, strict=True)
    )
    phases = "\n".join(
        f"  - {p.steps} steps of {p.batch}: {_weights(p.kinds)}; {_weights(p.forms)}; field before rule {p.value_first:.0%}; "
        f"0 to {p.lines} filler lines; words of no family {p.free_words:.0%}; plain {p.plain:.0%} of direct; about "
        f"{recipe.long_tokens} tokens {p.long:.0%} of batches."
        for leg in recipe.legs
        for p in leg
    )
    apart = (
        " (legs before leg {} by commands of their own)".format(meta["began_with_leg"])
        if meta["began_with_leg"]
        else ""
    )
    rates = ", ".join(f"{first:g} to {last:g}" for first, last in meta["learning_rates"])
    half = " --half" if meta["dtype"] == "bfloat16" else ""
    trial = "\n**A trial of a few steps: not an adapter to use.**\n" if meta.get("trial") else ""
    text = f"""# Competence adapter of `{meta["model"]}`
{trial}
Written by `experiments/train_competence.py`; retrain with
`python -m experiments.train_competence --model {meta["model"]} --seed {meta["seed"]}{half}`.

- Base: {EMBEDDED[meta["model"]].source}; adapter: LoRA r={RANK}, alpha={ALPHA} on all seven projections, float16,
  {path.stat().st_size / 1e6:.1f} MB, sha256 `{sha}`.
- Training: {meta["steps"]} steps, {meta["prompts"]:,} prompts, {meta["trained_tokens"]:,} tokens, AdamW {rates},
  {meta["dtype"]}, seed {meta["seed"]}, {meta["train_seconds"] / 60:.1f} minutes on {meta["threads"]} CPU threads{apart}.
  Loss on the answer tokens only.
- Data: gated decisions of `notelens/tasks/data/families.json` (sha256 `{meta["families_sha256"][:16]}`), as ordinary, freshly
  prefilled prompts; never a patched or stale cache. Hash of all training ids: `{meta["data_sha256"][:16]}`.
- Families trained on ({len(meta["train_families"])}): {", ".join(meta["train_families"])}.
- Families never trained on ({len(meta["eval_families"])}): {", ".join(meta["eval_families"])}.
  The two lists share no label, no value and no action word. They do share the wordings of the rules and the system text.
- Batches are minimal pairs (same prompt but field, update or trigger; different right answers), some with any words of the
  vocabulary in place of the family's values and actions. Mix, in phases:
{phases}
  {DISTRACTOR_SHARE:.0%} of all prompts hold an update about something else.

## Accuracy on families never trained on

The saved file merged into a fresh base model; greedy. Right means: argmax over the whole vocabulary is the first token of
the right action word, and for chains also that every token up to there is the expected one (so a chain in other words
counts as wrong). Forms, modes and orders share their draws of words, so a mistake comes in several rows at once.

Seen of these families while the recipe was chosen: {recipe.seen}.

Over forms and orders: {", ".join(f"{m} {a:.3f}" for m, a in by_mode.items())}.

| mode | form | order | accuracy | n |
| --- | --- | --- | --- | --- |
{table}

Not for use beyond these tasks: the adapter narrows the model to short rule decisions of this wording.
"""
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def main(
    model: Annotated[str, typer.Option(help="embedded model")] = "smollm2",
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder of the adapter and its card")] = Path("notelens/zoo/adapters"),
    checkpoint_dir: Annotated[Path | None, typer.Option(help="keep intermediate adapters here")] = None,
    checkpoint_every: int = 60,
    begin_leg: Annotated[int, typer.Option(help="continue with this leg, from the adapter of --begin-from")] = 0,
    begin_from: Annotated[Path | None, typer.Option(help="adapter that the leg before ended with")] = None,
    begin_seconds: Annotated[float, typer.Option(help="what the legs before took, for the card")] = 0.0,
    eval_n: Annotated[int, typer.Option(help="held-out draws; each is asked in every form, mode, order")] = 36,
    trial: Annotated[int | None, typer.Option(help="so many steps in all: a trial, nothing to ship")] = None,
    half: Annotated[bool, typer.Option(help="multiply in bfloat16; twice as fast where the CPU has it")] = False,
    threads: int = 2,
) -> None:
    """Train the adapter, evaluate the saved file on held-out families, write the card."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    if model not in RECIPES:
        raise typer.BadParameter(f"no recipe for {model!r}; there are: {', '.join(RECIPES)}")
    if (begin_leg > 0) != (begin_from is not None):
        raise typer.BadParameter("give --begin-leg and --begin-from together")
    begin = None if begin_from is None else (begin_leg, begin_from, begin_seconds)
    path, meta = train(model, seed, out, checkpoint_dir, checkpoint_every, begin, trial, half)
    if trial is not None:
        meta["trial"] = trial
    rows = evaluate(model, path, seed, eval_n)
    write_card(path, meta, rows)
    for row in rows:
        logger.info("%s", row)


if __name__ == "__main__":
    typer.run(main)
