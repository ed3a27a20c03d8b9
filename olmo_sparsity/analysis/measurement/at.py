"""Find the tokens of a document that a user names with `at`.

In the tokens "In", " 19", "21", " Anna", " opened", " it" with the places 0 to 5:

    at="Anna"                  [(3, 4)]           each occurrence of the words
    at=re.compile("19..")      [(1, 3)]           each match of a regular expression
    at=5, at=slice(4, 6)       [(5, 6)], [(4, 6)] a token by its place, or a run of tokens
    at=["Anna", 5]             [(3, 4), (5, 6)]   several of these

A span is from the place of its first token to one past its last. `find_spans` is the entry point;
`parse_at` reads the same from the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.text.documents import Document, first_characters
from olmo_sparsity.text.units import Spans

At = str | int | slice | re.Pattern[str] | Sequence["At"]
"""Names of targets: words, a regular expression, tokens by place, or several of these."""


def find_spans(document: Document, at: At, missing_ok: bool = False) -> Spans:
    """Return the token spans that `at` names, in order: every occurrence of words, or one span for
    a number or slice.

    Args:
        at: One name of targets, or several.
        missing_ok: Return no span, instead of raising DataError, if the text lacks what is named.
    """
    if isinstance(at, np.integer):
        at = int(at)  # which the checks below know
    accepted = str | int | slice | re.Pattern | Sequence | np.ndarray | pd.Series
    # A bool is an int to Python, and bytes are a sequence.
    if isinstance(at, bytes | bool) or not isinstance(at, accepted):
        raise ConfigError(
            f"at={at!r} must be words, a regular expression (re.compile), a token's number, a "
            "slice of tokens, or a list of these"
        )
    if isinstance(at, str | re.Pattern | int | slice):
        return _find_spans_of_one(document, at, missing_ok)
    # `not at` would fail for an array.
    if not len(at):
        raise ConfigError("at is empty; omit it, or pass words")
    # Two names may be the same tokens, which are one target.
    all_spans: set[tuple[int, int]] = set()
    for name in at:
        all_spans.update(find_spans(document, name, missing_ok))
    return sorted(all_spans)


def _find_spans_of_one(
    document: Document, at: str | re.Pattern[str] | int | slice, missing_ok: bool
) -> Spans:
    """Return the token spans of one name. Raise DataError if there is none and that is an error."""
    if isinstance(at, int | slice):
        spans = _find_places(document, at)
        shown = f"{at.start}:{at.stop}" if isinstance(at, slice) else str(at)
        remedy = "pass tokens FIRST:END of the text"
    elif isinstance(at, str):
        if not at.strip():
            raise ConfigError(f"at={at!r} is blank; pass the words of a target, or omit it")
        spans = _find_words(document, at)
        shown = at
        remedy = "check spelling and case"
        if at.isdecimal():
            remedy = f"for the token of that number pass {at}:{int(at) + 1}"
    else:
        spans = _find_matches(document, at)
        shown = at.pattern
        remedy = "check spelling and case"
    if not spans and not missing_ok:
        raise DataError(f"at={shown} does not occur in {len(document.tokens):,} tokens; {remedy}")
    return spans


def _find_places(document: Document, at: int | slice) -> Spans:
    """Return the span that a number or a slice names, or none if the text has no such token.
    Negative numbers count from the end, as in a list of Python."""
    if isinstance(at, slice) and at.step not in (None, 1):
        raise ConfigError(f"at={at!r} has a step, and a target is a run of tokens; omit the step")
    # The slice of −1 ends at the end of the text, which is None and not 0.
    run = slice(at, (at + 1) or None) if isinstance(at, int) else at
    places = range(len(document.tokens))[run]
    if not places:
        return []
    return [(places[0], places[-1] + 1)]


def _find_words(document: Document, words: str) -> Spans:
    """Return the spans of words, as the user wrote them. If there are none, look for the words as
    the tokenizer's normalizer changes them."""
    spans = _find_matches(document, re.compile(re.escape(words)))
    # A normalizer changes a text before it is tokenized: it lower-cases, or composes letters.
    normalizer = getattr(document.tokenizer, "normalizer", None)
    if spans or normalizer is None:
        return spans
    # Some normalizers write a space as "▁", which the texts of tokens do not have.
    words_as_read = normalizer.normalize_str(words).replace("▁", " ").strip()
    return _find_matches(document, re.compile(re.escape(words_as_read)))


def _find_matches(document: Document, pattern: re.Pattern[str]) -> Spans:
    """Return a span for each match of a regular expression: the tokens that hold its
    characters."""
    # For each token: its first character in the text that is not white space, and one past its
    # last. A token's leading white space is not part of what is named.
    begins = first_characters(document.texts)
    ends = np.cumsum([len(text) for text in document.texts])
    spans = set()
    for match in pattern.finditer("".join(document.texts)):
        # Such as of the expression "x*", which matches between any two characters.
        if not match.group():
            continue
        # The first token that ends after the match begins, and the first that begins after it ends.
        first = int(np.searchsorted(ends, match.start(), side="right"))
        end = int(np.searchsorted(begins, match.end(), side="left"))
        # A match of white space alone may end before its token begins.
        spans.add((first, max(end, first + 1)))
    return sorted(spans)


def parse_at(text: str) -> At:
    """Return the target that the option `--at` names: /a regular expression/, FIRST:END of tokens,
    or words."""
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            return re.compile(text[1:-1])
        except re.error as error:
            raise ConfigError(
                f"--at={text} is not a regular expression ({error}); words are written without /"
            ) from None
    if re.fullmatch(r"-?\d+:-?\d+", text):
        first, end = text.split(":")
        return slice(int(first), int(end))
    return text
