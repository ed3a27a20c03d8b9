"""Open text in the forms users have it: files, folders, data sets, the hub, strings.

Place in the flow: **text** → documents. Never imports torch. Text is tokenized as it is read, and
only the tokens are kept in memory.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, check_type
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.config.text import CorpusConfig, SplitAt
from olmo_sparsity.text import records
from olmo_sparsity.text.corpus import (
    Tally,
    good_documents,
    is_heldout,
    list_inputs,
    read_records,
)
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.runs import PreparedText, Reader, TrainingText, run_loaders, spread_evenly
from olmo_sparsity.text.vocabulary import BATCH_CHARACTERS, tokenizer_fingerprint
from olmo_sparsity.text.windows import Windows

Rows = Iterable[str | Mapping[str, Any]]

FORMS = (
    "a file or glob (.json, .jsonl, .parquet, or any plain text), a folder of plain text or of "
    "these, a prepared one, owner/name or hub:NAME:CONFIG:SPLIT on the hub, - (standard input), "
    "builtin:embedded, builtin:python, builtin:c4, c4_files:GLOB or text:PATH"
)

OF_BYTES = "is bytes, and a text is read; decode it, as in text.decode('utf-8')"

BUILT_IN = "builtin:"
"""Prefix of the name of an installed corpus; the bare name works where no such path exists."""

MOST_TOKENS = 2**28
"""All documents are kept in memory, 8 bytes a token: 2 GiB."""

TRAINED_ON = "text the model was trained on"


def open_documents(
    text: str | os.PathLike[str] | Rows | None,
    model: Reader,
    limit: int | None = None,
    *,
    field: str = "text",
    group_field: str | None = None,
    split_at: SplitAt = "whole",
    prompt_field: str | None = None,
    target_field: str | None = None,
    min_tokens: int | None = None,
    control_tokens: bool = False,
) -> Documents:
    """Read text as documents.

    `text`: what `FORMS` names, a `datasets.Dataset`, a DataFrame, or strings; None: the held-out
    documents of the run that the model comes from. Of a corpus that this run was trained on, only
    held-out documents are read.

    `limit`: read at most so many documents of at least `min_tokens`. The other options are those of
    `measure`. `group_field` names the field that groups records, such as an author: no document
    serves as unrelated text for another of its group. `prompt_field` and `target_field` name the
    two texts of records of a prompt and a target: the tokens of the target are the targets.
    `control_tokens`: whether `<|im_end|>` in a text becomes that token.
    """
    if prompt_field is not None or target_field is not None:
        field, prompt_field = _fields_of_pairs(field, prompt_field, target_field)
    if limit is not None:
        check_type("limit", limit, Integral, "a whole number of documents, or None")
    if limit is not None and limit < 2:
        raise ConfigError(
            f"{limit=} documents (--max-documents): pass at least 2, as one half of them sets the "
            "threshold and the other is reported"
        )
    if split_at not in get_args(SplitAt):
        raise ConfigError(f"{split_at=} is none of {', '.join(get_args(SplitAt))}")
    run = _run_of(model)
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    prepared, folder = _find_prepared(text, run, model.name)
    options: dict[str, Any] = {
        "field": field,
        "split_at": split_at,
        "group_field": group_field,
        "prompt_field": prompt_field,
    }
    tally = Tally()
    least = min_tokens or 0
    if prepared is not None:
        name = f"held-out documents of {folder}"
        _refuse_unused(CorpusConfig(**options), name)
        documents = _read_prepared(prepared, model, name, limit=limit, least=least)
    else:
        name = text if isinstance(text, str) else type(text).__name__
        texts = _untrained(text, name, options, run, tally)
        documents = _read(
            texts,
            model,
            name,
            limit=limit,
            least=least,
            control_tokens=control_tokens,
            tally=tally,
        )
    if not documents:
        of_length = f" of {min_tokens:,} tokens or more" if min_tokens else ""
        left_out = f": left out {tally.describe()}" if tally.left_out else ""
        raise DataError(f"{name} holds no documents{of_length}{left_out}")
    num_training = tally.left_out.get(TRAINED_ON, 0)
    return Documents(name, documents, num_training, grouped_by=group_field or "")


def _fields_of_pairs(
    field: str, prompt_field: str | None, target_field: str | None
) -> tuple[str, str]:
    """Return the fields of the target and of the prompt, in records of both."""
    prompt_field = prompt_field or "prompt"
    target_field = target_field or "target"
    if field != "text" or prompt_field == target_field:
        raise ConfigError(
            f"{prompt_field=} and {target_field=} must name two different fields of a record, "
            f"and {field=} must be left out"
        )
    return target_field, prompt_field


def _find_prepared(
    text: Any, run: TrainingText | None, model_name: str
) -> tuple[PreparedText | None, str]:
    """Return the prepared text that `text` names, or, without one, the held-out text of the run;
    and its folder. None where `text` is another form."""
    if text is not None:
        return _open_prepared(text), str(text)
    if run is not None:
        return run.open_heldout(), run.folder
    raise ConfigError(
        f"text=None: '{model_name}' was not trained here, so it has no held-out text; pass {FORMS}"
    )


def _untrained(
    text: Any, name: str, options: dict[str, Any], run: TrainingText | None, tally: Tally
) -> Iterator[records.TextRecord]:
    """Return the documents of a text; of one that the run was trained on, those it held out."""
    corpus, stream = _open(text, name, options)
    _refuse_unused(corpus, name)
    if run is not None:
        for trained_on in run.corpora:
            if _share_text(corpus, trained_on):
                stream = _heldout(stream, corpus, trained_on, run.heldout_share)
    return good_documents(stream, tally, corpus)


def open_text(text: str, field: str = "text") -> tuple[CorpusConfig, Iterator[records.TextRecord]]:
    """Return the corpus that a text names, and its documents."""
    corpus = _corpus(text, {"field": field})
    return corpus, good_documents(read_records(corpus), Tally(), corpus)


# --- which corpus a text names --------------------------------------------------------------------


def _open(
    text: str | Rows, name: str, options: dict[str, Any]
) -> tuple[CorpusConfig, Iterator[records.Record]]:
    """Return the corpus that `text` is or names, and its records. Rows in memory get a corpus with
    equal options."""
    if isinstance(text, str):
        if text == str(records.STDIN):
            corpus = CorpusConfig("text", **options)
            return corpus, records.read_file(records.STDIN, corpus)
        corpus = _corpus(text, options)
        return corpus, read_records(corpus)
    rows: Any = text
    if isinstance(text, bytes | bytearray):
        raise ConfigError(f"text={bytes(text[:40])!r} {OF_BYTES}")
    if isinstance(text, pd.DataFrame):
        # NaN, pandas' missing value, would be a text that is none, and a group named nan.
        rows = text.astype(object).where(text.notna(), None).to_dict("records")
    if not hasattr(rows, "__iter__") or isinstance(rows, set | frozenset):
        raise ConfigError(
            f"text={rows!r:.80} must be a path or name, or a list, Dataset or DataFrame; a set has "
            "no order, so pass sorted(text)"
        )
    if isinstance(rows, Mapping):
        keys = ", ".join(map(str, rows))[:60]
        if all(hasattr(split, "column_names") for split in rows.values()):  # a DatasetDict
            raise ConfigError(f"{name} has several splits, {keys}; pass one of them")
        raise ConfigError(f"text is a mapping of {keys}; pass its texts, list(texts.values())")
    corpus = CorpusConfig("c4", hub_name="", **options)
    if set(corpus.fields) <= set(getattr(rows, "column_names", None) or ()):
        rows = rows.select_columns(corpus.fields)  # decodes no images of other columns
    return corpus, _parse_rows(rows, name, corpus)


def _parse_rows(rows: Rows, name: str, corpus: CorpusConfig) -> Iterator[records.Record]:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, bytes | bytearray):
            raise ConfigError(f"{name}:{number}: {bytes(row[:40])!r} {OF_BYTES}")
        fields_of_row = {corpus.field: row} if isinstance(row, str) else row
        yield records.parse_row(fields_of_row, f"{name}:{number}", corpus)


def _corpus(text: str, options: dict[str, Any]) -> CorpusConfig:
    """Return the corpus that a string names, in the order of `FORMS`: what exists comes first."""
    kind, _, path = text.partition(":")
    installed = text.removeprefix(BUILT_IN)
    is_prefixed = installed != text
    # mypy does not narrow a string to the literals it is compared with.
    if installed in ("embedded", "python", "c4") and (is_prefixed or not os.path.exists(text)):
        return CorpusConfig(installed, **options)  # type: ignore[arg-type]
    if kind in ("c4_files", "text") and path:
        return CorpusConfig(kind, path=path, **options)  # type: ignore[arg-type]
    is_file = os.path.exists(text) or glob.has_magic(text) or records.is_records(Path(text))
    if is_file and "\n" not in text:  # with a line break it is a text: `*` may be in Markdown
        return CorpusConfig("files", path=text, **options)
    on_hub = re.fullmatch(r"hub:([^:]+)(?::([^:]*))?(?::([^:]+))?|\w[\w.-]*/[\w.-]+", text)
    if on_hub is None:
        shown = " ".join(text[:80].split())
        raise ConfigError(
            f"text={shown} is not {FORMS}; check that it exists, or pass a list of strings to "
            "measure the string itself"
        )
    hub_name, hub_config, hub_split = on_hub.groups()
    if hub_name is None and (Path(text).suffix in _TEXT_SUFFIXES or Path(text).parent.is_dir()):
        raise ConfigError(
            f"text={text} does not exist, and is taken for a path: {_reason_of_path(text)}; check "
            f"the name, or pass hub:{text} for a data set on the hub"
        )
    return CorpusConfig(
        "c4",
        hub_name=hub_name or text,
        hub_config=hub_config or None,
        hub_split=hub_split or "train",
        **options,
    )


_TEXT_SUFFIXES = (".txt", ".md", ".csv", ".tsv", ".gz", ".zst")
"""Of files, next to the suffixes of records. No data set on the hub is named so."""


def _reason_of_path(text: str) -> str:
    folder = Path(text).parent
    if folder.is_dir():
        return f"there is a folder {folder}"
    return f"it ends in {Path(text).suffix}"


def _refuse_unused(corpus: CorpusConfig, name: str) -> None:
    """Reject an option that has no effect on this source, as the config of a run does."""
    for item in fields(corpus):
        _, *sources = item.metadata.get("only_if", ("source",))
        value = getattr(corpus, item.name)
        if sources and corpus.source not in sources and value != item.default:
            raise ConfigError(f"{item.name}={value} means nothing to {name}; leave it out")


# --- text that a run was trained on ---------------------------------------------------------------


def _run_of(model: Reader) -> TrainingText | None:
    if not hasattr(model, "tokenizer"):
        raise ConfigError(
            f"model must be what load_model or wrap_model returns, not {type(model).__name__}"
        )
    return model.text


def _share_text(corpus: CorpusConfig, trained_on: CorpusConfig) -> bool:
    """Return whether two corpora have a file in common, or are the same data set."""
    if corpus.path and trained_on.path:
        try:
            paths = {path.resolve() for path in list_inputs(corpus)}
            trained_paths = {path.resolve() for path in list_inputs(trained_on)}
        except DataError:  # the run's files may be gone
            return corpus.path == trained_on.path
        return bool(paths & trained_paths)
    return all(
        (getattr(corpus, name) or "default") == (getattr(trained_on, name) or "default")
        for name in ("source", "path", "hub_name", "hub_config", "hub_split")
    )


def _heldout(
    stream: Iterator[records.Record], corpus: CorpusConfig, trained_on: CorpusConfig, share: float
) -> Iterator[records.Record]:
    """Yield the records that training held out; the others as left out."""
    # What a document is, and its group, decide whether it was held out.
    names = ("field", "group_field", "split_at", "prompt_field")
    if any(getattr(corpus, name) != getattr(trained_on, name) for name in names):
        options = ", ".join(f"{name}={getattr(trained_on, name)}" for name in names)
        raise ConfigError(
            f"the model was trained on this text with {options}; pass the same, as they decide "
            "what was held out"
        )
    for record in stream:
        if isinstance(record, records.TextRecord) and not is_heldout(record, share):
            yield records.LeftOut(TRAINED_ON, record.name)
        else:
            yield record


# --- reading --------------------------------------------------------------------------------------


def _read(
    texts: Iterator[records.TextRecord],
    model: Reader,
    name: str,
    *,
    limit: int | None,
    least: int,
    control_tokens: bool,
    tally: Tally,
) -> list[Document]:
    """Tokenize texts until `limit` documents have `least` tokens. Show what `tally` has counted."""
    if model.tokenizer is None:
        raise DataError(
            f"'{model.name}' has no tokenizer to read text with; copy its tokenizer.json to the "
            "model's folder, or pass a prepared folder"
        )
    documents: list[Document] = []
    distinct = _Distinct(name)
    num_tokens = 0
    num_read = 0
    # Without a least length each text is a document: read no more of a stream than are needed.
    # Copies among these are dropped, not replaced by later texts.
    wanted = texts if least else islice(texts, limit)
    with Progress("reading", limit, "documents", enabled=read_launch().rank == 0) as progress:
        for batch in _batches(wanted):
            encoded = _encode(batch, model, control_tokens)
            for record, (prompt_ids, rest_ids) in zip(batch, encoded, strict=True):
                num_read += 1
                if len(prompt_ids) + len(rest_ids) < least:
                    continue
                tokens = np.array([*prompt_ids, *rest_ids], dtype=np.int64)
                if not distinct.add(tokens, record.target):
                    continue
                document = Document(
                    tokens=tokens,
                    number=len(documents),
                    # Inputs without titles use the text itself as group.
                    group="" if record.group == record.text else record.group,
                    tokenizer=model.tokenizer,
                    name=record.name,
                    target=None if record.target is None else len(prompt_ids),
                )
                documents.append(document)
                num_tokens += len(document.tokens)
            _check_size(num_tokens, name)
            progress.update(len(documents), tokens=f"{num_tokens:,}")
            if limit is not None and len(documents) >= limit:
                break
        if least and documents:
            progress.note(
                _describe_choice(
                    name, limit=limit, num_long=len(documents), num_read=num_read, least=least
                )
            )
        if tally.bad or tally.left_out:
            progress.note(f"{name}: left out {tally.describe()}")
        distinct.report(progress.note)
    return documents[:limit]


class _Distinct:
    """Finds documents that equal an earlier one. They are read once: intervals take documents as
    independent, and with copies they come out too short."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_equal = 0
        self._hashes: set[bytes] = set()

    def add(self, tokens: np.ndarray, target: int | None = None) -> bool:
        """Return whether no earlier document has these tokens and this place of the target."""
        content = str(target).encode() + b":" + np.asarray(tokens, dtype="<u4").tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest in self._hashes:
            self.num_equal += 1
            return False
        self._hashes.add(digest)
        return True

    def report(self, note: Callable[[str], None]) -> None:
        """Say how many documents were left out, if any."""
        if self.num_equal:
            note(
                f"{self.name}: {self.num_equal:,} documents equal an earlier one; each is read once"
            )


def _encode(
    batch: list[records.TextRecord], model: Reader, control_tokens: bool
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each record's prompt, and of the rest. They are encoded separately, so
    that no token spans the boundary."""
    # A record without a target has an empty prompt.
    cuts = [record.target or 0 for record in batch]
    prompts = [record.text[:cut] for record, cut in zip(batch, cuts, strict=True)]
    rests = [record.text[cut:] for record, cut in zip(batch, cuts, strict=True)]
    prompt_ids = model.encode(prompts, control_tokens)
    rest_ids = model.encode(rests, control_tokens, follow=any(cuts))
    return list(zip(prompt_ids, rest_ids, strict=True))


def _batches(texts: Iterator[records.TextRecord]) -> Iterator[list[records.TextRecord]]:
    """Yield as many texts as one call of the tokenizer takes."""
    batch: list[records.TextRecord] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text) + 64  # what an encoding costs next to its tokens
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _open_prepared(text: Any) -> PreparedText | None:
    """Return the held-out documents of a folder that `prepare` wrote; None if it is none."""
    if not isinstance(text, str) or not os.path.isdir(text):
        return None
    for loader in run_loaders():
        prepared = loader.open_prepared(Path(text))
        if prepared is not None:
            return prepared
    return None


def _read_prepared(
    prepared: PreparedText, model: Reader, name: str, *, limit: int | None, least: int
) -> list[Document]:
    """Read held-out documents of a prepared folder: `limit` of those with `least` tokens."""
    if model.tokenizer is not None and not _encode_alike(prepared, model.tokenizer):
        raise DataError(
            f"{name} were made with another tokenizer than the model's; pass the text itself "
            "(text:PATH), or what was prepared with the model's tokenizer"
        )
    if limit is None and not least:
        _check_size(prepared.num_tokens, name)
    long: Sequence[int] = range(len(prepared))
    if least:
        long = [number for number in long if len(prepared.document(number)) >= least]
        if read_launch().rank == 0:
            say(
                _describe_choice(
                    name, limit=limit, num_long=len(long), num_read=len(prepared), least=least
                )
            )
    chosen = spread_evenly(long, limit or len(long))
    documents: list[Document] = []
    distinct = _Distinct(name)
    for stored in chosen:
        tokens = prepared.document(stored)
        if not distinct.add(tokens):
            continue
        document = Document(
            tokens=tokens,
            number=len(documents),
            group=prepared.group(stored),
            tokenizer=model.tokenizer,
            name=f"{name}:{stored}",
        )
        documents.append(document)
    if read_launch().rank == 0:
        distinct.report(say)
    # The vocabulary of a model without a tokenizer may be another one.
    largest = max((int(d.tokens.max()) for d in documents if len(d.tokens)), default=0)
    vocabulary = model.model.vocab_size
    if largest >= vocabulary:
        raise DataError(
            f"{name} hold token {largest}, and the model's vocabulary has {vocabulary}; pass text "
            "prepared with the model's tokenizer"
        )
    return documents


def _describe_choice(
    name: str, *, limit: int | None, num_long: int, num_read: int, least: int
) -> str:
    chosen = f"{min(num_long, limit or num_long):,} of {num_long:,} documents"
    return f"{name}: {chosen} with {least:,} tokens or more, of {num_read:,} read"


def _encode_alike(prepared: PreparedText, tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a prepared text are those of the tokenizer."""
    if tokenizer_fingerprint(prepared.tokenizer) == tokenizer_fingerprint(tokenizer):
        return True
    # A tokenizer that another library has saved again has another fingerprint.
    text = prepared.tokenizer.decode(prepared.document(0).tolist())
    prepared_ids = prepared.tokenizer.encode(text, add_special_tokens=False).ids
    if prepared_ids != tokenizer.encode(text, add_special_tokens=False).ids:
        return False
    return prepared.tokenizer.get_vocab() == tokenizer.get_vocab()


def _check_size(num_tokens: int, name: str) -> None:
    if num_tokens > MOST_TOKENS:
        raise DataError(
            f"{name}: more than {MOST_TOKENS:,} tokens do not fit in memory; limit the documents "
            "(max_documents; limit in open_documents)"
        )


# --- records of prompt and target -----------------------------------------------------------------


def cut_to_targets(documents: Documents, windows: Windows) -> Documents:
    """Cut each record of prompt and target to what the windows of its target's tokens hold.

    Leave out records with a prompt shorter than the long window. With long="all", prompts stay
    whole."""
    long = windows.first_target
    kept = [
        document
        for document in documents
        if document.target is not None and document.target >= long
    ]
    if len(kept) < 2:
        raise DataError(
            f"{documents.name}: {len(kept)} of {len(documents)} prompts have {long=} tokens or "
            "more, and measuring needs two; pass longer prompts, or lower long"
        )
    items: list[Document] = []
    for document in kept:
        cut = replace(document, number=len(items))
        if not windows.has_all:
            assert document.target is not None
            cut = replace(cut, tokens=document.tokens[document.target - long :], target=long)
        items.append(cut)
    return replace(documents, items=items, num_too_short=len(documents) - len(items))
