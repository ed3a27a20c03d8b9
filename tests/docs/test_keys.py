"""The table of all keys is that of the schema."""

from __future__ import annotations

import re

from docs.write_keys import PAGE, page


def test_the_table_of_keys_is_the_one_that_the_schema_gives() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m docs.write_keys`"


def test_every_key_has_a_sentence() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", page(), flags=re.M)
    assert len(rows) > 100
    assert [key for key, sentence in rows if not sentence] == []
