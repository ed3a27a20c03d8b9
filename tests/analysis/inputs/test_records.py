"""Records of files: read, or counted as bad with their place; a damaged file is named."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import zstandard

from olmo_sparsity.analysis.inputs import corpus, records
from olmo_sparsity.analysis.inputs.corpus import (
    BadRecord,
    CorpusConfig,
    Document,
    read_documents,
    read_records,
)
from olmo_sparsity.config.text import DataConfig, TokenizerConfig
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.corpora import c4_line, run


def write_compressed(path: Path, content: bytes) -> None:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":  # Two frames, as parallel compressors write them.
        half = len(content) // 2
        content = b"".join(zstandard.compress(c) for c in (content[:half], content[half:]))
    path.write_bytes(content)


def texts(config: CorpusConfig) -> list[str]:
    return [document.text for document in read_documents(config)]


def kinds(config: CorpusConfig) -> list[str]:
    return ["good" if isinstance(r, Document) else r.kind for r in read_records(config)]


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
    assert f"3 x malformed line (first: {path}:2, " in str(caught.value)
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
        "config = Config(source='c4_files', path=sys.argv[1], field='text', group_field=None,"
        " prompt_field=None, max_documents=None)\n"
        "print([record.kind for record in corpus.read_records(config)])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    kinds, grown_kib = run(code, f"{tmp_path}/*.zst").splitlines()
    assert kinds == "['longer than 1,048,576 bytes']"
    assert int(grown_kib) < 2**15


def test_a_prompt_stands_before_the_text_and_both_are_prepared(tmp_path: Path) -> None:
    rows = [{"q": f"What follows {n}? ", "a": f"After {n} comes {n + 1}."} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = CorpusConfig("files", path=str(tmp_path / "pairs.jsonl"), field="a", prompt_field="q")
    assert texts(corpus) == [row["q"] + row["a"] for row in rows]
    tokenizer = TokenizerConfig(train_vocab=300)
    data = DataConfig(str(tmp_path / "data"), corpus, tokenizer=tokenizer, heldout_share=0.3)
    prepare(data)
    shards = [open_shards(data, split) for split in ("train", "heldout")]
    found = [one.tokenizer.decode(one.document(n)) for one in shards for n in range(len(one))]
    assert sorted(found) == sorted(texts(corpus))
    with pytest.raises(ConfigError, match=r"corpus\.prompt_field=q \(now None\)"):
        prepare(replace(data, corpus=replace(corpus, prompt_field=None)))


def test_a_glob_without_files_or_with_foreign_ones_is_refused(tmp_path: Path) -> None:
    config = CorpusConfig(source="c4_files", path=str(tmp_path / "*.gz"))
    with pytest.raises(DataError, match=r"\*\.gz matches no file"):
        texts(config)
    (tmp_path / "notes.txt.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"notes\.txt\.gz"):
        texts(config)


# --- what is too large ----------------------------------------------------------------------------


HOLES = {
    ("hole.txt", "whole"): "longer than 33,554,432 bytes",
    ("hole.md", "blank-lines"): "line 1 has more than 536,870,912 bytes",
    ("hole.jsonl", "whole"): "line 1 has more than 536,870,912 bytes",
    ("hole.json", "whole"): "line 1 has more than 536,870,912 bytes",
    ("hole.csv", "whole"): "hole.csv: zero bytes, so it is not a text file",
    ("hole.json.zst", "whole"): "damaged after line 0 (ZSTD",
    ("hole.parquet", "whole"): "damaged after row 0 (Parquet magic bytes",
}


def test_files_of_5_gib_are_read_in_little_memory(tmp_path: Path) -> None:
    """Sparse ones, of no line's end, in a process that may not grow by more than half a GiB."""
    for name, _ in HOLES:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 5 * 2**30)
    code = (
        "import pyarrow, pyarrow.parquet, resource, sys\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "most = pages * resource.getpagesize() + 2**29\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "for path, split_at in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    config = Config(source='files', path=path, split_at=split_at, field='text',"
        " group_field=None, prompt_field=None, max_documents=None)\n"
        "    try: print(*corpus.read_records(config))\n"
        "    except DataError as error: print(error)\n"
    )
    words = [word for name, split_at in HOLES for word in (str(tmp_path / name), split_at)]
    answers = run(code, *words).splitlines()
    for answer, ((name, _), said) in zip(answers, HOLES.items(), strict=True):
        assert str(tmp_path / name) in answer
        assert said in answer


def test_a_line_without_end_is_refused_and_a_long_one_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a small file that unfolds to it."""
    monkeypatch.setattr(records, "LARGEST_DOCUMENT", 10**6)
    monkeypatch.setattr(records, "LARGEST_AT_ONCE", 10**7)
    monkeypatch.setattr(records, "_BUFFER", 2**17)
    path = tmp_path / "c4.jsonl.gz"
    write_compressed(path, b"\n".join([c4_line("a")[:-1], b"x" * 10**6 * 9, c4_line("b")]))
    config = CorpusConfig(source="c4_files", path=str(path), max_bad_share=1.0)
    assert kinds(config) == ["good", "longer than 1,000,000 bytes", "good"]
    write_compressed(path, b"x" * 10**6 * 11)
    with pytest.raises(DataError, match=r"c4\.jsonl\.gz: line 1 has more than 10,000,000 bytes"):
        kinds(config)


@pytest.mark.parametrize("suffix", [".json.zst", ".json.gz", ".json"])
def test_a_list_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """However small its file: over many lines, none of them long."""
    monkeypatch.setattr(records, "LARGEST_AT_ONCE", 10**6)
    path = tmp_path / f"list{suffix}"
    write_compressed(path, b"[\n" + b'{"text": "word"},\n' * 10**5 + b'{"text": "word"}]')
    with pytest.raises(DataError, match=r"list\.json.*: it is a list of more than 1,000,000 bytes"):
        list(records.read_file(path, records.Fields()))


def test_long_texts_of_tables_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_DOCUMENT", 1000)
    path = tmp_path / "table.parquet"
    pd.DataFrame({"text": ["short", "long " * 201, "short too"]}).to_parquet(path)
    found = list(records.read_file(path, records.Fields()))
    kinds = ["good" if isinstance(r, Document) else r.kind for r in found]
    assert kinds == ["good", "longer than 1,000 bytes", "good"]


def test_rows_that_cannot_be_read_in_parts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.parquet"
    texts = [f"{number} " * 1000 for number in range(100)]
    pd.DataFrame({"text": texts, "id": range(100)}).to_parquet(path)
    assert len(list(records.read_file(path, records.Fields()))) == 100
    monkeypatch.setattr(records, "LARGEST_AT_ONCE", 10**5)
    with pytest.raises(DataError, match=r"table\.parquet: its rows have 2,9.. bytes on average, "):
        list(records.read_file(path, records.Fields()))
    assert len(list(records.read_file(path, records.Fields("id")))) == 100


# --- groups ---------------------------------------------------------------------------------------


ROWS = [
    {"text": "one", "author": "Ada"},
    {"text": "two", "author": "ADA "},
    {"text": "three", "author": "Bo"},
    {"text": "four", "author": None},
    {"text": "five", "author": ""},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_field_groups_the_records_of_every_format(tmp_path: Path, suffix: str) -> None:
    path, table = tmp_path / f"books{suffix}", pd.DataFrame(ROWS)
    if suffix == ".parquet":
        table.to_parquet(path)
    elif suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        path.write_text(json.dumps(ROWS) if suffix == ".json" else "\n".join(map(json.dumps, ROWS)))
    config = CorpusConfig(source="files", path=str(path), group_field="author")
    found = [record for record in read_records(config) if isinstance(record, Document)]
    assert [document.text for document in found] == [row["text"] for row in ROWS]
    ada, same, bo, *without = (document.group_hash for document in found)
    assert ada == same != bo
    assert without == [Document(text, group=text).group_hash for text in ("four", "five")]
    with pytest.raises(DataError, match=r"has no field 'writer'; its fields are: .*author"):
        texts(CorpusConfig(source="files", path=str(path), group_field="writer"))


def test_the_group_of_a_url_is_its_host() -> None:
    values = ["https://a.org/1?x=2", "http://a.org", "https://b.org:80/a.org", 7, "a \ud800"]
    found = [
        records.parse_row({"text": "t", "by": by}, "here", records.Fields("text", "by"))
        for by in values
    ]
    assert [record.group for record in found if isinstance(record, Document)] == [
        "a.org",
        "a.org",
        "b.org:80",
        "7",
        "a ?",
    ]


def test_plain_text_has_no_groups(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book")
    config = CorpusConfig("files", path=str(tmp_path / "book.txt"), group_field="author")
    with pytest.raises(ConfigError, match=r"group_field=author: .*book\.txt is plain text"):
        texts(config)


def test_token_shards_in_a_folder_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book")
    (tmp_path / "train-00000.tokens.uint16").write_bytes(b"tokens without a zero byte")
    assert texts(CorpusConfig("text", path=str(tmp_path))) == ["a book"]


@pytest.mark.parametrize("source", ["files", "c4_files"])
def test_a_group_is_on_one_side_and_the_shards_know_it(tmp_path: Path, source: Any) -> None:
    rows = [
        {"text": f"part {part} by {author}: " + "word " * part, "author": f"author {author}"}
        for part in range(6)
        for author in range(12)
    ]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = CorpusConfig(source, path=str(tmp_path / "books.jsonl"), group_field="author")
    data = DataConfig(
        str(tmp_path / "data"),
        corpus,
        tokenizer=TokenizerConfig(train_vocab=300),
        heldout_share=0.4,
    )
    prepare(data)
    authors, hashes = [], []
    for split in ("train", "heldout"):
        shards = open_shards(data, split)
        found = [shards.tokenizer.decode(shards.document(i).tolist()) for i in range(len(shards))]
        authors.append({text.split(":")[0].split("by ")[1] for text in found})
        hashes.append({shards.group(i) for i in range(len(shards))})
        assert len(found) == 6 * len(authors[-1]) == 6 * len(hashes[-1]) > 0
    assert not authors[0] & authors[1]
    with pytest.raises(ConfigError, match=r"corpus\.group_field=author \(now None\)"):
        prepare(replace(data, corpus=replace(corpus, group_field=None)))
