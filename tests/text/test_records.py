"""Every format gives the same documents; a bad record is counted, a damaged file is an error."""

from __future__ import annotations

import codecs
import gzip
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text import record_files, records
from olmo_sparsity.text.corpus import read_documents, read_records
from olmo_sparsity.text.record_files import read_file
from olmo_sparsity.text.records import TextRecord, parse_row
from tests.support.corpora import TEXTS, c4_line, lines, packed

GROUPS = ["Ada", "https://a.org/1?x", "https://a.org/2", None]
ROWS = [
    {"text": text, "doc": {"by": group}, "by": group, "id": number}
    for number, (text, group) in enumerate(zip(TEXTS, GROUPS, strict=True))
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(path: str, **options: Any) -> list[TextRecord]:
    return list(read_documents(CorpusConfig("files", path=path, max_bad_share=1, **options)))


def kinds(path: str, source: Any = "files", **options: Any) -> list[str]:
    found = read_records(CorpusConfig(source, path=path, **options))
    return ["good" if isinstance(r, TextRecord) else r.kind for r in found]


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.zst", "a.parquet"])
def test_every_format_gives_the_same_documents(name: str) -> None:
    if name == "a.parquet":
        pd.DataFrame(ROWS).to_parquet(name)
    else:
        packed(Path(name), codecs.BOM_UTF8 * (name == "a.json") + lines(ROWS))
    found = read(name, group_field="by")
    assert [(d.text, d.group) for d in found] == list(
        zip(TEXTS, ["Ada", "a.org", "a.org", TEXTS[3]], strict=True)
    )
    assert [d.name for d in found] == [f"{name}:{number}" for number in (1, 2, 3, 4)]
    assert [d.group for d in read(name, group_field="doc.by")] == [d.group for d in found]
    pairs = read(name, field="by", prompt_field="text")
    assert [(d.text, d.target) for d in pairs] == [
        (text + group, len(text)) for text, group in zip(TEXTS, GROUPS[:3], strict=False)
    ]
    for missing in ("body", "text.body"):
        with pytest.raises(DataError, match=rf"no {missing} field .*: .*text"):
            read(name, field=missing)
    with pytest.raises(ConfigError, match="split_at"):
        read(name, split_at="blank-lines")


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.zst", "a"])
def test_plain_text_is_one_document_or_its_parts(name: str) -> None:
    packed(Path(name), b"\xef\xbb\xbf\n \none\ntwo\n\n\t\n\nthree\n\nfour")
    assert [d.text for d in read(name)] == ["\n \none\ntwo\n\n\t\n\nthree\n\nfour"]
    parts = read(name, split_at="blank-lines")
    assert [d.text for d in parts] == ["one\ntwo", "three", "four"]
    assert [d.name for d in parts] == [f"{name}:{number}" for number in (1, 2, 3)]
    for option in ("group_field", "field", "prompt_field"):
        with pytest.raises(ConfigError, match="without fields"):
            read(name, **{option: "author"})


def test_the_group_of_a_url_is_its_host() -> None:
    config = CorpusConfig("files", group_field="by")
    hosts = {"http://a.org": "a.org", "https://b.org:80/a.org": "b.org:80"}
    for value, group in {**hosts, 7: "7", "a \ud800": "a ?", " ": "t"}.items():
        record = parse_row({"text": "t", "by": value}, "here", config)
        assert isinstance(record, TextRecord)
        assert record.group == group


# --- bad records ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["files", "c4_files"])
def test_every_kind_of_bad_record_is_counted_with_its_place(source: str) -> None:
    path = "c4.json.gz"
    rows = {
        c4_line("good"): "good",
        b'{"text": "cut off in the mid\n': "malformed line",
        b"\n": "blank line",
        c4_line(" \n\t"): "empty document",
        c4_line("caf\u00e9").replace(b"\\u00e9", b"\xe9"): "wrong encoding",
        b'{"url": "https://example.org"}\n': "no text field",
        b'{"text": null}\n': "empty document",
        b'{"text": 7}\n': "text field that is not text",
        b'["text"]\n': "malformed line",
        b'{"text": "one", "text": "other"}\n': "key that is there twice",
        b'{"text": "one", "meta": {"id": 1, "id": 2}}\n': "key that is there twice",
        b'"text"\n': "malformed line",
        b'{"text": "half a pair: \\ud83d"}\n': "half of a surrogate pair",
        b'{"text": "a\\u0000"}\n': "wrong encoding",
        b"[" * 100_000 + b"\n": "malformed line",
        c4_line("the last one")[:-1]: "good",
    }
    packed(Path(path), b"".join(rows))
    assert kinds(path, source) == list(rows.values())
    config = CorpusConfig("files", path=path, max_bad_share=11 / 16)
    assert [d.text for d in read_documents(config)] == ["good", "the last one"]
    with pytest.raises(DataError, match=r"11 of the first 16 .* 4 x malformed line \(.*gz:2"):
        list(read_documents(replace(config, max_bad_share=0.68)))


def test_lines_that_end_with_cr_alone_are_named() -> None:
    Path("old.jsonl").write_bytes(c4_line("one").strip() + b"\r" + c4_line("two").strip())
    with pytest.raises(DataError, match="lines end with CR alone"):
        kinds("old.jsonl")


def test_other_encodings_and_tables_of_text_are_refused() -> None:
    Path("a.csv.gz").write_bytes(b"id,text\n1,one\n")
    with pytest.raises(ConfigError, match="path="):
        kinds("a.csv.gz")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "latin-1"):
        Path("a.txt").write_text("ü text", encoding=encoding)
        assert kinds("a.txt") == ["wrong encoding"]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.txt", "é and \ud83d".encode(errors="surrogatepass"), "a.txt, byte 8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xc3\xa9 and \\ud83d"}\n', "a.jsonl:2, character 7"),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_place(
    name: str, content: bytes, where: str
) -> None:
    Path(name).write_bytes(content)
    *_, record = read_file(Path(name), CorpusConfig("files", path=name))
    assert isinstance(record, records.BadRecord)
    assert record.where == where


def test_a_file_name_that_is_not_utf_8_is_stored_as_its_escapes(tmp_path: Path) -> None:
    """It names the document in tables, which hold UTF-8 alone."""
    path = tmp_path / "caf\udce9.txt"
    path.write_text("a text")
    (record,) = read_file(path, CorpusConfig("files", path=str(path)))
    assert isinstance(record, records.TextRecord)
    assert record.name == f"{tmp_path}/caf\\udce9.txt"


LONG = records.TOO_LONG.kind


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document may have 200 bytes."""
    monkeypatch.setattr(records, "LARGEST_DOCUMENT", 200)
    monkeypatch.setattr(record_files, "LARGEST_DOCUMENT", 200)


@pytest.mark.usefixtures("short_limit")
def test_a_longer_line_is_one_bad_record() -> None:
    Path("a.jsonl").write_bytes(c4_line("a") + b"x" * 5000 + b"\n" + c4_line("b") + b"y" * 1000)
    assert kinds("a.jsonl") == ["good", LONG, "good", LONG]


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize(
    ("size", "kind"), [(199, "good"), (200, "good"), (201, LONG), (5000, LONG)]
)
def test_a_longer_text_is_a_bad_record(size: int, kind: str) -> None:
    Path("a.txt").write_bytes(b"x" * size)
    pd.DataFrame({"text": ["x" * size]}).to_parquet("a.parquet")
    assert kinds("a.txt") == kinds("a.parquet") == [kind]


@pytest.mark.usefixtures("short_limit")
def test_a_longer_part_of_a_text_is_a_bad_record() -> None:
    Path("b.txt").write_bytes(b"one\n\n" + b"x\n" * 101 + b"\nthree")
    assert kinds("b.txt", split_at="blank-lines") == ["good", LONG, "good"]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json.gz", ".jsonl.zst", ".txt.gz"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "not compressed"])
def test_a_damaged_file_is_never_taken_for_a_short_one(suffix: str, damage: str) -> None:
    path = Path(f"a{suffix}")
    packed(path, b"text\n" + b"".join(c4_line(os.urandom(20).hex()) for _ in range(500)))
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[:-50]
    elif damage == "overwritten":
        content[len(content) // 4 :] = os.urandom(len(content) - len(content) // 4)
    else:
        content[:] = c4_line("a")
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a{suffix}: damaged after record \d+ \(."):
        kinds(str(path))


def test_a_file_that_is_cut_off_is_an_error() -> None:
    for name, content, number in (
        ("cut.jsonl", lines(ROWS)[:-9], 3),
        ("one.jsonl", b"{'text': 'one'}", 0),
        ("deep.json", b'{"a":' * 100_000, 0),
        ("a.parquet", b"PAR1 and what not", 0),
    ):
        Path(name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: damaged after record {number} "):
            kinds(name)
    Path("latin.jsonl").write_bytes(lines(ROWS) + b'{"text": "\xdc')
    assert kinds("latin.jsonl")[-1] == "wrong encoding"  # no one knows how many bytes were missing


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt", "a.json.gz"])
def test_an_empty_file_is_left_out(name: str) -> None:
    Path(name).touch()
    assert kinds(name) == ["empty document"]


# --- what is not read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b'[{"text": "one"}]', b'[\n {"text": "one"},\n {"text": 2}\n]']
)
def test_a_json_array_says_how_to_convert_it(content: bytes) -> None:
    Path("a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.json is a JSON array, .*jq -c .* > a\.jsonl"):
        kinds("a.json")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{\n "text": "one"\n}\n', r"a JSON object over several lines, .*jq -c \. a\.json"),
        (lines(ROWS).decode().encode("utf-16"), r"is UTF-16, .*iconv -f UTF-16 .*a\.json"),
    ],
)
def test_json_in_another_form_says_how_to_convert_it(content: bytes, match: str) -> None:
    Path("a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        kinds("a.json")


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ", "A.PARQUET"])
def test_a_suffix_in_capitals_is_the_same_format(name: str) -> None:
    if name.endswith("PARQUET"):
        pd.DataFrame(ROWS).to_parquet(name)
    else:
        content = lines(ROWS)
        Path(name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert [document.text for document in read(name)] == TEXTS


@pytest.mark.parametrize("name", ["a.pdf", "a.DOCX"])
def test_a_document_that_is_not_plain_text_is_named(name: str) -> None:
    Path(name).write_bytes(b"%PDF-1.7 no zero byte at its beginning")
    with pytest.raises(ConfigError, match=f"{name} is not plain text; convert it"):
        kinds(name)


def test_line_ends_stay_as_they_are_in_every_format() -> None:
    """A model sees the bytes of the text, so a file with CRLF has other tokens than one with LF."""
    text = "one\r\ntwo\r\n\r\nthree\n"
    Path("a.txt").write_bytes(text.encode())
    Path("a.jsonl").write_bytes(lines([{"text": text}]))
    pd.DataFrame({"text": [text]}).to_parquet("a.parquet")
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        (record,) = read_records(CorpusConfig("files", path=name))
        assert isinstance(record, TextRecord)
        assert record.text == text
    parts = read_documents(CorpusConfig("files", path="a.txt", split_at="blank-lines"))
    assert [part.text for part in parts] == ["one\r\ntwo", "three"]
