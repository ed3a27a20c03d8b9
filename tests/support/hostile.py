"""Explanations and results whose every string is one that a page must not take for its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.results.results import Results
from tests.support.explanations import TEXT, asked, make_model
from tests.support.fake_results import META, one_document

HOSTILE = (
    *("</script><script>canary=1</script>", "<!--<script>", "<img src=x onerror=canary=1>"),
    *("\u2028canary=1\u2029", '" onmouseover="canary=1', "' autofocus onfocus='canary=1"),
    *("javascript:canary=1", "{{script}}", "{{meta}}", "&lt;b&gt;", "]]>", "\\u003cscript\\u003e"),
    *("\0", "\x1b[31m", "\u202eevil", "$\\frac{1$", "%s %d {0}", "</style>", "</title>"),
)


def tiny_explanation(check: bool = True, **changed: Any) -> Explanation:
    """Of a model with random weights. Two of its three targets are of two tokens."""
    given = {"text": f"{TEXT} w3 w7 w8", "at": ["w7 w8", 40], "units": "span:3"} | changed
    found = asked(make_model(), **given)
    if check:
        found.check(3)
    return found


def hostile_explanation() -> Explanation:
    """Every string that came from outside is one of `HOSTILE`."""
    found = tiny_explanation()
    check = found.checked
    assert check is not None
    words = hostile_words(len(found.document.tokens))
    found.document.texts = words
    found.model.name = HOSTILE[0]
    for table in (found.targets, found.distant, check.table):
        table["text"] = words[: len(table)]
    influence = check.tables["influence"]
    influence["distant_text"] = hostile_words(len(influence))
    return found


def hostile_words(num: int) -> list[str]:
    return [HOSTILE[i % len(HOSTILE)] for i in range(num)]


def hostile_results(results: Results) -> Results:
    """Every string that came from outside is one of `HOSTILE`."""
    words = hostile_words(60)
    meta = replace(
        META,
        **{name: dict.fromkeys(getattr(META, name), HOSTILE[0]) for name in ("model", "data")},
        windows=META.windows | {"long": 8, "short": 2, "stride": 1},
        units=["tokens", HOSTILE[5]],
        selectors=["add_one", HOSTILE[2]],
        versions={HOSTILE[0]: list(HOSTILE)},
        counts={"documents_too_short": HOSTILE[4]},
    )
    one = one_document(words, {20 + i: [13, 14, 15] for i in range(30)}, meta)
    summary = results.summary.replace(
        {"gradient": HOSTILE[2], "bigram": HOSTILE[4], "span:4": HOSTILE[5]}
    )
    others = {"selector": HOSTILE[2]}, {"units": HOSTILE[5]}, {"control": "unrelated"}
    influence = [one.influence, *(one.influence.assign(**other) for other in others)]
    return replace(
        one,
        documents=pd.DataFrame({"document": [1], "name": [HOSTILE[2]]}),
        summary=summary,
        targets=pd.concat([one.targets, one.targets.assign(target_set=HOSTILE[0])]),
        influence=pd.concat(influence),
        # The tables of an explanation lack columns that a measurement stores.
        recovery=one.recovery.reindex(columns=[*one.recovery, "loss_without", "num_tokens"]),
        losses=one.losses.assign(placebo_loss_long=one.losses.loss_short),
    )
