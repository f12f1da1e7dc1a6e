"""From text to token ids and back: encode once, locate character spans in the ids, build prompts with named spans.

One path only: the text is rendered first (chat template, or plain), then encoded without further special tokens, so there
is exactly one beginning-of-sequence token and every span is found in the text that was really encoded.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from notelens.errors import AnswerError, SpanError
from notelens.prompt import Prompt, Span

logger = logging.getLogger(__name__)

Rendering = Literal["chat", "plain", "raw"]
RENDERINGS: tuple[Rendering, ...] = ("chat", "plain", "raw")
PLAIN_CUE = "\nAnswer:"
PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][\w-]*)\s*\}\}")
"""The place of a field's value in a text, ``{{name}}``."""
_PARTIAL = "\ufffd"  # what a byte-level tokenizer decodes an unfinished character to


@dataclass(frozen=True)
class Piece:
    """A part of the user message.

    Attributes:
        region: label of its tokens (``record``, ``filler``, ``rule``, ``request``, ...).
        text: the characters, verbatim.
        span: name of the span it belongs to, or ``None``; pieces with one name are the parts of one span.
    """

    region: str
    text: str
    span: str | None = None


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """The text of each token on its own (lossy for partial characters; for display)."""
    return tuple(_decode(tokenizer, [i]) for i in ids)


def encode(tokenizer: Any, text: str, *, templated: bool = False) -> tuple[int, ...]:
    """Token ids of rendered text, with the tokenizer's beginning-of-sequence token exactly once if it wants one.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: rendered text.
        templated: the text comes from a chat template (or must stay bare) and is encoded as it is.

    Raises:
        SpanError: the text is empty, begins with two such tokens, or holds a word that the tokenizer does not know.
    """
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    _refuse_unknown(tokenizer, text, ids)
    bos = bos_text(tokenizer)
    if bos is not None:
        bos_id = int(tokenizer.bos_token_id)
        if not templated and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        if ids[:2] == [bos_id, bos_id]:
            raise SpanError(f"the text begins with {bos!r} twice; render it once and let nothing add it again")
    if not ids:
        raise SpanError("nothing to encode: the text has no tokens")
    return tuple(ids)


def _refuse_unknown(tokenizer: Any, text: str, ids: Sequence[int]) -> None:
    """Refuse text that a tokenizer without a byte fallback would replace by its token for unknown words."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown not in ids or tokenizer.unk_token in text:
        return
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, " ")  # a template's own tokens are known; their letters are not
    words = re.findall(r"\w+|[^\w\s]", text)
    lost = [w for w in dict.fromkeys(words) if unknown in tokenizer.encode(w, add_special_tokens=False)]
    shown = ", ".join(map(repr, lost[:5])) or "a word"
    raise SpanError(f"{shown} in the text: not in the vocabulary of this tokenizer; use words that it knows")


def bos_text(tokenizer: Any) -> str | None:
    """The beginning-of-sequence token if this tokenizer puts one before ordinary text, else ``None``."""
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None or list(tokenizer.encode("a", add_special_tokens=True))[:1] != [bos_id]:
        return None
    return str(tokenizer.bos_token)


def offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Character range of every token: the tokenizer's own offsets, or incremental decoding where they cannot be right.

    Raises:
        SpanError: the ids do not decode to the text.
    """
    if getattr(tokenizer, "is_fast", False):
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        extra = len(ids) - len(coded["input_ids"])
        if extra in (0, 1) and list(ids[extra:]) == list(coded["input_ids"]):
            found = [(0, 0)] * extra + [(int(a), int(b)) for a, b in coded["offset_mapping"]]
            if _covers(found, text):
                return found
            logger.warning("offsets of %s do not cover the text; spans come from incremental decoding", type(tokenizer))
    return _decoded_offsets(tokenizer, text, ids)


def locate(tokenizer: Any, text: str, ids: Sequence[int], char_start: int, char_stop: int) -> Span:
    """The tokens that hold ``text[char_start:char_stop]``; white space at its ends is trimmed (and logged at the end).

    Args:
        tokenizer: the tokenizer that made ``ids``.
        text: the rendered text.
        ids: its token ids, as :func:`encode` returns them.
        char_start: first character of the span.
        char_stop: one past its last character.

    Raises:
        SpanError: the span is empty, a token straddles its border together with neighbouring characters (it is shown),
            or the tokens found do not decode to the span's text.
    """
    return _locate(tokenizer, text, ids, offsets(tokenizer, text, ids), char_start, char_stop)


def make_prompt(
    tokenizer: Any,
    pieces: Sequence[Piece],
    *,
    id: str,
    answer: str,
    rendering: Rendering = "chat",
    system: str | None = None,
) -> Prompt:
    """Build a prompt from pieces that are joined, as they are, into the user message.

    Args:
        tokenizer: a Hugging Face tokenizer.
        pieces: the parts of the message. Tokens of spans ``field`` and ``trigger`` get these names as region labels.
        id: the prompt's id.
        answer: the word that is right for it.
        rendering: ``chat`` applies the tokenizer's chat template with the generation prompt; ``plain`` is
            system text, blank line, message, ``Answer:``; ``raw`` is the message alone.
        system: system text; folded into the user turn (and logged) where the template has no system role.

    Returns:
        A prompt with one span per name and, where there are rule pieces, ``rule`` (trigger included); anchors
        ``rule_end``, ``before_request``, ``request_end`` (each where its region exists), ``before_decision``,
        ``decision``.

    Raises:
        SpanError: a piece holds text of a special token, a span cannot be located, or no chat template exists.
    """
    content = "".join(p.text for p in pieces)
    for part in [*pieces, Piece("system", system or "")]:
        refuse_special(tokenizer, part.span or part.region, part.text)
    text, content_at = render(tokenizer, content, rendering, system)
    ids = encode(tokenizer, text, templated=True)
    where = offsets(tokenizer, text, ids)

    regions_of_chars = ["template"] * len(text)
    if system and (system_at := text.find(system)) >= 0:
        regions_of_chars[system_at : system_at + len(system)] = ["system"] * len(system)
    spans: dict[str, list[Span]] = {}
    rule_chars: list[tuple[int, int]] = []
    at = content_at
    for piece in pieces:
        start, at = max(at, 0), at + len(piece.text)
        stop = min(at, len(text))
        if start >= stop:
            continue
        label = piece.span if piece.span in ("field", "trigger") else piece.region
        regions_of_chars[start:stop] = [str(label)] * (stop - start)
        if piece.region in ("rule", "trigger") or piece.span == "trigger":
            if rule_chars and rule_chars[-1][1] == start:
                rule_chars[-1] = (rule_chars[-1][0], stop)
            else:
                rule_chars.append((start, stop))
        if piece.span is not None:
            spans.setdefault(piece.span, []).append(_locate(tokenizer, text, ids, where, start, stop))
    if "rule" not in spans and rule_chars:
        spans["rule"] = [_locate(tokenizer, text, ids, where, a, b) for a, b in rule_chars if text[a:b].strip()]
    regions = tuple(_label(text, where[i], regions_of_chars) for i in range(len(ids)))
    return Prompt(
        id=id,
        text=text,
        token_ids=ids,
        tokens=token_texts(tokenizer, ids),
        spans={name: tuple(parts) for name, parts in spans.items()},
        regions=regions,
        anchors=_anchors(regions, spans),
        answer=answer,
    )


def answer_token(tokenizer: Any, prompt: Prompt, word: str, rendering: Rendering) -> int:
    """First token of ``word`` where the model would write it: right behind the prompt.

    Raises:
        AnswerError: the word merges with the end of the prompt, so no single next token stands for it.
    """
    lead = "" if rendering == "chat" else " "
    ids = encode(tokenizer, prompt.text + lead + word, templated=True)
    n = len(prompt)
    if ids[:n] != prompt.token_ids or len(ids) == n:
        raise AnswerError(f"answer {word!r} changes the tokens at the end of prompt {prompt.id!r}; use another cue")
    return ids[n]


def render(tokenizer: Any, content: str, rendering: Rendering, system: str | None) -> tuple[str, int]:
    """The rendered text and where the message begins in it.

    Raises:
        SpanError: an unknown rendering, no chat template, or a template that does not show the message exactly once.
    """
    if rendering == "raw":
        return content, 0
    if rendering == "plain":
        head = (bos_text(tokenizer) or "") + (f"{system}\n\n" if system else "")
        return f"{head}{content}{PLAIN_CUE}", len(head)
    if rendering != "chat":
        raise SpanError(f"unknown rendering {rendering!r}; choose one of {', '.join(RENDERINGS)}")
    if not getattr(tokenizer, "chat_template", None):
        raise SpanError("the tokenizer has no chat template; use rendering='plain' or 'raw'")
    from jinja2.exceptions import TemplateError

    messages = [{"role": "user", "content": content}]
    if system:
        try:
            text = _apply(tokenizer, [{"role": "system", "content": system}, *messages])
            folded = system not in text
        except TemplateError:
            text, folded = "", True
        if folded:
            logger.warning("the chat template has no system role; the system text goes into the user turn")
            text = _apply(tokenizer, [{"role": "user", "content": f"{system}\n\n{content}"}])
    else:
        text = _apply(tokenizer, messages)
    for wanted in (content, content.strip()):
        if text.count(wanted) == 1:
            return text, text.index(wanted) - (content.index(wanted))
    raise SpanError(f"the chat template shows the message {text.count(content.strip())} times; exactly once is needed")


def _apply(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def refuse_special(tokenizer: Any, what: str, text: str) -> None:
    """Check that ``text`` holds no special token, which would change the turns of a prompt.

    Raises:
        SpanError: it does; the message names ``what`` and the token.
    """
    hit = next((name for name in _special_names(tokenizer) if name in text), None)
    if hit is not None:
        raise SpanError(
            f"the {what} text {text[:60]!r} holds the special token {hit!r}; it would change "
            "the turns of the prompt and is refused"
        )


_SPECIAL: "WeakKeyDictionary[Any, tuple[tuple[Any, ...], tuple[str, ...]]]" = WeakKeyDictionary()


def _special_names(tokenizer: Any) -> tuple[str, ...]:
    """Texts of all special tokens, sorted; listing the 6,400 added tokens of a Gemma takes 20 ms, so they are kept."""
    named = tuple(str(t) for t in tokenizer.all_special_tokens)
    size = len(tokenizer) if hasattr(type(tokenizer), "__len__") else None
    state = (size, named)  # changes where tokens are added or named special
    kept = _SPECIAL.get(tokenizer)
    if kept is None or kept[0] != state:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        names = {*named, *(str(t) for t in added.values() if t.special)}
        kept = (state, tuple(sorted(n for n in names if n)))
        _SPECIAL[tokenizer] = kept
    return kept[1]


def _locate(
    tokenizer: Any, text: str, ids: Sequence[int], where: Sequence[tuple[int, int]], char_start: int, char_stop: int
) -> Span:
    wanted = text[char_start:char_stop]
    if not wanted.strip():
        raise SpanError(f"the span at characters {char_start}-{char_stop} holds no text")
    start = char_start + len(wanted) - len(wanted.lstrip())
    stop = char_stop - (len(wanted) - len(wanted.rstrip()))
    if stop < char_stop:
        logger.warning("span %r is trimmed to %r", wanted, text[start:stop])
    inside = [
        i for i, (a, b) in enumerate(where) if a < stop and b > start and text[max(a, start) : min(b, stop)].strip()
    ]
    if not inside:
        raise SpanError(f"no token holds {text[start:stop]!r} (characters {start}-{stop})")
    for i in (inside[0], inside[-1]):
        a, b = where[i]
        if text[a:start].strip() or text[stop:b].strip():
            raise SpanError(
                f"the token {text[a:b]!r} (position {i}) holds the border of the span {text[start:stop]!r} together with "
                "its neighbour; put white space between them or choose another value"
            )
    span = Span(inside[0], inside[-1] + 1)
    shown = _decode(tokenizer, list(ids[span.start : span.stop]))
    if _bare(shown) != _bare(text[start:stop]):
        raise SpanError(
            f"tokens {span.start}-{span.stop - 1} decode to {shown!r}, not to the span's text {text[start:stop]!r}"
        )
    return span


def _anchors(regions: Sequence[str], spans: dict[str, list[Span]]) -> dict[str, int]:
    last = len(regions) - 1
    anchors = {"decision": last, "before_decision": last - 1}
    if "rule" in spans:
        anchors["rule_end"] = spans["rule"][-1].stop - 1
    request = [i for i, label in enumerate(regions) if label == "request"]
    if request:
        anchors["request_end"] = request[-1]
        if request[0] > 0:
            anchors["before_request"] = request[0] - 1
    return anchors


def _label(text: str, chars: tuple[int, int], labels: Sequence[str]) -> str:
    a, b = chars
    if a >= b:
        return "template"
    first = next((i for i in range(a, b) if not text[i].isspace()), a)
    return labels[first]


def _covers(found: Sequence[tuple[int, int]], text: str) -> bool:
    """Whether ascending offsets cover every non-space character of the text."""
    covered = bytearray(len(text))
    low = 0
    for a, b in found:
        if a < low or b > len(text) or b < a:
            return False
        low = a
        covered[a:b] = b"\x01" * (b - a)
    return all(c or text[i].isspace() for i, c in enumerate(covered))


def _decoded_offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Offsets by decoding growing prefixes and counting non-space characters (quadratic; only where offsets fail)."""
    solid = [i for i, c in enumerate(text) if not c.isspace()]
    found: list[tuple[int, int]] = []
    seen = 0
    for i in range(1, len(ids) + 1):
        decoded = _decode(tokenizer, list(ids[:i]))
        partial = decoded.endswith(_PARTIAL)
        n = len("".join(decoded.rstrip(_PARTIAL).split()))
        if n < seen or n > len(solid):
            raise SpanError(
                f"token {i - 1} ({_decode(tokenizer, [ids[i - 1]])!r}) does not decode to the rendered text"
            )
        if partial and n < len(solid):
            found.append((solid[seen if n > seen else n], solid[n] + 1))
        elif n > seen:
            found.append((solid[seen], solid[n - 1] + 1))
        else:
            gap = solid[n - 1] + 1 if n else 0
            found.append((gap, solid[n] if n < len(solid) else len(text)))
        seen = n
    if seen != len(solid) or _bare(_decode(tokenizer, list(ids))) != _bare(text):
        raise SpanError("the token ids do not decode to the rendered text, so no span can be located in them")
    return found


def _bare(text: str) -> str:
    """Without white space and case, which word-level tokenizers do not keep."""
    return re.sub(r"\s+", "", text).casefold()


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
