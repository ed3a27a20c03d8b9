"""A letter of an array's name means the same dimension in all modules of the analysis."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import olmo_sparsity.analysis

FOLDER = Path(olmo_sparsity.analysis.__file__).parent
MODULES = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*.py")}
PAGE = Path(__file__).parents[2] / "docs" / "development.md"

SUFFIX = re.compile(r"\b[a-z]\w*_([A-Z][A-Z0-9]{0,3})\b")
"""Finds the letters of `loss_TK`."""

ENTRY = re.compile(r"([A-Z]) ([\w ]+)")
"""Finds letter and meaning in "N items of a list (rows)"."""


def letters_of_page() -> dict[str, str]:
    section = PAGE.read_text("utf-8").split("### Dimensions\n")[1]
    return dict(re.findall(r"^\| ([A-Z]) \| (.*) \|$", section, re.MULTILINE))


def key_of(source: str) -> dict[str, str]:
    """Return the letters that a module explains: letter → meaning, without what is in brackets."""
    key = re.search(r"Dimension key: (.*?)\.\s", source, re.DOTALL)
    if key is None:
        return {}
    without_brackets = re.sub(r"\s*\(.*?\)", "", " ".join(key[1].split()))
    return dict(ENTRY.findall(without_brackets))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_explains_the_letters_that_it_uses_as_the_glossary_does(module: str) -> None:
    source = MODULES[module]
    key = key_of(source)
    used = set("".join(SUFFIX.findall(source))) - set("0123456789")
    assert used == key.keys()
    letters = letters_of_page()
    assert key == {letter: letters[letter] for letter in key}


def test_no_letter_of_the_glossary_is_unused() -> None:
    assert set().union(*map(key_of, MODULES.values())) == letters_of_page().keys()
