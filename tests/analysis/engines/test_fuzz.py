"""Damaged replies of servers and damaged inputs of `score`: true numbers or an error, 250 times."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.engines import server as module
from olmo_sparsity.analysis.engines.server import Servers
from olmo_sparsity.analysis.kernels.engine import Prompt
from olmo_sparsity.analysis.models.load import wrap_model
from olmo_sparsity.analysis.models.pretrained_tokenizer import as_tokenizer
from olmo_sparsity.analysis.scoring.score import ScoreRequest, score_files
from olmo_sparsity.errors import UserError
from tests.support.explanations import WORDS, make_model, make_tokenizer
from tests.support.fake_server import VOCABULARY, FakeServer

pytestmark = pytest.mark.accept
NUM = 125
TOKENIZER = as_tokenizer(make_tokenizer(bos=False))
STRANGE = [
    *(None, "", "x", "\ud800", "token_id:abc", "token_id:" + "9" * 99, [], {}, True, -1, 10**400),
    *(float("nan"), 1e300, "y" * 10_000, [[[]]], {"a": 1}),
]


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


def damaged(reply: Any, rng: np.random.Generator) -> bytes:
    """With one value replaced, removed, repeated or moved, or cut or changed in one byte. No
    log-probability becomes another one, which nothing could tell."""
    reply = copy.deepcopy(reply)
    paths = [path for path in nodes(reply) if path]
    *above, key = paths[rng.integers(len(paths))]
    parent = reply
    for step in above:
        parent = parent[step]
    how, is_number = (
        rng.choice(["replace", "remove", "repeat", "move"]),
        isinstance(parent[key], float),
    )
    if how == "replace" or isinstance(parent, dict):
        strange = [one for one in STRANGE if not (is_number and type(one) is int)]
        parent[key] = strange[rng.integers(len(strange))]
    elif how == "remove":
        del parent[key]
    elif how == "repeat":
        parent.insert(key, parent[key])
    elif not is_number:
        other = int(rng.integers(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    raw = bytearray(json.dumps(reply).encode())
    if rng.random() < 0.2:
        return bytes(raw[: rng.integers(len(raw))])
    return bytes(raw)


class Damaging(FakeServer):
    """Damages replies from number `first` on: one of them, or all."""

    rng: np.random.Generator
    first, last, num_replies = math.inf, math.inf, 0

    def _reply(self, handler: Any, reply: dict[str, Any], fault: str | None) -> None:
        self.num_replies += 1
        if not self.first <= self.num_replies <= self.last:
            super()._reply(handler, reply, fault)
            return
        raw = damaged(reply, self.rng)
        handler.send_response(int(self.rng.choice([200] * 8 + [404, 500])))
        handler.end_headers()
        handler.wfile.write(raw)


def outcome(call: Callable[[], bool]) -> str:
    try:
        return "true" if call() else "SILENT"
    except UserError:
        return "refused"
    except Exception as error:
        return f"TRACEBACK {type(error).__name__}: {error}"


def test_damaged_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "say", lambda message: None)
    found = Counter[str]()
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        server = Damaging(TOKENIZER, str(rng.choice(["me", "vllm", "sglang", "sglang without id"])))
        server.rng, head = rng, rng.permutation(np.arange(3, VOCABULARY))[:30]
        asked = [Prompt(np.append(head[:8], head[9 + i]), head[20:]) for i in range(6)]
        is_met = rng.random() < 0.7

        def scored(
            server: Damaging = server, asked: list[Prompt] = asked, late: Any = is_met
        ) -> bool:
            if not late:
                server.first = 1 + int(server.rng.integers(6))
                server.last = server.first + int(server.rng.choice([0, 99]))
            options = {"at_once": 2, "timeout_s": 0.5, "patience_s": 0.05}
            engine = Servers([server.url], TOKENIZER, **options)
            if late:
                server.first = server.num_replies + 1 + int(server.rng.integers(5))
                server.last = server.first + int(server.rng.choice([0, 99]))
            truths = [server.model.truth(p.prefix.tolist(), p.continuation.tolist()) for p in asked]
            return np.allclose(engine.score(asked), truths, atol=1e-9)

        found[outcome(scored)] += 1
        server.stop()
    print(dict(found))
    assert set(found) <= {"true", "refused"}
    assert min(found.values()) > NUM // 10


def lines_of(rng: np.random.Generator) -> bytes:
    """Records of which some are strange, and sometimes a few wrong bytes."""
    rows: list[Any] = [
        {"text": " ".join(rng.choice(WORDS, rng.integers(1, 60)).tolist()), "id": number}
        for number in range(rng.integers(1, 8))
    ]
    for _ in range(rng.integers(3)):
        row = rows[rng.integers(len(rows))]
        key = str(rng.choice(["text", "id", "file", "row", "gain"]))
        if isinstance(row, dict):
            row[key] = STRANGE[rng.integers(len(STRANGE))]
    if rng.random() < 0.2:
        rows.append(STRANGE[rng.integers(len(STRANGE))])
    raw = bytearray("".join(json.dumps(row) + "\n" for row in rows).encode())
    if rng.random() < 0.3:
        raw[rng.integers(len(raw))] = rng.integers(256)
    if rng.random() < 0.15:
        del raw[rng.integers(len(raw)) :]
    return bytes(raw)


def texts_in(raw: bytes) -> list[str] | None:
    """What a reader of JSON lines finds, or None where a record is bad."""
    found = []
    for line in filter(bytes.strip, raw.split(b"\n")):
        try:
            text = json.loads(line)["text"]
            ok = text is None or text.encode() is not None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if ok and text and not text.isspace():
            found.append(text)
    return found


def test_damaged_inputs_of_score(tmp_path: Path) -> None:
    model, found = wrap_model(make_model(), make_tokenizer()), Counter[str]()
    for seed in range(NUM):
        rng, raw = np.random.default_rng(seed), lines_of(np.random.default_rng(1000 + seed))
        folder = tmp_path / str(seed)
        folder.mkdir()
        text = folder / "t.jsonl"
        text.write_bytes(raw)
        out = folder / str(
            rng.choice(["o.parquet", "a/o.jsonl"] * 4 + ["t.jsonl", "o.jsonl", "o.csv"])
        )
        options = {"contexts": [(8, 20), (8,), (4,), ()][rng.choice(4, p=[0.5, 0.44, 0.03, 0.03])]}
        pattern = str(rng.choice([str(text), str(folder / "t.*"), str(folder / "*.jsonl")]))
        given = {
            "text": pattern,
            "out": out,
            "local": 4,
            "blocks": int(rng.choice([0, *[1, 2] * 9])),
        }

        def scored(given: dict = given | options, raw: bytes = raw, rng: Any = rng) -> bool:
            request = ScoreRequest.of(model=model, **given)
            rows = read(score_files(request))
            for path in request_parts(given["out"])[: rng.integers(2)]:
                part = bytearray(path.read_bytes())
                part[rng.integers(len(part))] ^= 1 << rng.integers(8)
                path.write_bytes(part)
            numbers = [v for row in rows for v in row.values() if isinstance(v, float)]
            texts = texts_in(raw)
            return (
                np.isfinite(numbers).all()
                and texts is not None
                and len(rows) == len(texts)
                and rows == read(score_files(request))
            )

        found[outcome(scored)] += 1
        assert text.read_bytes() == raw, "an input was overwritten"
    print(dict(found))
    assert set(found) <= {"true", "refused"}
    assert min(found.values()) > NUM // 10


def request_parts(out: Path) -> list[Path]:
    return sorted(out.with_name(f"{out.name}.parts").glob("0*"))


def read(path: Path | None) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    assert path is not None
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]
