"""Tests with programs that not every machine has."""

import os
import shutil
from collections.abc import Sequence

import pytest


def needs(programs: Sequence[str], install: str, variable: str) -> pytest.MarkDecorator:
    """CI sets the variable, so that a missing program there is a failure and not a skip."""
    missing = [name for name in programs if not shutil.which(name)]
    return pytest.mark.skipif(
        bool(missing) and os.environ.get(variable) != "1",
        reason=f"no {', no '.join(missing)} here; "
        f"`apt-get install --no-install-recommends {install}` installs them",
    )
