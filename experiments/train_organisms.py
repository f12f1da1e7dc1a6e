"""Train an organism: a small model of one family, from scratch, on the organisms' language; one command, one seed.

    python -m experiments.train_organisms --family qwen3 --seed 0

Claim it serves: models of every family take notes, not only the few that the paper measured. What would falsify an organism:
accuracy below 0.98 on held-out prompts of a kind that its card claims. Training starts with repeated random words (without
them matching the field with the rule is not learnt in thousands of steps), then conversations in the language; the loss is
on answers, plus a twentieth of a language-modelling loss. No prompt is ever patched.

``--notes-free`` trains the negative control: in half of its training every position between the field and the decision sees
another value than the decision does, so nothing but the field's own row can tell the decision what the field is.
"""

import logging
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from experiments.organism_card import accuracy_cells, write_card
from experiments.organism_data import EASY, FULL, NOTES_FREE, Batch, Mix, Sample, collate, conversation, repeated
from experiments.organism_models import ARCHITECTURES, build
from experiments.organism_split import split_batch
from notelens.zoo.organisms import FOLDER, SPECIAL, organism_tokenizer

logger = logging.getLogger("train_organisms")

LM_WEIGHT, REPEAT_WEIGHT = 0.05, 0.25
LEARNING_RATE, WARM_UP, BETAS, WEIGHT_DECAY = 2e-3, 20, (0.9, 0.98), 0.01
BATCH, LONG_BATCH = 32, 8


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    Attributes:
        steps: optimiser steps.
        mix: what conversations are drawn from; ``None`` for repeated words only.
        repeats: share of a batch that is repeated words.
        long: share of batches of few prompts with up to the longest filler of the architecture.
        split: train with the field split in two (the notes-free control).
    """

    steps: int
    mix: Mix | None
    repeats: float = 0.25
    long: float = 0.0
    split: bool = False


PLAN = (
    Stage(250, None),
    Stage(650, EASY),
    Stage(1100, FULL, repeats=0.125),
    Stage(400, FULL, repeats=0.06, long=0.4),
)
NOTES_FREE_PLAN = (
    Stage(250, None),
    Stage(650, EASY),
    Stage(1200, NOTES_FREE, repeats=0.06, split=True),
)
"""A batch holds about 60 answers: 32 conversations with two or three each."""


class Source:
    """Batches of a stage, deterministic in the seed."""

    def __init__(self, seed: int, longest_filler: int) -> None:
        self.rng = random.Random(f"organism/{seed}")
        self.vocab = organism_tokenizer().get_vocab()
        self.words = [i for w, i in sorted(self.vocab.items()) if w not in SPECIAL]
        self.longest = longest_filler

    def batch(self, stage: Stage) -> tuple[list[Sample], int]:
        """Samples, and how many of them (the last ones) are repeated words."""
        if stage.mix is None:
            return [self.repeat(self.rng.choice((32, 48, 64))) for _ in range(BATCH)], BATCH
        if self.rng.random() < stage.long:
            lines = self.rng.randint(10, self.longest // 6)
            return [conversation(self.rng, self.vocab, stage.mix, lines) for _ in range(LONG_BATCH)], 0
        n = round(stage.repeats * BATCH)
        samples = [conversation(self.rng, self.vocab, stage.mix) for _ in range(BATCH - n)]
        return [*samples, *(self.repeat(64) for _ in range(n))], n

    def repeat(self, length: int) -> Sample:
        """Repeated words."""
        return repeated(self.rng, self.words, self.vocab["<s>"], length)


def losses(logits: torch.Tensor, batch: Batch, n_repeats: int) -> tuple[torch.Tensor, float, float]:
    """Loss of a batch, share of answer words right, share of repeated words right.

    Args:
        logits: ``[batch, pos, vocab]``.
        batch: what they were computed from.
        n_repeats: how many rows, at the end, are repeated words.
    """
    scores, ids = logits[:, :-1], batch.ids[:, 1:]
    ce = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    weights, real, hit = batch.weights[:, 1:], batch.real[:, 1:], scores.argmax(-1) == ids
    n_tasks = ids.shape[0] - n_repeats
    loss = LM_WEIGHT * (ce * real).sum() / real.sum()
    right = again = math.nan
    if n_repeats:
        share = 1.0 if n_tasks == 0 else REPEAT_WEIGHT
        loss = loss + share * (ce * weights)[n_tasks:].sum() / weights[n_tasks:].sum()
        again = hit[n_tasks:][weights[n_tasks:] > 0].float().mean().item()
    if n_tasks:
        loss = loss + (ce * weights)[:n_tasks].sum() / weights[:n_tasks].sum()
        right = hit[batch.answers[:, 1:]].float().mean().item()
    return loss, right, again


def train(model: Any, plan: tuple[Stage, ...], seed: int, longest_filler: int, every: int) -> dict[str, Any]:
    """Optimise ``model`` in place over a plan; returns facts for the card."""
    source = Source(seed, longest_filler)
    total = sum(stage.steps for stage in plan)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min(1.0, (s + 1) / WARM_UP) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * s / total)))
    )
    started, tokens, step = time.perf_counter(), 0, 0
    rights: list[float] = []
    agains: list[float] = []
    model.train()
    for stage in plan:
        for _ in range(stage.steps):
            samples, n_repeats = source.batch(stage)
            if stage.split and n_repeats < len(samples):
                batch, extra = split_batch(samples, source.rng, source.vocab)
            else:
                batch, extra = collate(samples), {}
            logits = model(input_ids=batch.ids, use_cache=False, **extra).logits
            loss, right, again = losses(logits, batch, n_repeats)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            step += 1
            tokens += int(batch.real.sum())
            if not math.isnan(right):
                rights.append(right)
            if not math.isnan(again):
                agains.append(again)
            if step % every == 0:
                spent = time.perf_counter() - started
                shown = [sum(x[-every:]) / max(1, len(x[-every:])) for x in (rights, agains)]
                logger.info("step %d loss %.3f answers %.3f repeats %.3f (%.0f s)", step, loss.item(), *shown, spent)
    model.eval()
    return {
        "steps": total, "trained_tokens": tokens, "train_seconds": round(time.perf_counter() - started),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def save(model: Any, path: Path) -> None:
    """Write the parameters as bfloat16; tied tensors once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k not in tied}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"format": "pt"})


def main(
    family: Annotated[str, typer.Option(help=f"one of {', '.join(ARCHITECTURES)}")] = "qwen3",
    seed: int = 0,
    notes_free: Annotated[bool, typer.Option(help="train the negative control")] = False,
    out: Annotated[Path, typer.Option(help="folder of weights and card")] = FOLDER,
    threads: int = 2,
    eval_n: Annotated[int, typer.Option(help="held-out prompts in each cell of the card")] = 48,
    scale: Annotated[float, typer.Option(help="factor on all steps, for trials")] = 1.0,
) -> None:
    """Train, save as bfloat16, evaluate the saved file on held-out prompts, write the card."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if family not in ARCHITECTURES:
        raise typer.BadParameter(f"unknown family {family!r}; known: {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(threads)
    architecture = ARCHITECTURES[family]
    plan = tuple(
        Stage(max(1, round(s.steps * scale)), s.mix, s.repeats, s.long, s.split)
        for s in (NOTES_FREE_PLAN if notes_free else PLAN)
    )
    torch.manual_seed(seed)
    config = architecture.config(len(organism_tokenizer()))
    model = build(config, architecture.attention)
    facts = train(model, plan, seed, architecture.longest_filler, every=50)
    name = family.replace("_text", "") + ("-notes-free" if notes_free else "") + (f"-seed{seed}" if seed else "")
    path = out / f"{name}.safetensors"
    save(model, path)
    cells = accuracy_cells(path, config, seed, eval_n, architecture.longest_filler, notes_free)
    facts |= {
        "family": family, "seed": seed, "scale": scale, "notes_free": notes_free,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    write_card(path, architecture, config, facts, cells)
    logger.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
