"""Corpora: every record is a document or counted as bad, and no document is on both sides."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.corpus import is_heldout, read_documents, read_records
from olmo_sparsity.text.records import LeftOut, TextRecord
from tests.support.corpora import c4_line


def texts(config: CorpusConfig) -> list[str]:
    return [document.text for document in read_documents(config)]


# --- the split ----------------------------------------------------------------------------------


@given(st.text(), st.floats(0, 1), st.sampled_from([str.upper, str.title, lambda t: f" {t}\n"]))
def test_equal_documents_fall_on_the_same_side(text: str, share: float, change: Any) -> None:
    sides = [is_heldout(TextRecord(t, t), share) for t in (text, text + " ")]
    sides += [is_heldout(TextRecord("another text", text), share)]
    assert len(set(sides)) == 1
    if text.isascii():
        assert is_heldout(TextRecord(change(text), change(text)), share) == sides[0]


def test_the_share_is_kept_and_grows_without_moving_documents_back() -> None:
    documents = [TextRecord(str(number), str(number)) for number in range(4000)]
    sides = {share: {d for d in documents if is_heldout(d, share)} for share in (0, 0.05, 0.3, 1)}
    assert not sides[0]
    assert 0.035 < len(sides[0.05]) / 4000 < 0.065
    assert sides[0.05] < sides[0.3] < sides[1] == set(documents)


def test_the_side_never_depends_on_the_machine() -> None:
    """Held-out text must stay held out for every checkpoint that was ever trained."""
    found = [n for n in range(40) if is_heldout(TextRecord(f"page {n}", f"page {n}"), 0.25)]
    assert found == [1, 9, 17, 21, 27, 29, 33, 34, 38, 39]


# --- embedded -----------------------------------------------------------------------------------


def test_embedded_passages_hold_neither_repeats_nor_questions() -> None:
    embedded = list(read_documents(CorpusConfig(source="embedded")))
    assert len(embedded) == 10_144
    assert len({document.text.partition(" -- ")[2] for document in embedded}) == len(embedded)
    for document in embedded:
        assert "\nQuestion:" not in document.text
        assert "\nAnswer:" not in document.text
        assert document.text.startswith(document.group + " -- ")
    groups = {document.group for document in embedded}
    assert len(groups) < 9_000, "articles of several passages are whole on one side"
    assert len({(d.group, is_heldout(d, 0.3)) for d in embedded}) == len(groups)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["text", "files"])
def test_each_plain_text_of_a_folder_is_a_document_in_order(source: Any, tmp_path: Path) -> None:
    for name in ("a.txt", "deep/b.txt", "read.me", ".git/config", "__pycache__/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "train-00000.tokens.uint16").write_bytes(b"tokens without a zero byte")
    assert texts(CorpusConfig(source, path=str(tmp_path))) == ["a.txt", "deep/b.txt", "read.me"]
    assert texts(CorpusConfig(source, path=str(tmp_path / "a.txt"))) == ["a.txt"]
    (tmp_path / "empty").mkdir()
    for path, problem in (("nowhere", "matches no file"), ("empty", "holds no text")):
        with pytest.raises(DataError, match=problem):
            texts(CorpusConfig(source, path=str(tmp_path / path)))


@pytest.mark.parametrize("stray", ["5.old", "lang=de/notes.txt", "part-1.jsonl.bak", "x.py"])
def test_records_beside_plain_text_are_not_chosen_from_silently(tmp_path: Path, stray: str) -> None:
    (tmp_path / "lang=de").mkdir()
    for name in ("a.jsonl", "lang=de/part-1.jsonl"):
        (tmp_path / name).write_bytes(c4_line(name))
    for name in ("README.md", "_SUCCESS", "LICENSE", "lang=de/_SUCCESS", "dataset_info.json"):
        (tmp_path / name).write_text("about the data")
    config = CorpusConfig("files", path=str(tmp_path))
    assert texts(config) == ["a.jsonl", "lang=de/part-1.jsonl"]
    (tmp_path / stray).write_text("a text")
    with pytest.raises(DataError, match=rf"a\.jsonl.*{stray}"):
        texts(config)
    assert "a text" in texts(CorpusConfig("text", path=str(tmp_path)))
    assert len(texts(CorpusConfig("files", path=f"{tmp_path}/**/*.jsonl"))) == 2


def test_other_documents_of_a_folder_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    for name in ("b.pdf", "c.docx"):
        (tmp_path / name).write_bytes(b"%PDF-1.7 no zero byte at its beginning")
    config = CorpusConfig("files", path=str(tmp_path))
    assert texts(config) == ["a text"] == texts(config)
    assert capsys.readouterr().err.count("skipped 2 files that are not plain text") == 1


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_damaged_files_are_skipped_up_to_a_limit(
    tmp_path: Path, allowed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        content = gzip.compress(c4_line(f"{name}1") + c4_line(os.urandom(3000).hex()))
        cut = len(content) if name == "b" else -500
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content[:cut])
    config = CorpusConfig("c4_files", path=f"{tmp_path}/*.gz", max_damaged_files=allowed)
    if allowed < 2:
        with pytest.raises(DataError, match=r"\.gz: damaged after record .*max_damaged_files"):
            texts(config)
        return
    read = list(read_records(config))
    assert "b1" in [record.text for record in read if isinstance(record, TextRecord)]
    left_out = [record for record in read if isinstance(record, LeftOut)]
    assert [record.kind for record in left_out] == ["damaged file"] * 2
    assert left_out[1].where.startswith(f"{tmp_path}/c.jsonl.gz:")
    assert f"{tmp_path}/a.jsonl.gz: damaged after" in capsys.readouterr().err
    for skip in range(len(read)):
        assert list(read_records(config, skip)) == read[skip:]


# --- the hub ------------------------------------------------------------------------------------


def test_c4_streams_the_split_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def rows() -> Any:
        yield from ({"text": text, "url": ""} for text in ("one", "", "three", "four"))
        raise ConnectionResetError("the line\nwent dead")

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.IterableDataset:
        asked.append((args, kwargs))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = CorpusConfig("c4", hub_config="de", hub_split="validation", max_documents=3)
    assert texts(config) == ["one", "three", "four"]
    assert asked == [(("allenai/c4", "de"), {"split": "validation", "streaming": True})]
    config.max_documents = None
    with pytest.raises(DataError, match=r"after 4 records: .*the line went dead"):
        texts(config)
    rest = read_records(config, skip=1)
    assert next(rest) == LeftOut("empty document", "allenai/c4 (de, validation) record 2")
    assert next(rest) == TextRecord("three", "three")


# --- any source ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(skip=st.integers(0, 12), wanted=st.none() | st.integers(0, 12), data=st.data())
def test_skipping_and_stopping_cut_the_same_stream(
    skip: int, wanted: int | None, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = data.draw(st.lists(st.booleans(), max_size=12))
    folder = tmp_path_factory.mktemp("c4")
    lines = [c4_line(str(n)) if is_good else b"?\n" for n, is_good in enumerate(good)]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:5]))
    (folder / "b.jsonl").write_bytes(b"".join(lines[5:]))
    config = CorpusConfig(source="c4_files", path=f"{folder}/*.jsonl")
    everything = list(read_records(config))
    records = [record for record in everything if not isinstance(record, LeftOut)]  # empty files
    assert [isinstance(record, TextRecord) for record in records] == good

    config.max_documents = wanted
    found = list(read_records(config, skip))
    assert found == everything[skip : skip + len(found)]
    if wanted is None:
        assert len(found) == max(0, len(everything) - skip)
    else:
        rest = sum(isinstance(record, TextRecord) for record in everything[skip:])
        assert sum(isinstance(record, TextRecord) for record in found) == min(wanted, rest)
