"""A pair of prompts from any text with a marked field, ``{{name}}``."""

from notelens.context import prefill
from notelens.errors import AnswerError, PairError, SpanError
from notelens.models.base import NoteModel
from notelens.prompt import Pair, Prompt
from notelens.spans import PLACEHOLDER, Piece, Rendering, answer_token, make_prompt


def pair_from_text(
    model: NoteModel,
    text: str,
    field_name: str,
    old: str,
    new: str,
    *,
    answers: tuple[str, str] | None = None,
    rendering: Rendering = "chat",
    system: str | None = None,
) -> Pair:
    """A pair from a prompt with a marked field, ``{{name}}``.

    Args:
        model: its tokenizer is used, and its own decisions where no answers are given.
        text: the user message; the field may occur several times.
        field_name: name of the placeholder.
        old, new: the two values.
        answers: right answers for old and new; the model's own next tokens when ``None``.
        rendering: ``chat``, ``plain`` or ``raw``.
        system: system text.

    Raises:
        SpanError: the field is not in the text, another placeholder is, a value is empty, or the text ends with the field.
        PairError: the values are the same, or have different token lengths.
        AnswerError: the answers share a first token, or the model decides the same for both values.

    Cost: none with answers, two prefills without.
    """
    check_text(text, field_name, old, new)
    pieces = _pieces(text, old), _pieces(text, new)

    def build(value: str, parts: list[Piece], answer: str) -> Prompt:
        name = f"{field_name}={value}"
        return make_prompt(model.tokenizer, parts, id=name, answer=answer, rendering=rendering, system=system)

    prompts = [build(v, p, "") for v, p in zip((old, new), pieces, strict=True)]
    if len(prompts[0]) != len(prompts[1]):
        raise PairError(
            f"with {old!r} the prompt has {len(prompts[0])} tokens, with {new!r} it has {len(prompts[1])}; rows are compared "
            "place by place, so pick values of equal token length"
        )
    if prompts[0].positions("field")[-1] >= prompts[0].decision:
        raise SpanError("the prompt ends with the field, so nothing is cached behind it; put text after it")
    if answers is None:
        ids = [int(model.next_logits(prefill(model, p).hidden).argmax()) for p in prompts]
        words = [str(model.tokenizer.decode([i])) for i in ids]
        if ids[0] == ids[1]:
            raise AnswerError(
                f"the model continues both prompts with {words[0]!r}, so this decision does not depend on the field; name "
                "the two answers yourself, or ask for something that the field decides"
            )
    else:
        words = [a.strip() for a in answers]
        if not all(words):
            raise AnswerError("an answer is empty; give two words, for the old and for the new value")
        ids = [answer_token(model.tokenizer, p, w, rendering) for p, w in zip(prompts, words, strict=True)]
    prompts = [build(v, p, w) for v, p, w in zip((old, new), pieces, words, strict=True)]
    return Pair(f"{field_name}:{old}->{new}", "custom", "custom", prompts[0], prompts[1], "field", (ids[0], ids[1]))


def check_text(text: str, field_name: str, old: str, new: str) -> None:
    """What can be said without a tokenizer.

    Raises:
        SpanError: the field is not in the text, another placeholder is, or a value is empty.
        PairError: the values are the same.
    """
    found = PLACEHOLDER.findall(text)
    if field_name not in found:
        names = ", ".join(sorted(set(found))) or "none"
        raise SpanError(
            f"the prompt has no field {{{{{field_name}}}}}; fields it has: {names}. Mark the place of the value in the text "
            "with two braces on each side"
        )
    other = sorted(set(found) - {field_name})
    if other:
        raise SpanError(f"the prompt has further fields: {', '.join(other)}; fill them in, only one may stay open")
    for value in (old, new):
        if not value.strip():
            raise SpanError(f"a value of field {field_name!r} is empty; give an old and a new one")
    if old.strip() == new.strip():
        raise PairError(f"both values of field {field_name!r} are {old!r}; give two different ones")


def _pieces(text: str, value: str) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for match in PLACEHOLDER.finditer(text):
        if match.start() > at:
            pieces.append(Piece("prompt", text[at : match.start()]))
        pieces.append(Piece("field", value, "field"))
        at = match.end()
    if at < len(text):
        pieces.append(Piece("prompt", text[at:]))
    return pieces
