"""Whether verdicts follow an answer through reasoning to the right source, on constructed traces.

    python -m study.benchmarks.reasoning smollm2 --out FOLDER [--keep FILE.jsonl]
    python -m study.benchmarks.reasoning --out study/results/reasoning.jsonl

A trace has three sources, each with an invented name and year, three sentences of reasoning, and an
answer. It is known which source and which sentences hold the words of each statement:

- chain: the second sentence repeats a source, and the answer repeats both;
- two: the last two sentences repeat a source each, and the answer has a statement for each;
- twice: the first sentence repeats a source, the last one repeats the first;
- invented: the second sentence and the answer hold what no source does;
- direct: the reasoning repeats another source than the answer.

Four traces of each. Decoys are sources and reasoning of other traces. For comparison, the same
answer is then attributed with its reasoning in view, as part of the question, so not as sources.
Each trace is two files in FOLDER; the same command resumes. The second command prints the table of
stored traces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity import attribute, load_model
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.sources.attribution import Attribution

KINDS, EACH, DECOYS = ("chain", "two", "twice", "invented", "direct"), 4, 14

THINGS = [
    *("bridge", "mill", "school", "library", "tower", "garden", "market", "clinic", "theatre"),
    *("bakery", "museum", "chapel", "harbour", "station", "hospital", "bathhouse"),
]
FIRST = [
    *("Orla", "Ottoline", "Amund", "Benedikt", "Ulla", "Casimir", "Delphine", "Eskil", "Frida"),
    *("Gawain", "Hedda", "Isidor", "Jorunn", "Kasper", "Linnea", "Matthis"),
]
LAST = [
    *("Brackwater", "Vexley", "Tvedt", "Marsk", "Quillfeather", "Norrgard", "Hollowell"),
    *("Ostrander", "Pemberwick", "Zeller", "Ravnsborg", "Thistlewood", "Undset", "Wynter"),
]
NOTES = [
    "The {thing} near the river was opened in {year} by {name}.",
    "In {year} {name} opened the {thing} on the hill.",
    "{name} is the person who opened the {thing} of the town, in {year}.",
]
REPEATS = [
    "One note says that {name} opened the {thing} in {year}.",
    "As for the {thing}, it was {name} who opened it, in {year}.",
]
RECALLS = "From what I remember, {name} opened the {thing} in {year}."
CONCLUDES = "So the answer has to be {name}, in {year}."
FILLERS = ["I have to find out who opened it.", "The rest does not help me with this question."]
ANSWER = "The {thing} was opened by {name} in {year}."

Fact = dict[str, str]


@dataclass(frozen=True)
class Trace:
    kind: str
    sources: dict[str, str]
    question: str
    reasoning: list[str]
    statements: list[str]
    origins: list[set[str]]
    """Sources of each statement, through any sentence."""

    holders: list[set[str]]
    """Sources and sentences that hold the words of each statement."""

    earlier: dict[str, set[str]]
    """The same of each sentence of the reasoning."""

    marks: list[str]
    """Names, things and years, which no decoy holds."""


def traces() -> Iterator[Trace]:
    draw = np.random.default_rng(5)
    for kind in KINDS:
        for _ in range(EACH):
            picked = (draw.permutation(names)[:4] for names in (THINGS, FIRST, LAST))
            things, firsts, lasts = (list(map(str, names)) for names in picked)
            years = draw.choice(np.arange(1804, 1990), 4, replace=False)
            facts = [
                {"thing": thing, "name": f"{first} {last}", "year": str(year)}
                for thing, first, last, year in zip(things, firsts, lasts, years, strict=True)
            ]
            yield _trace(kind, facts, draw)


def _trace(kind: str, facts: list[Fact], draw: np.random.Generator) -> Trace:
    own = [int(i) for i in draw.permutation(3)]
    names = [f"{facts[i]['thing']}.txt" for i in range(3)]
    notes = {names[i]: NOTES[i].format(**facts[i]) for i in range(3)}
    about, other = facts[own[0]], facts[own[1]]
    first, second = {names[own[0]]}, {names[own[1]]}
    r1, r2, r3 = ({f"reasoning {i}"} for i in (1, 2, 3))
    if kind == "invented":
        about, first = facts[3], set()
    answers, origins, holders = [about], [first], [first | r2]
    texts = [FILLERS[0], REPEATS[0].format(**about), FILLERS[1]]
    earlier = {"reasoning 2": first}
    if kind == "two":
        answers, origins, holders = [about, other], [first, second], [first | r2, second | r3]
        texts[2] = REPEATS[1].format(**other)
        earlier["reasoning 3"] = second
    elif kind == "twice":
        texts = [REPEATS[0].format(**about), FILLERS[1], CONCLUDES.format(**about)]
        holders, earlier = [first | r1 | r3], {"reasoning 1": first, "reasoning 3": first | r1}
    elif kind == "invented":
        texts[1] = RECALLS.format(**about)
    elif kind == "direct":
        texts[1] = REPEATS[0].format(**other)
        holders, earlier = [first], {"reasoning 2": second}
    question = "Who opened the {}, and when?".format(" and the ".join(a["thing"] for a in answers))
    statements = [ANSWER.format(**fact) for fact in answers]
    marks = [word for fact in facts for part in fact.values() for word in part.split()]
    return Trace(kind, notes, question, texts, statements, origins, holders, earlier, marks)


def measure(name: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model, every = load_model(name, dtype="bf16"), list(traces())
    distinct = sorted({text for t in every for text in (*t.sources.values(), *t.reasoning)})
    in_turn = sorted(range(len(every)), key=lambda number: number % EACH)  # all kinds first
    for is_in_view, number in product((False, True), in_turn):
        one, file = every[number], out / f"{number:02d}{'-in-view' * is_in_view}.json"
        if file.exists():
            continue
        others = [text for text in distinct if text not in FILLERS]
        others = [text for text in others if not any(mark in text for mark in one.marks)]
        picked = np.random.default_rng(number).permutation(others)[:DECOYS]
        reasoning = f"<think>\n{' '.join(one.reasoning)}\n</think>\n\n"
        question = f"{one.question}\n{reasoning.rstrip()}" if is_in_view else one.question
        found = attribute(
            model,
            sources=one.sources,
            question=question,
            reasoning=None if is_in_view else reasoning,
            answer=one.statements,
            decoys=[str(text) for text in picked],
            prefix="\n",
        )
        about = {
            "rows": [_row(found, i) for i in range(len(one.statements))],
            "steps": {name: _row(step, 0) for name, step in found.steps.items()},
            "token_forwards": found.token_forwards,
        }
        write_atomically(file, json.dumps(about))


def _row(found: Attribution, number: int) -> dict[str, Any]:
    row = found.statements.iloc[number]
    return {"named": list(row.sources), "origins": list(row.origins), "verdict": row.verdict}


def read(out: Path) -> dict[str, Any]:
    """Every trace by the name of its file."""
    if out.is_dir():
        return {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {row.pop("file"): row for row in rows}


def table(found: dict[str, Any]) -> str:
    lines, counts = list[str](), dict[str, list[bool]]()

    def count(claim: str, holds: bool) -> bool:
        counts.setdefault(claim, []).append(holds)
        return holds

    for number, one in enumerate(traces()):
        about, seen = (found.get(f"{number:02d}{ending}") for ending in ("", "-in-view"))
        for i, row in enumerate(seen["rows"] if seen else ()):
            count(f"reasoning in view, {one.kind}", set(row["named"]) == one.origins[i])
        for i, row in enumerate(about["rows"] if about else ()):
            named = set(row["named"])
            are_right = [
                count(f"origins right, {one.kind}", set(row["origins"]) == one.origins[i]),
                *(count("names of statements right", n in one.holders[i]) for n in sorted(named)),
            ]
            holders = {name for name in one.holders[i] if name not in one.sources}
            if holders:
                are_right.append(count("the sentence is named", bool(holders & named)))
            if not all(are_right):
                lines.append(f"trace {number} ({one.kind}), {one.statements[i]!r} {row['verdict']}")
        for name, row in about["steps"].items() if about else ():
            right = one.earlier.get(name, set())
            for source in row["named"]:
                if not count("names of sentences right", source in right):
                    lines.append(f"trace {number} ({one.kind}), {name} {row['verdict']}")
            count(f"sentence traced, {one.kind}", set(row["origins"]) == right - _inner(right))
    lines += [f"{claim}: {sum(holds)} of {len(holds)}" for claim, holds in sorted(counts.items())]
    cost = [row["token_forwards"] for name, row in found.items() if "-" not in name]
    lines.append(f"token-forwards a trace: {np.mean(cost):,.0f} on average, {max(cost):,} at most")
    return "\n".join(lines)


def _inner(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("reasoning ")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="without one, the table of stored traces alone")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, help="write all traces into one file")
    given = parser.parse_args()
    if given.model is not None:
        measure(given.model, given.out)
    traced = read(given.out)
    if not traced or (given.keep is not None and len(traced) < 2 * EACH * len(KINDS)):
        parser.error(f"{given.out} has {len(traced)} of {2 * EACH * len(KINDS)} traces")
    if given.keep is not None:
        lines = [json.dumps({"file": name, **row}) for name, row in traced.items()]
        write_atomically(given.keep, "\n".join(lines) + "\n")
    print(table(traced))
