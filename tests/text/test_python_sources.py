"""The Python sources of an environment: grouped by package, all of them counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text import python_sources
from olmo_sparsity.text.corpus import good_documents, list_inputs, read_records
from olmo_sparsity.text.records import TextRecord
from olmo_sparsity.text.tally import Tally


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
        "site-packages/olmo_sparsity/command/cli.py": module("ours"),
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
    wanted = {
        "site-packages/alpha/one.py": "alpha",
        "site-packages/alpha/two.py": "near repeat",
        "site-packages/beta/deep/copy.py": "beta",
        "site-packages/beta/empty.py": "empty document",
        "site-packages/beta/fork.py": "beta",
        "site-packages/beta/huge.py": "longer than 400,000 characters",
        "site-packages/gamma.py": "gamma",
        "json/__init__.py": "shorter than 800 characters",
        "json/decoder.py": "exact repeat",
        "zlib.py": "zlib",
        "zlib_old.py": "wrong encoding",
    }
    assert list_inputs(config) == [library / name for name in wanted]
    records = list(read_records(config))
    for (name, kind), record in zip(wanted.items(), records, strict=True):
        if isinstance(record, TextRecord):
            assert (record.group, record.text) == (kind, (library / name).read_text())
        else:
            assert (record.kind, record.where.split(", byte")[0]) == (kind, str(library / name))
    tally = Tally()
    # What was left out is no reason to fail.
    assert len(list(good_documents(records, tally, config))) == 5
    assert tally.bad == {"wrong encoding": 1}
    assert sum(tally.left_out.values()) == 5


@pytest.mark.usefixtures("library")
def test_python_files_skipped_still_count_as_read() -> None:
    """A resumed run must leave out what the first run would have."""
    config = CorpusConfig(source="python")
    whole = list(read_records(config))
    for skip in range(12):
        assert list(read_records(config, skip)) == whole[skip:]
