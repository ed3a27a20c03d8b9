"""Prepared folders and official OLMo files: opened whole, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.config.sections import DataConfig
from olmo_sparsity.config.text import TokenizerConfig
from olmo_sparsity.data import shards
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokenizer import train_tokenizer
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.io import sha256_of

OTHER = train_tokenizer(iter(["other words than before, other words"]), 300)


def word_tokenizer(folder: Path, vocabulary: dict[str, int], splitter: Any) -> TokenizerConfig:
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = splitter
    words.save(str(folder / "words.json"))
    return TokenizerConfig(name=str(folder / "words.json"))


def test_an_unprepared_folder_says_what_to_run(data: DataConfig) -> None:
    with pytest.raises(DataError, match="run `olmo-sparsity prepare` first"):
        open_shards(data, "train")


@pytest.mark.parametrize(
    "name",
    [
        "train-00000.tokens.uint16",
        "heldout-00000.tokens.uint16",
        "heldout-00000.ends.uint64",
        "train-00000.groups.uint64",
    ],
)
def test_a_damaged_shard_is_named(data: DataConfig, name: str) -> None:
    prepare(data)
    path = Path(data.folder) / name
    good = path.read_bytes()

    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match=f"{name} has .* truncated"):
        open_shards(data, "train")
    with pytest.raises(DataError, match=f"{name} has .* truncated"):
        prepare(data)

    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    split = name.split("-")[0]
    for use in (lambda: open_shards(data, split), lambda: prepare(data)):
        with pytest.raises(DataError, match=f"{name} does not have the SHA-256 that manifest"):
            use()
    open_shards(data, "train" if split == "heldout" else "heldout")
    open_shards(data, split, None)
    with pytest.raises(DataError, match=name):  # each process hashes a share of the files
        open_shards(data, split, (0, 2))
    open_shards(data, split, (1, 2))

    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_shards(data, "train")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is missing"),
        ("", "not a tokenizer"),
        ("{", "not a tokenizer"),
        (OTHER.to_str(), "is not the tokenizer the shards were written with"),
    ],
)
def test_another_tokenizer_in_the_folder_is_noticed(
    data: DataConfig, content: str | None, problem: str
) -> None:
    prepare(data)
    path = Path(data.folder) / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    for use in (lambda: open_shards(data, "train"), lambda: prepare(data)):
        with pytest.raises(DataError, match=rf"tokenizer\.json:? {problem}"):
            use()


def test_a_finished_folder_is_not_locked(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read-only."""
    prepare(data)
    monkeypatch.setattr("olmo_sparsity.folders.locked", None)
    assert prepare(data).complete


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("damage", ["falls", "repeats", "beyond", "short", "zero"])
def test_ends_that_do_not_rise_to_the_last_token_are_refused(
    data: DataConfig, split: str, damage: str
) -> None:
    """Also where the manifest vouches for them."""
    manifest = prepare(data)
    index, file = next((i, f) for i, f in enumerate(manifest.files) if f.split == split)
    path = Path(data.folder) / file.ends
    ends = np.fromfile(path, "<u8")
    place, value = {
        "falls": (3, ends[1]),
        "repeats": (3, ends[2]),
        "beyond": (-1, ends[-1] + 1),
        "short": (-1, ends[-1] - 1),
        "zero": (0, 0),
    }[damage]
    ends[place] = value
    ends.tofile(path)
    manifest.files[index] = replace(file, ends_sha256=sha256_of(path))
    manifest.save(Path(data.folder))
    with pytest.raises(DataError, match=rf"{file.ends} does not hold the ends of documents"):
        open_shards(data, split)


@pytest.mark.parametrize("name", ["../other/train.tokens", "/etc/passwd"])
def test_a_manifest_names_files_of_its_own_folder_only(data: DataConfig, name: object) -> None:
    prepare(data)
    path = Path(data.folder) / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("crc32")  # as an older version wrote it
    content["files"][0]["tokens"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"manifest.json: .* '{name}', which is outside"):
        open_shards(data, "train")


def test_a_broken_manifest_is_named(data: DataConfig) -> None:
    prepare(data)
    (Path(data.folder) / "manifest.json").write_text('{"settings": {}}')
    with pytest.raises(DataError, match=r"manifest\.json is not of a prepared folder"):
        open_shards(data, "train")


@pytest.fixture
def raw(tmp_path: Path) -> DataConfig:
    """As OLMo's preprocessing writes them: the second file ends inside a document."""
    eos, splitter = 300, pre_tokenizers.Whitespace()
    np.array([5, 6, 7, eos, 8, eos], "<u2").tofile(tmp_path / "part-0.npy")
    np.array([9, 10, eos, 11, 12], "<u2").tofile(tmp_path / "part-1.npy")
    np.array([13, eos], "<u2").tofile(tmp_path / "heldout.npy")
    return DataConfig(
        tokenizer=word_tokenizer(tmp_path, {"?": 0, "<|endoftext|>": eos}, splitter),
        train_files=[str(tmp_path / "part-*.npy")],
        heldout_files=[str(tmp_path / "heldout.npy")],
    )


def test_official_files_are_documents_too(raw: DataConfig) -> None:
    opened = open_shards(raw, "train")
    assert [opened.document(index).tolist() for index in range(len(opened))] == [
        *([5, 6, 7], [8], [9, 10], [11, 12])
    ]
    assert (opened.num_tokens, opened.vocab_size, opened.eos_id) == (11, 301, 300)
    assert open_shards(raw, "heldout").document(0).tolist() == [13]
    assert open_shards(raw, "train").fingerprint == opened.fingerprint
    with pytest.raises(ConfigError, match="nothing to prepare"):
        prepare(raw)


@given(st.lists(st.integers(0, 3), min_size=1), st.integers(1, 5))
def test_ends_are_found_across_chunks(ids: list[int], chunk: int) -> None:
    ends = shards._find_ends(np.array(ids, "<u2"), 0, chunk)
    wanted = [place + 1 for place, id in enumerate(ids) if id == 0]
    assert ends.tolist() == wanted + ([len(ids)] if ids[-1] else [])


def test_official_files_that_cannot_be_what_is_said_are_refused(
    raw: DataConfig, tmp_path: Path
) -> None:
    for content, problem in (
        (np.array([60_000], "<u2").tobytes(), "token 60,000, the tokenizer has 301"),
        (np.array([5, 6, 7], "<u4").tobytes(), r"is data\.token_dtype=uint32 meant"),
        (b"abc", "3 bytes"),
        (b"\x93NUMPY\x01\x00", "NumPy header"),
    ):
        (tmp_path / "part-1.npy").write_bytes(content)
        with pytest.raises(DataError, match=problem):
            open_shards(raw, "train")
    raw.heldout_files = [str(tmp_path / "part-0.npy")]
    with pytest.raises(DataError, match=r"part-0\.npy is in both"):
        open_shards(raw, "train")
    raw.train_files = [str(tmp_path / "nowhere-*.npy")]
    with pytest.raises(DataError, match="matches no file"):
        open_shards(raw, "train")
    raw.tokenizer = TokenizerConfig(train_vocab=300)
    with pytest.raises(ConfigError, match=r"needs data\.tokenizer\.name"):
        open_shards(raw, "train")
