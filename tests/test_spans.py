"""Spans in token ids: known answers on small tokenizers that are made here."""

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from notelens.errors import SpanError
from notelens.prompt import Span
from notelens.spans import encode, locate, offsets, refuse_special, token_texts

SENTENCES = [
    "If the order status is shipped then approve; if it is pending then refuse.",
    "The order status is now blue. The code is green.",
    "What should the shop do with this order? Answer with one word.",
    "Rent paid on Monday, blue chair, good morning",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def word_level(extra: str = "") -> PreTrainedTokenizerFast:
    """Word-level tokenizer over the words of SENTENCES, without a chat template."""
    split = pre_tokenizers.Whitespace()
    words = sorted({w for s in [*SENTENCES, extra] for w, _ in split.pre_tokenize_str(s)})
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    core.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


def byte_level(sentences: list[str] = SENTENCES, size: int = 700, **kwargs: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=SPECIAL, eos_token="<|im_end|>", **kwargs
    )


class WrongOffsets:
    """A tokenizer whose offsets are (0, 0) throughout, then one empty range (tokenizers issue 1553)."""

    is_fast = True

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        coded = self.inner(text, **kwargs)
        n = len(coded["input_ids"])
        return {"input_ids": coded["input_ids"], "offset_mapping": [(0, 0)] * (n - 1) + [(4, 4)]}


def found(tokenizer: Any, text: str, wanted: str) -> tuple[Span, list[str]]:
    """The span of the only occurrence of ``wanted`` and the texts of its tokens."""
    ids = encode(tokenizer, text)
    start = text.index(wanted)
    span = locate(tokenizer, text, ids, start, start + len(wanted))
    return span, list(token_texts(tokenizer, ids)[span.start : span.stop])


def test_word_level_span_is_the_word() -> None:
    span, tokens = found(word_level(), "The order status is shipped.", "shipped")
    assert span == Span(4, 5)
    assert tokens == ["shipped"]


def test_word_level_span_of_several_words_and_punctuation() -> None:
    span, tokens = found(word_level(), "If the order status is shipped then approve;", "shipped then approve;")
    assert (span.start, tokens) == (5, ["shipped", "then", "approve", ";"])


def test_unknown_word_is_refused_because_it_does_not_decode_back() -> None:
    with pytest.raises(SpanError, match="'zebra' in the text: not in the vocabulary"):
        found(word_level(), "The order is zebra.", "zebra")


def test_byte_level_token_with_leading_space_belongs_to_the_word() -> None:
    tokenizer = byte_level()
    _, tokens = found(tokenizer, "The order status is shipped then approve", "shipped")
    assert "".join(tokens) == " shipped"


@pytest.mark.parametrize("symbol", ["☃", "漢", "€", "é", "🙂"])
def test_all_byte_tokens_of_a_character_are_covered(symbol: str) -> None:
    tokenizer = byte_level()
    text = f"The code is {symbol} now."
    ids = encode(tokenizer, text)
    at = text.index(symbol)
    span = locate(tokenizer, text, ids, at, at + 1)
    assert tokenizer.decode(list(ids[span.start : span.stop])).strip() == symbol
    n_bytes = len(symbol.encode())
    assert span.stop - span.start in (n_bytes, n_bytes + 1)  # with the space, where that is a token of its own


@pytest.mark.parametrize("wanted", ["paid", "☃", "blue chair", "Rent", "now."])
def test_offsets_that_do_not_cover_the_text_fall_back_to_decoding(
    wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = "Rent paid ☃ blue chair\n\nis now."
    honest = byte_level()
    with caplog.at_level(logging.WARNING):
        span, _ = found(WrongOffsets(honest), text, wanted)
    assert "do not cover the text" in caplog.text
    expected, _ = found(honest, text, wanted)
    decoded = honest.decode(list(encode(honest, text)[span.start : span.stop]))
    assert decoded.strip() == wanted
    assert expected.stop == span.stop and expected.start >= span.start


def test_fallback_on_words_without_a_decoder_ignores_white_space() -> None:
    text = "Rent  paid\non Monday, blue chair"
    honest = word_level()
    ids = encode(honest, text)
    assert offsets(WrongOffsets(honest), text, ids) == offsets(honest, text, ids)


def test_ids_of_another_text_are_refused() -> None:
    tokenizer = word_level()
    with pytest.raises(SpanError, match="decode"):
        locate(WrongOffsets(tokenizer), "Rent paid", encode(tokenizer, "blue chair"), 0, 4)


def test_trailing_space_is_trimmed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level()
    text = "The code is blue  now."
    ids = encode(tokenizer, text)
    at = text.index("blue")
    with caplog.at_level(logging.WARNING):
        trimmed = locate(tokenizer, text, ids, at, at + len("blue "))
    assert "'blue ' is trimmed to 'blue'" in caplog.text
    assert trimmed == locate(tokenizer, text, ids, at, at + 4)


def test_merge_across_the_seam_is_shown() -> None:
    tokenizer = byte_level(["bluefix bluefix"] * 3)
    text = "bluefix"
    assert len(encode(tokenizer, text)) == 1
    with pytest.raises(SpanError, match=r"token 'bluefix' \(position 0\) holds the border of the span 'blue'"):
        locate(tokenizer, text, encode(tokenizer, text), 0, 4)


def test_a_span_of_white_space_is_refused() -> None:
    with pytest.raises(SpanError, match="holds no text"):
        found(word_level(), "Rent paid   on", "   ")


def test_exactly_one_beginning_of_sequence_token() -> None:
    tokenizer = byte_level(bos_token="<|im_start|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    plain = encode(tokenizer, "good morning")
    assert plain == encode(tokenizer, "<|im_start|>good morning")
    assert plain.count(bos) == 1 and plain[0] == bos
    with pytest.raises(SpanError, match="twice"):
        encode(tokenizer, "<|im_start|><|im_start|>good morning")
    span = locate(tokenizer, "good morning", plain, 5, 12)
    assert token_texts(tokenizer, plain)[span.stop - 1].endswith("morning"[-1])
    assert span.start > 0


def test_no_token_is_lost_without_a_beginning_of_sequence_token() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(list(encode(tokenizer, "blue chair"))) == "blue chair"


def test_empty_text_is_refused() -> None:
    with pytest.raises(SpanError, match="nothing to encode"):
        encode(word_level(), "")


def test_a_special_token_that_is_added_later_is_refused_from_then_on() -> None:
    tokenizer = byte_level()
    refuse_special(tokenizer, "filler", "a <|later|> b")
    for added in (["<|later|>"], [AddedToken("<|latest|>", special=True)]):
        tokenizer.add_tokens(added, special_tokens=True)
    for name in ("<|later|>", "<|latest|>", "<|im_end|>"):
        with pytest.raises(SpanError, match=r"holds the special token"):
            refuse_special(tokenizer, "filler", f"a {name} b")
    refuse_special(byte_level(), "filler", "a <|later|> b")  # another tokenizer
