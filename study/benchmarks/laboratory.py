"""Generate questions with answers that rely on known sources: one, two, either of two, or none.

    python -m study.benchmarks.laboratory data/sources  # text to train on, of configs/sources.yaml
    olmo-sparsity prepare configs/sources.yaml && olmo-sparsity train configs/sources.yaml

A fact is `verb name thing`. A source holds facts, a question asks for some, and each statement of
the answer gives one of them, or two from two sources. Sources share verbs and things; the name
tells a fact from the others. A verb has a synonym, so that a source may say a fact in another word
than the answer. Facts about a few names are always the same and no source contains them: the model
knows them by heart. A fifth of all facts is held out of the training text, and tests ask for these
alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

VERBS = [("eats", "dines"), ("drives", "steers"), ("sells", "trades"), ("fears", "dreads")]
NAMES = [first + last for first, last in product("BDFGKLMN", ["ana", "elo", "ibi", "oru"])]
THINGS = [f"{a}{b}{c}" for a, b, c in product("bdfgkmpt", "aeio", ["ns", "rs"])]
KNOWN = ["Zeno", "Zora", "Zuli", "Zani"]
"""Their facts are known by heart: of each verb one thing."""

WORDS = [
    "memo",
    "and",
    ".",
    "?",
    *NAMES,
    *KNOWN,
    *(word for pair in VERBS for word in pair),
    *THINGS,
]

LENGTH = 80
"""Tokens of a training text."""

ONE, EITHER, BOTH, NONE = "one", "either", "both", "none"


@dataclass(frozen=True)
class Fact:
    name: str
    verb: int
    thing: str

    def said(self, synonym: bool = False) -> str:
        return f"{VERBS[self.verb][synonym]} {self.name} {self.thing}"


@dataclass(frozen=True)
class Exercise:
    """Sources, a question, the statements of its answer, and what each of these rests on."""

    sources: dict[str, str]
    question: str
    statements: list[str]
    kinds: list[str]
    needs: list[list[str]]

    @property
    def text(self) -> str:
        return "\n\n".join([*self.sources.values(), self.question + "\n" + self.answer])

    @property
    def answer(self) -> str:
        return " ".join(self.statements)


def known(name: str, verb: int) -> Fact:
    return Fact(name, verb, THINGS[(7 * KNOWN.index(name) + 13 * verb) % len(THINGS)])


def is_heldout(fact: Fact) -> bool:
    """A fifth of all facts, spread so that no pair of words tells which."""
    return crc32(repr(fact).encode()) % 5 == 0


def draw(
    generator: np.random.Generator,
    kinds: list[str],
    num_sources: int,
    num_extra: int,
    heldout: bool = False,
) -> Exercise:
    """`kinds`: of the statements. `num_extra`: facts that no statement asks for."""
    facts = _facts(generator, len(kinds) + kinds.count(BOTH) + num_extra, heldout)
    inside: list[list[str]] = [[] for _ in range(num_sources)]
    names = [f"source {index + 1}" for index in range(num_sources)]

    def place(fact: Fact, others: list[int]) -> int:
        """Into the shortest source that is none of the others."""
        free = [s for s in generator.permutation(num_sources).tolist() if s not in others]
        where = min(free, key=lambda s: len(inside[s]))
        inside[where].append(fact.said(bool(generator.random() < 0.3)) + ".")
        return where

    statements, asked, needs = [], [], []
    for kind in kinds:
        if kind == NONE:
            stated = [known(str(generator.choice(KNOWN)), int(generator.integers(len(VERBS))))]
            holders: list[int] = []
        else:
            stated = [facts.pop() for _ in range(1 + (kind == BOTH))]
            holders = [place(stated[0], [])]
            if kind != ONE:
                holders.append(place(stated[-1], holders))
        statements.append(" and ".join(fact.said() for fact in stated) + ".")
        asked.append(" and ".join(f"{VERBS[fact.verb][0]} {fact.name}" for fact in stated) + "?")
        needs.append(sorted(names[holder] for holder in holders))
    for fact in facts:
        place(fact, [])
    sources = {
        name: " ".join(["memo", *generator.permutation(said).tolist()])
        for name, said in zip(names, inside, strict=True)
        if said
    }
    return Exercise(sources, " ".join(asked), statements, list(kinds), needs)


def _facts(generator: np.random.Generator, count: int, heldout: bool) -> list[Fact]:
    """Of different names."""
    facts = []
    for name in generator.choice(NAMES, count, replace=False).tolist():
        verb = int(generator.integers(len(VERBS)))
        every = [Fact(name, verb, thing) for thing in THINGS]
        kept = [fact for fact in every if is_heldout(fact) == heldout]
        facts.append(kept[generator.integers(len(kept))])
    return facts


def names_in(text: str) -> set[str]:
    """Of the facts of a text."""
    return {*text.replace(".", "").split()} & {*NAMES, *KNOWN}


def exercises(num: int, seed: int) -> Iterator[Exercise]:
    """Held-out ones: three to five sources, three statements of all kinds."""
    generator = np.random.default_rng([seed, 1])
    for _ in range(num):
        kinds = generator.choice([ONE, ONE, EITHER, BOTH, NONE], 3).tolist()
        yield draw(generator, kinds, int(generator.integers(3, 6)), 3, heldout=True)


# --- training -------------------------------------------------------------------------------------


def tokenizer() -> Tokenizer:
    """A token for each word."""
    words = ["<unk>", "<|endoftext|>", *WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def training_text(generator: np.random.Generator, read: Tokenizer) -> str:
    """Exercises, short and long, that fill one sequence; the rest of it is a row of dots."""
    texts, room = [], LENGTH - 1
    while True:
        kinds = generator.choice([ONE, ONE, ONE, EITHER, BOTH, NONE], generator.integers(1, 5))
        num_sources = int(generator.integers(2, 5))
        drawn = draw(generator, kinds.tolist(), num_sources, int(generator.integers(0, 3)))
        size = len(read.encode(drawn.text).ids)
        if size > room:
            if texts:
                return "\n".join([*texts, ". " * room])
            continue
        texts.append(drawn.text)
        room -= size


def main(folder: str, num_texts: int = 60_000, seed: int = 0) -> None:
    out, read = Path(folder), tokenizer()
    out.mkdir(parents=True, exist_ok=True)
    read.save(str(out / "tokenizer.json"))
    generator = np.random.default_rng([seed, 0])
    with (out / "train.jsonl").open("w") as file:
        for _ in range(num_texts):
            line: dict[str, Any] = {"text": training_text(generator, read)}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
