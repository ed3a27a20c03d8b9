"""Parts of a measurement survive kills and resumes without a trace of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olmo_sparsity.analysis.measurement.parts
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.schemas import MADE_OF_PARTS, PHASES, SCHEMAS
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.base.errors import DataError
from tests.support.parts import IDENTITY, flip_a_byte, tiny_rows, truncate, write

NUM_DOCUMENTS = 6


pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


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
    measured(folder).write_final_tables({}, Meta())
    return bytes_of(folder)


@pytest.mark.accept
@settings(max_examples=10)
@given(
    order=st.permutations(range(NUM_DOCUMENTS)),
    kills=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    twice=st.sets(st.integers(0, NUM_DOCUMENTS - 1)),
    part_size=st.integers(1, 4),
)
def test_killed_resumed_and_measured_by_two_equals_uninterrupted(
    expected: dict[str, bytes], order: list[int], kills: set[int], twice: set[int], part_size: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        parts = Parts(folder, IDENTITY, part_size=part_size)
        other = Parts(folder, IDENTITY, part_size=part_size)
        for step, document in enumerate([*order, *order]):  # the second round does what was lost
            if all(document in parts.find_finished(phase) for phase in PHASES):
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
            assert Parts(folder, IDENTITY).find_finished(phase) == set(range(NUM_DOCUMENTS))
        for _ in range(2):
            parts.find_finished(phase="losses"), parts.find_finished(phase="recovery")
            parts.write_final_tables({}, Meta())
            assert bytes_of(folder) == expected


@pytest.mark.parametrize("num_tables", range(len(SCHEMAS)))
def test_killed_between_final_tables_can_be_repeated(
    expected: dict[str, bytes], tmp_path: Path, num_tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = measured(tmp_path)
    written, write_table = [], olmo_sparsity.analysis.measurement.parts.write_table

    def write_some(path: Path, table: pa.Table) -> None:
        if len(written) == num_tables:
            raise KeyboardInterrupt
        written.append(path)
        write_table(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(olmo_sparsity.analysis.measurement.parts, "write_table", write_some)
        with pytest.raises(KeyboardInterrupt):
            parts.write_final_tables({}, Meta())
    with pytest.raises(DataError, match=r"not finished .*; run the same"):
        read_results(parts.folder)
    parts.write_final_tables({}, Meta())
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
        by = [column for column in schema.names if column != "loss_without"]
        pd.testing.assert_frame_equal(
            tables[name], tables[name].sort_values(by, ignore_index=True), check_dtype=False
        )
    wanted = tiny_rows(0)["losses"]["losses"]
    row = tables["losses"].query("document == 0 and target == 2").iloc[0]
    assert row.loss_long == np.float32(wanted["loss_long"][list(wanted["target"]).index(2)])
    assert tables["recovery"].loss_without.isna().sum() == 4
    assert tables["costs"].query("document == 5").values.tolist() == [
        [5, "tokens", "add_one", 2**40, 5]
    ]


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
    assert again.find_finished("losses") == {1}
    assert again.find_finished("recovery") == {0, 1}
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
    assert Parts(tmp_path / "one", IDENTITY).find_finished("losses") == {3}


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    rows = tiny_rows(1)["losses"]
    rows["losses"]["loss_long"][3] = np.inf
    with pytest.raises(DataError, match=r"document 1, table losses: loss_long .* 1 of 5 rows"):
        Parts(tmp_path, IDENTITY).add("losses", 1, rows)


# --- a document that is not finished --------------------------------------------------------------

TARGETS = {"document": np.array([[5, 6], [9, 10]])}


def rows_of_text(target: int) -> dict[str, pd.DataFrame]:
    rows = {"target": [target], "units": ["tokens"], "selector": ["add_one"], "lds": [target / 8]}
    return {"lds": pd.DataFrame(rows)}


def test_rows_of_an_unfinished_document_are_taken_up_before_later_ones(tmp_path: Path) -> None:
    unfinished = Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS)
    unfinished.store(["first"], rows_of_text(5))
    taken_up = Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS)
    assert taken_up.texts == {"first"}
    rows = taken_up.joined(rows_of_text(9))["lds"]
    assert rows.target.tolist() == [5, 9]
    assert rows.lds.tolist() == [0.625, 1.125]


def test_a_damaged_piece_of_an_unfinished_document_is_evaluated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS).store(["first"], rows_of_text(5))
    (piece,) = tmp_path.glob("parts/unfinished/000003/*")
    flip_a_byte(piece / "lds.parquet")
    assert not Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS).texts
    assert "its targets are evaluated again" in capsys.readouterr().err


def test_an_unfinished_document_with_other_targets_is_evaluated_again(tmp_path: Path) -> None:
    Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS).store(["first"], rows_of_text(5))
    others = {"document": np.array([[5, 6], [8, 9]])}
    assert not Parts(tmp_path, IDENTITY).open_unfinished(3, others).texts


def test_a_text_that_two_processes_evaluated_counts_once(tmp_path: Path) -> None:
    first, second = (Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS) for _ in range(2))
    first.store(["text"], rows_of_text(5))
    second.store(["text"], rows_of_text(5))
    tables = {"lds": rows_of_text(5)["lds"][:0]}
    taken_up = Parts(tmp_path, IDENTITY).open_unfinished(3, TARGETS)
    assert taken_up.joined(tables)["lds"].target.tolist() == [5]


def test_a_finished_document_leaves_no_pieces(tmp_path: Path) -> None:
    parts = Parts(tmp_path, IDENTITY)
    parts.open_unfinished(0, TARGETS).store(["first"], rows_of_text(5))
    write(parts, 0)
    parts.flush()
    assert not list(tmp_path.glob("parts/unfinished/*"))
