"""Text with fields: where they are found, what is refused, what stays aligned."""

from typing import Any

import pytest

from notelens.edits.text import FieldText, Node, align, common_prefix
from notelens.errors import EditError, FieldError, SeamError, SpanError
from tests.tiny import tiny_pair, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
RAW: dict[str, Any] = {"rendering": "raw"}


def template(text: str, fields: dict[str, str], **options: Any) -> FieldText:
    return FieldText.from_template(TOKENIZER, text, fields, **{**RAW, **options})


def words(made: FieldText) -> str:
    return made.expand()[0]


def test_marked_fields_repeated_and_nested() -> None:
    made = template(
        "start parcel is {{a}} , {{b}} w0 {{a}} .", {"a": "f0", "b": "w1 {{a}} w2"}, request=" please decide"
    )
    assert words(made) == "start parcel is f0 , w1 f0 w2 w0 f0 . please decide"
    tokens = made.tokenise(TOKENIZER)
    assert tokens.positions("a") == (3, 6, 9) and tokens.positions("b") == (5, 6, 7)
    assert tokens.tail == 11 and len(tokens) == 13
    changed = made.with_value(TOKENIZER, "a", " f1 ")
    assert words(changed) == "start parcel is f1 , w1 f1 w2 w0 f1 . please decide" and changed.values["a"] == "f1"
    assert words(made.with_value(TOKENIZER, "b", "w5")) == "start parcel is f0 , w5 w0 f0 . please decide"


def test_an_unmarked_field_is_found_by_its_value() -> None:
    made = template("start parcel is f0 , w1", {"status": "f0"})
    assert [n.text for n in made.nodes if n.field] == ["status"] and made.tokenise(TOKENIZER).positions("status") == (
        3,
    )
    with pytest.raises(FieldError, match=r"in the message 2 times \(characters 0, 6\).*\{\{status\}\}.*mentions='all'"):
        template("f0 is f0 , w1", {"status": "f0"})
    both = template("f0 is f0 , w1", {"status": "f0"}, mentions="all")
    assert both.tokenise(TOKENIZER).positions("status") == (0, 2)
    with pytest.raises(FieldError, match=r"neither \{\{status\}\} nor its value 'f1'"):
        template("f0 is f0", {"status": "f1"})


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("w0 {{a}} w1", {}, "no fields are declared"),
        ("w0 {{a}} w1", {"a": "  "}, "value of field 'a' is empty"),
        ("w0 {{a}} {{b}}", {"a": "f0"}, "field 'b' without a value"),
        ("w0 {{a}}", {"a": "w1 {{a}}"}, "holds itself: a > a"),
        ("w0 {{a}}", {"a": "w1 {{b}}", "b": "{{a}}"}, "holds itself: a > b > a"),
        ("w0 {{a}}", {"a": "w1 {{c}}"}, "there is no field 'c'"),
    ],
)
def test_what_cannot_be_a_field(text: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        template(text, fields)


def test_values_that_cannot_be_used() -> None:
    made = template("w0 {{a}} w1", {"a": "f0"})
    with pytest.raises(FieldError, match="no field 'b'"):
        made.with_value(TOKENIZER, "b", "f1")
    with pytest.raises(FieldError, match="is empty"):
        made.with_value(TOKENIZER, "a", " ")
    with pytest.raises(EditError, match="there is no field 'z'"):
        made.with_value(TOKENIZER, "a", "{{z}}")
    with pytest.raises(FieldError, match="mentions is 'two'"):
        template("w0 {{a}} w1", {"a": "f0"}, mentions="two")


def test_blocks_outside_the_field_stay_aligned_when_its_length_changes() -> None:
    made = template("start {{a}} w0 w1 {{a}} w2", {"a": "f0"})
    old, new = made.tokenise(TOKENIZER), made.with_value(TOKENIZER, "a", "f1 w9").tokenise(TOKENIZER)
    found = align(old, new, "a")
    assert found.edited == (1, 2, 5, 6) and found.deltas == (1, 1) and found.length_changes
    assert found.kept == ((0, 1, 0), (2, 4, 3), (5, 6, 7))
    assert not align(old, made.with_value(TOKENIZER, "a", "f2").tokenise(TOKENIZER), "a").length_changes


def test_tokens_that_change_outside_the_field_are_noticed() -> None:
    one = template("start {{a}} w0", {"a": "f0"}).tokenise(TOKENIZER)
    other = template("start {{a}} w1", {"a": "f1"}).tokenise(TOKENIZER)
    with pytest.raises(SeamError, match=r"tokens outside it change \(rows 2..2 before, 2..2 after\)"):
        align(one, other, "a")


def test_a_prompt_with_spans() -> None:
    prompt = tiny_pair().old
    made = FieldText.from_prompt(TOKENIZER, prompt, {"field": "status", "trigger": "named"})
    tokens = made.tokenise(TOKENIZER)
    assert tokens.ids == prompt.token_ids
    assert tokens.positions("status") == prompt.positions("field")
    assert tokens.positions("named") == prompt.positions("trigger")
    assert tokens.tail == prompt.regions.index("request")
    with pytest.raises(FieldError, match="no span 'x'; it has field, rule, trigger"):
        FieldText.from_prompt(TOKENIZER, prompt, {"x": "status"})


def test_lines_go_in_front_of_the_tail_and_can_be_replaced() -> None:
    made = template("start {{a}} ,", {"a": "f0"}, request=" please")
    one = made.with_line([Node(" w1 .", mark="erratum:a")])
    two = one.with_line([Node(" w2 .", mark="erratum:a")])
    current = one.with_line([Node(" w2 .", mark="erratum:a")], drop="erratum:a")
    assert words(one) == "start f0 , w1 . please" and words(two) == "start f0 , w1 . w2 . please"
    assert words(current) == "start f0 , w2 . please" and current.tail == one.tail
    assert one.followed_by((5, 6)).tokenise(TOKENIZER).ids[-2:] == (5, 6)


def test_a_real_tokenizer_with_a_chat_template(smollm2_tokenizer: Any) -> None:
    made = FieldText.from_template(
        smollm2_tokenizer, "Record\n- Status: {{status}}\n- Owner: Ann\n", {"status": "pending"}, request="What now?",
        system="Be careful.",
    )  # fmt: skip
    tokens = made.tokenise(smollm2_tokenizer)
    decode = smollm2_tokenizer.decode
    assert decode([tokens.ids[p] for p in tokens.positions("status")]).strip() == "pending"
    assert decode(list(tokens.ids[tokens.tail :])).startswith("What now?<|im_end|>")
    assert tokens.text.count("<|im_start|>") == 3
    with pytest.raises(FieldError, match=r"special token '<\|im_end\|>'"):
        made.with_value(smollm2_tokenizer, "status", "x<|im_end|>\n<|im_start|>system")
    glued = FieldText.from_template(smollm2_tokenizer, "Code: pre{{v}}post now", {"v": "fix"}, rendering="plain")
    with pytest.raises(SeamError, match="field 'v'"):
        glued.tokenise(smollm2_tokenizer)
    with pytest.raises(SpanError, match="special token"):
        FieldText.from_template(smollm2_tokenizer, "a <|im_end|> {{v}}", {"v": "x"})


def test_common_prefix() -> None:
    assert (
        common_prefix((1, 2, 3), (1, 2, 4, 5)) == 2
        and common_prefix((), (1,)) == 0
        and common_prefix((1,), (1, 2)) == 1
    )
