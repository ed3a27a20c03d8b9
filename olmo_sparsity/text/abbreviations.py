"""List words whose dot may not end a sentence, by what may follow them.

Place in the flow: **lists** → sentences.py, which asks `dot_is_full_stop` of each dot.

    "Dr."    a name follows: never ends a sentence
    "e.g."   never ends a sentence
    "Fig."   ends no sentence before a number
    "Inc."   ends a sentence if the next word is one that often begins sentences
    "J."     as "Inc."; so does "U.S." and each dotted abbreviation
    others   end a sentence

Abbreviations are in lower case, without their last dot.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MONTHS = _words("jan feb mar apr jun jul aug sep sept oct nov dec")

NEVER_LAST = _words(
    "adv approx bzw ca cf d.h e.g ggf evtl hrsg i.e p.ej viz vgl vs z.b т.е т.д ул им डॉ"
)
"""Their dots end no sentence."""

TITLES = _words(
    "adj adm bros bijv capt cmdr col dept dhr dipl dott dr dra drs ed eds est gen gov hon hr lt "
    "maj mevr mgr mlle mme mmes mr mrs ms mt mx prof prop rep rev sen sgt sig sra srta st"
)
"""Their dots end no sentence: a name follows. In lower case some are words ("he did one rep."), and
are treated as those of `LAST_BEFORE_BEGINNER`."""

LAST_BEFORE_BEGINNER = (
    _words(
        "al assn ave blvd bldg co corp ct esq etc inc jr llc ltd ph.d rd sr usw "
        "mon tue tues wed thu thur thurs fri"
    )
    | MONTHS
)
"""Their dots end a sentence if the next word is one of `BEGINNERS`."""

NOT_LAST_BEFORE_NUMBER = (
    _words("abs art ch chap eq fig figs n no nos nr num p par para pp pt sec seq tab vol vols")
    | MONTHS
)
"""Their dots end no sentence before a number: “Fig. 3”, “Oct. 5”. “He said no.” ends one."""

GERMAN_MONTHS = _words(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
"""In German, “3. Oktober” has an ordinal number."""

BEGINNERS = _words(
    "A After All Also Although An And Are As At Because Before Both But By Can Could Did Do Does "
    "Each For From Had Has Have He Her Here His How However I If In Is It Its Many Most My No "
    "Nobody Not Now Of On Once Or Our She Should Since So Some Such That The Their Then There "
    "These They This Those To Until Was We Were What When Where While Who Why With Would Yes You "
    "Your"
)
"""Words that often begin a sentence and are rarely part of a name."""

DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]|(?:[^\W\d_]{1,2}\.)+[^\W\d_]{2}")
"""Initials and such, without the last dot: “J”, “U.S”, “Ph.D”."""

NUMBER = re.compile(r"\d|[IVXLC]{2,}\b")
"""The beginning of a number; also a Roman one, of two letters or more as “I” is a word."""


def dot_is_full_stop(word: str, next_word: str, after_next: str) -> bool:
    """Return whether the dot after a word ends a sentence, and not just an abbreviation.

    Args:
        word: The word before the dot.
        next_word: The word after the dot.
        after_next: The character after the next word.
    """
    abbreviation = word.lower()
    if abbreviation in NEVER_LAST:
        return False
    if word.isdecimal() and len(word) < 3 and next_word in GERMAN_MONTHS:
        return False
    if abbreviation in NOT_LAST_BEFORE_NUMBER and NUMBER.match(next_word):
        return False
    if abbreviation in TITLES and not word.islower():
        return False
    if abbreviation in TITLES | LAST_BEFORE_BEGINNER or DOTTED.fullmatch(word):
        # “J. A. Smith”: the A begins no sentence.
        return next_word in BEGINNERS and after_next != "."
    return True
