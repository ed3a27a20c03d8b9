"""Corpora: every record is a document or counted as bad, and no document is on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.analysis.inputs.corpus import (
    BadRecord,
    CorpusConfig,
    Document,
    LeftOut,
    is_heldout,
    read_documents,
    read_records,
)
from olmo_sparsity.errors import DataError
from tests.support.corpora import c4_line, run


def texts(config: CorpusConfig) -> list[str]:
    return [document.text for document in read_documents(config)]


# --- the split ----------------------------------------------------------------------------------


@given(st.text(), st.floats(0, 1), st.sampled_from([str.upper, str.title, lambda t: f" {t}\n"]))
def test_equal_documents_fall_on_the_same_side(text: str, share: float, change: Any) -> None:
    sides = [is_heldout(Document(t, t), share) for t in (text, text + " ")]
    sides += [is_heldout(Document("another text", text), share)]
    assert len(set(sides)) == 1
    if text.isascii():
        assert is_heldout(Document(change(text), change(text)), share) == sides[0]


def test_the_share_is_kept_and_grows_without_moving_documents_back() -> None:
    documents = [Document(str(number), str(number)) for number in range(4000)]
    sides = {share: {d for d in documents if is_heldout(d, share)} for share in (0, 0.05, 0.3, 1)}
    assert not sides[0]
    assert 0.035 < len(sides[0.05]) / 4000 < 0.065
    assert sides[0.05] < sides[0.3] < sides[1] == set(documents)


def test_the_side_never_depends_on_the_machine() -> None:
    """Held-out text must stay held out for every checkpoint that was ever trained."""
    found = [n for n in range(40) if is_heldout(Document(f"page {n}", f"page {n}"), 0.25)]
    assert found == [1, 9, 17, 21, 27, 29, 33, 34, 38, 39]


# --- embedded -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> list[Document]:
    return list(read_documents(CorpusConfig(source="embedded")))


def test_embedded_passages_hold_neither_repeats_nor_questions(embedded: list[Document]) -> None:
    assert len(embedded) == 10_144
    assert sum(len(document.text) for document in embedded) > 5_900_000
    assert len({document.text.partition(" -- ")[2] for document in embedded}) == len(embedded)
    for document in embedded:
        assert "\nQuestion:" not in document.text
        assert "\nAnswer:" not in document.text
        assert document.text.startswith(document.group + " -- ")


def test_embedded_articles_are_whole_on_one_side(embedded: list[Document]) -> None:
    groups = {document.group for document in embedded}
    assert len(groups) < 9_000  # There are articles with several passages, or this proves nothing.
    assert len({(d.group, is_heldout(d, 0.3)) for d in embedded}) == len(groups)


# --- text ---------------------------------------------------------------------------------------


def test_text_folder_is_one_document_per_file_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("two\n\n\nparts")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / "read.me").write_bytes(b"no text\0")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "old.txt").write_bytes("café".encode("latin-1"))
    config = CorpusConfig(source="text", path=str(tmp_path), max_bad_share=0.5)
    assert texts(config) == ["first", "two\n\n\nparts"]
    others = [record for record in read_records(config) if not isinstance(record, Document)]
    assert others == [
        LeftOut("empty document", str(tmp_path / "empty.txt")),
        BadRecord("wrong encoding", str(tmp_path / "old.txt")),
    ]
    assert texts(CorpusConfig(source="text", path=str(tmp_path / "a.txt"))) == ["first"]


# --- the hub ------------------------------------------------------------------------------------


def test_c4_streams_the_split_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.IterableDataset:
        asked.append((args, kwargs))
        rows = [{"text": text, "url": ""} for text in ("one", "", "three", "four")]
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = CorpusConfig(source="c4", hub_config="de", hub_split="validation", max_bad_share=0.5)
    assert texts(config) == ["one", "three", "four"]
    assert asked == [(("allenai/c4", "de"), {"split": "validation", "streaming": True})]
    rest = list(read_records(config, skip=1))
    assert rest[0] == LeftOut("empty document", "allenai/c4 (de, validation) record 2")
    assert rest[1:] == [Document("three", "three"), Document("four", "four")]


def test_c4_that_breaks_off_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield {"text": "one"}
        raise ConnectionResetError("the line\nwent dead")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    with pytest.raises(DataError, match=r"after 1 records: .* went dead; .*run again to continue"):
        texts(CorpusConfig(source="c4"))


def test_c4_offline_names_the_other_sources(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads the variable when it is imported."""
    code = (
        "config = Config(source='c4', hub_name='allenai/c4', hub_config='en', hub_split='train',\n"
        "                field='text', group_field=None, prompt_field=None, max_documents=None)\n"
        "try: next(corpus.read_records(config))\n"
        "except DataError as error: print(error)\n"
    )
    said = run(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert said.count("\n") == 1
    assert said.startswith("cannot read allenai/c4 (en, train) from the hub")
    for name in ("c4_files", "text", "embedded"):
        assert name in said


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
    assert [isinstance(record, Document) for record in everything] == good

    config.max_documents = wanted
    found = list(read_records(config, skip))
    assert found == everything[skip : skip + len(found)]
    if wanted is None:
        assert len(found) == max(0, len(good) - skip)
    else:
        assert sum(isinstance(record, Document) for record in found) == min(
            wanted, sum(good[skip:])
        )


def test_embedded_and_text_skip_as_well(tmp_path: Path, embedded: list[Document]) -> None:
    assert list(read_records(CorpusConfig(source="embedded"), skip=5000)) == embedded[5000:]
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    text = CorpusConfig(source="text", path=str(tmp_path))
    assert [r.text for r in read_records(text, skip=2) if isinstance(r, Document)] == ["c"]
