"""Open text in the forms users have it: files, folders, data sets, the hub, strings.

Place in the flow: **text** → documents. Never imports torch. Text is tokenized as it is read, and
only the tokens are kept in memory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from olmo_sparsity.base.errors import ConfigError, DataError
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
from olmo_sparsity.text.runs import PreparedText, Reader, TrainingText, run_loaders
from olmo_sparsity.text.vocabulary import BATCH_CHARACTERS, tokenizer_fingerprint
from olmo_sparsity.text.windows import Windows

Rows = Iterable[str | Mapping[str, Any]]

FORMS = (
    "a file or glob (.json, .jsonl, .parquet, or any plain text), a folder of plain text or of "
    "these, a prepared one, owner/name or hub:NAME:CONFIG:SPLIT on the hub, - (standard input), "
    "builtin:embedded, builtin:python, builtin:c4, c4_files:GLOB or text:PATH"
)

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
    held-out documents are read. `limit`: the most documents, of at least `min_tokens`. The other
    options are those of `measure`: `group_field` names what groups records (no document serves as
    unrelated text for another of its group), `prompt_field` and `target_field` the texts of records
    of two.
    """
    if prompt_field is not None or target_field is not None:
        prompt_field, target_field = prompt_field or "prompt", target_field or "target"
        if field != "text" or prompt_field == target_field:
            raise ConfigError(f"{prompt_field=} and {target_field=} must differ, without {field=}")
        field = target_field
    if limit is not None and limit < 2:
        raise ConfigError(f"{limit=} documents (--max-documents): pass at least 2")
    if split_at not in get_args(SplitAt):
        raise ConfigError(f"{split_at=} is none of {', '.join(get_args(SplitAt))}")
    run = _run_of(model)
    if text is None and run is None:
        raise ConfigError(f"text=None: '{model.name}' was not trained here; pass {FORMS}")
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    tally, options = Tally(), dict[str, Any](field=field, split_at=split_at)
    options |= {"group_field": group_field, "prompt_field": prompt_field}
    prepared, folder, least = _open_prepared(text), str(text), min_tokens or 0
    if run is not None and text is None:
        prepared, folder = run.open_heldout(), run.folder
    if prepared is not None:
        name = f"held-out documents of {folder}"
        _refuse_unused(CorpusConfig(**options), name)
        documents = _read_prepared(prepared, model, limit, least, name)
    else:
        name = text if isinstance(text, str) else type(text).__name__
        texts = _untrained(text, name, options, run, tally)
        documents = _read(texts, tally, model, limit, least, name, control_tokens)
    if not documents:
        without = f": left out {tally.describe()}" if tally.left_out else ""
        of = f" of min_tokens={min_tokens}" if min_tokens else ""
        raise DataError(f"{name} holds no documents{of}{without}")
    num_training = tally.left_out.get(TRAINED_ON, 0)
    return Documents(name, documents, num_training, grouped_by=group_field or "")


def _untrained(
    text: Any, name: str, options: dict[str, Any], run: TrainingText | None, tally: Tally
) -> Iterator[records.TextRecord]:
    """Return the documents of a text; of one that the run was trained on, those it held out."""
    corpus, stream = _open(text, name, options)
    _refuse_unused(corpus, name)
    if run is not None and _same_corpus(corpus, run.corpus):
        stream = _heldout(stream, corpus, run.corpus, run.heldout_share)
    return good_documents(stream, tally, corpus)


def open_text(text: str, field: str = "text") -> tuple[CorpusConfig, Iterator[records.TextRecord]]:
    """The corpus that a text names, and its documents."""
    corpus = _corpus(text, {"field": field})
    return corpus, good_documents(read_records(corpus), Tally(), corpus)


# --- which source a text names --------------------------------------------------------------------


def _open(
    text: str | Rows, name: str, options: dict[str, Any]
) -> tuple[CorpusConfig, Iterator[records.Record]]:
    """The config of the source, and its records. Rows in memory get a config with equal options."""
    if isinstance(text, str):
        if text == str(records.STDIN):
            corpus = CorpusConfig("text", **options)
            return corpus, records.read_file(records.STDIN, corpus)
        corpus = _corpus(text, options)
        return corpus, read_records(corpus)
    rows: Any = text.to_dict("records") if isinstance(text, pd.DataFrame) else text
    if isinstance(rows, Mapping):
        raise ConfigError(f"{name} has several splits, {', '.join(rows)}; pass one of them")
    corpus = CorpusConfig("c4", hub_name="", **options)
    if set(corpus.fields) <= set(getattr(rows, "column_names", None) or ()):
        rows = rows.select_columns(corpus.fields)  # decodes no images of other columns
    dicts = ({corpus.field: row} if isinstance(row, str) else row for row in rows)
    return corpus, (
        records.parse_row(row, f"{name}:{number}", corpus)
        for number, row in enumerate(dicts, start=1)
    )


def _corpus(text: str, options: dict[str, Any]) -> CorpusConfig:
    kind, _, path = text.partition(":")
    named = text.removeprefix(BUILT_IN)
    # mypy does not narrow a string to the literals it is compared with.
    if named in ("embedded", "python", "c4") and (named != text or not os.path.exists(text)):
        return CorpusConfig(named, **options)  # type: ignore[arg-type]
    if kind in ("c4_files", "text") and path:
        return CorpusConfig(kind, path=path, **options)  # type: ignore[arg-type]
    is_file = os.path.exists(text) or glob.has_magic(text) or records.is_records(Path(text))
    if is_file and "\n" not in text:
        return CorpusConfig("files", path=text, **options)
    on_hub = re.fullmatch(r"hub:([^:]+)(?::([^:]*))?(?::([^:]+))?|\w[\w.-]*/[\w.-]+", text)
    if on_hub is None:
        shown = " ".join(text[:80].split())
        raise ConfigError(f"text={shown} is not {FORMS}; of a string itself: a list of strings")
    name, config, split = on_hub.groups()
    options = options | {"hub_name": name or text, "hub_config": config or None}
    return CorpusConfig("c4", hub_split=split or "train", **options)


def _refuse_unused(corpus: CorpusConfig, name: str) -> None:
    for item in fields(corpus):
        sources, value = item.metadata.get("only_if", ())[1:], getattr(corpus, item.name)
        if sources and corpus.source not in sources and value != item.default:
            raise ConfigError(f"{item.name}={value} means nothing to {name}; leave it out")


# --- text that a run was trained on ---------------------------------------------------------------


def _run_of(model: Reader) -> TrainingText | None:
    if not hasattr(model, "tokenizer"):
        raise ConfigError(f"model must be of load_model or wrap_model, not {type(model).__name__}")
    return model.text


def _same_corpus(one: CorpusConfig, other: CorpusConfig) -> bool:
    """Return whether the two share text: a file, or the data set."""
    if one.path and other.path:
        try:
            files = [{path.resolve() for path in list_inputs(config)} for config in (one, other)]
        except DataError:  # the run's files may be gone
            return one.path == other.path
        return bool(files[0] & files[1])
    return all(
        (getattr(one, name) or "default") == (getattr(other, name) or "default")
        for name in ("source", "path", "hub_name", "hub_config", "hub_split")
    )


def _heldout(
    stream: Iterator[records.Record], corpus: CorpusConfig, trained_on: CorpusConfig, share: float
) -> Iterator[records.Record]:
    names = ("field", "group_field", "split_at", "prompt_field")
    if any(getattr(corpus, name) != getattr(trained_on, name) for name in names):
        given = ", ".join(f"{name}={getattr(trained_on, name)}" for name in names)
        raise ConfigError(f"the model was trained on this text with {given}; pass the same")
    for record in stream:
        if isinstance(record, records.TextRecord) and not is_heldout(record, share):
            yield records.LeftOut(TRAINED_ON, record.name)
        else:
            yield record


# --- reading --------------------------------------------------------------------------------------


def _read(
    texts: Iterator[records.TextRecord],
    tally: Tally,
    model: Reader,
    limit: int | None,
    least: int,
    name: str,
    control_tokens: bool,
) -> list[Document]:
    tokenizer, documents, num_tokens, num_read = model.tokenizer, list[Document](), 0, 0
    if tokenizer is None:
        raise DataError(f"'{model.name}' has no tokenizer (tokenizer.json) to read text with")
    with Progress("reading", limit, "documents", enabled=read_launch().rank == 0) as progress:
        for batch in _batches(texts if least else islice(texts, limit)):
            # A target has tokens of its own.
            cuts = [one.target or 0 for one in batch]
            pairs = [*zip((one.text for one in batch), cuts, strict=True)]
            prompts = model.encode([text[:cut] for text, cut in pairs], control_tokens)
            rest = model.encode([text[cut:] for text, cut in pairs], control_tokens, any(cuts))
            for one, before, after in zip(batch, prompts, rest, strict=True):
                # Sources without titles use the text itself as group.
                group = "" if one.group == one.text else one.group
                ids = np.array([*before, *after], dtype=np.int64)
                num_read += 1
                if len(ids) < least:
                    continue
                start = None if one.target is None else len(before)
                documents.append(
                    Document(ids, len(documents), group, tokenizer, name=one.name, target=start)
                )
                num_tokens += len(ids)
            _check_size(num_tokens, name)
            progress.update(len(documents), tokens=f"{num_tokens:,}")
            if limit is not None and len(documents) >= limit:
                break
        if least:
            progress.note(_describe_choice(name, limit, len(documents), num_read, least))
        if tally.bad or tally.left_out:
            progress.note(f"{name}: left out {tally.describe()}")
    return documents[:limit]


def _batches(texts: Iterator[records.TextRecord]) -> Iterator[list[records.TextRecord]]:
    batch, size = list[records.TextRecord](), 0
    for text in texts:
        batch.append(text)
        size += len(text.text) + 64  # what an encoding costs next to its tokens
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open_prepared(text: Any) -> PreparedText | None:
    if not isinstance(text, str) or not os.path.isdir(text):
        return None
    found = (loader.open_prepared(Path(text)) for loader in run_loaders())
    return next(filter(None, found), None)


def _read_prepared(
    prepared: PreparedText, model: Reader, limit: int | None, least: int, name: str
) -> list[Document]:
    if model.tokenizer is not None and not _encode_alike(prepared, model.tokenizer):
        raise DataError(f"{name} were made with another tokenizer than the model's; pass text")
    if limit is None and not least:
        _check_size(prepared.num_tokens, name)
    every = range(len(prepared))
    long = [n for n in every if len(prepared.document(n)) >= least] if least else every
    num = min(len(long), limit or len(long))
    # Neighbours are often of one package or day: fewer documents are spread evenly over all.
    chosen = [long[number * len(long) // num] for number in range(num)]
    if least and read_launch().rank == 0:
        say(_describe_choice(name, limit, len(long), len(every), least))
    documents = [
        Document(
            prepared.document(n), number, prepared.group(n), model.tokenizer, name=f"{name}:{n}"
        )
        for number, n in enumerate(chosen)
    ]
    largest = max((int(d.tokens.max()) for d in documents if len(d.tokens)), default=0)
    if largest >= (size := model.model.vocab_size):
        raise DataError(f"{name}: token {largest}, the model's vocabulary has {size}")
    return documents


def _describe_choice(name: str, limit: int | None, found: int, read: int, least: int) -> str:
    num = min(found, limit or found)
    return f"{name}: {num:,} of {found:,} documents with {least:,} tokens or more, of {read:,} read"


def _encode_alike(prepared: PreparedText, tokenizer: Any) -> bool:
    """A tokenizer that another library has saved again has another fingerprint."""
    both = (prepared.tokenizer, tokenizer)
    if len({tokenizer_fingerprint(one) for one in both}) == 1:
        return True
    text = prepared.tokenizer.decode(prepared.document(0).tolist())
    ids = [one.encode(text, add_special_tokens=False).ids for one in both]
    return ids[0] == ids[1] and both[0].get_vocab() == both[1].get_vocab()


def _check_size(num_tokens: int, name: str) -> None:
    if num_tokens > MOST_TOKENS:
        raise DataError(f"{name}: more than {MOST_TOKENS:,} tokens; limit max_documents")


# --- targets that are given -----------------------------------------------------------------------


def cut_to_targets(documents: Documents, windows: Windows) -> Documents:
    """Return what the windows of each target's tokens hold, for records of prompt and target.
    Records with a prompt shorter than the long window are omitted. With long="all", whole
    prompts."""
    long = windows.first_target
    kept = [d for d in documents if d.target is not None and d.target >= long]
    cut = kept
    if windows.long != "all":
        cut = [replace(d, tokens=d.tokens[(d.target or 0) - long :], target=long) for d in kept]
    if len(cut) < 2:
        found = f"{len(cut)} of {len(documents)} prompts have {long=} tokens or more"
        raise DataError(f"{documents.name}: {found}, and measuring needs two; lower long")
    items = [replace(document, number=number) for number, document in enumerate(cut)]
    return replace(documents, items=items, num_too_short=len(documents) - len(cut))
