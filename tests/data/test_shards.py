"""Prepared folders: opened whole, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.config.sections import DataConfig
from olmo_sparsity.data.preparation import document_batches
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shard_manifest import Manifest
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import train_tokenizer
from tests.conftest import data_section

OTHER = train_tokenizer(iter(["other words than before, other words"]), 300)


def test_an_unprepared_folder_says_what_to_run(data: DataConfig) -> None:
    with pytest.raises(DataError, match="run `olmo-sparsity prepare` first"):
        open_shards(data, "train")


@pytest.mark.parametrize("name", ["train-00000.tokens.uint16", "heldout-00000.ends.uint64"])
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


@pytest.mark.parametrize("damage", ["falls", "repeats", "beyond", "short", "zero"])
def test_ends_that_do_not_rise_to_the_last_token_are_refused(data: DataConfig, damage: str) -> None:
    """Also where the manifest vouches for them."""
    manifest = prepare(data)
    index, file = next((i, f) for i, f in enumerate(manifest.files) if f.split == "train")
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
        open_shards(data, "train")


@pytest.mark.parametrize("name", ["../other/train.tokens", "/etc/passwd"])
def test_a_manifest_names_files_of_its_own_folder_only(
    data: DataConfig, name: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(data)
    monkeypatch.setattr("olmo_sparsity.base.work_folder.locked", None)
    assert prepare(data).complete, "a finished folder may be read-only"
    path = Path(data.folder) / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("crc32")  # as an older version wrote it
    content["files"][0]["tokens"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"manifest.json names '{name}', outside"):
        open_shards(data, "train")
    path.write_text('{"settings": {}}')
    with pytest.raises(DataError, match=r"manifest\.json is not of a prepared folder"):
        open_shards(data, "train")


@pytest.fixture(params=["train", "heldout"])
def several_files(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> TokenShards:
    """A split of several files."""
    monkeypatch.setattr(document_batches, "SHARD_CHARACTERS", 100_000)
    data = config_from_dict({"data": data_section(tmp_path)}).data
    prepare(data)
    shards = open_shards(data, request.param)
    assert len(shards.paths) > 1
    return shards


def test_documents_are_the_tokens_between_their_ends(several_files: TokenShards) -> None:
    shards = several_files
    expected: list[list[int]] = []
    for tokens_path, ends_path, _ in shards.files:
        tokens = np.fromfile(tokens_path, "<u2")
        first = 0
        for end in np.fromfile(ends_path, "<u8").tolist():
            assert tokens[end - 1] == shards.eos_id
            expected.append(tokens[first : end - 1].tolist())
            first = end
    assert [shards.document(number).tolist() for number in range(len(shards))] == expected
    for beyond in (-1, len(expected)):
        with pytest.raises(IndexError):
            shards.document(beyond)


def test_shards_and_manifest_count_the_same(several_files: TokenShards) -> None:
    folder = several_files.paths[0].parent
    split = several_files.paths[0].name.partition("-")[0]
    manifest = Manifest.load(folder)
    num_tokens = sum(len(np.fromfile(path, "<u2")) for path in several_files.paths)
    assert manifest.num_documents(split) == len(several_files)
    assert manifest.num_tokens(split) == several_files.num_tokens == num_tokens


def test_bytes_of_a_token_are_those_of_the_first_file(several_files: TokenShards) -> None:
    shards = several_files
    numbers = range(len(shards.ends[0]))
    text = "".join(shards.tokenizer.decode(shards.document(number)) for number in numbers)
    num_tokens = len(np.fromfile(shards.paths[0], "<u2"))
    assert shards.bytes_per_token == pytest.approx(len(text.encode()) / num_tokens)


def test_cut_into_sequences_what_is_left_of_each_file_is_unused(
    several_files: TokenShards,
) -> None:
    pieces = []
    for path in several_files.paths:
        tokens = np.fromfile(path, "<u2")
        num_sequences = len(tokens) // 30
        pieces.append(tokens[: num_sequences * 30].reshape(-1, 30))
    sequences = Sequences(several_files, 30)
    read = np.stack([sequences[number] for number in range(len(sequences))])
    assert (read == np.concatenate(pieces)).all()
