"""Cut an answer into statements and the texts between them, at spans that a user passes.

Example: `Answer("It opened. Thanks.", [(0, 10)])` has the statement "It opened." and the text
" Thanks.", which stays in view.

Place in the flow: answer → **`Answer.pieces`** → answer_tokens.py, which encodes the pieces. (An
answer without spans is cut into sentences there.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError, check_type, printable


class AnswerPiece(NamedTuple):
    """A text of an answer: a statement, or what is between statements."""

    text: str
    is_statement: bool


@dataclass(frozen=True)
class Answer:
    """An answer with the spans of characters, (first, end), of its statements. The rest of it stays
    in view.

    Example:
        Answer("It opened in 1921. Thank you for asking.", [(0, 18)])
    """

    text: str
    spans: Sequence[tuple[int, int]]

    def pieces(self) -> list[AnswerPiece]:
        """Return texts that together are the answer, and whether each is a statement:

            Answer("It opened. Thanks.", [(0, 10)])   →   "It opened."   statement
                                                          " Thanks."     stays in view

        White space belongs to the piece after it, as most tokenizers begin a word with its space.
        """
        # Cut the text at the spans.
        cuts: list[AnswerPiece] = []
        last_end = 0
        for first, end in self._checked_spans():
            cuts.append(AnswerPiece(self.text[last_end:first], is_statement=False))
            cuts.append(AnswerPiece(self.text[first:end], is_statement=True))
            last_end = end
        cuts.append(AnswerPiece(self.text[last_end:], is_statement=False))

        # Move white space at the end of a piece to the next one. The last piece keeps its own.
        pieces: list[AnswerPiece] = []
        space_before = ""
        for cut, is_statement in cuts:
            text = space_before + cut
            words = text.rstrip()
            space_before = text[len(words) :]
            if words:
                pieces.append(AnswerPiece(words, is_statement))
        if space_before:
            words, is_statement = pieces[-1]
            pieces[-1] = AnswerPiece(words + space_before, is_statement)
        return pieces

    def _checked_spans(self) -> list[tuple[int, int]]:
        """Return the spans in their order; raise ConfigError if one is empty, overlaps another or
        lies outside the text."""
        check_type("answer: text", self.text, str, "a text")
        try:
            spans = sorted((int(first), int(end)) for first, end in self.spans)
        except (TypeError, ValueError):
            raise ConfigError(
                f"answer: spans={printable(repr(self.spans))[:60]} must be a list of pairs "
                "(first, end) of characters"
            ) from None
        if not spans:
            raise ConfigError(
                "answer: it has no spans; give (first, end) of each statement, or a text"
            )
        last_end = 0
        for first, end in spans:
            is_inside = last_end <= first < end <= len(self.text)
            if not is_inside or not self.text[first:end].strip():
                raise ConfigError(
                    f"answer: the span ({first}, {end}) is empty, overlaps another, or ends after "
                    f"the {len(self.text)} characters; give (first, end) of each statement"
                )
            last_end = end
        return spans
