"""Open text in the forms users have it, as documents: files, folders, data sets, the hub, strings.

    open_documents("my_texts", model)            # all
    open_documents("my_texts", model, limit=100, min_tokens=4096)
    open_documents(None, model)                  # what the run held out

    text → the corpus that it names (forms.py) → records (corpus.py) → documents (tokenized.py)
         → a prepared folder, or none: held-out text that is tokenized already ↗

If the model was trained on the corpus, only held-out documents are read. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from olmo_sparsity.base.errors import ConfigError, DataError, check_type
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.text import CorpusConfig, SplitAt
from olmo_sparsity.text.corpus import good_documents, is_heldout, list_inputs, read_records
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.forms import (
    FORMS,
    Rows,
    check_options_are_used,
    corpus_of,
    open_rows_or_corpus,
)
from olmo_sparsity.text.records import LeftOut, Record, TextRecord
from olmo_sparsity.text.runs import PreparedText, Reader, TrainingText, run_loaders
from olmo_sparsity.text.tally import Tally
from olmo_sparsity.text.tokenized import Selection, read_prepared, tokenize
from olmo_sparsity.text.windows import Windows

TRAINED_ON = "text the model was trained on"
"""The reason to leave out a record, for messages."""


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

    Args:
        text: What `FORMS` names, a `datasets.Dataset`, a DataFrame, or strings. None means the
            held-out documents of the run that the model comes from. Of a corpus that this run was
            trained on, only held-out documents are read.
        model: What `load_model` returns; its tokenizer encodes the text.
        limit: The largest number of documents of at least `min_tokens` to read. None means all of
            them.
        field: The field of a record that holds the text.
        group_field: The field that groups records, such as an author: no document serves as
            unrelated text for another of its group.
        split_at: Where a file of plain text is split into documents.
        prompt_field, target_field: The two texts of records of a prompt and a target: the tokens of
            the target are the targets.
        min_tokens: The smallest number of tokens of a document; shorter ones are left out.
        control_tokens: Whether `<|im_end|>` in a text becomes that token.
    """
    _check_limit(limit)
    if split_at not in get_args(SplitAt):
        raise ConfigError(f"{split_at=} is none of {', '.join(get_args(SplitAt))}")
    fields = _RecordFields(text=field, prompt=None)
    if prompt_field is not None or target_field is not None:
        fields = _fields_of_pairs(field, prompt_field, target_field)
    # Fields of `CorpusConfig`; which input it is follows from the text.
    corpus_options: dict[str, Any] = {
        "field": fields.text,
        "split_at": split_at,
        "group_field": group_field,
        "prompt_field": fields.prompt,
    }
    run = _run_of(model)
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    selection = Selection(limit, min_tokens or 0)
    tally = Tally()

    # The text is either tokenized already, in a prepared folder, or it is read and tokenized.
    heldout = _find_heldout(text, run, model.name)
    if heldout is not None:
        name = f"held-out documents of {heldout.folder}"
        check_options_are_used(CorpusConfig(**corpus_options), name)
        documents = read_prepared(heldout.text, model, name, selection)
    else:
        assert text is not None, "without a text there is held-out text, or an error"
        name = text if isinstance(text, str) else type(text).__name__
        texts = _read_untrained(text, name, corpus_options, run, tally)
        documents = tokenize(
            texts, model, name, selection, control_tokens=control_tokens, tally=tally
        )

    if not documents:
        raise _no_documents(name, min_tokens, tally)
    if group_field is not None:
        _check_groups(name, group_field, {document.group for document in documents})
    num_training = tally.left_out.get(TRAINED_ON, 0)
    return Documents(name, documents, num_training, grouped_by=group_field or "")


def _check_groups(name: str, group_field: str, groups: set[str]) -> None:
    """Print a line if the group field has no effect. Raise DataError if it makes two groups of one
    number: the unrelated text of a document could then be of its own group."""
    is_first_process = read_launch().rank == 0
    if groups == {""} and is_first_process:
        say(f"{name}: {group_field} is empty in all documents, so that each is a group of its own")
    for group in sorted(groups):
        whole_number = group.removesuffix(".0")
        if whole_number != group and whole_number in groups:
            raise DataError(
                f"{name}: group_field={group_field} is {whole_number} in some documents and "
                f"{group} in others, which would be two groups; write the numbers alike"
            )


def _check_limit(limit: int | None) -> None:
    """Raise ConfigError if a limit leaves too few documents to measure."""
    if limit is None:
        return
    check_type("limit", limit, Integral, "a whole number of documents, or None")
    if limit < 2:
        raise ConfigError(
            f"{limit=} documents (--max-documents): pass at least 2, as one half of them sets the "
            "threshold and the other is reported"
        )


@dataclass(frozen=True)
class _RecordFields:
    """The fields of a record that are read, besides that of its group."""

    text: str
    """The field with the text; of a prompt and a target, that of the target."""

    prompt: str | None
    """The field with the prompt; None if records have none."""


def _fields_of_pairs(
    field: str, prompt_field: str | None, target_field: str | None
) -> _RecordFields:
    """Return the fields of the prompt and of the target, "prompt" and "target" by default. Raise
    ConfigError if they are the same, or if `field` names a third one."""
    prompt_field = prompt_field or "prompt"
    target_field = target_field or "target"
    if field != "text" or prompt_field == target_field:
        raise ConfigError(
            f"{prompt_field=} and {target_field=} must name two different fields of a record, "
            f"and {field=} must be left out"
        )
    return _RecordFields(text=target_field, prompt=prompt_field)


def _no_documents(name: str, min_tokens: int | None, tally: Tally) -> DataError:
    """Return the error for an input without documents, with what was left out of it."""
    of_length = f" of {min_tokens:,} tokens or more" if min_tokens else ""
    left_out = f": left out {tally.describe()}" if tally.left_out else ""
    return DataError(f"{name} holds no documents{of_length}{left_out}")


def open_text(text: str, field: str = "text") -> Iterator[TextRecord]:
    """Yield the documents of the corpus that `text` names, as text."""
    corpus = corpus_of(text, {"field": field})
    return good_documents(read_records(corpus), Tally(), corpus)


# --- text that training held out ------------------------------------------------------------------


@dataclass(frozen=True)
class _HeldoutText:
    """Tokenized documents that training held out."""

    text: PreparedText
    folder: str


def _find_heldout(text: Any, run: TrainingText | None, model_name: str) -> _HeldoutText | None:
    """Return the held-out documents of the prepared folder that `text` names, or, if it is None,
    those of the run. Return None if `text` names another input. `run`: what the model was trained
    on."""
    if text is not None:
        prepared = _find_prepared(text)
        return None if prepared is None else _HeldoutText(prepared, str(text))
    if run is not None:
        return _HeldoutText(run.open_heldout(), run.folder)
    raise ConfigError(
        f"text=None: '{model_name}' was not trained here, so it has no held-out text; pass {FORMS}"
    )


def _find_prepared(text: Any) -> PreparedText | None:
    """Return the held-out documents of a folder that `prepare` wrote; None for anything else."""
    if not isinstance(text, str) or not os.path.isdir(text):
        return None
    for loader in run_loaders():
        prepared = loader.open_prepared(Path(text))
        if prepared is not None:
            return prepared
    return None


def _run_of(model: Reader) -> TrainingText | None:
    """Return the text that the model's run was trained on; None if it is not from a run."""
    if not hasattr(model, "tokenizer"):
        raise ConfigError(
            f"model must be what load_model or wrap_model returns, not {type(model).__name__}"
        )
    return model.text


def _read_untrained(
    text: str | Rows, name: str, options: dict[str, Any], run: TrainingText | None, tally: Tally
) -> Iterator[TextRecord]:
    """Yield the documents of an input that the run was not trained on: all of them, or those that
    training held out. Count the others in `tally`."""
    opened = open_rows_or_corpus(text, name, options)
    check_options_are_used(opened.corpus, name)
    records = opened.records
    if run is not None:
        for trained_on in run.corpora:
            if _share_text(opened.corpus, trained_on):
                records = _heldout(records, opened.corpus, trained_on, run.heldout_share)
    return good_documents(records, tally, opened.corpus)


def _share_text(corpus: CorpusConfig, trained_on: CorpusConfig) -> bool:
    """Return whether a corpus and one that was trained on have a file in common, or are the same
    data set."""
    if corpus.path and trained_on.path:
        try:
            paths = {path.resolve() for path in list_inputs(corpus)}
            trained_paths = {path.resolve() for path in list_inputs(trained_on)}
        except DataError:  # the run's files may be gone
            return corpus.path == trained_on.path
        return bool(paths & trained_paths)
    # None and "" both mean the default of an option.
    return all(
        (getattr(corpus, name) or "default") == (getattr(trained_on, name) or "default")
        for name in ("source", "path", "hub_name", "hub_config", "hub_split")
    )


def _heldout(
    records: Iterator[Record], corpus: CorpusConfig, trained_on: CorpusConfig, share: float
) -> Iterator[Record]:
    """Yield the records that training held out, and a `LeftOut` for each that it read. Raise
    ConfigError if the options of the two corpora differ. `share`: the fraction that was held
    out."""
    # What a document is, and its group, decide whether it was held out.
    names = ("field", "group_field", "split_at", "prompt_field")
    if any(getattr(corpus, name) != getattr(trained_on, name) for name in names):
        options = ", ".join(f"{name}={getattr(trained_on, name)}" for name in names)
        raise ConfigError(
            f"the model was trained on this text with {options}; pass the same, as they decide "
            "what was held out"
        )
    for record in records:
        if isinstance(record, TextRecord) and not is_heldout(record, share):
            yield LeftOut(TRAINED_ON, record.name)
        else:
            yield record


# --- records of prompt and target -----------------------------------------------------------------


def cut_to_targets(documents: Documents, windows: Windows) -> Documents:
    """Return records of prompt and target, with prompts that are cut to the long window of the
    target's first token. With long="all", prompts stay whole. Records with a shorter prompt are
    left out. With a long window of 4 tokens:

        before    p0 p1 p2 p3 p4 p5 │ t0 t1     target = 6
        after           p2 p3 p4 p5 │ t0 t1     target = 4
    """
    long = windows.first_target
    long_enough = [
        document
        for document in documents
        if document.target is not None and document.target >= long
    ]
    if len(long_enough) < 2:
        raise DataError(
            f"{documents.name}: {len(long_enough)} of {len(documents)} prompts have {long=} tokens "
            "or more, and measuring needs two; pass longer prompts, or lower long"
        )
    items: list[Document] = []
    for document in long_enough:
        cut = replace(document, number=len(items))
        if not windows.has_all:
            assert document.target is not None
            cut = replace(cut, tokens=document.tokens[document.target - long :], target=long)
        items.append(cut)
    return replace(documents, items=items, num_too_short=len(documents) - len(items))
