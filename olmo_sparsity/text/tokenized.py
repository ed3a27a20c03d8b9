"""Tokenize texts into documents, or take the tokens of a prepared folder.

    records               documents, with min_tokens=3
    "The cat sat."        [464, 3797, 3332, 13]    number=0
    "The  cat sat."       a copy but for white space: left out
    "Hi."                 two tokens: left out
    "It opened."          [1026, 4721, 13]         number=1

`tokenize` does this for text, in batches as it is read, so that only the tokens are kept in memory.
`read_prepared` does it for the held-out documents of a prepared folder, which are tokens already.
inputs.py calls both. Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.records import TextRecord
from olmo_sparsity.text.runs import PreparedText, Reader, spread_evenly
from olmo_sparsity.text.tally import Tally
from olmo_sparsity.text.vocabulary import BATCH_CHARACTERS, encode_alike

MAX_TOKENS = 2**28
"""The largest number of tokens of all documents, which are kept in memory: 8 bytes each, 2 GiB."""

_CHARACTERS_OF_ENCODING = 64
"""The memory of an encoding beside its tokens, in characters. With it, a batch of many short texts
is not too large."""


@dataclass(frozen=True)
class Selection:
    """Which documents are wanted."""

    limit: int | None
    """The largest number of documents. None means all of them."""

    min_tokens: int
    """The smallest number of tokens of a document. Shorter ones are left out."""

    def describe(self, name: str, num_long_enough: int, num_read: int) -> str:
        """Return a line that says how many documents were chosen, such as "a.txt: 100 of 130
        documents with 4,096 tokens or more, of 900 read"."""
        num_chosen = min(num_long_enough, self.limit or num_long_enough)
        chosen = f"{num_chosen:,} of {num_long_enough:,} documents"
        return f"{name}: {chosen} with {self.min_tokens:,} tokens or more, of {num_read:,} read"


def tokenize(
    texts: Iterator[TextRecord],
    model: Reader,
    name: str,
    selection: Selection,
    *,
    control_tokens: bool,
    tally: Tally,
) -> list[Document]:
    """Tokenize texts until there are as many documents as wanted, and print what was left out.

    Args:
        name: The name of the input, for messages.
        control_tokens: Whether a control token that a text spells out becomes that token.
        tally: The counts of records that were read and left out before they came here.
    """
    if model.tokenizer is None:
        raise DataError(
            f"'{model.name}' has no tokenizer to read text with; copy its tokenizer.json to the "
            "model's folder, or pass a prepared folder"
        )
    limit = selection.limit
    documents: list[Document] = []
    contents = _Contents(name, ignored=" but for white space")
    num_tokens = 0
    num_read = 0
    # Without a smallest length each text is a document: read no more of a stream than are needed.
    # Copies among these are dropped, not replaced by later texts.
    texts_to_read = texts if selection.min_tokens else islice(texts, limit)
    with Progress("reading", limit, "documents", enabled=read_launch().rank == 0) as progress:
        for batch in _split_into_batches(texts_to_read):
            num_read += len(batch)
            for encoded in _encode_batch(batch, model, control_tokens):
                if encoded.num_tokens < selection.min_tokens:
                    continue
                document = encoded.to_document(model.tokenizer, number=len(documents))
                # By both hashes: a tokenizer may also drop other differences than those in white
                # space.
                if contents.add(_hash_of(document), encoded.record.content_hash):
                    documents.append(document)
                    num_tokens += len(document.tokens)
            check_fits_in_memory(num_tokens, name)
            progress.update(len(documents), tokens=f"{num_tokens:,}")
            if limit is not None and len(documents) >= limit:
                break

        if selection.min_tokens and documents:
            progress.note(selection.describe(name, len(documents), num_read))
        if tally.bad or tally.left_out:
            progress.note(f"{name}: left out {tally.describe()}")
        contents.report(progress.note)
    # The last batch may have had more than were wanted.
    return documents[:limit]


class _Encoded(NamedTuple):
    """A record and its tokens."""

    record: TextRecord
    prompt_ids: list[int]
    """Empty for a record without a prompt."""

    rest_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.rest_ids)

    def to_document(self, tokenizer: Tokenizer, number: int) -> Document:
        """Return the record as a document. `number`: how many documents precede it."""
        record = self.record
        return Document(
            tokens=np.array([*self.prompt_ids, *self.rest_ids], dtype=np.int64),
            number=number,
            # Inputs without titles use the text itself as group.
            group="" if record.group == record.text else record.group,
            tokenizer=tokenizer,
            name=record.name,
            target=None if record.target is None else len(self.prompt_ids),
        )


def _encode_batch(batch: list[TextRecord], model: Reader, control_tokens: bool) -> list[_Encoded]:
    """Return the tokens of each record. Its prompt and the rest are encoded separately, so that no
    token spans the boundary."""
    # A record without a target has an empty prompt.
    cuts = [record.target or 0 for record in batch]
    prompts = [record.text[:cut] for record, cut in zip(batch, cuts, strict=True)]
    rests = [record.text[cut:] for record, cut in zip(batch, cuts, strict=True)]
    prompt_ids = model.encode(prompts, control_tokens)
    rest_ids = model.encode(rests, control_tokens, follow=any(cuts))
    return [_Encoded(*fields) for fields in zip(batch, prompt_ids, rest_ids, strict=True)]


def _split_into_batches(texts: Iterator[TextRecord]) -> Iterator[list[TextRecord]]:
    """Yield lists of as many texts as one call of the tokenizer gets."""
    batch: list[TextRecord] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text) + _CHARACTERS_OF_ENCODING
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _hash_of(document: Document) -> bytes:
    """Return a hash of a document's tokens, and of where its target begins."""
    content = str(document.target).encode() + b":" + document.tokens.astype("<u4").tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


class _Contents:
    """The contents of all documents so far, as hashes, by which copies are left out. With copies,
    intervals would come out too short, as they take documents as independent."""

    def __init__(self, name: str, ignored: str = "") -> None:
        """Remember nothing yet.

        Args:
            name: The name of the input, for messages.
            ignored: What the hashes leave out, for messages, such as " but for white space".
        """
        self.name = name
        self.ignored = ignored
        self.num_equal = 0
        self._hashes: set[bytes] = set()

    def add(self, *hashes: bytes) -> bool:
        """Remember a document by hashes of its content, and return whether no earlier one had one
        of them."""
        if not self._hashes.isdisjoint(hashes):
            self.num_equal += 1
            return False
        self._hashes.update(hashes)
        return True

    def report(self, note: Callable[[str], None]) -> None:
        """Print with `note` how many documents were left out, if any."""
        if self.num_equal:
            note(
                f"{self.name}: {self.num_equal:,} documents equal an earlier one{self.ignored}; "
                "each is read once"
            )


# --- prepared folders -----------------------------------------------------------------------------


def read_prepared(
    prepared: PreparedText, model: Reader, name: str, selection: Selection
) -> list[Document]:
    """Return held-out documents of a prepared folder: those that are long enough, or as many of
    them as wanted, evenly spread."""
    if model.tokenizer is not None:
        text = prepared.tokenizer.decode(prepared.document(0).tolist())
        if not encode_alike(prepared.tokenizer, model.tokenizer, text):
            raise DataError(
                f"{name} were made with another tokenizer than the model's; pass the text itself "
                "(text:PATH), or what was prepared with the model's tokenizer"
            )
    if selection.limit is None and not selection.min_tokens:
        check_fits_in_memory(prepared.num_tokens, name)
    is_first_process = read_launch().rank == 0
    long_enough: Sequence[int] = range(len(prepared))
    if selection.min_tokens:
        long_enough = [
            number
            for number in long_enough
            if len(prepared.document(number)) >= selection.min_tokens
        ]
        if is_first_process:
            say(selection.describe(name, len(long_enough), len(prepared)))

    documents: list[Document] = []
    contents = _Contents(name)
    for stored_number in spread_evenly(long_enough, selection.limit or len(long_enough)):
        document = Document(
            tokens=prepared.document(stored_number),
            number=len(documents),
            group=prepared.group(stored_number),
            tokenizer=model.tokenizer,
            name=f"{name}:{stored_number}",
        )
        if contents.add(_hash_of(document)):
            documents.append(document)
    if is_first_process:
        contents.report(say)
    _check_vocabulary(documents, model, name)
    return documents


def _check_vocabulary(documents: Sequence[Document], model: Reader, name: str) -> None:
    """Raise DataError if documents have tokens that the model does not know. A model without a
    tokenizer may have another vocabulary than the prepared text."""
    largest = max(
        (int(document.tokens.max()) for document in documents if len(document.tokens)), default=0
    )
    vocabulary = model.model.vocab_size
    if largest >= vocabulary:
        raise DataError(
            f"{name} hold token {largest}, and the model's vocabulary has {vocabulary}; pass text "
            "prepared with the model's tokenizer"
        )


def check_fits_in_memory(num_tokens: int, name: str) -> None:
    """Raise DataError if there are more than `MAX_TOKENS` tokens, which are kept in memory."""
    if num_tokens > MAX_TOKENS:
        raise DataError(
            f"{name}: more than {MAX_TOKENS:,} tokens do not fit in memory; limit the documents "
            "(max_documents; limit in open_documents)"
        )
