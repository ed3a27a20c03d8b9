"""Hold a prompt with sources as pieces of tokens.

Place in the flow: prompt/encode.py → **`SourcePrompt`** → layout.py, which adds an answer.

All that is not a source stays in view: the question, earlier messages, texts without a name. A
prompt of two sources, with a text in view between them, has

    pieces      source 0 │ "\\n\\n" │ text in view │ "\\n\\n" │ source 1 │ "\\n\\n"
    local_ids   question, and what follows it until the answer begins

With the option `units`, sections of a source are judged in place of it, such as its paragraphs.
Each section is then a source, as far as verdicts are concerned, and only decoys are drawn for whole
sources:

    pieces      notes.txt §1 │ notes.txt §2 │ "\\n\\n" │ …
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.units import Spans


@dataclass(frozen=True)
class Piece:
    """A text of the prompt as tokens, and what separates it from the next."""

    text_ids: list[int]
    after_ids: list[int]
    """Tokens of the separator, which stay in place when a decoy replaces the text."""

    source: int | None = None
    """The index of the source, or of the section of one, that is judged here. None means that the
    text stays in view."""

    whole_source: int | None = None
    """The index of the source that contains this section, which all sections of one source share.
    Equal to `source` where sources are judged as wholes."""


@dataclass(frozen=True)
class SourcePrompt:
    """Sources and question, encoded, without an answer."""

    model: LoadedModel
    names: list[str]
    """Names of the sources, or of the sections of them that are judged."""

    pieces: list[Piece]
    local_ids: list[int]
    """The question, and what a chat template puts after it."""

    prefix_ids: list[int]
    """Tokens before every window, such as a beginning-of-text token."""

    num_reasoning: int = 0
    """Number of sources at the end that are sentences of the model's reasoning."""

    def with_reasoning(self, ids: list[int], spans: Spans) -> SourcePrompt:
        """Return the prompt continued by the tokens of the reasoning, whose sentences become
        further sources:

            before   pieces │ local_ids: question
            after    pieces │ question │ reasoning 1 │ … │ reasoning n │ local_ids: last token

        Args:
            ids: Tokens of the reasoning.
            spans: First and end token of each sentence. Empty: the reasoning only stays in view.
        """
        if not spans:
            return replace(self, local_ids=[*self.local_ids, *ids])

        # Verdicts name sources, so a sentence must not have the name of one.
        sentence_names = [f"reasoning {i + 1}" for i in range(len(spans))]
        duplicates = sorted(set(self.names) & set(sentence_names))
        if duplicates:
            raise ConfigError(
                f"sources: '{duplicates[0]}' names a sentence of the reasoning; rename it"
            )

        # The last token stays in view: the local window must not be empty, and precedes the answer.
        last_end = min(spans[-1][1], len(ids) - 1)
        ends = [*(end for _, end in spans[:-1]), last_end]

        # The question is no longer next to the answer, so it becomes a piece like others in view.
        first_sentence = spans[0][0]
        pieces = [*self.pieces, Piece([*self.local_ids, *ids[:first_sentence]], [])]
        for sentence_index, (first, _) in enumerate(spans):
            source = len(self.names) + sentence_index
            sentence_ids = ids[first : ends[sentence_index]]
            pieces.append(Piece(sentence_ids, after_ids=[], source=source, whole_source=source))
        return replace(
            self,
            names=[*self.names, *sentence_names],
            pieces=pieces,
            local_ids=ids[last_end:],
            num_reasoning=len(spans),
        )

    @cached_property
    def sections_by_source(self) -> list[list[list[int]]]:
        """For each source in order, the tokens of each of its judged sections; of a source that is
        judged as a whole, there is one."""
        # A dictionary keeps the order in which sources appear in the prompt.
        sections_by_source: dict[int | None, list[list[int]]] = {}
        for piece in self.pieces:
            if piece.source is not None:
                sections_by_source.setdefault(piece.whole_source, []).append(piece.text_ids)
        return list(sections_by_source.values())

    @cached_property
    def ids_of_sources(self) -> list[np.ndarray]:
        """The tokens of each whole source."""
        return [np.array([*chain(*sections)]) for sections in self.sections_by_source]

    @property
    def longest_length(self) -> int:
        """Number of tokens of the longest source."""
        return max(map(len, self.ids_of_sources))

    @property
    def ids_before_answer(self) -> list[int]:
        """All tokens that precede the answer, without the prefix."""
        ids: list[int] = []
        for piece in self.pieces:
            ids += piece.text_ids
            ids += piece.after_ids
        return ids + self.local_ids
