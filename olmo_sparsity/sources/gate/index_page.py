"""Write the index of a file of questions, and the page of a question without sources.

Place in the flow: questions.py, and suite.py with checks → stored answers (answers.py) →
**`write_index`** → index.html, which links the pages of answers that page.py has written:

    question                   statements   rest on a source   undecided   checks
    opening: When did it open?          2                  1           0   passed
    What do tickets cost?               1                  0           0   none
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from olmo_sparsity.analysis.results.view import escape
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.sources.gate.answers import StoredAnswer, read_answers

HEAD = '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>Questions</title>\n'

WORDS_OF_CHECKS = {True: "passed", False: "failed", None: "none"}
"""What the column of checks says, by whether all checks of a question passed. None means that it
has no checks."""


def page_file(pages: Path, index: int) -> Path:
    """Return the file of the page of the question with this index."""
    return pages / f"{index:06d}.html"


def write_page_without_sources(pages: Path, index: int, question: str) -> None:
    """Write the page of a question whose prompt has no sources."""
    text = escape(f"{question}: the prompt has no sources, so no statement rests on one")
    write_atomically(page_file(pages, index), f"{HEAD}<p>{text}</p></html>\n")


def write_index(
    pages: str | Path, out: str | Path, passes: Mapping[int, bool] | None = None
) -> None:
    """Write the page that lists the questions, with the number of statements that rest on a source,
    and that are undecided.

    Args:
        pages: The folder of the pages.
        out: The folder of the results.
        passes: Whether all checks of a question passed, by its index from 0. None means no column
            of checks.
    """
    titles = ["question", "statements", "rest on a source", "undecided"]
    if passes is not None:
        titles.append("checks")
    lines = ["".join(f"<th>{title}</th>" for title in titles)]
    for answer in read_answers(out):
        cells = _cells(answer)
        if passes is not None:
            cells.append(WORDS_OF_CHECKS[passes.get(answer.question)])
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    write_atomically(Path(pages) / "index.html", f"{HEAD}<table>\n{rows}\n</table></html>\n")


def _cells(answer: StoredAnswer) -> list[str]:
    """Return the cells of a question: a link to its page, and three counts of statements."""
    title = f"{answer.id}: {answer.asked}" if answer.id else answer.asked
    # Relative, so that the folder of pages can be moved or uploaded.
    link = f'<a href="{page_file(Path(), answer.question)}">{escape(title)}</a>'
    statements = answer.statements
    num_undecided = sum(statement.is_undecided for statement in statements)
    # A statement may rest on a sentence of the reasoning that is undecided itself. It is counted
    # once, as undecided.
    num_sourced = sum(
        bool(statement.sources) and not statement.is_undecided for statement in statements
    )
    return [link, str(len(statements)), str(num_sourced), str(num_undecided)]
