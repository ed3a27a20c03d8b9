"""Append lines to a file on a disk that may be away for a while.

    file = AppendedFile(run_folder / "metrics.jsonl")
    file.append(b'{"step": 1}\\n')     # OSError: the disk is away; the line is kept in memory
    file.append(b'{"step": 2}\\n')     # writes both lines

Training goes on meanwhile. metrics.py writes metrics.jsonl with it.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.base.files import writing


class AppendedFile:
    """A file that grows by whole lines. Lines that the disk did not take are kept in memory, and
    are written before the next ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failures = 0
        """Number of writes in a row that have failed."""

        self._unwritten = b""
        """Lines that are not in the file, as the disk did not take them."""

        self._num_written_bytes = 0
        """Size of the file after the last write that succeeded."""

    @property
    def num_unwritten_lines(self) -> int:
        """Return the number of lines that the disk has not taken."""
        return self._unwritten.count(b"\n")

    def replace_content(self, lines: bytes) -> None:
        """Replace the whole file, atomically."""
        with writing(self.path) as partial:
            partial.write_bytes(lines)
        self._num_written_bytes = self.path.stat().st_size

    def append(self, lines: bytes) -> None:
        """Append lines, after those of earlier calls that the disk did not take. Raise OSError if
        it does not take them now; they are then kept for the next call."""
        self._unwritten += lines
        self.flush()

    def flush(self) -> None:
        """Append the lines that are kept in memory. Raise OSError if the disk does not take
        them."""
        if not self._unwritten:
            return
        try:
            num_bytes = self._append_unwritten()
        except OSError:
            self.num_failures += 1
            raise
        # Only now, as a network disk may report an error when a file is closed.
        self._num_written_bytes = num_bytes
        self._unwritten = b""
        self.num_failures = 0

    def _append_unwritten(self) -> int:
        """Append the lines that are kept in memory, and return the size of the file."""
        with self.path.open("ab") as file:
            if self.num_failures:
                # The write that failed may have written some of its bytes.
                file.truncate(self._num_written_bytes)
            file.write(self._unwritten)
            file.flush()
            return file.tell()
