"""Text for a measurement, as token ids of the model that is measured, and the texts that controls
put in its place.

Place in the flow: text → **documents** → windows. Never imports torch.

Dimension key: L tokens of a document, F far places.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from tokenizers import Tokenizer

from analysis.pieces import first_characters, token_pieces
from analysis.windows import Block, Spans, Units, Windows, span_width
from olmo_sparsity.config import CorpusConfig, DataConfig, PlantedConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.corpus import Document as CorpusDocument
from olmo_sparsity.data.corpus import is_heldout, list_inputs, read_documents
from olmo_sparsity.data.planted import Planting
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import tokenizer_fingerprint
from olmo_sparsity.errors import ConfigError, DataError

if TYPE_CHECKING:
    from olmo_sparsity.model.load import LoadedModel

_BEGINNINGS = {"words": r"(?<!\S)\S", "sentences": r"(?:^|[.!?][\"'”’)\]]*\s+|\n\s*\n)\s*\S"}
"""A word or a sentence begins with the last character of a match."""


@dataclass(eq=False)
class Document:
    tokens: np.ndarray
    number: int = 0
    """Its index in the text it comes from: draws for it are seeded by this."""

    group: str = ""
    """Documents of one group share text (passages of one article), and are never foreign to each
    other. Empty: it shares text with none."""

    tokenizer: Tokenizer | None = field(default=None, repr=False)
    truth: np.ndarray | None = None
    """Of a document with a planted dependency: the places of the marks; of its twin without them,
    no places."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token; joined they are the document."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        return token_pieces(self.tokenizer, self.tokens.tolist())

    def units(self, kind: str, first: int, end: int) -> Units:
        """Those of the places first … end − 1, counted from `first`."""
        width = span_width(kind)
        if width is not None:
            return Units.of_spans(end - first, width)
        return Units.of_runs(self._runs[kind][first:end])

    @cached_property
    def _runs(self) -> dict[str, np.ndarray]:
        """For each token the number of the word, and of the sentence, that it is part of."""
        if self.tokenizer is None:
            raise DataError(
                "words and sentences need the text of each token, and the model has no tokenizer; "
                "take units of tokens or spans"
            )
        text, inside_L = "".join(self.texts), first_characters(self.texts)
        begins = {
            kind: [match.end() - 1 for match in re.finditer(pattern, text)]
            for kind, pattern in _BEGINNINGS.items()
        }
        return {kind: np.searchsorted(at, inside_L, side="right") for kind, at in begins.items()}


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    name: str
    items: list[Document] = field(repr=False)
    num_training: int = 0
    """Left out, because the model was trained on them."""

    num_too_short: int = 0
    """Left out, because they cannot hold what is planted."""

    @staticmethod
    def of(texts: Sequence[np.ndarray], name: str = "documents") -> Documents:
        return Documents(name, [Document(text, number) for number, text in enumerate(texts)])

    def __len__(self) -> int:
        return len(self.items)

    # A slice is a list of documents, which callers that index need not be told.
    def __getitem__(self, number: int) -> Document:  # type: ignore[override]
        return self.items[number]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for document in self.items:
            tokens = document.tokens.astype("<u4")
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if document.truth is not None:
                digest.update(document.truth.astype("<u4").tobytes())
        return digest.hexdigest()

    @property
    def are_planted(self) -> bool:
        return self.items[0].truth is not None


# --- controls -------------------------------------------------------------------------------------

ForeignText = Literal["unrelated", "matched", "shuffled"]
FOREIGN_TEXTS = get_args(ForeignText)


@dataclass(frozen=True)
class FarText:
    """The tokens of a far part, by where they stand in the document they come from."""

    document: Document
    places_F: np.ndarray

    @staticmethod
    def at(document: Document, first: int, num_far: int) -> FarText:
        return FarText(document, np.arange(first, first + num_far))

    @property
    def is_run(self) -> bool:
        """Whether it stands in its document as it is here."""
        return bool((np.diff(self.places_F) == 1).all())

    @property
    def tokens_F(self) -> np.ndarray:
        return self.document.tokens[self.places_F]

    def units(self, kind: str) -> Units:
        first = int(self.places_F.min())
        return self.document.units(kind, first, first + len(self.places_F))

    def text(self, first: int, end: int) -> str:
        """Of some far places; without a tokenizer, the numbers of the tokens."""
        places = self.places_F[first:end]
        if self.document.tokenizer is None:
            return " ".join(str(token) for token in self.document.tokens[places])
        return "".join(self.document.texts[place] for place in places)


@dataclass(frozen=True)
class Controls:
    """Draws the texts that take the place of a document's far part.

    Every draw is seeded by (seed, document, block, draw): who measures a document, and in which
    order, leaves no trace in its numbers. Where the far part is all that stands before a block, one
    draw serves all blocks of a document, and each takes as much of its beginning as it needs.
    """

    documents: Sequence[Document]
    windows: Windows
    kind: ForeignText = "unrelated"
    num_draws: int = 3
    seed: int = 0

    @cached_property
    def _candidates(self) -> list[Document]:
        """A text that holds planted marks is foreign to none."""
        return [
            document
            for document in self.documents
            if self.windows.long == "all" or len(document.tokens) > self.windows.long
            if not (document.truth is not None and len(document.truth))
        ]

    @property
    def num_candidates(self) -> int:
        return len({document.group or document.number for document in self._candidates})

    def _foreign_to(self, document: Document) -> list[Document]:
        return [
            other
            for other in self._candidates
            if other.number != document.number
            and (not other.group or other.group != document.group)
        ]

    def unrelated(self, document: Document, block: Block, draw: int) -> FarText:
        """As many consecutive tokens of another document."""
        return self._draw(self._foreign_to(document), document, block, draw)

    def placebo(self, document: Document, block: Block) -> FarText:
        """The unrelated text that plays the document's own: where there are documents enough, not
        one that stands in as foreign."""
        used = {
            self.unrelated(document, block, draw).document.number for draw in range(self.num_draws)
        }
        others = self._foreign_to(document)
        unused = [other for other in others if other.number not in used]
        return self._draw(unused or others, document, block, 0, 1)

    def foreign(
        self, document: Document, block: Block, far: FarText, targets: Spans, draw: int
    ) -> Iterator[tuple[FarText, Spans]]:
        """The foreign text of a draw for `far`, with the targets of the block it is for."""
        if self.kind == "unrelated":
            yield self.unrelated(document, block, draw), targets
            return
        if self.kind == "shuffled":
            generator = np.random.default_rng([self.seed, document.number, block.start, draw, 2])
            yield replace(far, places_F=generator.permutation(far.places_F)), targets
            return
        tokens = block.targets_W[[first for first, _ in targets]]
        for token in np.unique(tokens):
            seeds = [self.seed, document.number, block.start, draw, 2, int(token)]
            others = [o for o in self._foreign_to(document) if o is not far.document]
            text = self._with_token(others, document, block, int(token), seeds)
            yield text, [span for span, of in zip(targets, tokens, strict=True) if of == token]

    def _draw(
        self, others: list[Document], document: Document, block: Block, *seeds: int
    ) -> FarText:
        start, length = block.start, block.num_far
        if self.windows.long == "all":
            start, length = 0, len(document.tokens) - self.windows.short
        others = [other for other in others if len(other.tokens) >= length]
        if not others:
            raise DataError(
                f"the controls need another document of at least {length:,} tokens; give more text"
            )
        generator = np.random.default_rng([self.seed, document.number, start, *seeds])
        other = others[generator.integers(len(others))]
        first = int(generator.integers(len(other.tokens) - length + 1))
        return FarText.at(other, first, block.num_far)

    def _with_token(
        self, others: list[Document], document: Document, block: Block, token: int, seeds: list[int]
    ) -> FarText:
        """Around an occurrence of the token, which may stand anywhere in it. Where no document has
        the token, it is put somewhere into one."""
        num_far, generator = block.num_far, np.random.default_rng(seeds)
        holders = [o for o in others if len(o.tokens) >= num_far and (o.tokens == token).any()]
        if not holders:
            text = self._draw(others, document, block, *seeds[3:])
            changed = replace(text.document, tokens=text.document.tokens.copy())
            changed.tokens[generator.choice(text.places_F)] = token
            return FarText(changed, text.places_F)
        other = holders[generator.integers(len(holders))]
        place = int(generator.choice(np.flatnonzero(other.tokens == token)))
        lowest, highest = max(0, place - num_far + 1), min(place, len(other.tokens) - num_far)
        return FarText.at(other, int(generator.integers(lowest, highest + 1)), num_far)


# --- reading --------------------------------------------------------------------------------------

FORMS = "a prepared folder, embedded, python, c4, c4_files:GLOB or text:PATH"


def open_documents(text: str | None, model: LoadedModel, limit: int | None = None) -> Documents:
    """`text` None: the held-out documents of the run that the model comes from. Of a corpus that
    the model's own run was trained on, only what was held out is read."""
    if limit is not None and limit < 2:
        raise ConfigError(f"limit={limit} documents: at least 2 are needed, one in each half")
    run = _config_of_run(model.name)
    if text is None and run is None:
        raise ConfigError(f"'{model.name}' is not a run of ours: say which text to read ({FORMS})")
    kind, _, path = (text or "").partition(":")
    num_training = 0
    if text is None or (Path(text) / "manifest.json").is_file():
        data = DataConfig(folder=text) if text is not None else run
        assert data is not None
        shards = open_shards(data, "heldout")
        name = f"held-out documents of {data.folder}"
        _same_tokenizer(shards, model, name)
        count = len(shards) if limit is None else min(limit, len(shards))
        found = [
            Document(shards.document(number), number, tokenizer=model.tokenizer)
            for number in range(count)
        ]
    elif kind in ("embedded", "python", "c4", "c4_files", "text"):
        if (kind in ("c4_files", "text")) != bool(path):
            raise ConfigError(f"text={text} must be {FORMS}")
        # `kind` is one of its literals by the line above, which mypy does not follow.
        corpus = CorpusConfig(source=kind, path=path or None)  # type: ignore[arg-type]
        name, found = text, []
        trained_on = run is not None and _same_corpus(corpus, run.corpus)
        for document in read_documents(corpus):
            if trained_on and run is not None and not is_heldout(document, run.heldout_share):
                num_training += 1
                continue
            found.append(_tokenized(document, len(found), model))
            if len(found) == limit:
                break
    else:
        hint = f": did you mean text:{text}?" if Path(text).exists() else ""
        raise ConfigError(f"text={text} is not {FORMS}{hint}")
    if not found:
        raise DataError(
            f"{name} holds no documents" + (" that were held out" if num_training else "")
        )
    largest = max((int(d.tokens.max()) for d in found if len(d.tokens)), default=0)
    vocabulary = model.model.vocab_size
    if largest >= vocabulary:
        raise DataError(f"{name} holds token {largest}, the model's vocabulary has {vocabulary}")
    return Documents(name, found, num_training=num_training)


def _config_of_run(model_name: str) -> DataConfig | None:
    path = Path(model_name) / "config.yaml"  # a checkpoint of ours is named by its folder
    return load_config(path).data if path.is_file() else None


def _same_corpus(one: CorpusConfig, other: CorpusConfig) -> bool:
    """Whether one holds text of the other: a file of both, or the same data set."""
    if one.path and other.path:
        try:
            files = [{path.resolve() for path in list_inputs(config)} for config in (one, other)]
        except DataError:  # the run's files may be gone
            return one.path == other.path
        return bool(files[0] & files[1])
    names = ("source", "path", "hub_name", "hub_config", "hub_split")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _same_tokenizer(shards: TokenShards, model: LoadedModel, name: str) -> None:
    if model.tokenizer is None:
        return
    theirs, ours = (tokenizer_fingerprint(t) for t in (shards.tokenizer, model.tokenizer))
    if theirs != ours and not _encode_alike(shards, model.tokenizer):
        raise DataError(
            f"{name} were made with another tokenizer than the model's; give the text itself "
            "(text:PATH) or the shards the model was trained with"
        )


def _encode_alike(shards: TokenShards, tokenizer: Tokenizer) -> bool:
    """A tokenizer that another library has saved anew has another fingerprint."""
    probe = shards.tokenizer.decode(shards.document(0).tolist())
    ids = [t.encode(probe, add_special_tokens=False).ids for t in (shards.tokenizer, tokenizer)]
    return ids[0] == ids[1] and shards.tokenizer.get_vocab() == tokenizer.get_vocab()


def _tokenized(document: CorpusDocument, number: int, model: LoadedModel) -> Document:
    if model.tokenizer is None:
        raise DataError(
            f"'{model.name}' has no tokenizer beside it, so text cannot be read for it; give a "
            "prepared folder, or put its tokenizer.json there"
        )
    ids = model.tokenizer.encode(document.text, add_special_tokens=False).ids
    # A source without titles groups by the text itself.
    group = "" if document.group == document.text else document.group
    return Document(np.array(ids, dtype=np.int64), number, group, model.tokenizer)


# --- ground truth ---------------------------------------------------------------------------------


def plant_dependencies(
    documents: Documents, model: LoadedModel, windows: Windows, seed: int = 0
) -> Documents:
    """Each document that is long enough, cut to one target with its long window, twice: with K
    marks at random far places that determine the target (data/planted.py), then, all of them
    again, without the marks, so that there is nothing to find."""
    if model.tokenizer is None:
        raise DataError(
            f"'{model.name}' has no tokenizer beside it, which planting needs to choose its "
            "tokens; put its tokenizer.json there"
        )
    run = _config_of_run(model.name)
    config = run.planted if run is not None else PlantedConfig()  # as the model was trained
    if config.num_tokens > windows.num_far:
        raise DataError(f"{config.num_tokens} planted tokens are more than the far ones")
    planting = Planting.of(config, model.tokenizer)
    with_marks, without = [], []
    for document in documents:
        if len(document.tokens) <= windows.long:
            continue
        text = document.tokens[: windows.long + 1]
        generator = np.random.default_rng([seed, document.number])
        planted, places_K = planting.plant(text, generator, 0, windows.num_far, windows.long - 1)
        bare = np.where(np.isin(np.arange(len(text)), places_K), planting.clear(text), planted)
        group = document.group or f"document {document.number}"
        same = replace(document, group=group, truth=places_K, tokens=planted)
        with_marks.append(same)
        without.append(replace(same, truth=places_K[:0], tokens=bare))
    if len(with_marks) < 2:
        raise DataError(
            f"{documents.name}: {len(with_marks)} documents are longer than long={windows.long}, "
            "and planting needs two; give more or longer text, or lower long"
        )
    items = [replace(d, number=number) for number, d in enumerate([*with_marks, *without])]
    return Documents(
        f"{documents.name}, {config.num_tokens} tokens planted",
        items,
        num_too_short=len(documents) - len(with_marks),
    )
