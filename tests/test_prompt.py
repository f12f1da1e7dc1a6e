"""Prompts with named spans, and the contract of pairs."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from notelens.errors import AnswerError, PairError, SpanError
from notelens.prompt import Pair, Prompt, Span
from notelens.spans import Piece, answer_token, make_prompt
from tests.test_spans import SPECIAL, byte_level, word_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
DROPS_SYSTEM = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
TRIMS = TEMPLATE.replace("m['content']", "m['content'] | trim")
SYSTEM = "Be careful."
WORDS = "If the order status is shipped then approve otherwise refuse . pending blue green - Monday now What order"


def rule_prompt(
    tokenizer: Any,
    value: str = "shipped",
    trigger: str = "shipped",
    *,
    answer: str = "approve",
    rendering: Any = "raw",
    system: str | None = None,
    filler: str = "\n- Monday\n",
) -> Prompt:
    """A short gated decision."""
    pieces = [
        Piece("record", "order status "),
        Piece("field", value, "field"),
        Piece("filler", filler),
        Piece("rule", "If the order status is "),
        Piece("rule", trigger, "trigger"),
        Piece("rule", " then approve otherwise refuse."),
        Piece("filler", filler),
        Piece("request", "What now"),
    ]
    return make_prompt(tokenizer, pieces, id=f"{value}-{trigger}", answer=answer, rendering=rendering, system=system)


def test_raw_rendering_adds_nothing_and_places_everything() -> None:
    prompt = rule_prompt(word_level(WORDS))
    # order status shipped - Monday If the order status is shipped then approve otherwise refuse . - Monday What now
    assert len(prompt) == 20
    assert prompt.spans["field"] == (Span(2, 3),)
    assert prompt.spans["trigger"] == (Span(10, 11),)
    assert prompt.spans["rule"] == (Span(5, 16),)
    assert prompt.regions == (
        *["record"] * 2,
        "field",
        *["filler"] * 2,
        *["rule"] * 5,
        "trigger",
        *["rule"] * 5,
        *["filler"] * 2,
        *["request"] * 2,
    )
    assert dict(prompt.anchors) == {
        "rule_end": 15,
        "before_request": 17,
        "request_end": 19,
        "before_decision": 18,
        "decision": 19,
    }
    assert prompt.after("rule") == (16, 17, 18)


def test_chat_rendering_goes_through_the_template_once() -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    prompt = rule_prompt(tokenizer, rendering="chat", system=SYSTEM)
    messages = [
        {"role": "system", "content": SYSTEM},
        {
            "role": "user",
            "content": "order status shipped\n- Monday\nIf the order status is shipped then approve otherwise refuse."
            "\n- Monday\nWhat now",
        },
    ]
    direct = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == direct
    assert "".join(t for t, r in zip(prompt.tokens, prompt.regions, strict=True) if r == "system") == SYSTEM
    assert "".join(prompt.tokens[i] for i in prompt.positions("rule")).strip().startswith("If the order")
    assert prompt.tokens[prompt.anchors["rule_end"]].endswith(".")
    assert prompt.regions[prompt.anchors["request_end"] + 1] == "template"
    assert prompt.regions[prompt.anchors["before_request"] + 1] == "request"
    assert prompt.tokens[-1] == "\n" and prompt.regions[-1] == "template"


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_template_without_a_system_role_gets_it_in_the_user_turn(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prompt = rule_prompt(byte_level(chat_template=template), rendering="chat", system=SYSTEM)
    assert "no system role" in caplog.text
    assert prompt.text.startswith(f"<|im_start|>user\n{SYSTEM}\n\norder status shipped")
    assert "".join(t for t, r in zip(prompt.tokens, prompt.regions, strict=True) if r == "system") == SYSTEM
    assert "".join(prompt.tokens[i] for i in prompt.positions("field")).strip() == "shipped"


def test_template_that_trims_the_message_does_not_move_the_spans() -> None:
    tokenizer = byte_level(chat_template=TRIMS)
    pieces = [Piece("record", "\n\n order status "), Piece("field", "blue", "field"), Piece("request", " What now \n")]
    prompt = make_prompt(tokenizer, pieces, id="a", answer="approve")
    assert "".join(prompt.tokens[i] for i in prompt.positions("field")).strip() == "blue"
    assert prompt.text.count("What now<|im_end|>") == 1


def test_plain_rendering_ends_in_its_cue() -> None:
    prompt = rule_prompt(byte_level(), rendering="plain", system=SYSTEM)
    assert prompt.text.startswith(f"{SYSTEM}\n\norder status") and prompt.text.endswith("What now\nAnswer:")
    assert prompt.tokens[prompt.decision].endswith(":")
    assert prompt.regions[prompt.decision] == "template"


@pytest.mark.parametrize("special", SPECIAL)
def test_special_token_in_a_value_is_refused_by_name(special: str) -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    value = f"blue{special}\n<|im_start|>system"
    with pytest.raises(SpanError, match=r"the field text .* holds the special token '<\|im_"):
        rule_prompt(tokenizer, value, rendering="chat")


def test_special_token_in_the_system_text_is_refused() -> None:
    with pytest.raises(SpanError, match="the system text"):
        rule_prompt(byte_level(chat_template=TEMPLATE), rendering="chat", system="Be <|im_end|> careful")


def test_trailing_space_of_a_value_is_trimmed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    with caplog.at_level(logging.WARNING):
        prompt = rule_prompt(tokenizer, "blue ", rendering="chat")
    assert "'blue ' is trimmed to 'blue'" in caplog.text
    assert "".join(prompt.tokens[i] for i in prompt.positions("field")).strip() == "blue"
    assert prompt.spans["field"] == rule_prompt(tokenizer, "blue", rendering="chat").spans["field"]


def test_no_chat_template_is_said_so() -> None:
    with pytest.raises(SpanError, match=r"no chat template; use rendering='plain' or 'raw'"):
        rule_prompt(word_level(WORDS), rendering="chat")


def test_message_that_occurs_twice_is_refused() -> None:
    template = "{{ messages[0]['content'] }} {{ messages[0]['content'] }}"
    with pytest.raises(SpanError, match="2 times"):
        rule_prompt(byte_level(chat_template=template), rendering="chat")


def test_a_name_in_several_pieces_has_several_parts() -> None:
    pieces = [Piece("rule", "then "), Piece("rule", "approve", "trigger"), Piece("rule", " otherwise ")]
    pieces += [Piece("rule", "refuse", "trigger"), Piece("request", " What now")]
    prompt = make_prompt(word_level(WORDS), pieces, id="a", answer="approve", rendering="raw")
    assert prompt.spans["trigger"] == (Span(1, 2), Span(3, 4))
    assert prompt.positions("trigger") == (1, 3)
    assert prompt.spans["rule"] == (Span(0, 4),)
    assert prompt.regions == ("rule", "trigger", "rule", "trigger", "request", "request")


def test_value_glued_to_its_neighbour_is_refused() -> None:
    pieces = [Piece("field", "blue", "field"), Piece("request", "green")]
    with pytest.raises(SpanError, match="'bluegreen'"):
        make_prompt(word_level("bluegreen"), pieces, id="a", answer="approve", rendering="raw")


def test_answer_token_is_the_next_token_in_the_answer_position() -> None:
    words = word_level(WORDS)
    prompt = rule_prompt(words)
    assert words.convert_ids_to_tokens(answer_token(words, prompt, "approve", "raw")) == "approve"
    tokenizer = byte_level(chat_template=TEMPLATE)
    chat, plain = (rule_prompt(tokenizer, rendering=r) for r in ("chat", "plain"))
    first = answer_token(tokenizer, chat, "approve", "chat")
    assert "approve".startswith(tokenizer.decode([first]))
    assert tokenizer.decode([answer_token(tokenizer, plain, "approve", "plain")]).startswith(" ")


def test_answer_that_merges_with_the_prompt_is_refused() -> None:
    tokenizer = byte_level(["ANSWERblue " * 3])
    prompt = make_prompt(tokenizer, [Piece("request", "blue ANSWER")], id="a", answer="blue", rendering="raw")
    with pytest.raises(AnswerError, match="changes the tokens at the end"):
        answer_token(tokenizer, prompt, "blue", "chat")


def pair_of(old: Prompt, new: Prompt, axis: Any = "field", ids: tuple[int, int] = (1, 2)) -> Pair:
    return Pair("p", "family", "custom", old, new, axis, ids)


def test_pair_differs_only_in_the_field() -> None:
    tokenizer = word_level(WORDS)
    pair = pair_of(rule_prompt(tokenizer), rule_prompt(tokenizer, "pending", answer="refuse"))
    assert pair.differing == (2,)
    back = pair.reversed()
    assert (back.old.answer, back.new.answer, back.answer_ids, back.id) == ("refuse", "approve", (2, 1), "p~")


def test_pair_that_differs_elsewhere_names_both_positions_and_tokens() -> None:
    tokenizer = word_level(WORDS)
    other = rule_prompt(tokenizer, "pending", "pending", filler="\n- blue\n")
    with pytest.raises(
        PairError, match=r"outside the field span, at position 4 \('Monday' / 'blue'\), 10 \('shipped' / 'pe"
    ):
        pair_of(rule_prompt(tokenizer), other)


def test_pair_along_the_trigger_refuses_a_changed_field() -> None:
    tokenizer = word_level(WORDS)
    with pytest.raises(PairError, match=r"outside the trigger span, at position 2 \('shipped' / 'pending'\)"):
        pair_of(rule_prompt(tokenizer), rule_prompt(tokenizer, "pending", "pending"), "trigger")


def test_values_of_other_token_length_are_refused_with_both_lengths() -> None:
    tokenizer = word_level(WORDS)
    with pytest.raises(PairError, match=r"20 and 21 tokens; pick values of equal token length"):
        pair_of(rule_prompt(tokenizer), rule_prompt(tokenizer, "now blue"))


def test_answers_sharing_their_first_token_are_refused() -> None:
    tokenizer = word_level(WORDS)
    with pytest.raises(AnswerError, match=r"'approve' and 'refuse' share their first token \(7\)"):
        pair_of(rule_prompt(tokenizer), rule_prompt(tokenizer, "pending", answer="refuse"), ids=(7, 7))


def test_identical_prompts_are_no_pair() -> None:
    prompt = rule_prompt(word_level(WORDS))
    with pytest.raises(PairError, match="identical tokens"):
        pair_of(prompt, prompt)


def test_prompt_checks_its_own_lengths() -> None:
    prompt = rule_prompt(word_level(WORDS))
    with pytest.raises(SpanError, match="20 token ids, 20 token texts, 1 regions"):
        replace(prompt, regions=("rule",))
    with pytest.raises(SpanError, match="span 'x' ends at 21 of 20"):
        replace(prompt, spans={"x": (Span(1, 21),)})
    with pytest.raises(SpanError, match="anchor 'x' is at 20 of 20"):
        replace(prompt, anchors={"x": 20})
    with pytest.raises(SpanError, match=r"no span 'nope'; it has field, rule, trigger"):
        prompt.positions("nope")
    with pytest.raises(SpanError, match="empty or negative"):
        Span(3, 3)
