"""Read the files that `attribute --source` names.

Place in the flow: words of the command line → **`read_sources`**: texts by name → attribute.py.
A word may be

    faq.md          a file, which is called faq.md
    FAQ=faq.md      a file with another name
    texts           a folder: each of its files is a source
    texts/*.md      a glob, if the shell has not expanded it
"""

from __future__ import annotations

import os
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say


class NamedFile(NamedTuple):
    """A file that is a source."""

    name: str
    path: str


def read_sources(words: list[str]) -> dict[str, str]:
    """Return the text of each source by its name. `words`: as `--source` takes them."""
    from olmo_sparsity.analysis.explain.text_file import read_text

    files: list[NamedFile] = []
    for word in words:
        files += list_files(word)
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"--source: duplicate names: {', '.join(names)}; name one, as NAME=FILE")
    if len(files) > len(words):
        # A folder may hold more than the user knows.
        say(f"--source: {len(files)} files are sources: {', '.join(names)}")
    texts: dict[str, str] = {}
    for file in files:
        try:
            texts[file.name] = read_text(file.path)
        except DataError as error:
            # A file that is missing or empty cannot be converted.
            is_other_form = "is not text" in str(error)
            remedy = "; convert it to text, or name other files" if is_other_form else ""
            raise DataError(f"--source: {error}{remedy}") from None
    return texts


def list_files(word: str) -> list[NamedFile]:
    """Return the files that a word of `--source` means.

    A name may hold letters that have a meaning here. So what exists comes first: a file `a=b.md` is
    that file and not NAME=FILE, and a file `[1].md` is no glob.
    """
    path = Path(word)
    name, _, file_name = word.partition("=")
    if file_name and not path.exists() and Path(file_name).is_file():
        return [NamedFile(name, file_name)]
    if path.is_dir():
        return _files_of_several(word, list(path.iterdir()))
    if not path.exists() and has_magic(word):
        return _files_of_several(word, [Path(match) for match in glob(word)])
    if file_name and not path.is_file():
        # A file that is not there is named in the error when it is read.
        return [NamedFile(name, file_name)]
    return [NamedFile(_readable_name(path), word)]


def _files_of_several(word: str, paths: list[Path]) -> list[NamedFile]:
    """Return the files among the paths of a folder or glob, in the order of their names."""
    # What begins with a dot was written by a program, such as .DS_Store.
    files = sorted(path for path in paths if path.is_file() and path.name[0] != ".")
    if not files:
        raise ConfigError(f"--source={word} is a folder or glob without files; name files")
    return [NamedFile(_readable_name(file), str(file)) for file in files]


def _readable_name(path: Path) -> str:
    """Return the name of a file as text. In the locale C Python reads names as ASCII, and other
    letters as halves of surrogate pairs, though most names are in UTF-8."""
    return os.fsencode(path.name).decode(errors="backslashreplace")
