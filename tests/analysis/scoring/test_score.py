"""Scores of documents: against a ladder written naively, from files, resumed after a kill."""

from __future__ import annotations

import json
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
from olmo_sparsity.analysis.options import ScoreSettings, build
from olmo_sparsity.analysis.scoring import score as module
from olmo_sparsity.analysis.scoring.score import ScoreRequest, count_score, score, score_files
from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.folders import Pieces
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.load import wrap_model
from tests.support.explanations import WORDS, make_model, make_tokenizer

CONTEXTS, LOCAL = (8, 20), 4


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
        pairs = [*pairwise([*near, *block])]
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
    named = [{"body": text, "id": number} for number, text in enumerate(texts)]
    options: dict[str, Any] = {"contexts": CONTEXTS, "local": LOCAL, "blocks": 2, "seed": 3}
    whole = list(olmo_sparsity.score(model, iter(named), field="body", **options))
    for one, other in zip(whole, score(model, texts, **options, batch_tokens=1), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert whole[3]["scored_tokens"] == 2 * LOCAL
    assert build(ScoreSettings, {"contexts": "1k,4K,9000"}).contexts == (1024, 4096, 9000)


@pytest.mark.parametrize(
    ("documents", "more"),
    [
        *((["a", 3], {}), ([{"body": "a"}], {}), ([{"text": None}], {}), (["\ud800"], {})),
        *(("a", {}), (["a"], {"contexts": (4,)}), (["a"], {"contexts": ()})),
    ],
)
def test_what_cannot_be_scored_is_refused(model: Any, documents: Any, more: dict) -> None:
    with pytest.raises(UserError):
        list(score(model, documents, **{"contexts": CONTEXTS, "local": LOCAL} | more))


def test_losses_that_are_no_numbers_are_an_error(texts: list[str]) -> None:
    broken = make_model()
    with torch.no_grad():
        next(broken.parameters())[40].fill_(float("nan"))  # of one token
    with pytest.raises(DataError, match="not finite"):
        list(score(wrap_model(broken, make_tokenizer()), texts, contexts=CONTEXTS, local=LOCAL))


def request_of(model: Any, text: Path, out: Path, **more: Any) -> ScoreRequest:
    given = {"contexts": CONTEXTS, "local": LOCAL, "blocks": 2, "seed": 3} | more
    return ScoreRequest.of(model=model, text=str(text), out=out, **given)


def read(path: Any) -> Any:
    return pq.read_table(path).to_pylist()


STRANGE = [1, "a", {}, 2**70, [1, "a"], "\ud800", None, float("nan")]
"""A field of a record that no column of a table can hold."""


def test_files_in_shards_and_after_a_stop(
    model: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes from one process, from two that share the parts, from one that stopped, and
    from one whose parts were damaged."""
    monkeypatch.setattr(module, "PART_DOCUMENTS", 2)
    monkeypatch.setattr(module, "POOL", 5)  # the last document is in nobody's control
    rows = [{"text": text, "id": STRANGE[number]} for number, text in enumerate(texts)]
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def into(name: str, **more: Any) -> Any:
        return score_files(request_of(model, lines, tmp_path / f"{name}.parquet", **more))

    whole = into("whole")
    in_memory = list(score(model, texts, contexts=CONTEXTS, local=LOCAL, blocks=2, seed=3))
    assert read(whole) == [row | {"file": str(lines)} for row in in_memory]
    assert into("shards", shard=(1, 2)) is None
    expected = whole.read_bytes()
    assert into("shards", shard=(0, 2)).read_bytes() == expected
    really, calls = Pieces.write, []

    def stop(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        really(*given)

    monkeypatch.setattr(Pieces, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        into("stopped")
    for damage in (lambda b: b, lambda b: b[:-9], lambda b: b.replace(b"1", b"2"), lambda b: b""):
        for path in sorted((tmp_path / "stopped.parquet.parts").glob("0*"))[:1]:
            path.write_bytes(damage(path.read_bytes()))
        before = len(calls)
        assert into("stopped").read_bytes() == expected
        assert len(calls) - before == (2 if before == 2 else 1)  # of three parts
    with pytest.raises(ConfigError, match="settings"):
        into("whole", seed=4)
    rows[-1]["text"] += " w3"  # the part that holds a changed text is computed again
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, begun = read(whole), len(calls)
    changed = read(into("whole"))
    assert changed[:-1] == before[:-1]
    assert changed[-1]["tokens"] == before[-1]["tokens"] + 1
    assert len(calls) - begun == 1
    needed = 0  # as the documentation of `score` says
    for row in read(whole):
        fits = [context for context in CONTEXTS if row[f"loss_{context}"] is not None]
        each = sum(fits) + max(fits, default=0) + LOCAL * (len(fits) + 3)
        needed += row["scored_tokens"] // LOCAL * each
    counted = count_score(request_of(model, lines, tmp_path / "none.parquet"))
    assert counted.token_forwards == needed
    assert "6 (all of" in str(counted)


def test_no_input_is_written_and_no_output_read(
    model: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in" / "of"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to("in")
    given = folder / "t.parquet"
    pq.write_table(pa.table({"text": texts}), given)
    before = given.read_bytes()
    for text, out in [
        *(("in/of/t.parquet", "link/of/../of/t.parquet"), ("in/of/*.parquet", "in/of/t.parquet")),
        *(("in/of", "in/of/new.parquet"), ("link", "in/of/n.parquet")),
    ]:
        with pytest.raises(ConfigError, match="out="):
            score_files(request_of(model, Path(text), Path(out)))
    assert given.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["t.parquet"]
    request = request_of(model, Path("in/**/*.*"), Path("in/new.parquet"))
    assert len(read(score_files(request))) == len(texts)
    for _ in ("its output", "its parts"):
        with pytest.raises(ConfigError, match="out="):
            score_files(request)
        Path("in/new.parquet").unlink(missing_ok=True)


def test_another_tokenizer_or_template_is_another_work(texts: list[str], tmp_path: Path) -> None:
    lines = tmp_path / "t.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model, other, told = make_model(), make_tokenizer(), make_tokenizer()
    other.add_tokens(["w1 w2"])
    told.chat_template = "{{ messages }}"
    score_files(request_of(wrap_model(model, make_tokenizer()), lines, tmp_path / "a.parquet"))
    for tokenizer, name in ((other, "tokenizer"), (told, "chat_template")):
        request = request_of(wrap_model(model, tokenizer), lines, tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=name):
            score_files(request)
