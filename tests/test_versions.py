"""What results say of how they were made."""

import sys

import pytest

from olmo_sparsity.versions import typed_command


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/opt/venv/bin/olmo-sparsity", "olmo-sparsity"),
        ("/home/someone/olmo_sparsity/cli.py", "olmo-sparsity"),
        ("scripts/measure.py", "scripts/measure.py"),
    ],
)
def test_a_command_is_kept_as_typed_without_where_it_is_installed(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "measure", "a model", "--out", "there"])
    assert typed_command() == [said, "measure", "a model", "--out", "there"]
