"""Scores of documents: against a ladder written naively, from files, resumed after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import olmo_sparsity
from olmo_sparsity.analysis.models.load import wrap_model
from olmo_sparsity.analysis.scoring import score as module
from olmo_sparsity.analysis.scoring.score import estimate_score, score, score_files
from olmo_sparsity.analysis.settings import ScoreSettings, build
from olmo_sparsity.command.cli import main
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.streams import stream
from tests.support.explanations import WORDS, make_model, make_tokenizer

CONTEXTS, LOCAL = (8, 20), 4
SETTINGS = ScoreSettings(contexts=CONTEXTS, local=LOCAL, blocks=2, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return wrap_model(make_model(), make_tokenizer())


def make_words(length: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, length).tolist())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [make_words(length, seed) for seed, length in enumerate((40, 6, 26, 70, 33, 14))]


@torch.no_grad()
def naive(model: Any, ids: list[int]) -> np.ndarray:
    """The loss of each token but the first, from one plain forward pass."""
    tokens = torch.tensor([[1, *ids]])  # behind the beginning-of-text token
    logits = model.model(tokens, torch.arange(len(ids) + 1)[None])[0].float()
    return -logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_a_naive_ladder_gives_the_same(model: Any, texts: list[str]) -> None:
    rows = list(score(model, texts, contexts=CONTEXTS, local=LOCAL, blocks=1, seed=3))
    assert [row["row"] for row in rows] == list(range(len(texts)))
    draws_seen = 0
    for row, text in zip(rows, texts, strict=True):
        ids = model.encode([text])[0]
        assert row["text"] == text
        assert row["tokens"] == len(ids)
        data = text.encode()
        assert row["gzip"] == len(zlib.compress(data, 6)) / len(data)
        fits = [context for context in CONTEXTS if context + LOCAL <= len(ids)]
        if not fits:
            assert row["gain"] is row["context"] is row["net_gain"] is row["loss_8"] is None
            continue
        start = int(stream(3, "score", row["row"]).integers(fits[-1], len(ids) - LOCAL + 1))
        block = ids[start : start + LOCAL]
        of = {c: naive(model, ids[start - c : start + LOCAL])[-LOCAL:] for c in (LOCAL, *fits)}
        for context, loss_T in of.items():
            assert row[f"loss_{context}"] == pytest.approx(loss_T.mean(), abs=1e-4)
        gain_T = of[LOCAL] - of[fits[-1]]
        assert row["context"] == fits[-1]
        assert row["gain"] == pytest.approx(gain_T.mean(), abs=1e-4)
        assert row["key_share"] == ((gain_T > 2) & (of[fits[-1]] < 2)).mean()
        far, near = ids[start - fits[-1] : start - LOCAL], ids[start - LOCAL : start]
        others = [model.encode([other])[0] for other in texts if other != text]
        losses = []  # behind each stretch of other documents, one of which was drawn
        enough = [other for other in others if len(other) >= len(far)]
        few = [other for other in others if len(other) < len(far)]
        joined = [one + other for one in few for other in others if one is not other]
        for other in [*enough, *(one[: len(far)] for one in joined)]:
            for first in range(max(len(other) - len(far) + 1, 0)):
                losses.append(naive(model, [*other[first : first + len(far)], *near, *block]))
        found = [loss_T[-LOCAL:].mean() for loss_T in losses]
        assert np.abs(np.array(found) - row["loss_unrelated"]).min() < 1e-4
        assert row["net_gain"] == pytest.approx(row["gain"] - row["gain_unrelated"], abs=1e-6)
        seen = [*pairwise(far)]
        before = [*near, *block]
        pairs = [*pairwise(before)]
        repeats_T = [
            pairs[LOCAL - 1 + i] in seen and pairs[LOCAL - 1 + i] not in pairs[: LOCAL - 1 + i]
            for i in range(LOCAL)
        ]
        if gain_T.sum() > 0:
            expected = gain_T[repeats_T].sum() / gain_T.sum()
            assert row["recurs"] == pytest.approx(expected, abs=1e-3)
        draws_seen += 1
    assert draws_seen == 5


def test_rows_do_not_depend_on_what_is_beside_them(model: Any, texts: list[str]) -> None:
    named = [{"text": text, "id": number, "row": "mine"} for number, text in enumerate(texts)]
    options: dict[str, Any] = {"contexts": CONTEXTS, "local": LOCAL, "blocks": 2, "seed": 3}
    whole = list(olmo_sparsity.score(model, iter(named), **options))
    small = list(score(model, named, **options, batch_tokens=1))
    for one, other in zip(whole, small, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, float):
                assert other[name] == pytest.approx(value, abs=1e-5)
            else:
                assert other[name] == value
    assert (whole[4]["id"], whole[4]["row_input"], whole[4]["row"]) == (4, "mine", 4)
    assert whole[3]["scored_tokens"] == 2 * LOCAL
    for wrong in (["a", 3], [{"body": "a"}]):
        with pytest.raises((DataError, TypeError, ValueError)):
            list(score(model, wrong, contexts=CONTEXTS, local=LOCAL))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be more than local=4"):
        list(score(model, texts, contexts=(4,), local=4))
    assert build(ScoreSettings, {"contexts": "1k,4K,9000"}).contexts == (1024, 4096, 9000)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_files_in_shards_and_after_a_stop(
    model: Any, texts: list[str], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes from one process, from two that share the parts, and from one that stopped."""
    monkeypatch.setattr(module, "PART_DOCUMENTS", 2)
    rows = [{"text": text, "id": number, "tags": ["a", "b"]} for number, text in enumerate(texts)]
    rows[3]["late"] = 0.5
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "texts.parquet")

    def into(name: str, text: Path = lines, **more: Any) -> Any:
        return score_files(model, str(text), tmp_path / f"{name}{suffix}", SETTINGS, **more)

    whole = into("whole")
    if suffix == ".parquet":
        table = pq.read_table(whole).to_pylist()
    else:
        table = [json.loads(line) for line in whole.read_text().splitlines()]
    in_memory = list(score(model, rows, contexts=CONTEXTS, local=LOCAL, blocks=2, seed=3))
    for one, other in zip(table, in_memory, strict=True):
        kept = {n: v for n, v in one.items() if n not in ("file", "late")}
        assert kept == {n: v for n, v in other.items() if n not in ("file", "late")}
        assert one["file"] == str(lines)
    assert (table[3]["late"], table[3]["tags"]) == (0.5, ["a", "b"])
    assert into("shards", shard=(1, 2)) is None
    assert into("shards", shard=(0, 2)).read_bytes() == whole.read_bytes()
    really, calls = module._write, []

    def stop(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        really(*given)

    monkeypatch.setattr(module, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        into("stopped")
    before = len(calls)
    assert into("stopped").read_bytes() == whole.read_bytes()
    assert len(calls) - before == 2  # of three parts, the first was kept
    from_table = into("table", tmp_path / "texts.parquet")
    assert from_table.stat().st_size > 0
    with pytest.raises(ConfigError, match="settings"):
        score_files(model, str(lines), whole, ScoreSettings(contexts=(9,), local=4))
    said = estimate_score(model, str(lines), SETTINGS)
    assert "6 read (all of" in said
    assert "1 of them shorter than 12 tokens" in said


def test_a_killed_command_resumes_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": make_words(60, seed)}) for seed in range(260)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    words = ["score", "demo", "--text", "t.jsonl", "--contexts", "40", "--local", "8", "--out"]
    killed = subprocess.Popen([sys.executable, "-m", "olmo_sparsity", *words, "a.parquet"])
    parts = tmp_path / "a.parquet.parts"
    while killed.poll() is None and len(list(parts.glob("0*.parquet"))) < 2:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "a.parquet").exists()
    assert main([*words, "a.parquet"]) == main([*words, "b.parquet"]) == 0
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 260


def test_a_text_that_changed_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only the part that holds it."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": make_words(60, seed), "label": "a"} for seed in range(130)]
    words = ["score", "demo", "--text", "t.jsonl", "--contexts", "40", "--local", "8", "--out"]

    def scored(out: str) -> list[Any]:
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert main([*words, out]) == 0
        return pq.read_table(tmp_path / out).to_pylist()

    before, parts = scored("a.parquet"), tmp_path / "a.parquet.parts"
    assert len(list(parts.glob("0*"))) == 3
    rows[-1] = {"text": make_words(60, 999), "label": "b"}
    after = scored("a.parquet")
    assert after == scored("b.parquet")
    assert after[:-1] == before[:-1]
    assert after[-1]["label"] == "b"
    assert after[-1]["loss_8"] != before[-1]["loss_8"]
    assert len(list(parts.glob("0*"))) == 4
    del rows[100:]
    assert len(scored("a.parquet")) == 100
