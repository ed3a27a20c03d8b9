"""Print the verdicts on U1 to U23 and the paper's table: `python -m study.parity`."""

from __future__ import annotations

from study.parity import family, program_order, reach, table
from study.parity.models import NAMES
from study.parity.verdicts import Finding, format_findings
from study.tasks.experiment import list_trials


def judge_all() -> dict[str, Finding]:
    """Judge U1 to U23 by the stored models."""
    settings = table.table_settings()
    train_ks = sorted(settings.train_ks)
    return {
        **table.judge(table.read_table(), train_ks, len(settings.seeds)),
        **reach.judge(reach.read_cells()),
        **family.judge(family.read_cells(), family.read_nearest(), train_ks),
        **program_order.judge(program_order.read_program_order()),
    }


def report() -> str:
    """Return the verdicts and the paper's table, for each scheme, as text."""
    settings = table.table_settings()
    models = table.read_table()
    parts = [
        f"{len(models)} of {len(list_trials(settings))} models of the table are trained.",
        format_findings(judge_all()),
    ]
    for scheme in table.SCHEMES:
        parts.append(f"{NAMES[scheme]}:")
        parts.append(table.format_table(models, scheme, table.SHOWN_LENGTHS))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report())
