"""Token shards: nothing is lost, whatever happens on the way, and OLMo reads them as they are."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.locks import LOCK, locked
from olmo_sparsity.config.sections import DataConfig
from olmo_sparsity.config.text import CorpusConfig, TokenizerConfig
from olmo_sparsity.data import tokenizer
from olmo_sparsity.data.preparation import document_batches, together
from olmo_sparsity.data.preparation.split_checks import check_counts
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shard_manifest import Manifest
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokenizer import train_tokenizer
from olmo_sparsity.text.corpus import is_heldout, read_records
from olmo_sparsity.text.records import TextRecord


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen shards out of a few kilobytes."""
    monkeypatch.setattr(document_batches, "SHARD_CHARACTERS", 1500)
    monkeypatch.setattr(document_batches, "BATCH_CHARACTERS", 700)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 100)


def contents(data: DataConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(data.folder).iterdir()}


def word_tokenizer(folder: Path, vocabulary: dict[str, int], splitter: Any) -> TokenizerConfig:
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = splitter
    words.save(str(folder / "words.json"))
    return TokenizerConfig(name=str(folder / "words.json"))


# --- prepare ------------------------------------------------------------------------------------


@pytest.fixture(params=[None, "allenai_gpt-neox-olmo-dolma-v1_5"])
def prepared(
    data: DataConfig, small_shards: None, request: pytest.FixtureRequest
) -> tuple[DataConfig, Manifest]:
    """A folder of several shards, with a tokenizer that is trained there, and with another one."""
    if request.param is not None:
        data.tokenizer = TokenizerConfig(name=request.param)
    manifest = prepare(data)
    assert manifest is not None
    assert manifest.num_shards > 5
    return data, manifest


def records_of(data: DataConfig, split: str) -> list[TextRecord]:
    """Return the documents of the source that belong to this split."""
    return [
        record
        for record in read_records(data.corpus)
        if isinstance(record, TextRecord)
        if is_heldout(record, 0.3) == (split == "heldout")
    ]


def test_bad_records_are_counted_and_said(
    prepared: tuple[DataConfig, Manifest], capsys: pytest.CaptureFixture[str]
) -> None:
    data, manifest = prepared
    assert manifest.tally.bad == {"malformed line": 3}
    prepare(data)  # which finds it prepared
    assert "left out: 3 x malformed line" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_shards_hold_every_document_once_and_on_its_side(
    prepared: tuple[DataConfig, Manifest], split: str
) -> None:
    data, manifest = prepared
    shards = open_shards(data, split)
    texts = [record.text for record in records_of(data, split)]
    assert len(shards) == manifest.num_documents(split) == len(texts)
    documents = [shards.document(number).tolist() for number in range(len(shards))]
    assert [shards.tokenizer.decode(ids) for ids in documents] == texts
    for ids, text in zip(documents, texts, strict=True):
        assert ids == shards.tokenizer.encode(text, add_special_tokens=False).ids
    num_tokens = sum(len(ids) + 1 for ids in documents)
    assert shards.num_tokens == manifest.num_tokens(split) == num_tokens


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_documents_of_one_group_have_one_name_of_it(
    prepared: tuple[DataConfig, Manifest], split: str
) -> None:
    data, _ = prepared
    shards = open_shards(data, split)
    groups = [record.group for record in records_of(data, split)]
    names = [shards.group(number) for number in range(len(shards))]
    assert len(set(names)) == len(set(groups)) == len(set(zip(names, groups, strict=True)))


def test_the_two_splits_are_all_documents_and_have_other_fingerprints(
    prepared: tuple[DataConfig, Manifest],
) -> None:
    data, _ = prepared
    train = open_shards(data, "train")
    heldout = open_shards(data, "heldout")
    assert len(train) + len(heldout) == 90
    assert train.fingerprint != heldout.fingerprint
    with pytest.raises(IndexError):
        train.document(len(train))


@pytest.mark.usefixtures("small_shards")
def test_olmo_reads_the_shards_as_they_are_and_cuts_the_same_sequences(data: DataConfig) -> None:
    """None of them crosses from one shard to the next."""
    from olmo.data.memmap_dataset import MemMapDataset

    prepare(data)
    opened = open_shards(data, "train")
    assert len(opened.paths) > 5
    ours = Sequences(opened, 7)
    theirs = MemMapDataset(*opened.paths, chunk_size=7, memmap_dtype=np.uint16)
    assert len(ours) == len(theirs) == sum(path.stat().st_size // 14 for path in opened.paths)
    for index in range(len(theirs)):
        assert ours[index].tolist() == theirs[index]["input_ids"].tolist()


def test_a_large_vocabulary_gets_four_bytes_a_token(tmp_path: Path, data: DataConfig) -> None:
    vocabulary = {"<|endoftext|>": 0, "the": 1, "river": 70_000, "?": 2}
    data.tokenizer = word_tokenizer(tmp_path, vocabulary, pre_tokenizers.Whitespace())
    manifest = prepare(data)
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", 70_001)
    opened = open_shards(data, "train")
    assert opened.paths[0].name == "train-00000.tokens.uint32"
    assert opened.dtype == np.uint32
    assert 70_000 in opened.document(0) or 70_000 in opened.document(1)


def test_the_end_token_can_never_stand_inside_a_document(tmp_path: Path, data: DataConfig) -> None:
    splitter = pre_tokenizers.WhitespaceSplit()
    data.tokenizer = word_tokenizer(tmp_path, {"<|endoftext|>": 0, "?": 1}, splitter)
    with pytest.raises(DataError, match="end-of-text token"):
        prepare(data)


def test_too_many_bad_records_fail_before_anything_counts_as_done(data: DataConfig) -> None:
    data.corpus.max_bad_share = 0.01
    with pytest.raises(DataError, match="3 of the first 93 records are bad"):
        prepare(data)
    with pytest.raises(DataError, match="prepared in part"):
        open_shards(data, "train")
    data.corpus.max_bad_share = 0.05
    assert prepare(data).complete


@pytest.mark.parametrize(("share", "lacking"), [(0.0001, "held-out"), (0.9999, "training")])
def test_an_empty_side_is_refused(data: DataConfig, share: float, lacking: str) -> None:
    data.heldout_share, data.corpus.path = share, (data.corpus.path or "").replace("*", "a.json")
    with pytest.raises(DataError, match=f"no {lacking} document"):
        prepare(data)
    data.heldout_share = 0.3  # Nothing was lost: the same folder takes better settings.
    assert prepare(data).complete


@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_a_share_that_holds_out_nothing_is_refused_before_text_is_tokenized(
    data: DataConfig, shard: tuple[int, int]
) -> None:
    """As of a config for C4 that is used for a small text."""
    data.heldout_share = 0.0001
    with pytest.raises(DataError, match="no held-out document of 90 documents") as error:
        prepare(data, shard)
    assert not [*Path(data.folder).rglob("tokenizer.json")], "its training comes first"
    share = re.search(r"--data.heldout_share=(\S+) holds out about 27", str(error.value))
    assert share is not None
    data.heldout_share = float(share[1])
    manifest = prepare(data)
    assert manifest is not None
    assert 10 <= manifest.num_documents("heldout") <= 40


@pytest.mark.parametrize(
    ("num_documents", "share", "remedy"),
    [
        (12, 0.001, "or raise the share: --data.heldout_share=0.5 holds out about 6"),
        (3, 0.5, "give more text"),
        (1, 0.001, "give more text"),
    ],
)
def test_the_remedy_for_few_documents_holds_out_what_it_says(
    data: DataConfig, num_documents: int, share: float, remedy: str
) -> None:
    data.heldout_share = share
    counts = {"train": num_documents, "heldout": 0}
    with pytest.raises(DataError) as error:
        check_counts(data, counts)
    assert str(error.value).endswith(remedy)


def test_without_a_heldout_share_there_is_only_training_text(data: DataConfig) -> None:
    data.heldout_share = 0
    assert prepare(data).num_documents("heldout") == 0
    assert len(open_shards(data, "train")) == 90
    with pytest.raises(DataError, match="no heldout documents"):
        open_shards(data, "heldout")


# --- again, and after a kill --------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.accept
@pytest.mark.usefixtures("small_shards")
def test_stopped_at_any_step_and_resumed_gives_the_same_bytes(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies does so between two system calls; each of those that change the folder
    (open for writing, rename) is once the first that does not happen."""
    monkeypatch.setattr(document_batches, "SHARD_CHARACTERS", 7000)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # Slow, and only for power cuts.
    with stopping_after(None) as steps:
        assert prepare(data).num_shards > 2
    whole = contents(data)
    assert steps[0] > 25
    for last in range(steps[0]):
        again = replace(data, folder=str(tmp_path / f"stopped-{last}"))
        with pytest.raises(Killed), stopping_after(last):
            prepare(again)
        (Path(again.folder) / LOCK).unlink(missing_ok=True)  # this process is not really dead
        prepare(again)
        assert contents(again) == whole, f"stopped after step {last}"


@pytest.mark.usefixtures("small_shards")
def test_processes_that_share_the_files_write_the_same_bytes(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the one that joins them is killed at its end."""
    manifest, shared = prepare(data), replace(data, folder=str(tmp_path / "shared"))
    whole = contents(data)
    assert {file.tokens for file in manifest.files} > {"train-00006.tokens.uint16"}

    def killed(*_: object) -> None:
        raise Killed

    assert prepare(shared, (1, 2)) is None
    for name in ("_join_folders", "sync"):
        with monkeypatch.context() as patch:
            patch.setattr(together, name, killed)
            with pytest.raises(Killed):
                prepare(shared, (0, 2))
        (Path(shared.folder) / LOCK).unlink(missing_ok=True)
    assert prepare(shared, (0, 2)) == manifest
    assert contents(shared) == whole
    assert prepare(shared, (1, 2)) == manifest
    shared.corpus.max_documents = 80
    with pytest.raises(ConfigError, match="max_documents=null"):
        prepare(shared, (0, 2))


@pytest.fixture
def records(tmp_path: Path, data: DataConfig) -> DataConfig:
    """The same documents in two files of JSON lines and one of Parquet."""
    folder = tmp_path / "records"
    folder.mkdir()
    texts = [f"document {number} of river and the café " * 3 for number in range(60)]
    for name, first in (("a", 0), ("b", 20)):
        lines = [json.dumps({"body": text}) for text in texts[first : first + 20]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pd.DataFrame({"body": texts[40:]}).to_parquet(folder / "c.parquet")
    corpus = CorpusConfig("files", path=str(folder), field="body")
    return replace(data, corpus=corpus, folder=str(tmp_path / "alone"))


def documents_of(data: DataConfig) -> dict[str, list[list[int]]]:
    opened = {split: open_shards(data, split) for split in ("train", "heldout")}
    return {
        split: [shards.document(number).tolist() for number in range(len(shards))]
        for split, shards in opened.items()
    }


def test_processes_share_files_of_records_of_any_kind(records: DataConfig, tmp_path: Path) -> None:
    shared = replace(records, folder=str(tmp_path / "shared"))
    assert prepare(shared, (1, 2)) is None
    assert prepare(shared, (0, 2)) is not None
    prepare(records)
    assert documents_of(shared) == documents_of(records)
    assert not (tmp_path / "shared/parts").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_documents": 30}, "data.corpus.max_documents=30 counts over all files"),
        ({"source": "embedded"}, "data.corpus.source=embedded; prepare it as one process"),
        ({"path": "plain"}, "notes.txt is plain text"),
    ],
)
def test_a_corpus_that_one_process_reads_is_not_shared(
    records: DataConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("river")
    if "path" in change:
        change = {"path": str(tmp_path / "plain")}
    records.corpus = replace(records.corpus, **change)
    with pytest.raises(ConfigError) as caught:
        prepare(records, (0, 2))
    assert message in str(caught.value)


@contextmanager
def stopping_after(last: int | None) -> Iterator[list[int]]:
    """Yields the number of steps done, in a list."""
    done = [0]

    def counted(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)  # the heartbeat of the lock
            if done[0] == last:
                raise Killed
            done[0] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "replace"), (Path, "open")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield done


def test_a_finished_folder_is_left_alone(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare(data)
    times = {path: path.stat().st_mtime_ns for path in Path(data.folder).iterdir()}
    for path in Path(data.corpus.path or "").parent.iterdir():
        path.unlink()
    assert prepare(data) == first
    assert "is already prepared" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path(data.folder).iterdir()} == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: setattr(d, "heldout_share", 0.2), "heldout_share=0.3 (now 0.2)"),
        (lambda d: setattr(d.tokenizer, "train_vocab", 301), "train_vocab=300 (now 301)"),
        (lambda d: setattr(d.corpus, "max_documents", 80), "corpus.max_documents=None (now 80)"),
        (lambda d: setattr(d, "corpus", CorpusConfig()), "source=c4_files (now embedded)"),
        (lambda d: (Path(d.folder).parent / "c4/d.json.gz").touch(), "other source files"),
    ],
)
def test_other_settings_and_sources_are_refused_by_name(
    data: DataConfig, change: Callable[[DataConfig], None], message: str
) -> None:
    prepare(data)
    before = contents(data)
    change(data)
    with pytest.raises(ConfigError) as caught:
        prepare(data)
    assert message in str(caught.value)
    assert contents(data) == before


def test_a_tokenizer_that_changed_under_its_name_is_refused(
    tmp_path: Path, data: DataConfig
) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(iter(["a b c"]), 300).save(str(path))
    data.tokenizer = TokenizerConfig(name=str(path))
    prepare(data)
    train_tokenizer(iter(["other words than before, other words"]), 300).save(str(path))
    with pytest.raises(ConfigError, match=r"another tokenizer than .* is now"):
        prepare(data)


def test_two_at_once_are_refused(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(data.folder).mkdir()
    with locked(Path(data.folder)), pytest.raises(UserError, match="is being written by process"):
        prepare(data)
    assert prepare(data).complete
    for name, number in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, number)
    with pytest.raises(UserError, match="as one task"):
        prepare(data)


def test_damaged_files_of_all_processes_count_together(data: DataConfig) -> None:
    for name in "ac":
        path = Path(data.corpus.path or "").parent / f"{name}.json.gz"
        path.write_bytes(path.read_bytes()[:-40])
    data.tokenizer = TokenizerConfig(name="allenai_gpt-neox-olmo-dolma-v1_5")
    data.heldout_share = 0.0
    data.corpus.max_damaged_files = 1
    assert prepare(data, (0, 2)) is None
    with pytest.raises(DataError, match=r"2 files are damaged .*max_damaged_files=1"):
        prepare(data, (1, 2))
    data.corpus.max_damaged_files = 2
    manifest = prepare(data, (1, 2))
    assert manifest is not None
    assert manifest.tally.left_out["damaged file"] == 2
    assert manifest.num_documents("train") >= 30
