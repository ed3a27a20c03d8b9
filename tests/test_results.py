"""Results survive kills and resumes without a trace of them."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import analysis.parts
from analysis.documents import token_texts
from analysis.parts import Parts
from analysis.results import FILES, Meta, read_results
from analysis.tables import MADE_OF_PARTS, PHASES, SCHEMAS
from olmo_sparsity.data.tokenizer import load_tokenizer, train_tokenizer
from olmo_sparsity.errors import DataError
from olmo_sparsity.manifest import write_manifest
from tests.fake_results import DOCUMENTS, META, fake_words

IDENTITY = {"model": {"fingerprint": "a1"}, "windows": {"long": 64, "short": 16}, "ks": [1, 2]}
NUM_DOCUMENTS = 6
ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


def tiny_rows(document: int) -> dict[str, dict]:
    """Of both phases. Document 3 has no rows. Rows come in no order."""
    if document == 3:
        return {phase: {} for phase in PHASES}
    rng = np.random.default_rng(document)
    targets = rng.permutation(5)
    about = {"target": targets, "far_part": ["document"] * 5, "units": ["tokens"] * 5,
             "selector": ["add_one"] * 5}  # fmt: skip
    losses = {
        "losses": {"target": targets, "token_id": rng.integers(9, size=5),
                   "loss_short": rng.random(5), "loss_long": rng.random(5), "kl": rng.random(5),
                   "stratum": ["new"] * 5, "placebo_loss_long": rng.random(5),
                   "placebo_kl": rng.random(5), "placebo_stratum": ["new"] * 5},
        "documents": {"name": [f"{document}.txt"]},
    }  # fmt: skip
    recovery = {
        "tokens": {"place": targets, "token_id": rng.integers(9, size=5),
                   "text": [f"{document}·{place}" for place in targets]},
        "costs": {"units": ["tokens"], "selector": ["add_one"], "token_forwards": [2**40],
                  "num_targets": [5]},
        "lds": {"target": targets, "units": ["tokens"] * 5, "selector": ["add_one"] * 5,
                "lds": rng.uniform(-1, 1, 5)},
        "recovery": about | {"control": ["own"] * 5, "draw": [0] * 5, "k": [1] * 5,
                             "num_tokens": [1] * 5, "loss_set": rng.random(5),
                             "loss_without": [None] * 5,
                             "kl_set": [None, np.nan, 0.5, 1.0, 0.25]},
        "influence": about | {"control": ["foreign"] * 5, "rank": [1] * 5,
                              "far_first": rng.integers(50, size=5), "far_end": [60] * 5,
                              "far_text": ["x"] * 5, "influence": rng.random(5)},
    }  # fmt: skip
    return {"losses": losses, "recovery": recovery}


def write(parts: Parts, document: int) -> None:
    for phase, tables in tiny_rows(document).items():
        parts.write(phase, document, tables)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def measured(folder: Path) -> Parts:
    parts = Parts(folder, IDENTITY)
    for document in range(NUM_DOCUMENTS):
        write(parts, document)
    parts.flush()
    return parts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted measurement."""
    folder = tmp_path_factory.mktemp("once")
    measured(folder).finish({}, Meta())
    return bytes_of(folder)


@settings(max_examples=25)
@given(
    order=st.permutations(range(NUM_DOCUMENTS)),
    kills=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    twice=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    part_size=st.integers(1, 4),
)
def test_killed_resumed_and_measured_by_two_equals_uninterrupted(
    expected: dict[str, bytes],
    order: list[int],
    kills: set[int],
    twice: set[int],
    part_size: int,
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        parts = Parts(folder, IDENTITY, part_size=part_size)
        other = Parts(folder, IDENTITY, part_size=part_size)
        for step, document in enumerate([*order, *order]):  # the second round does what was lost
            if all(document in parts.finished(phase) for phase in PHASES):
                continue
            write(parts, document)
            if document in twice:
                write(other, document)
            if step in kills:  # what is buffered is gone, a part half written stays
                half_written = folder / "parts/losses/000099.tmp"
                half_written.mkdir(exist_ok=True)
                (half_written / "losses.parquet").write_bytes(b"PAR1")
                parts = Parts(folder, IDENTITY, part_size=part_size)
        parts.flush()
        other.flush()
        for phase in PHASES:
            assert Parts(folder, IDENTITY).finished(phase) == set(range(NUM_DOCUMENTS))
        for _ in range(2):
            parts.finished(phase="losses"), parts.finished(phase="recovery")
            parts.finish({}, Meta())
            assert bytes_of(folder) == expected


@pytest.mark.parametrize("num_tables", range(len(SCHEMAS)))
def test_killed_between_final_tables_can_be_repeated(
    expected: dict[str, bytes], tmp_path: Path, num_tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = measured(tmp_path)
    written, write_table = [], analysis.parts.write_table

    def write_some(path: Path, table: pa.Table) -> None:
        if len(written) == num_tables:
            raise KeyboardInterrupt
        written.append(path)
        write_table(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(analysis.parts, "write_table", write_some)
        with pytest.raises(KeyboardInterrupt):
            parts.finish({}, Meta())
    with pytest.raises(DataError, match=r"not finished .*; run the same"):
        read_results(parts.folder)
    parts.finish({}, Meta())
    assert bytes_of(parts.folder) == expected


def test_rows_come_back_sorted_with_their_values(tmp_path: Path) -> None:
    parts = Parts(tmp_path, IDENTITY)
    for document in (5, 0):
        write(parts, document)
    assert parts.read("losses").empty  # still in the buffer
    parts.flush()
    tables = {name: parts.read(name) for name in MADE_OF_PARTS}
    for name, schema in MADE_OF_PARTS.items():
        assert list(tables[name].columns) == schema.names
        by = [column for column in schema.names if column != "kl_set"]
        pd.testing.assert_frame_equal(
            tables[name], tables[name].sort_values(by, ignore_index=True), check_dtype=False
        )
    wanted = tiny_rows(0)["losses"]["losses"]
    row = tables["losses"].query("document == 0 and target == 2").iloc[0]
    assert row.loss_long == np.float32(wanted["loss_long"][list(wanted["target"]).index(2)])
    assert tables["recovery"].kl_set.isna().sum() == 4
    assert tables["costs"].query("document == 5").to_dict("records") == [
        {"document": 5, "units": "tokens", "selector": "add_one", "token_forwards": 2**40,
         "num_targets": 5}
    ]  # fmt: skip


def test_another_identity_is_refused_by_its_fields(tmp_path: Path) -> None:
    Parts(tmp_path, IDENTITY)
    Parts(tmp_path, json.loads(json.dumps(IDENTITY)))
    changed = IDENTITY | {"windows": {"long": 64, "short": 8}, "ks": [1]}
    message = r"identity\.json is of a measurement with .*windows\.short=16 \(now 8\);"
    with pytest.raises(DataError, match=message):
        Parts(tmp_path, changed)
    (tmp_path / "identity.json").unlink()
    (tmp_path / "losses.parquet").touch()
    with pytest.raises(DataError, match=r"no identity\.json .* other files \(losses\.parquet\)"):
        Parts(tmp_path, IDENTITY)


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "a.txt", "model.safetensors"])
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "measure.log").touch()
    with pytest.raises(DataError, match=f"holds other files \\({name}\\); name a new folder"):
        Parts(tmp_path, IDENTITY)
    assert {path.name for path in tmp_path.iterdir()} == {name, "measure.log"}
    (tmp_path / name).unlink()
    Parts(tmp_path, IDENTITY)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_a_damaged_file_is_named(
    results_folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    damage(folder / name)
    with pytest.raises(DataError, match=rf"^[^\n]*{name}[^\n]* makes it again[^\n]*$"):
        read_results(folder)


def test_results_of_another_version_are_named(results_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    losses = pq.read_table(folder / "losses.parquet")
    renamed = losses.rename_columns(["x", *losses.schema.names[1:]])
    pq.write_table(renamed, folder / "losses.parquet")
    write_manifest(folder, FILES)
    with pytest.raises(DataError, match=r"losses\.parquet: column document must be int32"):
        read_results(folder)
    (folder / "lds.parquet").unlink()
    write_manifest(folder, [name for name in FILES if name != "lds.parquet"])
    with pytest.raises(DataError, match=r"another version: .*lds\.parquet; measure into another"):
        read_results(folder)


def test_unfinished_and_unreadable_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no results"):
        read_results(tmp_path)
    parts = Parts(tmp_path, IDENTITY)
    write(parts, 0)
    parts.flush()
    with pytest.raises(DataError, match=r"not finished .*; run the same"):
        read_results(tmp_path)
    parts.finish({}, Meta())
    read_results(tmp_path)
    for text in ("{", "[]", '{"windows": 3}', '{"ks": null}'):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(DataError, match=r"meta\.json"):
            read_results(tmp_path)
        write_manifest(tmp_path, FILES)  # by somebody who changed it on purpose
        with pytest.raises(DataError, match=r"meta\.json: "):
            read_results(tmp_path)


@pytest.mark.parametrize("name", ["finished.json", "manifest.json", "losses.parquet"])
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_a_damaged_part_is_named_and_its_documents_are_missing(
    tmp_path: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture
) -> None:
    parts = Parts(tmp_path, IDENTITY)
    for document in (0, 1):
        write(parts, document)
        parts.flush()
    whole = {table: parts.read(table) for table in MADE_OF_PARTS}
    part = next(tmp_path.glob("parts/losses/000000-*"))
    damage(part / name)
    again = Parts(tmp_path, IDENTITY)
    assert again.finished("losses") == {1}
    assert again.finished("recovery") == {0, 1}
    assert capsys.readouterr().err.startswith(f"{part} is passed over ({name}")
    write(again, 0)
    again.flush()
    for table in MADE_OF_PARTS:
        pd.testing.assert_frame_equal(again.read(table), whole[table])


def test_a_part_of_another_measurement_is_passed_over(tmp_path: Path) -> None:
    for name, identity in (("one", IDENTITY), ("other", IDENTITY | {"ks": [1]})):
        parts = Parts(tmp_path / name, identity)
        write(parts, len(name))
        parts.flush()
    (part,) = (tmp_path / "other/parts/losses").iterdir()
    shutil.copytree(part, tmp_path / "one/parts/losses" / part.name)
    assert Parts(tmp_path / "one", IDENTITY).finished("losses") == {3}


def test_a_part_of_an_older_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as older:
        schema = SCHEMAS["recovery"]
        without = schema.remove(schema.get_field_index("loss_without"))
        for tables in (SCHEMAS, PHASES["recovery"]):
            older.setitem(tables, "recovery", without)
        rows = tiny_rows(1)
        del rows["recovery"]["recovery"]["loss_without"]
        parts = Parts(tmp_path, IDENTITY)
        for phase, tables in rows.items():
            parts.write(phase, 1, tables)
        parts.flush()
    parts = Parts(tmp_path, IDENTITY)
    assert parts.finished("losses") == {1}
    assert parts.finished("recovery") == set()
    assert "column loss_without must be float" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    rows = tiny_rows(1)["losses"]
    rows["losses"]["loss_long"][3] = np.inf
    with pytest.raises(DataError, match=r"document 1, table losses: loss_long .* 1 of 5 rows"):
        Parts(tmp_path, IDENTITY).write("losses", 1, rows)


def test_a_process_that_lives_loses_at_most_the_last_seconds(tmp_path: Path) -> None:
    write(Parts(tmp_path, IDENTITY, flush_every_s=0), 0)
    assert Parts(tmp_path, IDENTITY).finished("losses") == {0}


def test_results_hold_everything_and_pandas_reads_them(results_folder: Path) -> None:
    results = read_results(results_folder)
    texts = results.tokens.query(f"document == {DOCUMENTS[1]}").text  # an odd one: reported
    assert "".join(texts) == "".join(fake_words(DOCUMENTS[1]))
    assert results.meta.windows == META.windows
    # The one-liner of docs/formats.md.
    line = re.search(r"pd\.read_parquet\(\"(.*?)\"\)", (ROOT / "docs/formats.md").read_text())
    assert line
    table = pd.read_parquet(results_folder / Path(line[1]).name)
    pd.testing.assert_frame_equal(table, getattr(results, Path(line[1]).stem))


def test_the_format_document_names_every_column() -> None:
    text = (ROOT / "docs/formats.md").read_text()
    for name, schema in SCHEMAS.items():
        section = text.split(f"### `{name}.parquet`")[1].split("\n##")[0]
        documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, flags=re.MULTILINE)
        assert documented == [(field.name, str(field.type)) for field in schema], name


CORNERS = [
    "Hello  wörld 🧑‍🚀 \x00 � <|endoftext|>  é e\u0301",
    "a    b\n\n\t\tx",
    "",
]


def llama_like_tokenizer() -> Tokenizer:
    """Letters, and bytes for everything else; its decoder drops the first space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """Its decoder joins a token to its neighbours as it likes."""
    names = ["[UNK]", *"abc.,'", *(f"##{letter}" for letter in "abc")]
    tokenizer = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        "trained": train_tokenizer(iter(["".join(fake_words(0)), *CORNERS]), 400),
        "gpt-neox": load_tokenizer("allenai_gpt-neox-olmo-dolma-v1_5"),
        "llama": llama_like_tokenizer(),
        "word piece": word_piece_tokenizer(),
    }


@pytest.mark.parametrize("name", ["trained", "gpt-neox", "llama", "word piece"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.sampled_from(CORNERS) | st.text(alphabet="ab.,' é🚀�"), data=st.data())
def test_pieces_joined_are_the_document(
    tokenizers: dict[str, Tokenizer], name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text).ids
    start = data.draw(st.integers(0, len(ids)))  # a document may begin and end within a character
    ids = ids[start : data.draw(st.integers(start, len(ids)))]
    for place in data.draw(st.sets(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, 10**6)  # no token of the vocabulary
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["trained", "gpt-neox", "llama"])
def test_a_character_belongs_to_the_token_that_completes_it(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("a🚀�🚀").ids
    pieces = token_texts(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "🚀", "�", "🚀"]
    whole = tokenizer.decode(ids)
    for i, piece in enumerate(pieces):
        if piece == "🚀":
            assert "".join(pieces[: i + 1]) == tokenizer.decode(ids[: i + 1])
            assert tokenizer.decode(ids[:i]) != tokenizer.decode(ids[: i + 1])
    assert whole == "a🚀�🚀"


def test_a_token_keeps_the_characters_that_it_completes() -> None:
    """It ends within the next one."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "ĠðŁ": 1, "ļĢ": 2}, "a"))
    tokenizer.decoder = decoders.ByteLevel()
    assert token_texts(tokenizer, [0, 1, 2]) == ["a", " ", "🚀"]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"share": 0.1}, "large gap, the token is new"),
        ({"share": 1.0}, "all, the token is new"),
        ({"given": "…"}, "chosen in other results, the token is new"),
    ],
)
def test_a_set_is_named_by_how_its_targets_were_chosen(
    chosen: dict, words: str, results_folder: Path
) -> None:
    results = read_results(results_folder)
    results.meta.targets = chosen
    assert results.spell_set("gap_new") == words
