"""Find the names that the sources of an earlier run have now.

Place in the flow: stored answers of both runs (answers.py) → **`current_names`**, then
**`with_current_names`** and **`describe_changes`** → baseline.py.

A source is known by its text, not by its name. A retriever that numbers its chunks gives the name
`faq (2)` to another text as soon as it returns them in another order:

    earlier                 now                    the earlier source is now called
    faq       text 1        faq       text 2       faq (2)
    faq (2)   text 2        faq (2)   text 1       faq
    notes     text 3        notes     text 4       notes: its text is gone, the name is free

Where this module says text, a hash of it is meant: answers store no texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from olmo_sparsity.sources.gate.answers import StoredAnswer


def current_names(texts: Mapping[str, str], earlier_texts: Mapping[str, str]) -> dict[str, str]:
    """Return, for each name of an earlier source, the name that its text has now. No two earlier
    sources get the same name.

    Args:
        texts: Text of each source, by name.
        earlier_texts: The same in the earlier run.
    """
    # A name that still has its text stays.
    new_names = {name: name for name, text in earlier_texts.items() if texts.get(name) == text}

    # Other earlier texts get the name of an equal text that is left.
    names_by_text: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        if name not in new_names:
            names_by_text[text].append(name)  # two sources may have one text
    for name, text in earlier_texts.items():
        if name not in new_names and names_by_text[text]:
            new_names[name] = names_by_text[text].pop(0)

    # Texts that are gone keep their name, unless another earlier source has it now.
    taken = set(new_names.values())
    for name in earlier_texts:
        if name in new_names:
            continue
        free_name = name
        while free_name in taken:
            free_name = f"{free_name} (earlier)"
        new_names[name] = free_name
        taken.add(free_name)
    return new_names


def with_current_names(earlier_answer: StoredAnswer, new_names: Mapping[str, str]) -> StoredAnswer:
    """Return an earlier answer with the names that its sources have now. `new_names`: what
    `current_names` returns."""

    def renamed(names: Sequence[str]) -> list[str]:
        return [new_names.get(name, name) for name in names]

    rows = [
        replace(
            row,
            sources=renamed(row.sources),
            open=renamed(row.open),
            origins=renamed(row.origins),
            cells={new_names.get(name, name): cell for name, cell in row.cells.items()},
        )
        for row in earlier_answer.statements
    ]
    texts = {new_names[name]: text for name, text in earlier_answer.source_texts.items()}
    return replace(earlier_answer, source_texts=texts, statements=rows)


def describe_changes(texts: Mapping[str, str], earlier_texts: Mapping[str, str]) -> list[str]:
    """Return which sources are new, are gone or have another text, in words."""
    changed_names = {name for name, _ in earlier_texts.items() ^ texts.items()}
    changes: list[str] = []
    for name in sorted(changed_names):
        if name not in texts:
            changes.append(f"{name} is gone")
        elif name not in earlier_texts:
            changes.append(f"{name} is new")
        else:
            changes.append(f"{name} has another text")
    return changes
