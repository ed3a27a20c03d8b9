"""Servers that fail: no wrong number, a clear end, and the rest when the call is repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from olmo_sparsity import load_model
from olmo_sparsity.analysis.engines import server as module
from olmo_sparsity.analysis.engines.server import API_KEY, Servers
from olmo_sparsity.analysis.models.pretrained_tokenizer import as_tokenizer
from olmo_sparsity.analysis.scoring.logprobs import Prompt
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.explanations import make_tokenizer
from tests.support.fake_server import VOCABULARY, FakeServer, TableModel

TOKENIZER = as_tokenizer(make_tokenizer(bos=False))
OWNERS = ["me", "vllm", "sglang"]
PASSING = ["slow", "429", "500", "503", "cut off", "closed", "restarted"]
LASTING = ["fewer", "other", "nan", "positive", "null", "text", "far", "404"]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "say", lambda message: None)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made: list[FakeServer] = []
    yield made
    for server in made:
        server.stop()


def prompts(seed: int, num: int = 6) -> list[Prompt]:
    generator = np.random.default_rng(seed)
    rows = generator.integers(3, VOCABULARY, size=(num, 12))
    rows[:, :4] = rows[0, :4]
    return [Prompt(row[:8], row[8:]) for row in rows]


def opened(*made: FakeServer, **changed: Any) -> Servers:
    given = {"at_once": 2, "timeout_s": 0.2, "patience_s": 2.0} | changed
    return Servers([server.url for server in made], TOKENIZER, **given)


def are_true(found: list[np.ndarray], asked: list[Prompt], model: TableModel) -> bool:
    truths = [model.truth(p.prefix.tolist(), p.continuation.tolist()) for p in asked]
    return all(np.allclose(own, true, atol=1e-9) for own, true in zip(found, truths, strict=True))


@pytest.mark.parametrize("owner", OWNERS)
def test_scores_are_those_of_the_model(owner: str, servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, owner))
    asked = prompts(0, num=20)
    engine = opened(servers[0])
    assert are_true(engine.score([*asked, asked[0]]), [*asked, asked[0]], servers[0].model)
    assert engine.token_forwards == 20 * 11  # equal prompts are sent once


def test_failures_give_no_wrong_number(servers: list[FakeServer]) -> None:
    """135 trials: what passes is repeated, what lasts ends the call, and a call that is repeated
    when the server is sound gives all numbers."""
    ended, found = 0, 0
    for owner, fault, seed in itertools.product(OWNERS, PASSING, range(3)):
        server = FakeServer(TOKENIZER, owner)
        engine, first, asked = opened(server), server.number, prompts(seed)
        at = first + 1 + seed  # past the probe that begins a call
        if fault == "restarted":

            def restart(number: int, server: FakeServer = server, at: int = at) -> str | None:
                if number == at:
                    server.restart(after_s=0.05)
                    return "closed"
                return None

            server.fault = restart
        else:
            server.fault = lambda number, at=at, fault=fault: fault if number == at else None
        assert are_true(engine.score(asked), asked, server.model), (owner, fault, seed)
        assert server.number > at
        found += 1
        server.stop()
    for owner, fault, seed in itertools.product(OWNERS, LASTING, range(3)):
        server = FakeServer(TOKENIZER, owner)
        engine, first, asked = opened(server), server.number, prompts(seed)
        server.fault = lambda number, at=first + 1 + seed, fault=fault: (
            fault if number >= at else None
        )
        with pytest.raises(DataError, match=r"127\.0\.0\.1"):
            engine.score(asked)
        ended += 1
        server.fault = lambda number: None
        assert are_true(engine.score(asked), asked, server.model)
        server.stop()
    assert ended + found >= 100


@pytest.mark.parametrize("owner", OWNERS)
def test_a_server_that_returns_as_another_model_is_noticed(
    owner: str, servers: list[FakeServer]
) -> None:
    servers.append(FakeServer(TOKENIZER, owner))
    engine, asked = opened(servers[0]), prompts(1)
    servers[0].model = TableModel(seed=1)  # between two calls
    with pytest.raises(DataError, match="another model"):
        engine.score(asked)
    servers[0].model = TableModel()
    at = servers[0].number + 3

    def exchange(number: int) -> str | None:
        if number == at:
            servers[0].restart(after_s=0.05, seed=1)
            return "closed"
        return None

    servers[0].fault = exchange
    with pytest.raises(DataError, match="another model since it was restarted"):
        engine.score(asked)


def test_numbers_that_belong_to_the_neighbour_are_refused(servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, "misplaced"))
    with pytest.raises(DataError, match="do not belong to the tokens beside them"):
        opened(servers[0])


def test_a_server_without_log_probabilities_of_prompts_is_named(servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, "llamacpp"))
    with pytest.raises(DataError, match="of generated tokens only"):
        opened(servers[0])


def test_two_servers_share_the_prompts_and_one_is_enough(servers: list[FakeServer]) -> None:
    servers += [FakeServer(TOKENIZER, "vllm"), FakeServer(TOKENIZER, "vllm")]
    for server in servers:
        server.delay_s = 0.01
    engine, asked = opened(*servers, patience_s=0.2), prompts(2, num=40)
    assert are_true(engine.score(asked), asked, servers[0].model)
    whole = sorted((*p.prefix.tolist(), *p.continuation.tolist()) for p in asked)
    for server, half in zip(servers, (whole[:20], whole[20:]), strict=True):  # neighbours
        of_call = [tuple(ids) for ids in server.prompts if tuple(ids) in whole]
        assert set(of_call[:8]) <= set(half)
        assert len(of_call) >= 8
    servers[1].stop()
    asked = prompts(3, num=40)
    assert are_true(engine.score(asked), asked, servers[0].model)
    servers[0].stop()
    with pytest.raises(DataError, match="no server is left"):
        engine.score(asked)
    for server in servers:
        server.start()


@pytest.mark.parametrize("num", [2, 6, 16])
def test_no_server_takes_what_another_can_begin_at_once(
    servers: list[FakeServer], num: int
) -> None:
    servers += [FakeServer(TOKENIZER, "vllm"), FakeServer(TOKENIZER, "vllm")]
    engine, asked = opened(*servers, at_once=8, timeout_s=5.0), prompts(4, num=num)
    whole = {(*p.prefix.tolist(), *p.continuation.tolist()) for p in asked}
    engine.score(asked)
    sent = [sum(tuple(ids) in whole for ids in server.prompts) for server in servers]
    assert sorted(sent) == [len(whole) // 2, len(whole) - len(whole) // 2]


def test_servers_of_different_models_are_refused(servers: list[FakeServer]) -> None:
    servers += [FakeServer(TOKENIZER), FakeServer(TOKENIZER, seed=1)]
    with pytest.raises(DataError, match="serves another model than"):
        opened(*servers)


def test_the_key_is_sent_and_never_written(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.append(FakeServer(TOKENIZER, key="s3cret-key"))
    with pytest.raises(DataError, match=f"401.*set {API_KEY}"):
        opened(servers[0])
    monkeypatch.setenv(API_KEY, "s3cret-kez")  # the server writes what it got into its reply
    with pytest.raises(DataError, match="401") as caught:
        opened(servers[0])
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv(API_KEY, "s3cret\nkey")
    with pytest.raises(ConfigError) as refused:
        opened(servers[0])
    assert "s3cret" not in str(refused.value)
    monkeypatch.setenv(API_KEY, "s3cret-key")
    asked = prompts(0)
    assert are_true(opened(servers[0]).score(asked), asked, servers[0].model)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://127.0.0.1:port", "is not a URL"),
        ("http://user:pw@127.0.0.1:1", "no user, password"),
        ("http://127.0.0.1:1", "needs the tokenizer"),
        ("llama:none.gguf", "does not exist"),
    ],
)
def test_wrong_names_are_refused(url: str, match: str) -> None:
    tokenizer = None if "tokenizer" in match or "llama" in url else make_tokenizer()
    with pytest.raises((ConfigError, DataError), match=match):
        load_model(url, tokenizer=tokenizer)
