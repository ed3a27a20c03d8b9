"""Write the table of sparse parity into docs/results.md: `python -m study.pages.write_parity`.

The table stands between two comments of that page; a test fails when it no longer follows from the
stored trials.
"""

from __future__ import annotations

from olmo_sparsity.base.files import write_atomically
from study.pages.stored import ROOT
from study.parity.models import NAMES
from study.parity.table import SCHEMES, SHOWN_LENGTHS, format_table, read_table

PAGE = ROOT / "docs/results.md"
BEGIN = "<!-- Sparse parity: written by study/pages/write_parity.py -->"
END = "<!-- End of sparse parity -->"


def written_tables() -> str:
    """Return a table for each scheme: a line for each K_train and length."""
    models = read_table()
    parts = []
    for scheme in SCHEMES:
        parts.append(f"**{NAMES[scheme]}**")
        parts.append(format_table(models, scheme, SHOWN_LENGTHS))
    return "\n\n".join(parts)


def with_tables(page: str) -> str:
    """Return a page with today's tables between its two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{written_tables()}\n\n{END}{after}"


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
