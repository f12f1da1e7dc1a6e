"""A two-layer decoder with weights written by hand, as a real ``LlamaForCausalLM``, so every answer is known on paper.

The prompt ``... field ... rule with trigger , ; ... request . : ?`` has one field token worth f = -1 or +1 and trigger
tokens worth t = -1 or +1. What the weights do, and nothing else:

* Layer 0, heads 0 and 1 (stored head 0): delimiters ``; , . :`` attend to the field and to the trigger and copy f and t
  into two channels. Every other token attends to ``start``, whose values are zero. Scores differ by more than 100, so
  the softmax underflows: other weights are exactly 0 in float32.
* Layer 0, MLP: ``silu(x) y + silu(-x) (-y) = x y``, so a delimiter behind field and trigger writes the conclusion c = f
  t.
* Layer 1, head 2 (stored head 1), the *read head*: the decision token ``?`` attends to the *notes* ``;`` only and moves
  the mean of their conclusions to the output channel. Other delimiters hold the conclusion too, and nobody reads them.
* Head 3 of layer 0 lets filler tokens look at what precedes them (position dependent, through a rotating pair of
  channels), so that caches and positions matter everywhere; delimiters and ``?`` do not take part in it.

Consequences: field-only and trigger-only recovery are exactly 0, the notes row in layer 1 has recovery 1 by its value
in stored head 1 alone (keys are the same on both sides), rows of layer 0 have 0. The conclusion is decodable at a
delimiter from the output of layer 0 on and at ``?`` from the output of layer 1; the decision's logit-lens margin is the
constant bias before that. RoPE acts (channels 0 and 4 of each key rotate), but the channels that carry meaning stand in
pairs that do not visibly rotate.
"""

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from notelens.prompt import Pair, Prompt, Span
from notelens.tasks.base import Cell, Instance

# --- vocabulary -------------------------------------------------------------------------------------------------------

ANSWERS = ("deny", "approve")
FIELD_VALUES = {"f0": -1.0, "f1": 1.0, "f2": 0.0}
"""``f2`` says nothing: the conclusion is then 0."""
TRIGGER_VALUES = {"t0": -1.0, "t1": 1.0, "n0": 1.0, "n1": -1.0, "x0": 1.0, "y0": 1.0, "x1": -1.0, "y1": -1.0}
NOTE, DELIMITERS, SINK, DECISION = ";", (";", ",", ".", ":"), "start", "?"
FAMILIES = ("parcel", "visit", "claim", "loan", "seat", "badge")
_FILLER = tuple(f"w{i}" for i in range(12))
_PLAIN = (*FAMILIES, *_FILLER, "is", "if", "then", "else", "unless", "please", "decide")
VOCABULARY = ("unk", SINK, *FIELD_VALUES, *TRIGGER_VALUES, *DELIMITERS, DECISION, *ANSWERS, *_PLAIN)
FORMS = ("two_clause", "polarity", "swapped", "negated")

# --- channels and constants -------------------------------------------------------------------------------------------

_FLAGS = ("sink", "field", "trigger", "delimiter", "note", "decision", "filler")
_NAMES = (*_FLAGS, "f", "t", "gathered_f", "gathered_t", "conclusion", "out", "balance", "one")
CHANNEL = {name: i for i, name in enumerate(_NAMES)}
"""Meaning of the first residual channels; 16 to 31 hold a code of the token's identity."""
_CODE, D_MODEL, D_HEAD, N_HEADS, N_KV_HEADS, N_LAYERS = 16, 32, 8, 4, 2, 2
READ_LAYER, READ_HEAD, READ_KV_HEAD = 1, 2, 1
WRITE_INDEX, COMMIT_INDEX = 1, 2
"""Indices into the residuals (0 is the embedding) at which delimiters hold the conclusion and the decision is final."""
_EPS = 1e-10
_ROPE_THETA = 1e30
_SINK_SCORE, _MATCH_SCORE = 130.0, 300.0
_C = 2.0
"""Size of the conclusion in the residual of a delimiter."""
_G = 3.0
"""What a unanimous read adds to the output channel of the decision token."""
_BIAS = 0.25
"""Value of the output channel in the embedding of the decision token: a lens margin that is right by chance."""
_W = 2.0
"""Weight of the output channel in the unembedding rows of the answers."""


def _scale(norm_squared: float) -> float:
    """What RMSNorm multiplies a residual of this squared norm with."""
    return 1.0 / math.sqrt(norm_squared / D_MODEL + _EPS)


def tiny_margin(read: float) -> float:
    """logit(approve) - logit(deny) at the decision when the notes' mean conclusion is ``read``, in closed form."""
    out = _BIAS + _G * read
    return 2 * _W * out * _scale(D_MODEL - _BIAS**2 + out**2)


LENS_MARGIN_BEFORE = 2 * _W * _BIAS * _scale(D_MODEL)
"""logit(approve) - logit(deny) at the decision, read from the embedding or the output of layer 0, any prompt."""


# --- tokenizer --------------------------------------------------------------------------------------------------------


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer, words separated by white space, no special tokens, no chat template."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="unk"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny prompts; shared."""
    return new_tokenizer()


def ids_of(words: Sequence[str]) -> tuple[int, ...]:
    """Token ids of words; every word must be in the vocabulary."""
    return tuple(VOCABULARY.index(word) for word in words)


# --- weights ----------------------------------------------------------------------------------------------------------


def _embedding(word: str, generator: torch.Generator) -> torch.Tensor:
    """One row of squared norm ``D_MODEL``."""
    row = torch.zeros(D_MODEL, dtype=torch.float64)
    code = torch.randn(D_MODEL - _CODE, generator=generator, dtype=torch.float64)
    row[CHANNEL["one"]] = 1.0
    if word == SINK:
        row[CHANNEL["sink"]] = 1.0
    else:
        row[_CODE:] = 2.0 * code / code.norm()
    if word in FIELD_VALUES:
        row[CHANNEL["field"]], row[CHANNEL["f"]] = 1.0, FIELD_VALUES[word]
    elif word in TRIGGER_VALUES:
        row[CHANNEL["trigger"]], row[CHANNEL["t"]] = 1.0, TRIGGER_VALUES[word]
    elif word in DELIMITERS:
        row[CHANNEL["delimiter"]] = 1.0
        row[CHANNEL["note"]] = float(word == NOTE)
    elif word == DECISION:
        row[CHANNEL["decision"]], row[CHANNEL["out"]] = 1.0, _BIAS
    elif word != SINK:
        row[CHANNEL["filler"]] = 1.0
    row[CHANNEL["balance"]] = math.sqrt(D_MODEL - float(row.square().sum()))
    return row


def _linear(n_out: int, n_in: int, entries: Mapping[tuple[int, int], float]) -> torch.Tensor:
    weight = torch.zeros(n_out, n_in, dtype=torch.float64)
    for at, value in entries.items():
        weight[at] = value
    return weight


def _at(head: int, dim: int) -> int:
    return head * D_HEAD + dim


def _weights(reads_notes: bool, reads_field: bool) -> dict[str, torch.Tensor]:
    """All weights of the decoder.

    Args:
        reads_notes: layer 1's read head moves the notes to the output.
        reads_field: the decision token gathers field and trigger itself in layer 0 and concludes there.
    """
    c, root = CHANNEL, math.sqrt(D_HEAD)
    sink, match, slow, spin = 3, 2, 6, 0  # channels of a head; pair 0 (channels 0 and 4) rotates by one radian a token
    heads, kv_heads = N_HEADS * D_HEAD, N_KV_HEADS * D_HEAD
    generator = torch.Generator().manual_seed(0)
    embedding = torch.stack([_embedding(word, generator) for word in VOCABULARY])

    query0 = {
        (_at(0, match), c["delimiter"]): _MATCH_SCORE * root,
        (_at(1, slow), c["delimiter"]): _MATCH_SCORE * root,
        (_at(0, sink), c["one"]): _SINK_SCORE * root,
        (_at(1, sink), c["one"]): _SINK_SCORE * root,
        (_at(3, spin), c["filler"]): 1.5 * root,
        (_at(3, sink), c["one"]): _SINK_SCORE * root,
        (_at(3, sink), c["filler"]): -_SINK_SCORE * root,
    }
    if reads_field:
        query0[_at(0, match), c["decision"]] = _MATCH_SCORE * root
        query0[_at(1, slow), c["decision"]] = _MATCH_SCORE * root
    key0 = {
        (_at(0, match), c["field"]): 1.0,
        (_at(0, slow), c["trigger"]): 1.0,
        **{(_at(h, sink), c["sink"]): 1.0 for h in range(N_KV_HEADS)},
        **{(_at(h, spin), c["one"]): 1.0 for h in range(N_KV_HEADS)},
    }
    value0 = {
        (_at(0, 0), c["f"]): 1.0,
        (_at(0, 1), c["t"]): 1.0,
        **{(_at(1, i), _CODE + i): 1.0 for i in range(D_HEAD)},
    }
    out0 = {
        (c["gathered_f"], _at(0, 0)): 1.0,
        (c["gathered_t"], _at(1, 1)): 1.0,
        **{(_CODE + i, _at(3, i)): 0.8 for i in range(D_HEAD)},
    }
    filled = _scale(D_MODEL + 2)  # a delimiter that holds f and t
    gate = {(0, c["gathered_f"]): 1.0, (1, c["gathered_f"]): -1.0}
    up = {(0, c["gathered_t"]): 1.0, (1, c["gathered_t"]): -1.0}
    down = {(c["conclusion"], i): _C / filled**2 for i in (0, 1)}
    if reads_field:
        down |= {(c["out"], i): _G / filled**2 for i in (0, 1)}

    query1 = {
        (_at(READ_HEAD, match), c["decision"]): _MATCH_SCORE * root,
        (_at(READ_HEAD, sink), c["one"]): _SINK_SCORE * root,
    }
    key1 = {
        (_at(READ_KV_HEAD, match), c["note"]): 1.0,
        **{(_at(h, sink), c["sink"]): 1.0 for h in range(N_KV_HEADS)},
        **{(_at(h, spin), c["one"]): 1.0 for h in range(N_KV_HEADS)},
    }
    value1 = {  # stored head 0 holds the conclusion and the field as well, for nobody
        (_at(READ_KV_HEAD, 0), c["conclusion"]): 1.0,
        (_at(0, 0), c["conclusion"]): 1.0,
        (_at(0, 1), c["f"]): 1.0,
    }
    written = _scale(D_MODEL + 2 + _C**2)
    out1 = {(c["out"], _at(READ_HEAD, 0)): _G / (_C * written)} if reads_notes else {}

    head = torch.zeros(len(VOCABULARY), D_MODEL, dtype=torch.float64)
    head[:, _CODE:] = 0.3 * torch.randn(len(VOCABULARY), D_MODEL - _CODE, generator=generator, dtype=torch.float64)
    for word, sign in zip(ANSWERS, (-1.0, 1.0), strict=True):
        head[VOCABULARY.index(word)] = 0.0
        head[VOCABULARY.index(word), c["out"]] = sign * _W
    ones = torch.ones(D_MODEL, dtype=torch.float64)
    n_mlp = 4
    layer0 = {
        "self_attn.q_proj": _linear(heads, D_MODEL, query0),
        "self_attn.k_proj": _linear(kv_heads, D_MODEL, key0),
        "self_attn.v_proj": _linear(kv_heads, D_MODEL, value0),
        "self_attn.o_proj": _linear(D_MODEL, heads, out0),
        "mlp.gate_proj": _linear(n_mlp, D_MODEL, gate),
        "mlp.up_proj": _linear(n_mlp, D_MODEL, up),
        "mlp.down_proj": _linear(D_MODEL, n_mlp, down),
    }
    layer1 = {
        "self_attn.q_proj": _linear(heads, D_MODEL, query1),
        "self_attn.k_proj": _linear(kv_heads, D_MODEL, key1),
        "self_attn.v_proj": _linear(kv_heads, D_MODEL, value1),
        "self_attn.o_proj": _linear(D_MODEL, heads, out1),
        "mlp.gate_proj": _linear(n_mlp, D_MODEL, {}),
        "mlp.up_proj": _linear(n_mlp, D_MODEL, {}),
        "mlp.down_proj": _linear(D_MODEL, n_mlp, {}),
    }
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": head}
    for layer, parts in enumerate((layer0, layer1)):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.{name}.weight": weight for name, weight in parts.items()}
        weights |= {f"{at}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    return weights


def tiny_hf(*, reads_notes: bool = True, reads_field: bool = False) -> LlamaForCausalLM:
    """A fresh copy of the decoder as a plain transformers model, float32, in evaluation mode."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=D_MODEL,
        intermediate_size=4,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=D_HEAD,
        max_position_embeddings=512,
        rms_norm_eps=_EPS,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights = {name: w.float() for name, w in _weights(reads_notes, reads_field).items()}
    model.load_state_dict(weights, strict=True)
    return model


def wrapped(hf: Any, name: str, **options: Any) -> Any:
    """The model behind the library's protocol, with a tokenizer of its own."""
    from notelens.models.load import wrap

    return wrap(hf, new_tokenizer(), name=name, **options)


@cache
def tiny_model() -> Any:
    """The hand-set decoder as a ``NoteModel``; shared and read-only."""
    return wrapped(tiny_hf(), "tiny")


@cache
def broken_direct() -> Any:
    """The decision token reads field and trigger itself: field- and trigger-only recovery 1, notes 0, commit at 1."""
    return wrapped(tiny_hf(reads_notes=False, reads_field=True), "tiny-direct")


@cache
def broken_blind() -> Any:
    """Conclusions are written and nobody reads them: every prompt is answered "approve" with the bias."""
    return wrapped(tiny_hf(reads_notes=False), "tiny-blind")


# --- prompts ----------------------------------------------------------------------------------------------------------


def _rule(form: str, rule: int) -> list[tuple[str, str]]:
    """Words of the rule with their region, and triggers marked."""
    if form == "polarity":
        return [("if", "rule"), (f"t{rule}", "trigger"), ("then", "rule"), (",", "rule")]
    if form == "negated":
        return [("unless", "rule"), (f"n{rule}", "trigger"), ("then", "rule"), (",", "rule")]
    if form == "swapped":
        return [("if", "rule"), (f"x{rule}", "trigger"), ("else", "rule"), (f"y{rule}", "trigger"), (",", "rule")]
    if form == "two_clause":
        return [("if", "rule"), ("x0", "rule"), ("else", "rule"), ("y0", "rule"), (",", "rule")]
    raise ValueError(f"unknown form {form!r}; there are {', '.join(FORMS)}")


def conclusion_of(words: Sequence[str]) -> int:
    """Index into ``ANSWERS`` of what the weights conclude from the words; the field must be ``f0`` or ``f1``."""
    f = [FIELD_VALUES[w] for w in words if w in FIELD_VALUES]
    t = [TRIGGER_VALUES[w] for w in words if w in TRIGGER_VALUES]
    return int(sum(f) / len(f) * sum(t) / len(t) > 0)


def _spans(labels: Sequence[str], names: Sequence[str]) -> tuple[Span, ...]:
    """Maximal runs of positions whose label is one of ``names``."""
    inside = [i for i, label in enumerate(labels) if label in names]
    starts = [i for i in inside if i - 1 not in inside]
    return tuple(Span(a, next(b + 1 for b in inside if b >= a and b + 1 not in inside)) for a in starts)


def tiny_prompt(labelled: Sequence[tuple[str, str]], *, id: str) -> Prompt:
    """A prompt from (word, region) pairs; the last word is the decision token."""
    words, regions = zip(*labelled, strict=True)
    n = len(words)
    spans = {"field": _spans(regions, ("field",)), "rule": _spans(regions, ("rule", "trigger"))}
    if "trigger" in regions:
        spans["trigger"] = _spans(regions, ("trigger",))
    request = [i for i, region in enumerate(regions) if region == "request"]
    anchors = {
        "rule_end": spans["rule"][-1].stop - 1,
        "before_request": request[0] - 1,
        "request_end": request[-1],
        "before_decision": n - 2,
        "decision": n - 1,
    }
    return Prompt(
        id=id,
        text=" ".join(words),
        token_ids=ids_of(words),
        tokens=words,
        spans=spans,
        regions=regions,
        anchors=anchors,
        answer=ANSWERS[conclusion_of(words)],
    )


def tiny_words(
    form: str, cell: Cell, *, family: str = "parcel", index: int = 0, seed: int = 0, n_notes: int = 1
) -> list[tuple[str, str]]:
    """(word, region) pairs of one cell. Fillers depend on family, index and seed only: cells and forms share them."""
    rng = random.Random(f"tiny/{seed}/{family}/{index}")

    def line(end: str) -> list[tuple[str, str]]:
        return [(w, "filler") for w in (*rng.choices(_FILLER, k=rng.randint(2, 4)), end)]

    before = [part for _ in range(rng.randint(1, 3)) for part in line(",")]
    after = [part for i in range(n_notes - 1 + rng.randint(1, 3)) for part in line(NOTE if i < n_notes - 1 else ",")]
    return [
        (SINK, "template"), (family, "record"), ("is", "record"), (f"f{cell[0]}", "field"), (",", "record"),
        *before, *_rule(form, cell[1]), (NOTE, "filler"), *after,
        ("please", "request"), ("decide", "request"), (".", "request"), (":", "template"), (DECISION, "template"),
    ]  # fmt: skip


def tiny_instance(
    form: str = "polarity", family: str = "parcel", index: int = 0, *, seed: int = 0, n_notes: int = 1
) -> Instance:
    """One grid of prompts: two field values by two versions of the rule (one version for ``two_clause``)."""
    cells: tuple[Cell, ...] = ((0, 0), (1, 0)) if form == "two_clause" else ((0, 0), (0, 1), (1, 0), (1, 1))
    id = f"{family}/{form}/{index:03d}"
    prompts: dict[Cell, Prompt] = {}
    for cell in cells:
        words = tiny_words(form, cell, family=family, index=index, seed=seed, n_notes=n_notes)
        prompts[cell] = tiny_prompt(words, id=f"{id}/{cell[0]}{cell[1]}")
    return Instance(
        id=id,
        family=family,
        form=form,
        group=f"{family}/{index:03d}",
        cells=prompts,
        answers=ANSWERS,
        answer_ids=(VOCABULARY.index(ANSWERS[0]), VOCABULARY.index(ANSWERS[1])),
        conclusion={cell: ANSWERS.index(prompt.answer) for cell, prompt in prompts.items()},
        meta={"v0": "f0", "v1": "f1", "p": "deny", "q": "approve", "n_notes": n_notes, "n_tokens": len(prompts[0, 0])},
    )


def tiny_instances(
    n: int,
    forms: Sequence[str] = ("polarity",),
    *,
    families: Sequence[str] = FAMILIES[:4],
    seed: int = 0,
    n_notes: int = 1,
) -> list[Instance]:
    """The first ``n`` instances, spread evenly over families and forms.

    Args:
        n_notes: how many notes ``;`` each prompt holds; the decision reads their mean.
    """
    found: list[Instance] = []
    index = 0
    while len(found) < n:
        for shift in range(len(forms)):
            for at, family in enumerate(families):
                form = forms[(at + shift) % len(forms)]
                found.append(tiny_instance(form, family, index, seed=seed, n_notes=n_notes))
        index += 1
    return found[:n]


def tiny_pair(form: str = "polarity", axis: Any = "field", *, index: int = 0, n_notes: int = 1) -> Pair:
    """One pair of prompts along ``axis``."""
    return tiny_instance(form, index=index, n_notes=n_notes).pair(axis)


class TinyTask:
    """The tiny prompts as a task."""

    name = "tiny"

    def __init__(self, forms: Sequence[str] = ("polarity",), n_notes: int = 1) -> None:
        self.forms, self.n_notes = tuple(forms), n_notes

    def instances(self, tokenizer: Any, n: int, seed: int) -> list[Instance]:
        return tiny_instances(n, self.forms, seed=seed, n_notes=self.n_notes)


TOKEN_IDS: Mapping[str, int] = MappingProxyType({word: i for i, word in enumerate(VOCABULARY)})
