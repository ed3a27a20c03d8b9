"""Files that are whole or not there, and are read with bounds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import DataError, UnreadableNowError, UserError
from olmo_sparsity.base.files import (
    read_bounded,
    read_json,
    remove_partial,
    write_atomically,
    writing,
)


def test_processes_that_write_the_same_file_at_once_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    with writing(file) as first, writing(file) as second:
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first", "the one that ends last"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_to_a_file_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "disk/page.html")
    write_atomically(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "disk/page.html").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    write_atomically(file, "before\n")
    half = "half \ud800"  # the second character cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, half)
    assert file.read_bytes() == b"before\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_name_without_room_for_a_temporary_one_is_refused_with_the_limit(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("a" * 242), "text")
    with pytest.raises(UserError, match=r"File name too long; pass a name of at most 242 bytes$"):
        write_atomically(tmp_path / ("a" * 243), "text")


def test_a_full_disk_is_said_of_the_file(tmp_path: Path) -> None:
    """Also of libraries that give the number in their message only."""
    for error in (OSError(28, "x"), RuntimeError("I/O error: No space (os error 28)")):
        with (
            pytest.raises(UserError, match="weights cannot be written: No space left on device"),
            writing(tmp_path / "weights"),
        ):
            raise error
    for other in (OSError(2, "x", "/another"), RuntimeError("a bug")):
        with pytest.raises(type(other)), writing(tmp_path / "weights"):
            raise other
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_read_only_is_said_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(Path, "unlink", fail)  # also of a file that is not there
    with pytest.raises(UserError, match=r"page\.html cannot be written: Read-only file system"):
        write_atomically(tmp_path / "page.html", "text")


def test_what_never_ends_or_fills_the_memory_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**26 + 1)
    for name in ("pipe", "device", "sparse"):
        with pytest.raises(UserError, match=f"{name}.*(regular file|are read)"):
            read_json(tmp_path / name, dict, "restore it")
    os.truncate(tmp_path / "sparse", 2**26)
    assert len(read_bounded(tmp_path / "sparse")) == 2**26


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_json_file_on_a_disk_that_is_away_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(path: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    for damaged, content in (("missing", None), ("cut", "{")):
        path = tmp_path / damaged
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataError, match=r"; restore it$") as error:
            read_json(path, dict, "restore it")
        assert not isinstance(error.value, UnreadableNowError)
    monkeypatch.setattr(Path, "open", fail)
    remedy = rf"cut cannot be read now \({os.strerror(number)}\); it may be intact"
    with pytest.raises(UnreadableNowError, match=remedy) as error:
        read_json(tmp_path / "cut", dict, "restore it")
    assert error.value.errno == number, "by which it is known whether it may pass"


PREPARING = "from olmo_sparsity.command.streams import prepare_streams; prepare_streams()"


@pytest.mark.parametrize("preparing", ["", PREPARING])
def test_closed_standard_input_is_named(preparing: str) -> None:
    program = (
        f"{preparing}\n"
        "from olmo_sparsity.base.errors import DataError\n"
        "from olmo_sparsity.base.files import open_standard_input\n"
        "try: open_standard_input()\n"
        "except DataError as error: print(error)\n"
    )
    line = [*("bash", "-c"), f'{sys.executable} -c "$0" <&-', program]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.stdout.startswith("standard input is closed; pass a file")


def test_leftovers_are_looked_for_while_another_process_writes(tmp_path: Path) -> None:
    """Its partial folders get their final names meanwhile."""
    program = (
        "import shutil, sys\n"
        "from pathlib import Path\n"
        "from olmo_sparsity.base.files import writing\n"
        "part = Path(sys.argv[1], 'part')\n"
        "print('begun', flush=True)\n"
        "while True:\n"
        "    with writing(part) as partial:\n"
        "        (partial / 'inner').mkdir(parents=True)\n"
        "    names = [path.name for path in part.rglob('*')]\n"
        "    assert names == ['inner'], names\n"
        "    shutil.rmtree(part)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            for _ in range(3000):
                remove_partial(tmp_path)
            assert writer.poll() is None, "it lost nothing, and nothing was added"
        finally:
            writer.kill()
