"""Read unrelated texts, and draw the decoys of each source from them.

Place in the flow: prompt (prompt/pieces.py) and unrelated texts → **`read_decoys`** → texts that
share nothing with the prompt → **`draw_decoys`** → decoys, each as long as its source → trials.py.

A decoy joins texts in random order, and leaves out the middle of what is too long:

    text 5  text 2  text 7                       joined
    text 5  te             xt 7                  as long as the source

If sections of a source are judged, a decoy of the whole source is cut where the source is.

Dimension key: D decoys of a source, L tokens of a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from olmo_sparsity.analysis.explain.unrelated import SAME_TEXT, passages
from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.prompt.pieces import SourcePrompt
from olmo_sparsity.text.inputs import open_documents

NUM_ATTEMPTS = 20
"""Attempts for each decoy, before an error reports that no more of them differ. With few texts, a
decoy may come out as an earlier one."""

MIN_TEXTS = 100
"""At least this many texts are read, or all if the input has fewer, so that decoys differ."""


def read_decoys(model: LoadedModel, prompt: SourcePrompt, decoys: Any) -> list[np.ndarray]:
    """Return the tokens of different texts that share no passage with the prompt.

    Args:
        model: Encodes the texts.
        prompt: The prompt whose sources are to be replaced.
        decoys: A mapping or list of texts, or any input that `open_documents` reads.
    """
    longest_length = prompt.longest_length
    # A decoy that repeats a source would give what the source gives.
    passages_of_prompt = _passages(prompt)
    different: dict[bytes, np.ndarray] = {}
    for text in _read_texts(model, decoys, longest_length):
        if len(text) and not _shares_a_passage(text, passages_of_prompt):
            different[text.tobytes()] = text  # equal texts count once

    num_tokens = sum(map(len, different.values()))
    if num_tokens < longest_length:
        raise DataError(
            f"decoys: {num_tokens:,} tokens share no passage with a source, and the longest source "
            f"has {longest_length:,}; give more texts"
        )
    return list(different.values())


def _read_texts(model: LoadedModel, decoys: Any, longest_length: int) -> list[np.ndarray]:
    """Return the tokens of each text that the user has passed as decoys. `longest_length`: number
    of tokens of the longest source."""
    if isinstance(decoys, Mapping):
        decoys = list(decoys.values())
    if isinstance(decoys, list) and all(isinstance(text, str) for text in decoys):
        encoded = model.encode(decoys, control_tokens=False)
        return [np.array(ids, dtype=np.int64) for ids in encoded]
    # Enough for the longest source, even if texts have ten tokens each.
    limit = max(MIN_TEXTS, longest_length // 10)
    read_launch()  # an error of the environment is not one of the decoys
    try:
        return [document.tokens for document in open_documents(decoys, model, limit=limit)]
    except UserError as error:
        raise type(error)(f"decoys: {error}") from None


def _passages(prompt: SourcePrompt) -> dict[int, set[bytes]]:
    """Return the passages of sources and of long texts in view, by their length in tokens. All have
    `SAME_TEXT` tokens, but a source that is shorter is one passage as a whole."""
    passages_by_length: dict[int, set[bytes]] = {}
    in_view = [piece.text_ids for piece in prompt.pieces if piece.source is None]
    # A short text in view, such as the mark of a turn, may be part of any decoy.
    long_in_view = [np.array(ids) for ids in in_view if len(ids) >= SAME_TEXT]
    for ids in [*prompt.ids_of_sources, *long_in_view]:
        length = min(SAME_TEXT, len(ids))
        passages_by_length.setdefault(length, set()).update(passages(ids, length))
    return passages_by_length


def _shares_a_passage(text: np.ndarray, passages_by_length: dict[int, set[bytes]]) -> bool:
    """Return whether a text has any of these passages."""
    return any(
        not prompt_passages.isdisjoint(passages(text, length))
        for length, prompt_passages in passages_by_length.items()
    )


def draw_decoys(
    prompt: SourcePrompt, texts: Sequence[np.ndarray], draws: int, seed: int
) -> list[np.ndarray]:
    """Return decoys_DL of each source, or of each judged section of one. All decoys of a source
    differ.

    Args:
        prompt: The prompt whose sources are to be replaced.
        texts: What `read_decoys` returns.
        draws: Number of decoys of each source.
        seed: Seed of the random order of texts.
    """
    num_tokens = sum(map(len, texts))
    num_needed = draws * prompt.longest_length
    if len(texts) < draws or num_tokens < num_needed:
        say(
            f"{draws} decoys, {num_needed:,} tokens, are drawn from {len(texts)} texts of "
            f"{num_tokens:,} tokens: some share text"
        )
    decoys: list[np.ndarray] = []
    for source, source_L in enumerate(prompt.ids_of_sources):
        # A stream of its own, so that a further source changes no decoy of the others.
        decoys_DL = _draw_different(texts, source_L, draws, stream(seed, "decoys", source))
        if len(decoys_DL) < draws:
            raise DataError(
                f"decoys: the texts make only {len(decoys_DL)} different ones of {len(source_L)} "
                f"tokens, and draws={draws}; give more texts"
            )
        # A section is replaced by the section of the decoy that has its places.
        lengths = [len(ids) for ids in prompt.sections_by_source[source]]
        decoys += np.split(decoys_DL, np.cumsum(lengths)[:-1], axis=1)
    return decoys


def _draw_different(
    texts: Sequence[np.ndarray], source_L: np.ndarray, draws: int, generator: np.random.Generator
) -> np.ndarray:
    """Return decoys_DL of one source. There are fewer than `draws` if no more are found that differ
    from each other and from the source.

    Args:
        texts: Texts to join.
        source_L: The source.
        draws: Number of decoys that are wanted.
        generator: Random numbers of this source.
    """
    length = len(source_L)
    decoys: dict[bytes, np.ndarray] = {}
    # The text with which each attempt begins: all texts in random order, again and again.
    first_texts = np.resize(generator.permutation(len(texts)), NUM_ATTEMPTS * draws).tolist()
    for attempt, first in enumerate(first_texts):
        order = generator.permutation(len(texts)).tolist()
        others = [texts[other] for other in order if other != first]
        # Each draw begins with another text. When all texts had their turn, it begins within one.
        start = 0 if attempt < len(texts) else int(generator.integers(len(texts[first])))
        in_order = [texts[first][start:], *others, texts[first][:start]]
        decoy_L = _join_to_length(in_order, length)
        if not np.array_equal(decoy_L, source_L):
            decoys.setdefault(decoy_L.tobytes(), decoy_L)
        if len(decoys) == draws:
            break
    return np.array(list(decoys.values()), dtype=np.int64).reshape(-1, length)


def _join_to_length(texts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return as many of these texts as needed, joined, without the middle of what is too long.

    So a decoy begins and ends as texts do: an end within a sentence would change how the question
    after it is read.
    """
    ends = np.cumsum([len(text) for text in texts])
    num_texts = int(np.argmax(ends >= length)) + 1
    joined = np.concatenate(texts[:num_texts])
    # Half of the tokens from the beginning of what was joined, and half from its end.
    num_head = (length + 1) // 2
    num_tail = length // 2
    return np.delete(joined, slice(num_head, len(joined) - num_tail))
