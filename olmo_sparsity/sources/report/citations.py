"""Write an answer with citations of the sources that its statements rely on.

Place in the flow: `Attribution.text` (attribution.py) → **`cite`**:

    It was opened in June 1921. [1] Katharina Weiss opened it. [2/3] The sun rises in the east.

    [1] bridge.txt
    [2] mayor.txt
    [3] fair.txt

Sources that each suffice share one citation, `[2/3]`. Sources that are needed together have one
citation each, `[2][3]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from olmo_sparsity.base.errors import ConfigError, check_type
from olmo_sparsity.sources.prompt.layout import AnswerText
from olmo_sparsity.sources.report.table_rows import StatementRow


def cite(
    answer_texts: Sequence[AnswerText], statements: pd.DataFrame, form: str, references: bool
) -> str:
    """Return the answer with a citation after each statement that relies on a source.

    Args:
        answer_texts: Texts that together are the answer, each with the index of its statement.
        statements: `Attribution.statements`.
        form: How a citation is written: a text with 1 or name once, such as `[1]`, `[^1]` or
            `(name)`.
        references: Whether to append a line for each source that is cited. Names need none.
    """
    _check_form(form)
    writer = _CitationWriter(form)
    answer = ""
    for text, statement in answer_texts:
        if statement is None:
            answer += text
            continue
        groups = _cited_together(statements.iloc[statement])
        citations = "".join(writer.cite(names) for names in groups)
        answer += _with_citations(text, citations)
    if references and writer.cited_names and not writer.by_name:
        answer = "\n".join([answer.rstrip() + "\n", *writer.reference_lines()])
    return answer.strip()


def _check_form(form: str) -> None:
    """Raise ConfigError unless the form says once where the number, or the name, is written."""
    check_type("citations", form, str, "a text that holds 1 or name once, as in [1]")
    if (form.count("1"), form.count("name")) not in ((1, 0), (0, 1)):
        raise ConfigError(f"citations={form} must hold 1 or name once, as in [1]")


def _cited_together(row: StatementRow) -> list[Sequence[str]]:
    """Return a group of names for each citation of a statement: the sources that share it. For
    `[2/3]` that is one group of two names, for `[2][3]` two groups of one."""
    # Alternatives share a citation, unless the reasoning leads to further sources.
    if row.kind == "either" and row.origins == row.sources:
        return [row.sources]
    return [(name,) for name in row.origins]


class _CitationWriter:
    """Writes citations of sources, and numbers sources in the order in which they are cited."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.by_name = "name" in form
        self.cited_names: list[str] = []

    def cite(self, names: Sequence[str]) -> str:
        """Return one citation of these sources."""
        self.cited_names += [name for name in dict.fromkeys(names) if name not in self.cited_names]
        if self.by_name:
            return self.form.replace("name", "/".join(names))
        numbers = "/".join(str(self.cited_names.index(name) + 1) for name in names)
        return self.form.replace("1", numbers)

    def reference_lines(self) -> list[str]:
        """Return a line for each source that was cited, with its citation."""
        # A footnote of Markdown is defined as `[^1]: name`.
        colon = ":" if self.form.startswith("[^") else ""
        return [f"{self.cite([name])}{colon} {name}" for name in self.cited_names]


def _with_citations(text: str, citations: str) -> str:
    """Return a text with citations after its last word, before the white space that follows."""
    if not citations:
        return text
    words = text.rstrip()
    # The end of a block of code must be alone in its line.
    is_fence = words.endswith(("```", "~~~"))
    separator = "\n" if is_fence else " "
    return f"{words}{separator}{citations}{text[len(words) :]}"
