"""Write the tables of sparse parity into docs/results.md: `python -m study.pages.write_parity`.

They stand between comments of that page: accuracy by K_train, length and k, and what the registered
rules U1 to U7 say of each K_train. A test fails when they no longer follow from the stored trials.
"""

from __future__ import annotations

from collections.abc import Sequence

from olmo_sparsity.base.files import write_atomically
from study.pages.stored import ROOT
from study.parity.models import NAMES, Model, select
from study.parity.table import (
    CLAIMS,
    SCHEMES,
    SHOWN_LENGTHS,
    case_name,
    format_table,
    judge,
    read_table,
    table_settings,
)
from study.parity.verdicts import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    UNFINISHED,
    VOID,
    Finding,
    Outcome,
    interval_of,
)
from study.tables_of_rows import markdown

PAGE = ROOT / "docs/results.md"
END = "<!-- End of sparse parity -->"

LINES = {
    "U1": "U1: seeds that learn each k ≤ K_train at 50 tokens, PoSE and RoPE alone",
    "U2": "U2: PoSE, k ≤ K_train, mean accuracy at four times the length",
    "U3": "U3: the same at ten times",
    "U4": "U4: by how much the mean of larger k is below it",
    "U5": "U5: what k = K_train + 2 loses from 50 to 500 tokens, beyond k = K_train",
    "U6": "U6: RoPE alone, k ≤ K_train, mean accuracy at ten times the length",
    "U7": "U7: what accuracy of PoSE at 500 tokens loses each time k doubles, of k ≤ K_train",
}
"""What each line of the table of claims shows."""

WORDS = {CONFIRMED: "as claimed", REFUTED: "refuted", UNDECIDED: "undecided", VOID: "void"}
"""How the page calls what a rule says of one K_train."""


# --- accuracy -------------------------------------------------------------------------------------


def accuracy_tables() -> str:
    """Return a table for each scheme: a line for each K_train and length."""
    models = read_table()
    parts = []
    for scheme in SCHEMES:
        parts.append(f"**{NAMES[scheme]}**")
        parts.append(format_table(models, scheme, SHOWN_LENGTHS))
    return "\n\n".join(parts)


# --- claims ---------------------------------------------------------------------------------------


def claims_table() -> str:
    """Return a table with a line for each of U1 to U7 and a column for each K_train, and the
    verdict on all of them."""
    settings = table_settings()
    num_seeds = len(settings.seeds)
    train_ks = sorted(settings.train_ks)
    models = read_table()
    findings = judge(models, train_ks, num_seeds)
    lines = [["claim", *(f"K_train = {k}" for k in train_ks), "all"]]
    for claim, finding in findings.items():
        if claim == "U1":
            cells = [learnt_cell(models, finding, k, num_seeds) for k in train_ks]
        else:
            cells = [measured_cell(claim, finding, k) for k in train_ks]
        lines.append([LINES[claim], *cells, finding.verdict])
    return markdown(lines)


def learnt_cell(models: list[Model], finding: Finding, train_k: int, num_seeds: int) -> str:
    """Return how many seeds of both schemes learn one K_train, such as "5 and 4 of 5, as claimed".

    Args:
        models: All models of the table.
        finding: What U1 says.
        num_seeds: The number of seeds that are to be trained of each scheme.
    """
    counts = []
    verdicts = set()
    for scheme in SCHEMES:
        counts.append(str(sum(model.mastered for model in select(models, scheme, train_k))))
        verdicts.add(finding.outcomes[case_name(scheme, train_k)].verdict)
    # If one scheme is unfinished, so is the cell; else two different verdicts are both named.
    if UNFINISHED in verdicts:
        verdicts = {UNFINISHED}
    words = " and ".join(sorted(WORDS.get(verdict, verdict) for verdict in verdicts))
    return f"{' and '.join(counts)} of {num_seeds}, {words}"


def measured_cell(claim: str, finding: Finding, train_k: int) -> str:
    """Return mean, interval and outcome of one claim and K_train, such as
    "0.97 [0.93, 1.01], as claimed". A slope is shown as a fall."""
    outcome = finding.outcomes[case_name(CLAIMS[claim].scheme, train_k)]
    if outcome.verdict not in WORDS:
        return outcome.verdict
    if not outcome.values:
        return WORDS[outcome.verdict]
    return f"{format_mean(claim, outcome)}, {WORDS[outcome.verdict]}"


def format_mean(claim: str, outcome: Outcome) -> str:
    """Return a claim's mean over the models of one case with its interval. A slope is shown as a
    fall."""
    values: Sequence[float] = outcome.values
    if claim == "U7":
        values = [-value for value in values]
    mean, low, high = interval_of(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


# --- the page -------------------------------------------------------------------------------------

BLOCKS = {
    "<!-- Sparse parity: written by study/pages/write_parity.py -->": accuracy_tables,
    "<!-- Sparse parity, claims: written by study/pages/write_parity.py -->": claims_table,
}
"""The comment before each table, and what writes the table."""


def with_tables(page: str) -> str:
    """Return a page with today's tables between its comments."""
    for begin, write in BLOCKS.items():
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(END)
        page = f"{before}{begin}\n\n{write()}\n\n{END}{after}"
    return page


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
