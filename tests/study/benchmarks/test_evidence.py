"""Steps of the evidence: texts, losses by position, and tables of several measurements."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from olmo_sparsity import measure, read_results
from olmo_sparsity.analysis.inputs.sentences import sentence_starts
from olmo_sparsity.analysis.models.load import DEMO
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.tokenizer import train_tokenizer
from study.benchmarks.evidence import (
    choosing_the_planted,
    collect,
    compare,
    cut,
    exchange,
    losses_of,
)
from study.benchmarks.pieces import pieces
from study.benchmarks.questions import share
from tests.support.fake_results import write_fake_results


def test_pieces_are_as_long_as_sentences_and_begin_elsewhere() -> None:
    generator = random.Random(0)
    text = " ".join(
        " ".join("word" for _ in range(generator.randint(3, 30))).capitalize() + "."
        for _ in range(100)
    )
    begins, sentences = pieces(text), sentence_starts(text)
    assert len(begins) == len(sentences) == 100
    assert all(place == 0 or text[place - 1] == " " for place in begins)
    assert len({*begins} & {*sentences}) < 20
    lengths, own = (sorted(np.diff([*places, len(text)])) for places in (begins, sentences))
    assert np.abs(np.subtract(lengths, own)).max() <= len("Words. ")


def test_beginnings_of_all_that_are_long_enough(
    data_folder: Path, heldout: TokenShards, tmp_path: Path
) -> None:
    out = tmp_path / "cut.jsonl"
    texts = [heldout.tokenizer.decode(heldout.document(i)) for i in range(len(heldout))]
    limit = sorted(map(len, texts))[len(texts) // 2]
    assert cut(data_folder, out, limit) == sum(len(text) >= limit for text in texts)
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert found == [text[:limit] for text in texts if len(text) >= limit]


def test_stretches_are_exchanged_between_documents() -> None:
    rng = random.Random(0)
    # Each document has words of its own, so that a stretch tells where it is from.
    texts = [" ".join(rng.choice(f"{c}a {c}b {c}c".split()) for _ in range(90)) for c in "bdfg"]
    tokenizer: Tokenizer = train_tokenizer(iter(texts), 300)
    before = [tokenizer.encode(text).ids for text in texts]
    after = [tokenizer.encode(text).ids for text in exchange(texts, tokenizer, 8, seed=1)]

    def cut(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + 8]) for i in range(0, len(ids) - 7, 8)]

    assert [len(cut(ids)) for ids in after] == [len(cut(ids)) for ids in before]
    stretches = [stretch for ids in before for stretch in cut(ids)]
    assert sorted(s for ids in after for s in cut(ids)) == sorted(stretches)
    stayed = sum(s in cut(b) for b, a in zip(before, after, strict=True) for s in cut(a))
    assert stayed < len(stretches) / 2, "a quarter stays where it was, by chance"


TEXT = "The miller of Orsk kept three ducks. " * 12


def test_losses_between_positions_are_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, "short", TEXT[9:])))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / "model")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    found = losses_of(str(tmp_path / "model"), str(path), [0, 16, 64], 3)
    assert found.document.tolist() == [0, 2]
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        within = model(tokens[:, :16], labels=tokens[:, :16]).loss.item()
        hidden = tokens.where(torch.arange(64) >= 16, -100)
        beyond = model(tokens, labels=hidden).loss.item()
    assert found.loc[0, ["0-16", "16-64"]].tolist() == pytest.approx([within, beyond], abs=1e-5)


MAX_DOCUMENTS = 8
ASKED = {
    "planted": True,
    "max_documents": MAX_DOCUMENTS,
    "long": 40,
    "short": 8,
    "stride": 16,
    "draws": 1,
    "min_gap": 0.0,
}


def test_a_rule_is_compared_with_what_was_planted(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(trained, **ASKED, selectors=["add_one", "pairs"], ks=[1, 2])
    assert found is not None
    evaluated: dict[str, Any] = {}

    def measure_once(model: str, text: None, *, choices: Results, **given: Any) -> Results | None:
        """The planted tokens are evaluated again only where the rules chose others."""
        key = choices.influence.to_json()
        if key not in evaluated:
            evaluated[key] = measure(model, text, choices=choices, **given)
        return evaluated[key]

    monkeypatch.setattr("study.benchmarks.evidence.measure", measure_once)

    def compared(**tables: pd.DataFrame) -> pd.DataFrame:
        return compare(replace(found, **tables), str(trained), MAX_DOCUMENTS)

    of_planted = choosing_the_planted(found).influence
    own = of_planted[(of_planted.control == "own") & (of_planted["rank"] <= 2)]
    planted = found.planted.groupby("document").place.agg(set)
    for (document, _), places in own.groupby(["document", "selector"]).far_first.agg(set).items():
        assert document not in planted or places == planted[document]
    rounded = found.recovery.assign(loss_set=found.recovery.loss_set + 1e-6)
    same = compared(influence=of_planted, recovery=rounded)
    assert (same[["found", "as_good"]] == 1).all(axis=None)
    assert (compared().found < 1).all()  # nobody taught this model
    for nats, part in ((-100, 1), (100, 0)):
        changed = found.recovery.assign(loss_set=found.recovery.loss_set + nats)
        assert (compared(recovery=changed).as_good == part).all()
    one, other = compared().loss_set_of_planted  # whatever a rule chose
    assert one == pytest.approx(other, abs=1e-4)


def test_what_it_cannot_compare_is_refused(trained: Path) -> None:
    asked = {"units": ["tokens", "span:2"], "selectors": ["add_one"], "ks": [1, 2]}
    found = measure(trained, **ASKED, **asked)
    assert found is not None
    with pytest.raises(SystemExit, match="tokens alone"):
        compare(found, str(trained), MAX_DOCUMENTS)


def test_rows_of_every_measurement(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("later", "former")]
    write_fake_results(folders[0])
    shutil.copytree(*folders)
    found = collect(folders).set_index("measurement")
    assert list(found.index.unique()) == ["former", "later"]
    results = read_results(folders[0])
    assert found.loc["later"].recovery.tolist() == pytest.approx(
        results.summary.recovery.tolist(), abs=1e-4
    )
    check = results.meta.induction
    assert found.induction_share.iloc[0] == pytest.approx(
        check["drop"] / check["loss_first"], abs=1e-4
    )


def test_a_share_of_names_is_resampled_by_question() -> None:
    """Two wrong names of one question are one draw: half of the resamples have neither or both."""
    wrong, named = pd.Series([2, 0, 0, 0]), pd.Series([2, 1, 1, 0])
    assert share(wrong, named).startswith("0.50 [0.00, ")
    assert share(wrong, named).endswith("n = 4")
    assert share(wrong, named * 0) == "–"
    assert share(pd.Series([0, 0, 0]), pd.Series([2, 2, 2])) == "0.00 [0.00, 0.50], n = 6"
