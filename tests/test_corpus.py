"""Corpora: every record is a document or counted as bad, and no document is on both sides."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.config import CorpusConfig
from olmo_sparsity.data import corpus, python_sources, records
from olmo_sparsity.data.corpus import (
    BadRecord,
    Document,
    LeftOut,
    is_heldout,
    list_inputs,
    read_documents,
    read_records,
)
from olmo_sparsity.errors import DataError


def c4_line(text: str) -> bytes:
    row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
    return json.dumps(row).encode() + b"\n"


def write_compressed(path: Path, content: bytes) -> None:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":  # Two frames, as parallel compressors write them.
        half = len(content) // 2
        content = b"".join(zstandard.compress(c) for c in (content[:half], content[half:]))
    path.write_bytes(content)


def texts(config: CorpusConfig) -> list[str]:
    return [document.text for document in read_documents(config)]


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a process of its own prints. It does not import the settings, which import torch."""
    code = (
        "from types import SimpleNamespace as Config\n"
        "from olmo_sparsity.data import corpus, records\n"
        "from olmo_sparsity.errors import DataError\n"
    ) + code
    command, env = [sys.executable, "-c", code, *arguments], os.environ | environment
    return subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout


def kinds(config: CorpusConfig) -> list[str]:
    return ["good" if isinstance(r, Document) else r.kind for r in read_records(config)]


# --- the split ----------------------------------------------------------------------------------


@given(
    st.text(), st.floats(0, 1), st.sampled_from([str.upper, str.title, lambda t: f" {t}\n"])
)  # fmt: skip
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


# --- C4 files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", corpus.LINE_SUFFIXES)
def test_c4_files_of_every_suffix(tmp_path: Path, suffix: str) -> None:
    wanted = [f"Document {n}, café\nsecond line" for n in range(40)]
    write_compressed(tmp_path / f"b{suffix}", b"".join(map(c4_line, wanted[20:])))
    write_compressed(tmp_path / f"a{suffix}", b"".join(map(c4_line, wanted[:20])))
    config = CorpusConfig(source="c4_files", path=str(tmp_path / "*"))
    assert texts(config) == wanted


def test_c4_files_count_every_kind_of_bad_record_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "c4.json.gz"
    lines = [
        c4_line("good"),
        b'{"text": "cut off in the mid\n',
        b"\n",
        c4_line(" \n\t"),
        c4_line("caf\u00e9").replace(b"\\u00e9", b"\xe9"),
        b'{"url": "https://example.org"}\n',
        b'{"text": null}\n',
        b'{"text": 7}\n',
        b'["text"]\n',
        b'{"text": "half a pair: \\ud83d"}\n',
        b"[" * 100_000 + b"\n",
        c4_line("the last one")[:-1],
    ]
    write_compressed(path, b"".join(lines))
    config = CorpusConfig(source="c4_files", path=str(path), max_bad_share=0.9)
    assert kinds(config) == [
        *("good", "malformed line", "blank line", "empty document", "wrong encoding"),
        *("no text field", "empty document", "no text field", "malformed line", "wrong encoding"),
        *("malformed line", "good"),
    ]
    assert list(read_records(config))[4] == BadRecord("wrong encoding", f"{path}:5")
    assert texts(config) == ["good", "the last one"]

    config.max_bad_share = 0.5
    with pytest.raises(DataError, match="7 of the first 12 records are bad") as caught:
        texts(config)
    assert f"3 x malformed line (first: {path}:2)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_endless_line_is_one_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_DOCUMENT", 200)
    path = tmp_path / "c4.jsonl"
    path.write_bytes(c4_line("a") + b"x" * 5000 + b"\n" + c4_line("b") + b"y" * 1000)
    config = CorpusConfig(source="c4_files", path=str(path))
    too_long = "longer than 200 bytes"
    assert kinds(config) == ["good", too_long, "good", too_long]


@pytest.mark.parametrize("suffix", [".json.gz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "not compressed"])
def test_a_damaged_file_is_named_and_never_taken_for_a_short_one(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    path = tmp_path / f"c4{suffix}"
    write_compressed(path, b"".join(c4_line(os.urandom(20).hex()) for _ in range(500)))
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[:-50]
    elif damage == "overwritten":
        content[len(content) // 4 :] = os.urandom(len(content) - len(content) // 4)
    else:
        content[:] = c4_line("a")
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged after line") as caught:
        texts(CorpusConfig(source="c4_files", path=str(path), max_bad_share=1))
    assert str(path) in str(caught.value)


def test_a_zstd_file_is_read_in_bounded_memory_and_linear_time(tmp_path: Path) -> None:
    """In a process that may not grow by more than an eighth of what is unfolded."""
    compressor = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "c4.jsonl.zst").open("wb") as file:
        for _ in range(16):
            file.write(compressor.compress(b"x" * 2**24))
        file.write(compressor.flush())
    assert (tmp_path / "c4.jsonl.zst").stat().st_size < 2**17
    code = (
        "import pyarrow, resource, sys\n"
        "records.LARGEST_DOCUMENT = 2**20\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config = Config(source='c4_files', path=sys.argv[1], field='text', max_documents=None)\n"
        "print([record.kind for record in corpus.read_records(config)])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    kinds, grown_kib = run(code, f"{tmp_path}/*.zst").splitlines()
    assert kinds == "['longer than 1,048,576 bytes']"
    assert int(grown_kib) < 2**15


def test_a_glob_without_files_or_with_foreign_ones_is_refused(tmp_path: Path) -> None:
    config = CorpusConfig(source="c4_files", path=str(tmp_path / "*.gz"))
    with pytest.raises(DataError, match=r"\*\.gz matches no file"):
        texts(config)
    (tmp_path / "notes.txt.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"notes\.txt\.gz"):
        texts(config)


# --- text ---------------------------------------------------------------------------------------


def test_text_folder_is_one_document_per_file_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("two\n\n\nparts")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / "read.me").write_text("not text")
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


# --- Python -------------------------------------------------------------------------------------


def module(name: str, num_lines: int = 60, common: str = "") -> str:
    return common + "".join(f"{name}_{number} = compute({number})\n" for number in range(num_lines))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library, with the site-packages it has outside a virtual environment."""
    half = module("half", 60)
    files = {
        "json/decoder.py": module("decode"),
        "json/__init__.py": module("init", 2),
        "zlib.py": module("zlib"),
        "site-packages/alpha/one.py": module("one", common=half),
        "site-packages/alpha/two.py": module("two", 59, common=half),  # 60 lines of 119 are known
        "site-packages/beta/fork.py": module("three", 61, common=half),
        "site-packages/beta/deep/copy.py": module("decode"),
        "site-packages/beta/huge.py": "#" * 400_001,
        "site-packages/beta/empty.py": "",
        "site-packages/beta/notes.txt": module("notes"),
        "site-packages/gamma.py": module("gamma"),
        "site-packages/olmo_sparsity/cli.py": module("ours"),
        "site-packages/analysis/cli.py": module("ours too"),
        "site-packages/__editable___olmo_sparsity_finder.py": module("ours as well"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "zlib_old.py").write_bytes(module("größe").encode("latin-1"))
    paths = {
        "stdlib": tmp_path,
        **dict.fromkeys(("purelib", "platlib"), tmp_path / "site-packages"),
    }
    monkeypatch.setattr(python_sources.sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(python_sources, "TABLE_BITS", 20)
    return tmp_path


def test_python_files_are_grouped_by_package_and_all_of_them_counted(library: Path) -> None:
    config = CorpusConfig(source="python", max_bad_share=0.1)
    site = library / "site-packages"
    short, long = "shorter than 800 characters", "longer than 400,000 characters"
    wanted = [
        (site / "alpha/one.py", "alpha"),
        (site / "alpha/two.py", LeftOut),
        (site / "beta/deep/copy.py", "beta"),
        (site / "beta/empty.py", LeftOut),
        (site / "beta/fork.py", "beta"),
        (site / "beta/huge.py", LeftOut),
        (site / "gamma.py", "gamma"),
        (library / "json/__init__.py", LeftOut),
        (library / "json/decoder.py", LeftOut),
        (library / "zlib.py", "zlib"),
        (library / "zlib_old.py", BadRecord),
    ]
    assert list_inputs(config) == [path for path, _ in wanted]
    records = list(read_records(config))
    for (path, kind), record in zip(wanted, records, strict=True):
        if isinstance(record, Document):
            assert (record.group, record.text) == (kind, path.read_text())
        else:
            assert (type(record), record.where) == (kind, str(path))
    left_out = {Path(r.where).name: r.kind for r in records if isinstance(r, LeftOut)}
    assert left_out == {
        **{"two.py": "near repeat", "decoder.py": "exact repeat"},
        **{"empty.py": short, "__init__.py": short, "huge.py": long},
    }
    tally = corpus.Tally()
    # What was left out is no reason to fail.
    assert len(list(corpus.good_documents(records, tally, config))) == 5
    assert tally.bad == {"wrong encoding": 1}
    assert tally.left_out == {short: 2, long: 1, "near repeat": 1, "exact repeat": 1}


@pytest.mark.usefixtures("library")
def test_python_files_skipped_still_count_as_read() -> None:
    """A resumed run must leave out what the first run would have."""
    config = CorpusConfig(source="python")
    whole = list(read_records(config))
    for skip in range(12):
        assert list(read_records(config, skip)) == whole[skip:]


def test_an_environment_without_python_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), tmp_path)
    monkeypatch.setattr(python_sources.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(DataError, match=r"holds no \.py file"):
        texts(CorpusConfig(source="python"))


def test_the_python_of_this_environment_is_found() -> None:
    files = python_sources.list_python_files()
    packages = {package for package, _ in files}
    assert {"json", "argparse", "torch", "numpy"} <= packages
    assert not packages & {"olmo_sparsity", "analysis", "site-packages"}
    assert len({path for _, path in files}) == len(files) > 2000


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
    with pytest.raises(DataError, match=r"after 1 records: .* went dead; run again to continue"):
        texts(CorpusConfig(source="c4"))


def test_c4_offline_names_the_other_sources(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads the variable when it is imported."""
    code = (
        "config = Config(source='c4', hub_name='allenai/c4', hub_config='en', hub_split='train',\n"
        "                field='text', max_documents=None)\n"
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
