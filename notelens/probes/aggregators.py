"""Kinds of tokens: which positions are aggregators, and which only repeat the field's value or an answer.

An *aggregator* (DESIGN section 2) is a position that carries no content of its own: a delimiter, punctuation, a
newline, or a token of the chat template. Everything is decided from the text of single tokens and from the regions of
the prompt, so it needs no tokenizer.
"""

import unicodedata
from collections.abc import Sequence
from typing import Literal

from notelens.prompt import Prompt

TokenClass = Literal["template", "newline", "space", "punctuation", "content"]
AGGREGATORS: tuple[TokenClass, ...] = ("template", "newline", "space", "punctuation")
_PARTIAL = "\ufffd"  # what a byte-level tokenizer decodes an unfinished character to: content, not a symbol


def token_class(text: str, region: str) -> TokenClass:
    """The kind of one token.

    Args:
        text: the token on its own, white space included.
        region: its region label; everything the template brings is ``template``, words such as "assistant" too.
    """
    if region == "template":
        return "template"
    if not text.strip():
        return "newline" if "\n" in text or "\r" in text else "space"
    if all(c != _PARTIAL and unicodedata.category(c)[0] in "PSZC" for c in text):
        return "newline" if "\n" in text else "punctuation"
    return "content"


def token_classes(prompt: Prompt) -> list[TokenClass]:
    """The kind of every token of a prompt."""
    return [token_class(t, r) for t, r in zip(prompt.tokens, prompt.regions, strict=True)]


def is_aggregator(kind: TokenClass) -> bool:
    """Whether tokens of this kind count as aggregators."""
    return kind in AGGREGATORS


def repeats(tokens: Sequence[str], words: Sequence[str]) -> list[bool]:
    """Which tokens spell one of ``words`` again, alone or together with their neighbours.

    A run of tokens counts when its characters, without white space and case, equal a word's; so a word must begin and
    end at token borders ("good" is not found in "goods").
    """
    bare = ["".join(t.split()).casefold() for t in tokens]
    found = [False] * len(tokens)
    for word in {"".join(w.split()).casefold() for w in words} - {""}:
        for start in range(len(bare)):
            spelled, stop = "", start
            while stop < len(bare) and len(spelled) < len(word):
                spelled += bare[stop]
                stop += 1
            if bare[start] and spelled == word:
                found[start:stop] = [True] * (stop - start)
    return found


def runs(regions: Sequence[str]) -> list[tuple[str, int, int]]:
    """Region, run and distance from the run's end of every position.

    Runs of one region are counted from the end of the prompt, so that the last filler block of every prompt has run 0
    however many blocks stand before it.
    """
    found: list[tuple[str, int, int]] = [("", 0, 0)] * len(regions)
    seen: dict[str, int] = {}
    stop = len(regions)
    while stop > 0:
        start = stop
        while start > 0 and regions[start - 1] == regions[stop - 1]:
            start -= 1
        region = regions[stop - 1]
        for position in range(start, stop):
            found[position] = (region, seen.get(region, 0), stop - 1 - position)
        seen[region] = seen.get(region, 0) + 1
        stop = start
    return found


def slots(tokens: Sequence[str], regions: Sequence[str]) -> list[tuple[str, str]]:
    """Two names for every position that mean the same in prompts of different length and content.

    The first says which token it is: region, run, text, and how many equal texts follow within the run ("the last
    newline of the last filler block"). The second says where it is: region, run, kind, distance from the run's end.
    """
    counts: dict[tuple[str, int, str], int] = {}
    named: list[tuple[str, str]] = []
    places = runs(regions)
    for position in reversed(range(len(regions))):
        region, run, distance = places[position]
        key = (region, run, tokens[position])
        counts[key] = counts.get(key, 0) + 1
        kind = token_class(tokens[position], region)
        named.append((f"{region}/{run}/{tokens[position]}/{counts[key] - 1}", f"{region}/{run}/{kind}#{distance}"))
    return named[::-1]
