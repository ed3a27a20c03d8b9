"""Encode the sources and the question of a request.

Place in the flow: request → texts (prompt/texts.py) → **`encode_prompt`** → a `SourcePrompt`
(prompt/pieces.py) → layout.py, which adds an answer.

Sources are encoded one by one, so that the others keep their tokens if a decoy replaces one:

    texts    "The bridge opened in 1921."   "\\n\\n"   "When did it open?\\n"
    tokens   [464, 7696, …]                 [628]     [2215, 750, …]
             text_ids of a Piece            after_ids  local_ids
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from olmo_sparsity.base.errors import ConfigError, check_type, printable
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.prompt.pieces import Piece, SourcePrompt
from olmo_sparsity.sources.prompt.texts import plain_texts, template_texts
from olmo_sparsity.sources.reading.prompt_parts import Segment, parts_of
from olmo_sparsity.sources.reading.read_sources import read_turns
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import span_width


def encode_prompt(model: LoadedModel, request: AttributeRequest) -> SourcePrompt:
    """Return the prompt of a request as tokens, without an answer."""
    settings = request.settings
    turns = read_turns(request.sources)
    segments_of_request = parts_of(turns)
    names = _candidate_names(segments_of_request, request.candidates)

    if request.is_chat:
        texts = template_texts(model, turns, request.question)
        prefix_ids: list[int] = []  # the template writes its own
    else:
        texts = plain_texts(turns, request.question)
        prefix_ids = model.prefix_ids(request.loading.prefix, segments_of_request[0].text)

    # Texts between sources follow another text, so a tokenizer puts no space before them.
    after_texts = [part.after for part in texts.parts]
    local_ids, *after_ids = model.encode([texts.closing, *after_texts], follow=True)

    # A template adds texts of its own, so these may be more than `segments_of_request`.
    segments = [part.segment for part in texts.parts]
    text_ids = _encode_segments(model, segments, settings.control_tokens)
    pieces: list[Piece] = []
    for index, segment in enumerate(segments):
        # A source that is no candidate stays in view, as a text without a name does.
        source = names.index(segment.name) if segment.name in names else None
        pieces.append(Piece(text_ids[index], after_ids[index], source=source, whole_source=source))
    prompt = SourcePrompt(
        model=model, names=names, pieces=pieces, local_ids=local_ids, prefix_ids=prefix_ids
    )
    if settings.units != "sources":
        return _divide_sources(prompt, settings.units)
    return prompt


def _candidate_names(segments: Sequence[Segment], candidates: Sequence[str] | None) -> list[str]:
    """Return the names of the sources that a verdict may name, in the order of the prompt."""
    names = [segment.name for segment in segments if segment.is_source]
    duplicates = [name for index, name in enumerate(names) if name in names[:index]]
    if duplicates:
        raise ConfigError(f"two sources have one name, '{printable(duplicates[0])}'; rename one")
    if isinstance(candidates, str):
        candidates = [candidates]
    if candidates is not None:
        check_type("candidates", candidates, str, "a list of names of sources", several=True)
    unknown = sorted(set(candidates or ()) - set(names))
    if unknown:
        raise ConfigError(
            f"candidates: no source is named {', '.join(unknown)}; the names are {', '.join(names)}"
        )
    chosen = [name for name in names if candidates is None or name in candidates]
    if not chosen:
        raise ConfigError(
            "sources: none has a name, and a text without one stays in view; give {name: text, …}, "
            "or a list with Segment(name, text)"
        )
    return chosen


def _encode_segments(
    model: LoadedModel, segments: Sequence[Segment], control_tokens: bool
) -> list[list[int]]:
    """Return the tokens of each segment of a prompt.

    A source is encoded as a text of its own. What looks like a control token in it, such as
    `<|im_end|>`, is encoded as letters, unless `control_tokens` is set. A segment without a name is
    encoded as what it is: the beginning of the prompt, or a text that follows another, before which
    a tokenizer puts no space.
    """
    kinds = [_kind_of(index, segment) for index, segment in enumerate(segments)]
    options_of_kind: dict[_TextKind, dict[str, bool]] = {
        "source": {"control_tokens": control_tokens},
        "beginning": {},
        "following": {"follow": True},
    }
    ids_by_index: dict[int, list[int]] = {}
    # One call for each kind of text, as tokenizers encode many texts faster than one by one.
    for kind, options in options_of_kind.items():
        indices = [index for index, kind_of_segment in enumerate(kinds) if kind_of_segment == kind]
        encoded = model.encode([segments[index].text for index in indices], **options)
        ids_by_index.update(zip(indices, encoded, strict=True))
    return [ids_by_index[index] for index in range(len(segments))]


_TextKind = Literal["source", "beginning", "following"]


def _kind_of(index: int, segment: Segment) -> _TextKind:
    """Return how a segment is encoded. `index`: its index in the prompt."""
    if segment.is_source:
        return "source"
    return "beginning" if index == 0 else "following"


# --- sections of sources --------------------------------------------------------------------------


def _divide_sources(prompt: SourcePrompt, units: str) -> SourcePrompt:
    """Return the prompt with each source divided into sections, which are judged instead of it. The
    second section of notes.txt is named "notes.txt §2". `units`: what a section is, such as
    sentences, paragraphs or span:16."""
    names: list[str] = []
    pieces: list[Piece] = []
    for piece in prompt.pieces:
        if piece.source is None:
            pieces.append(piece)
            continue
        document = Document(np.array(piece.text_ids), tokenizer=prompt.model.tokenizer)
        ends = _ends_of_sections(document, units)
        first = 0
        for number, end in enumerate(ends, start=1):
            # What separates the source from the next text follows its last section.
            after_ids = piece.after_ids if end == ends[-1] else []
            ids = piece.text_ids[first:end]
            pieces.append(Piece(ids, after_ids, source=len(names), whole_source=piece.source))
            names.append(f"{prompt.names[piece.source]} §{number}")
            first = end
    return replace(prompt, names=names, pieces=pieces)


def _ends_of_sections(document: Document, units: str) -> list[int]:
    """Return one past the last token of each section of a document."""
    num_tokens = len(document.tokens)
    width = span_width(units)
    if width is None:
        ends: list[int] = document.units(units, 0, num_tokens).end.tolist()
        return ends
    # Side by side; spans of other commands may overlap.
    return [*range(width, num_tokens, width), num_tokens]
