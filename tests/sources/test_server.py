"""Servers that fail: no wrong number, a clear end, and the rest when the call is repeated."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity import load_model
from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.models.pretrained_tokenizer import as_tokenizer
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.sources.dialects import DIALECTS
from olmo_sparsity.sources.servers import checks as server_checks
from olmo_sparsity.sources.servers import connection
from olmo_sparsity.sources.servers.connection import API_KEY
from olmo_sparsity.sources.servers.pool import Servers
from tests.support.explanations import make_tokenizer
from tests.support.fake_server import VOCABULARY, WRONG, FakeServer, TableModel

TOKENIZER = as_tokenizer(make_tokenizer(bos=False))
PASSING = ["slow", "429", "500", "503", "cut off", "closed", "restarted"]
LASTING = ["fewer", "other", "404", "abc", "half a letter", "huge", "brackets", "constant", *WRONG]


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(connection, "NEW_PATIENCE_S", 0.03)  # less than a restart takes
    monkeypatch.setattr(connection, "say", messages.append)
    monkeypatch.setattr(server_checks, "say", messages.append)
    return messages


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    made: list[FakeServer] = []
    yield made
    for server in made:
        server.stop()


@pytest.fixture(params=["me", "vllm", "sglang", "sglang without id", "llamacpp"])
def server(request: pytest.FixtureRequest, servers: list[FakeServer]) -> FakeServer:
    servers.append(FakeServer(TOKENIZER, request.param))
    return servers[0]


def prompts(seed: int, num: int = 6, tail: int = 4) -> list[Prompt]:
    """Their last tokens are equal, as of one answer behind several sources."""
    rows = np.random.default_rng(seed).integers(3, VOCABULARY, size=(num, 12 + tail))
    rows[:, :4], rows[:, -tail - 2 :] = rows[0, :4], rows[0, -tail - 2 :]
    return [Prompt(row[:-tail], row[-tail:]) for row in rows]


def opened(*made: FakeServer, **changed: Any) -> Servers:
    given = {"at_once": 2, "timeout_s": 0.2, "patience_s": 2.0} | changed
    return Servers([server.url for server in made], TOKENIZER, **given)


def are_true(found: list[np.ndarray], asked: list[Prompt], model: TableModel) -> bool:
    truths = [model.truth(p.prefix.tolist(), p.continuation.tolist()) for p in asked]
    return all(np.allclose(own, true, atol=1e-9) for own, true in zip(found, truths, strict=True))


def test_scores_are_those_of_the_model(server: FakeServer) -> None:
    model, asked = opened(server), prompts(0, num=20)
    assert are_true(model.score([*asked, asked[0]]), [*asked, asked[0]], server.model)
    assert model.token_forwards == 20 * 15  # equal prompts are sent once


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_repeated(server: FakeServer, fault: str) -> None:
    model, asked = opened(server), prompts(1)
    at = server.number + 2

    def fails(number: int) -> str | None:
        if number == at and fault == "restarted":
            server.restart(after_s=0.05)
            return "closed"
        return fault if number == at else None

    server.fault = fails
    assert are_true(model.score(asked), asked, server.model)
    assert server.number > at


@pytest.mark.accept
@pytest.mark.parametrize("fault", LASTING)
def test_what_lasts_ends_the_call(server: FakeServer, fault: str) -> None:
    """And the same call gives all numbers when the server is sound."""
    model, asked = opened(server, patience_s=0.05), prompts(2, tail=10)
    at = server.number + 2
    server.fault = lambda number: fault if number >= at else None
    with pytest.raises(DataError, match=r"127\.0\.0\.1"):
        model.score(asked)
    server.fault = lambda number: None
    assert are_true(model.score(asked), asked, server.model)


def test_replies_that_were_exchanged_are_noticed(server: FakeServer) -> None:
    """Or impossible: a server whose replies do not tell their prompt gets one at a time."""
    model, asked = opened(server, at_once=4, timeout_s=5.0), prompts(3)
    server.delay_s, server.most_now = 0.02, 0
    model.score(asked)
    if server.owner in ("sglang without id", "llamacpp"):
        assert server.most_now == 1
        return
    assert server.most_now > 1
    server.fault = lambda number: "swapped"
    with pytest.raises(DataError, match=r"other tokens than were sent|another request"):
        model.score(asked)


@pytest.mark.accept
def test_a_server_that_returns_as_another_model_is_noticed(server: FakeServer) -> None:
    model, asked = opened(server), prompts(1)
    server.model = TableModel(seed=1)  # between two calls
    with pytest.raises(DataError, match="another model"):
        model.score(asked)
    server.model = TableModel()
    first = server.number

    def exchange_silently(number: int) -> None:
        if number == first + 3:  # among the prompts of a call, with the connection kept
            server.model = TableModel(seed=1)

    server.fault = exchange_silently
    with pytest.raises(DataError, match="another model than when it was first asked"):
        model.score(asked)
    server.model = TableModel()
    at = server.number + 3

    def exchange(number: int) -> str | None:
        if number != at:
            return None
        server.restart(after_s=0.05, seed=1)
        return "closed"

    server.fault = exchange
    with pytest.raises(DataError, match="another model than when it was first asked"):
        model.score(asked)


def test_a_model_that_replies_to_one_prompt_in_between_is_noticed(server: FakeServer) -> None:
    """Probes before and after it are of the right model, but it names itself."""
    model, asked = opened(server, at_once=1), prompts(1)
    exchanged_at = server.number + 3

    def exchange_for_one_request(number: int) -> None:
        is_exchanged = number == exchanged_at
        server.model = TableModel(seed=1 if is_exchanged else 0)
        server.named = "another" if is_exchanged else "table"

    server.fault = exchange_for_one_request
    with pytest.raises(DataError, match=r"replied as another model \(another, and first table\)"):
        model.score(asked)


@pytest.mark.accept
def test_noise_is_measured_and_no_other_model(server: FakeServer) -> None:
    for noise in (0.04, 0.08):
        server.noise = noise
        for _ in range(5):
            model = opened(server)
            assert noise / 2 < model.servers[0].noise < 2 * noise
            for _ in range(3):
                model.score(prompts(0, num=1))
    server.model = TableModel(seed=1)
    with pytest.raises(DataError, match="another model"):
        model.score(prompts(0, num=1))
    server.noise = 1.0
    with pytest.raises(DataError, match="vary by"):
        opened(server)


def test_servers_that_cannot_be_used_are_refused(servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, "misplaced"))
    with pytest.raises(DataError, match="do not belong to it"):
        opened(servers[0])
    servers += [FakeServer(TOKENIZER), FakeServer(TOKENIZER, seed=1)]
    with pytest.raises(DataError, match="serves another model than"):
        opened(*servers[1:])


OWNERS = ["me", "vllm", "sglang", "llamacpp"]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("broken", ["truncated", "context-free"])
def test_a_server_that_does_not_read_its_context_is_refused(
    owner: str, broken: str, servers: list[FakeServer]
) -> None:
    servers.append(FakeServer(TOKENIZER, owner, broken=broken))
    with pytest.raises(DataError, match="does not read its context"):
        opened(servers[0], timeout_s=5.0)


@pytest.mark.parametrize("broken", ["halved", "base 2", "base 10"])
@pytest.mark.parametrize("owner", OWNERS)
def test_numbers_of_another_scale_are_refused(
    owner: str, broken: str, servers: list[FakeServer]
) -> None:
    servers.append(FakeServer(TOKENIZER, owner, broken=broken))
    with pytest.raises(DataError, match="no log-probabilities"):
        opened(servers[0], timeout_s=5.0)


def test_five_candidates_alone_do_not_tell_base_2(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So docs/sources.md says that a larger vocabulary may hide it."""
    monkeypatch.setattr(server_checks, "FEW_TOKENS", 0)
    servers.append(FakeServer(TOKENIZER, broken="base 2"))
    opened(servers[0], timeout_s=5.0)


class DemoServer(FakeServer):
    """Its numbers are those of the demo model: of a real one, whose probabilities fall slowly."""

    def start(self) -> None:
        demo = load_model("demo", device="cpu")

        class Model:
            @torch.inference_mode()
            def log_p(self, ids: Any) -> np.ndarray:
                logits_LV = demo.model.model(torch.tensor([list(ids)])).logits[0]
                return logits_LV.double().log_softmax(-1).numpy()

        super().start()
        self.model: Any = Model()


def test_base_2_is_noticed_on_a_real_model_by_five_candidates(servers: list[FakeServer]) -> None:
    tokenizer = load_model("demo", device="cpu").tokenizer
    servers.append(DemoServer(tokenizer))
    Servers([servers[0].url], tokenizer, timeout_s=5.0, patience_s=2.0)
    servers[0].broken = "base 2"
    with pytest.raises(DataError, match="as with logarithms of base 2"):
        Servers([servers[0].url], tokenizer, timeout_s=5.0, patience_s=2.0)


def test_llama_server_says_that_it_truncated(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.append(server := FakeServer(TOKENIZER, "llamacpp"))
    model = opened(server, timeout_s=5.0)
    reply = server._llamacpp
    monkeypatch.setattr(server, "_llamacpp", lambda *given: reply(*given) | {"truncated": True})
    with pytest.raises(DataError, match="was truncated"):
        model.score(prompts(0, num=1))


class AcmeServer(FakeServer):
    """Replies as the example of docs/extend.md expects."""

    def _echo(self, body: Any, ids: list[int], values: list[Any], best: Any) -> dict[str, Any]:
        prompt = [{"id": i, "logprob": value} for i, value in zip(ids, values, strict=True)]
        return {"prompt": prompt, "generated": [{"id": best[0], "logprob": best[1]}]}


def test_the_dialect_of_the_page_needs_one_class_and_one_entry(
    servers: list[FakeServer], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path("docs/extend.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*class Acme\(Dialect\).*?)```", page, re.DOTALL)
    names = dict[str, Any]()
    exec(code, names)
    dialect = names["Acme"]()
    monkeypatch.setitem(DIALECTS, dialect.owner, dialect)
    servers.append(AcmeServer(TOKENIZER, "acme"))
    asked = prompts(0)
    assert are_true(opened(servers[0], timeout_s=60.0).score(asked), asked, servers[0].model)
    assert said == []  # all tokens of so small a vocabulary are scored
    servers[0].broken = "base 2"
    with pytest.raises(DataError, match="of all 45 tokens add up to"):
        opened(servers[0], timeout_s=60.0)
    servers[0].broken = ""
    monkeypatch.setattr(server_checks, "FEW_TOKENS", 44)
    opened(servers[0], timeout_s=60.0)
    assert said == [
        f"{servers[0].url} returns no candidates, so the scale of its numbers is not checked"
    ]
    servers[0].fault = lambda number: "other"
    with pytest.raises(DataError, match="other tokens than were sent"):
        opened(servers[0])


def test_a_web_page_ends_the_call_at_once(servers: list[FakeServer]) -> None:
    servers.append(server := FakeServer(TOKENIZER))
    server.fault = lambda number: "web page"
    began = time.monotonic()
    with pytest.raises(DataError, match="web page"):
        opened(server, patience_s=300.0)
    assert time.monotonic() - began < 5
    assert server.number == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("307", "with status 307 .*, a redirect; pass the URL behind it: /elsewhere"),
        ("gzip", r"compressed its reply to /v1/completions \(gzip\), unasked"),
    ],
)
def test_a_proxy_in_front_of_a_server_is_named_at_once(
    fault: str, said: str, servers: list[FakeServer]
) -> None:
    servers.append(server := FakeServer(TOKENIZER, fault=lambda number: fault))
    with pytest.raises(DataError, match=said):
        opened(server, patience_s=300.0)
    assert server.number == 1


def test_a_server_without_a_model_is_named(servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, broken="no models"))
    with pytest.raises(DataError, match="lists no model; load one there"):
        opened(servers[0])


def test_a_reply_about_fewer_tokens_says_how_many(servers: list[FakeServer]) -> None:
    servers.append(FakeServer(TOKENIZER, "vllm", fault=lambda number: "fewer"))
    with pytest.raises(DataError, match=r"\d+ tokens where \d+ were sent"):
        opened(servers[0])


def test_nothing_is_said_of_requests_that_a_command_leaves_when_it_ends(
    servers: list[FakeServer], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.append(FakeServer(TOKENIZER))
    asked = connection.Connection(
        servers[0].url, connection.WaitLimits(timeout_s=1.0, patience_s=1.0)
    )

    def fail(path: str, body: Any) -> None:
        asked._client.close()  # as when the interpreter ends
        raise connection._NoReply("ReadError: Bad file descriptor", is_lost=True)

    monkeypatch.setattr(asked, "_send", fail)
    with pytest.raises(connection.ServerGone):
        asked.request("/v1/models")
    assert said == []


def test_a_request_that_hangs_is_reported_once(
    servers: list[FakeServer], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HANGING_S", 0.1)
    servers.append(server := FakeServer(TOKENIZER))
    model = opened(server, timeout_s=5.0)
    server.delay_s = 0.4
    model.score(prompts(0, num=1))
    lines = [line for line in said if "has not replied" in line]
    assert lines
    assert "5 s (--timeout)" in lines[0]


def test_a_server_that_never_replied_is_not_waited_for(
    servers: list[FakeServer], said: list[str]
) -> None:
    servers.append(server := FakeServer(TOKENIZER))
    server.stop()
    with pytest.raises(DataError, match="did not reply"):
        opened(server, patience_s=300.0)
    assert "again for 0.03 s" in said[0]
    server.start()


@pytest.mark.parametrize("fault", ["429", "503"])
def test_a_server_that_replied_is_not_called_silent(fault: str, servers: list[FakeServer]) -> None:
    servers.append(server := FakeServer(TOKENIZER, fault=lambda number: fault))
    with pytest.raises(DataError, match=r"did not reply as it should .*; see its log"):
        opened(server, patience_s=0.05)


@pytest.mark.accept
@pytest.mark.parametrize("num", [2, 6, 16, 40])
def test_two_servers_share_the_prompts_and_one_is_enough(
    num: int, servers: list[FakeServer]
) -> None:
    servers += [FakeServer(TOKENIZER, "vllm"), FakeServer(TOKENIZER, "vllm")]
    for server in servers:
        server.delay_s = 0.02
    model, asked = opened(*servers, at_once=8, timeout_s=5.0, patience_s=0.1), prompts(4, num)
    assert are_true(model.score(asked), asked, servers[0].model)
    whole = {(*p.prefix.tolist(), *p.continuation.tolist()) for p in asked}
    sent = [sum(tuple(ids) in whole for ids in server.prompts) for server in servers]
    assert sum(sent) == num
    assert min(sent) >= num // 6  # a busy machine may delay either of them
    servers[1].stop()
    assert are_true(model.score(asked), asked, servers[0].model)
    servers[0].stop()
    with pytest.raises(DataError, match="no server is left"):
        model.score(asked)
    for server in servers:
        server.start()


@pytest.mark.parametrize("key", ["s3cret-kez", "s3cret\nkey", "s3crèt", " s3cret "])
def test_the_key_is_sent_and_never_written(
    key: str, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.append(FakeServer(TOKENIZER, key="s3cret-key"))
    monkeypatch.setenv(API_KEY, key)  # the server writes what it got into its reply
    with pytest.raises(UserError, match=API_KEY) as refused:
        opened(servers[0])
    assert "s3cr" not in str(refused.value)
    monkeypatch.setenv(API_KEY, "s3cret-key")
    asked = prompts(0)
    assert are_true(opened(servers[0]).score(asked), asked, servers[0].model)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:port", "http://h:99999", "http://[::1", "http://", "ftp://h"),
        *("http://me:SECRET@127.0.0.1:1", "HTTPS://SECRET@h:port", "http://h:1?key=SECRET"),
        *("http://h:1,http://me:SEC@RET@h:1", "llama:http://me:SECRET@h:1"),
    ],
)
def test_wrong_urls_are_refused_without_their_passwords(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_model(url, tokenizer=make_tokenizer())
    assert not {"SECRET", "SEC", "RET"} & {*str(refused.value).replace("@", " ").split()}
    assert "SECRET" not in str(refused.value)
