"""Results survive kills, resumes and merges without a trace of them."""

from __future__ import annotations

import json
import re
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

from analysis.pieces import token_pieces
from analysis.results import (
    ROWS_BY_DOCUMENT,
    SCHEMAS,
    ResultWriter,
    consolidate,
    merge,
    read_parts,
    read_results,
)
from olmo_sparsity.data.tokenizer import load_tokenizer, train_tokenizer
from olmo_sparsity.errors import DataError
from tests.fake_results import (
    DOCUMENTS,
    META,
    SUMMARY,
    document_rows,
    fake_words,
    write_fake_results,
)

IDENTITY = {"model": {"fingerprint": "a1"}, "windows": {"long": 64, "short": 16}, "ks": [1, 2]}
NUM_DOCUMENTS = 6
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("olmo_sparsity.files.sync", lambda path: None)


def tiny_rows(document: int) -> dict:
    """Document 3 has no rows; document 4 has no candidates. Rows come in no order."""
    if document == 3:
        return {}
    rng = np.random.default_rng(document)
    targets = rng.permutation(5)
    rows: dict = {
        "tokens": {
            "place": targets,
            "token_id": rng.integers(9, size=5),
            "text": [f"{document}·{place}" for place in targets],
        },
        "losses": {
            "target": targets,
            "token_id": rng.integers(9, size=5),
            "loss_long": rng.random(5),
            "loss_short": rng.random(5),
            "half": ["report"] * 5,
        },
        "costs": {"selector": ["add_one"], "token_forwards": [2**40], "num_targets": [5]},
        "recovery": {
            "target": targets,
            "target_set": ["gap"] * 5,
            "selector": ["add_one"] * 5,
            "control": ["own"] * 5,
            "draw": [0] * 5,
            "k": [1] * 5,
            "loss_set": rng.random(5),
            "kl_set": [None, np.nan, 0.5, 1.0, 0.25],
            "kl_short": [None, np.nan, 1.0, 2.0, 3.0],
        },
    }
    if document == 4:
        rows["influence"] = {}
    else:
        # Draws of the foreign control share every key; only the rest of the row tells them apart.
        rows["influence"] = {
            "target": [0] * 4,
            "selector": ["add_one"] * 4,
            "control": ["foreign"] * 4,
            "rank": [1, 0, 1, 0],
            "far_position": rng.integers(50, size=4),
            "far_token_id": rng.integers(9, size=4),
            "influence": rng.random(4),
        }
    return rows


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def measured_at_once(folder: Path) -> dict[str, bytes]:
    writer = ResultWriter(folder, IDENTITY)
    for document in range(NUM_DOCUMENTS):
        writer.write(document, tiny_rows(document))
    writer.close()
    consolidate(folder, SUMMARY, META)
    return bytes_of(folder)


@settings(deadline=None, max_examples=25)
@given(
    order=st.permutations(range(NUM_DOCUMENTS)),
    kills=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    consolidated_after=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    part_size=st.integers(1, 4),
)
def test_killed_and_resumed_equals_uninterrupted(
    order: list[int], kills: set[int], consolidated_after: set[int], part_size: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        expected = measured_at_once(Path(parent) / "once")
        folder = Path(parent) / "often"
        writer = ResultWriter(folder, IDENTITY, part_size=part_size)
        for step, document in enumerate([*order, *order]):  # the second round does what was lost
            if document in writer.finished():
                continue
            writer.write(document, tiny_rows(document))
            if step in kills:  # what is buffered is gone, a part half written stays
                half_written = folder / "parts" / "000099.tmp"
                half_written.mkdir(exist_ok=True)
                (half_written / "losses.parquet").write_bytes(b"PAR1")
                writer = ResultWriter(folder, IDENTITY, part_size=part_size)
            if step in consolidated_after:
                consolidate(folder, {}, {})
        writer.close()
        assert writer.finished() == set(range(NUM_DOCUMENTS))
        consolidate(folder, SUMMARY, META)
        assert bytes_of(folder) == expected
        assert not list((folder / "parts").iterdir())
        consolidate(folder, SUMMARY, META)
        assert bytes_of(folder) == expected


@settings(deadline=None, max_examples=15)
@given(
    shard_of=st.lists(st.integers(0, 2), min_size=NUM_DOCUMENTS, max_size=NUM_DOCUMENTS),
    finished_shards=st.sets(st.integers(0, 2)),
    order=st.permutations(range(3)),
)
def test_merged_shards_equal_one_process(
    shard_of: list[int], finished_shards: set[int], order: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        expected = measured_at_once(Path(parent) / "once")
        folders = [Path(parent) / f"shard{i}" for i in range(3)]
        for i, folder in enumerate(folders):
            writer = ResultWriter(folder, IDENTITY)
            for document in range(NUM_DOCUMENTS):
                if shard_of[document] == i:
                    writer.write(document, tiny_rows(document))
            writer.close()
            if i in finished_shards:
                consolidate(folder, {}, {})
        out = Path(parent) / "merged"
        (Path(parent) / "merged.tmp").mkdir()  # an earlier merge was killed
        merge([folders[i] for i in order], out)
        assert ResultWriter(out, IDENTITY).finished() == set(range(NUM_DOCUMENTS))
        consolidate(out, SUMMARY, META)
        assert bytes_of(out) == expected


@pytest.mark.parametrize("num_tables", range(len(SCHEMAS)))
def test_consolidate_killed_between_tables_can_be_repeated(
    tmp_path: Path, num_tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measured_at_once(tmp_path / "once")
    folder = tmp_path / "killed"
    for documents in ([0, 1, 2], [3, 4, 5]):
        writer = ResultWriter(folder, IDENTITY)
        for document in documents:
            writer.write(document, tiny_rows(document))
        writer.close()
        if documents[0] == 0:
            consolidate(folder, SUMMARY, META)
    import analysis.results

    written = 0
    write_table = analysis.results._write_table

    def write_some(path: Path, table: pa.Table) -> None:
        nonlocal written
        if written == num_tables:
            raise KeyboardInterrupt
        written += 1
        write_table(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(analysis.results, "_write_table", write_some)
        with pytest.raises(KeyboardInterrupt):
            consolidate(folder, SUMMARY, META)
    with pytest.raises(DataError, match="does not count"):
        read_results(folder)
    assert len(read_parts(folder)["losses"]) == 5 * (NUM_DOCUMENTS - 1)
    consolidate(folder, SUMMARY, META)
    assert bytes_of(folder) == expected


def test_rows_come_back_sorted_with_their_values(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, IDENTITY)
    for document in (5, 0):
        writer.write(document, tiny_rows(document))
    assert read_parts(tmp_path)["losses"].empty  # still in the buffer
    writer.close()
    parts = read_parts(tmp_path)
    for name, schema in ROWS_BY_DOCUMENT.items():
        assert list(parts[name].columns) == schema.names
        by = [column for column in schema.names if not column.startswith("kl_")]
        pd.testing.assert_frame_equal(
            parts[name], parts[name].sort_values(by, ignore_index=True), check_dtype=False
        )
    wanted = tiny_rows(0)["losses"]
    row = parts["losses"].query("document == 0 and target == 2").iloc[0]
    assert row.loss_long == np.float32(wanted["loss_long"][list(wanted["target"]).index(2)])
    assert parts["recovery"].kl_set.isna().sum() == 4
    costs = parts["costs"].query("document == 5")
    assert costs.to_dict("records") == [
        {"document": 5, "selector": "add_one", "token_forwards": 2**40, "num_targets": 5}
    ]
    consolidate(tmp_path, {}, {})
    for name, table in read_parts(tmp_path).items():
        pd.testing.assert_frame_equal(table, parts[name])


def test_another_identity_is_refused_by_its_first_field(tmp_path: Path) -> None:
    ResultWriter(tmp_path / "a", IDENTITY).close()
    ResultWriter(tmp_path / "a", json.loads(json.dumps(IDENTITY)))
    changed = IDENTITY | {"windows": {"long": 64, "short": 8}, "ks": [1]}
    message = r"windows\.short differs: 8 in this measurement, 16 in .*identity\.json"
    with pytest.raises(DataError, match=message):
        ResultWriter(tmp_path / "a", changed)
    ResultWriter(tmp_path / "b", IDENTITY | {"seed": 3}).close()
    with pytest.raises(DataError, match=r"seed differs: nothing in .*a, 3 in .*b; "):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_refuses_what_it_cannot_add_up(tmp_path: Path) -> None:
    for name in "ab":
        writer = ResultWriter(tmp_path / name, IDENTITY)
        writer.write(2, tiny_rows(2))
        writer.close()
    with pytest.raises(DataError, match=r"document 2 is in .*a and in .*b"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(DataError, match="already exists"):
        merge([tmp_path / "a"], tmp_path / "b")
    with pytest.raises(DataError, match="no folders"):
        merge([], tmp_path / "out")
    with pytest.raises(DataError, match="holds no results"):
        merge([tmp_path / "nowhere"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))


def rename_a_column(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["x", *table.schema.names[1:]]), path)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, rename_a_column, Path.unlink])
def test_a_damaged_table_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    write_fake_results(tmp_path)
    damage(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=rf"^[^\n]*{name}\.parquet[^\n]*$"):
        read_results(tmp_path)


def test_unfinished_and_unreadable_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no results"):
        read_results(tmp_path)
    writer = ResultWriter(tmp_path, IDENTITY)
    writer.write(0, tiny_rows(0))
    writer.close()
    with pytest.raises(DataError, match=r"no meta\.json yet; run the same"):
        read_results(tmp_path)
    consolidate(tmp_path, SUMMARY, META)
    read_results(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(DataError, match=r"meta\.json"):
            read_results(tmp_path)


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, IDENTITY)
    rows = tiny_rows(1)
    rows["losses"]["loss_long"][3] = np.inf
    with pytest.raises(DataError, match=r"document 1, table losses: loss_long .* 1 of 5 rows"):
        writer.write(1, rows)


def test_a_process_that_lives_loses_at_most_the_last_seconds(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, IDENTITY, flush_every_s=0)
    writer.write(0, tiny_rows(0))
    assert ResultWriter(tmp_path, IDENTITY).finished() == {0}


def test_results_hold_everything_and_pandas_reads_them(tmp_path: Path) -> None:
    write_fake_results(tmp_path)
    results = read_results(tmp_path)
    expected = document_rows(DOCUMENTS[0])["tokens"]
    texts = results.tokens.query("document == 0").text
    assert "".join(texts) == "".join(expected["text"])
    assert results.meta["windows"] == META["windows"]
    assert len(results.summary) == len(SUMMARY["summary"]["k"])
    # The one-liner of docs/formats.md.
    line = re.search(r"pd\.read_parquet\(\"(.*?)\"\)", (ROOT / "docs/formats.md").read_text())
    assert line
    table = pd.read_parquet(tmp_path / Path(line[1]).name)
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
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
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
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text() | st.sampled_from(CORNERS) | st.text(alphabet="ab.,' é🚀�"), data=st.data())
def test_pieces_joined_are_the_document(
    tokenizers: dict[str, Tokenizer], name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text).ids
    start = data.draw(st.integers(0, len(ids)))  # a document may begin and end within a character
    ids = ids[start : data.draw(st.integers(start, len(ids)))]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["trained", "gpt-neox", "llama"])
def test_a_character_belongs_to_the_token_that_completes_it(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("a🚀�🚀").ids
    pieces = token_pieces(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "🚀", "�", "🚀"]
    whole = tokenizer.decode(ids)
    for i, piece in enumerate(pieces):
        if piece == "🚀":
            assert "".join(pieces[: i + 1]) == tokenizer.decode(ids[: i + 1])
            assert tokenizer.decode(ids[:i]) != tokenizer.decode(ids[: i + 1])
    assert whole == "a🚀�🚀"
