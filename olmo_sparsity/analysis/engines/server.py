"""Score prompts on HTTP servers that return the log-probabilities of a prompt's own tokens.

Place in the flow: prompts as token IDs → **requests** → log-probabilities, each reply checked.

A reply counts only if its tokens are the tokens sent and its numbers are log-probabilities. Before
that, a server proves that its numbers belong to the tokens beside them: the token that it generates
must get the same log-probability when it is sent as part of a prompt. A server that was restarted
must prove that it is the same model.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch

from olmo_sparsity.errors import ConfigError, DataError, printable
from olmo_sparsity.io import read_json, write_atomically
from olmo_sparsity.runtime import say

if TYPE_CHECKING:
    from olmo_sparsity.analysis.scoring.logprobs import Prompt

API_KEY = "OLMO_SPARSITY_API_KEY"
"""Environment variable. Its value is sent as a bearer token and written nowhere."""

PROBE = (
    "The capital of France is Paris, and the capital of Italy is Rome. One, two, three, four, "
    "five, six, seven. To be, or not to be, that is the question."
)
"""A text; a server scores its tokens before anything else."""

PROBE_FILE = "server.json"
"""In a folder of results: the log-probabilities of the probe."""

MISPLACED_NATS, OTHER_NATS = 0.5, 0.05
"""A generated token and the same token in a prompt differ by rounding only; a number that belongs
to the token beside it usually differs by several nats. Means of the probe's tokens of one model
differ by less than the second."""

AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which the same request may succeed."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LARGEST_REPLY = 2**28
LEAST_LOG_P = -1e3
"""Servers write −9,999 for minus infinity, which JSON lacks."""


class _NoReply(Exception):
    """A request may succeed when it is sent again, after so many seconds."""

    def __init__(self, reason: str, after_s: float = 0.0, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.is_lost = after_s, is_lost


class _Gone(Exception):
    """A server has not replied for as long as we wait."""


Scored = tuple[Any, Any]
"""A token, as an ID or a text, and its log-probability, as a server writes them."""


# --- what servers read and write ------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    path: str
    body: Callable[[list[int], int], dict[str, Any]]
    """Of a prompt's tokens, and the number of the first that is scored."""

    read: Callable[[Any, list[int], int], list[Scored]]
    """The scored tokens of the prompt, and behind them the generated one."""


def _completion(ids: list[int], **others: Any) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1} | others


def _read_echo(reply: Any, ids: list[int], first: int) -> list[Scored]:
    log_p = reply["choices"][0]["logprobs"]
    pairs = list(zip(log_p["tokens"], log_p["token_logprobs"], strict=True))
    if len(pairs) <= 1 < len(ids):
        raise DataError(
            "it returns log-probabilities of generated tokens only, as llama.cpp's own server "
            "does; use llama-cpp-python's server example, vLLM or SGLang, or llama:FILE.gguf"
        )
    return pairs[first:]


def _read_vllm(reply: Any, ids: list[int], first: int) -> list[Scored]:
    choice = reply["choices"][0]
    found, generated = choice["prompt_logprobs"][first:], choice["logprobs"]
    pairs = [
        (token, of_place[str(token)]["logprob"]) if str(token) in of_place else (None, None)
        for token, of_place in zip(ids[first:], found, strict=False)
    ]
    pairs += [(None, None)] * (len(found) - len(pairs))
    return [*pairs, (generated["tokens"][0], generated["token_logprobs"][0])]


def _read_sglang(reply: Any, ids: list[int], first: int) -> list[Scored]:
    about = reply["meta_info"]
    if (num := about["prompt_tokens"]) != len(ids):
        raise DataError(f"it read {num} tokens where {len(ids)} were sent")
    pairs = [(token, log_p) for log_p, token, *_ in about["input_token_logprobs"]]
    log_p, token, *_ = about["output_token_logprobs"][0]
    return [*pairs[-(len(ids) - first) :], (token, log_p)]


DIALECTS = {
    "vllm": Dialect(
        "/v1/completions",
        lambda ids, first: _completion(ids, prompt_logprobs=0, return_tokens_as_token_ids=True),
        _read_vllm,
    ),
    "sglang": Dialect(
        "/generate",
        lambda ids, first: {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            # The log-probability of the first token returned is null.
            "logprob_start_len": first - 1,
        },
        _read_sglang,
    ),
    "echo": Dialect("/v1/completions", lambda ids, first: _completion(ids, echo=True), _read_echo),
}
"""Requests and replies of vLLM, SGLang, and servers that follow OpenAI's `echo`."""


# --- one server -----------------------------------------------------------------------------------


class Server:
    """One server at one URL: `http://host:8000`, or with the name of a model, `…#NAME`."""

    def __init__(self, url: str, tokenizer: Any, timeout_s: float, patience_s: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"'{printable(url)}' is not a URL like http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query:
            raise ConfigError(
                f"a URL of a server must have no user, password or query; a key belongs in the "
                f"environment variable {API_KEY}"
            )
        self.secure, self.host, self.port = parts.scheme == "https", parts.hostname, port
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self.root}"
        self.model, self.tokenizer = parts.fragment, tokenizer
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.dialect, self.card = DIALECTS["echo"], dict[str, Any]()
        self.is_known, self._recognizing = False, threading.Lock()
        self.probe: tuple[list[int], np.ndarray] | None = None

    def send(self, path: str, body: Mapping | None = None) -> Any:
        """Return the reply to one request, sent once."""
        key = os.environ.get(API_KEY, "")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{API_KEY} holds letters that HTTP does not allow")
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        connect = HTTPSConnection if self.secure else HTTPConnection
        connection = connect(self.host, self.port, timeout=self.timeout_s)
        ends, raw = time.monotonic() + self.timeout_s, bytearray()
        try:
            content = None if body is None else json.dumps(body)
            connection.request(
                "GET" if body is None else "POST", self.root + path, content, headers
            )
            with connection.getresponse() as response:
                while part := response.read1(2**20):
                    raw += part
                    if time.monotonic() > ends or len(raw) > LARGEST_REPLY:
                        raise TimeoutError(f"{len(raw):,} bytes after {self.timeout_s:.0f} s")
        except (OSError, HTTPException) as error:
            reason = printable(f"{type(error).__name__}: {error}")
            raise _NoReply(reason, is_lost=not isinstance(error, TimeoutError)) from None
        finally:
            connection.close()
        status = response.status
        if status in AGAIN:
            after = response.headers.get("Retry-After", "")
            raise _NoReply(f"status {status}", float(after) if after.isdecimal() else 0.0)
        if status != 200:
            text = " ".join(raw.decode(errors="replace").split())
            text = printable(text.replace(key, "…") if key else text)[:300]
            remedy = f"; set {API_KEY}" if status in (401, 403) else ""
            raise DataError(f"{self.url}{path}: status {status} ({text}){remedy}")
        try:
            return json.loads(raw)
        except ValueError:
            raise _NoReply("its reply is cut off, or not JSON") from None

    def request(self, path: str, body: Mapping | None = None) -> Any:
        """Return the reply to a request, sent again for as long as `patience_s`."""
        wait_s, ends = FIRST_WAIT_S, math.inf
        while True:
            try:
                return self.send(path, body)
            except _NoReply as error:
                self.is_known &= not error.is_lost
                if ends == math.inf:
                    ends = time.monotonic() + self.patience_s
                    say(f"{self.url}: {error}; trying again for {self.patience_s:.0f} s")
                wait_s = max(wait_s, min(error.after_s, 2 * LONGEST_WAIT_S))
                if time.monotonic() + wait_s > ends:
                    raise _Gone(f"{self.url} did not reply ({error})") from None
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def score(self, ids: list[int], first: int) -> np.ndarray:
        """Return log p of the tokens from number `first` on."""
        return self._score(ids, first)[0]

    def _score(self, ids: list[int], first: int) -> tuple[np.ndarray, Scored]:
        """Return log p of the tokens from number `first` on, and the token generated after them."""
        body = self.dialect.body(ids, first)
        reply = self.request(
            self.dialect.path, {"model": self.model} | body if self.model else body
        )
        try:
            pairs = self.dialect.read(reply, ids, first)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(
                f"{self.url} returns no log-probabilities of a prompt ({type(error).__name__}: "
                f"{printable(str(error))[:100]}); it must support `echo` with `logprobs`, "
                "`prompt_logprobs` (vLLM), or /generate with `logprob_start_len` (SGLang)"
            ) from None
        except DataError as error:
            raise DataError(f"{self.url}: {error}") from None
        sent = ids[first:]
        if len(pairs) not in (len(sent), len(sent) + 1):
            raise DataError(
                f"{self.url} returned {len(pairs)} tokens where {len(sent)} were sent: its "
                "numbers are not used"
            )
        log_p = np.array([self._checked(*both) for both in zip(sent, pairs, strict=False)])
        return log_p, pairs[len(sent)] if len(pairs) > len(sent) else (None, None)

    def _checked(self, sent: int, scored: Scored) -> float:
        token, log_p = scored
        if not self._is_same(token, sent):
            raise DataError(
                f"{self.url} reads other tokens than were sent: {token!r:.40} in place of "
                f"{self.tokenizer.decode([sent], skip_special_tokens=False)!r} ({sent}); pass "
                "the tokenizer of its model, and a server that takes token IDs"
            )
        is_number = isinstance(log_p, int | float) and not isinstance(log_p, bool)
        if not is_number or not LEAST_LOG_P < log_p < 1e-3:  # NaN is not, either
            raise DataError(f"{self.url} returned {log_p!r:.40} as a log-probability")
        return min(float(log_p), 0.0)

    def _is_same(self, token: Any, sent: int) -> bool:
        if isinstance(token, str) and token.startswith("token_id:"):
            token = int(token.removeprefix("token_id:"))
        if isinstance(token, int):
            return token == sent
        if not isinstance(token, str):
            return False
        own = self.tokenizer.decode([sent], skip_special_tokens=False).replace("\ufffd", "")
        spelt = token.replace("\ufffd", "").replace("▁", " ").strip()
        is_part = not own and token.startswith(("bytes:", "<0x"))  # of a letter
        is_special = not spelt and sent in self.tokenizer.get_added_tokens_decoder()
        return spelt == own.strip() or is_part or is_special

    def meet(self, like: Server | None = None) -> None:
        """Find out which requests the server takes, and whether its numbers can be used."""
        listed = self.request("/v1/models")
        try:
            models = {one["id"]: dict(one) for one in listed["data"]}
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{self.url}/v1/models does not list models") from None
        if not self.model and len(models) != 1:
            raise ConfigError(
                f"{self.url} has the models {', '.join(map(str, models))}; append one: "
                f"{self.url}#NAME"
            )
        self.model = self.model or str(next(iter(models)))
        card = models.get(self.model, {})
        self.dialect = DIALECTS.get(str(card.get("owned_by")), DIALECTS["echo"])
        # `created` is the time of the request or of the start in vLLM and llama-cpp-python.
        self.card = {key: card.get(key) for key in ("root", "max_model_len") if key in card}
        ids = self._encoded(PROBE)
        found, self.is_known = self.score(ids, 1), True
        if like is not None:
            assert like.probe is not None
            self.refuse_other(found, like.probe[1], f"than {like.url}")
        self.probe = ids, found
        self._check_places(ids)

    def recognize(self) -> None:
        """Compare the server's numbers with its first ones."""
        with self._recognizing:
            if not self.is_known:
                assert self.probe is not None
                ids, before = self.probe
                self.refuse_other(self.score(ids, 1), before, "since it was restarted")
                self.is_known = True

    def refuse_other(self, now: np.ndarray, before: np.ndarray, than: str) -> None:
        if (nats := distance(now, before)) > OTHER_NATS:
            raise DataError(
                f"{self.url} serves another model {than}: its log-probabilities of one text differ "
                f"by {nats:.2f} nats a token"
            )

    def _check_places(self, ids: list[int]) -> None:
        """Reject numbers that belong to the token before or after."""
        tried = 0
        for num in (len(ids) // 4, len(ids) // 2, len(ids)):
            _, (token, log_p) = self._score(ids[:num], 1)
            if isinstance(token, str):
                text = token.removeprefix("token_id:")
                encoded = self._encoded(text) if text == token else [int(text)]
                if len(encoded) != 1:
                    continue
                token = encoded[0]
            if not isinstance(token, int):
                continue
            tried += 1
            again = self.score([*ids[:num], token], num)[0]
            if not abs(again - log_p) <= MISPLACED_NATS:
                raise DataError(
                    f"{self.url} returns numbers that do not belong to the tokens beside them: the "
                    f"token that it generates has log-probability {log_p:.2f}, and {again:.2f} in "
                    "a prompt (llama_cpp.server does this without a token at the beginning); use "
                    "another server"
                )
        if not tried:
            raise DataError(
                f"{self.url} does not return the token that it generates, so it cannot be checked "
                "whether its numbers belong to the tokens beside them"
            )

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        body = {"model": self.model, "prompt": ids, "max_tokens": max_new_tokens, "temperature": 0}
        reply = self.request("/v1/completions", body)
        try:
            return self._encoded(str(reply["choices"][0]["text"]))
        except (KeyError, TypeError, IndexError):
            raise DataError(f"{self.url}/v1/completions returned no text") from None


# --- several servers of one model -----------------------------------------------------------------


class Servers:
    """A `LogprobModel` on servers of one model, each with `at_once` requests at a time."""

    device = torch.device("cpu")
    """Of what is left to compute here: nothing."""

    dtype_name = "of the server"

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        *,
        at_once: int = 8,
        timeout_s: float = 600.0,
        patience_s: float = 300.0,
    ) -> None:
        self.servers = [Server(url, tokenizer, timeout_s, patience_s) for url in urls]
        self.at_once, self.token_forwards = at_once, 0
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        with _naming_the_lost():
            for server in self.servers:
                server.meet(self.servers[0] if server is not self.servers[0] else None)

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Neighbours of the sorted prompts, which share most, go to one server. `token_forwards`
        counts what is sent; a server's cache may save some of it."""
        different = sorted({prompt.key for prompt in prompts})
        found: dict[tuple, np.ndarray] = {}
        alive, reasons = list(self.servers), list[str]()
        for server in alive:
            server.is_known = False
        while left := [key for key in different if key not in found]:
            if not alive:
                raise DataError(
                    f"no server is left: {'; '.join(dict.fromkeys(reasons))}. Start it again and "
                    "repeat the call"
                )
            gone = _Round(alive, left, self.at_once, found).run()
            reasons += gone.values()
            alive = [server for server in alive if server not in gone]
        self.token_forwards += sum(len(a) + len(b) - 1 for a, b in different)
        return [found[prompt.key] for prompt in prompts]

    def recognize_in(self, folder: Path) -> None:
        """Write the first server's numbers for the probe into a folder of results, or raise if
        they differ from those in it."""
        first, before = self.servers[0], read_probe(folder)
        assert first.probe is not None
        if before is None:
            write_atomically(folder / PROBE_FILE, json.dumps(first.probe[1].tolist()))
        else:
            first.refuse_other(first.probe[1], before, f"than when {folder} was begun")

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        with _naming_the_lost():
            return self.servers[0].generate(ids, max_new_tokens)


def distance(now: np.ndarray, before: np.ndarray) -> float:
    """Return the mean difference of log-probabilities of the probe; infinity: other tokens."""
    return float(np.abs(now - before).mean()) if now.shape == before.shape else math.inf


def read_probe(folder: Path) -> np.ndarray | None:
    """Return what a server returned for the probe when the results in this folder were begun."""
    file = folder / PROBE_FILE
    if not file.exists():
        return None
    return np.array(read_json(file, list, "restore it, or name a new folder"), dtype=float)


@contextmanager
def _naming_the_lost() -> Iterator[None]:
    try:
        yield
    except _Gone as error:
        raise DataError(f"{error}; start it, or correct the URL") from None


class _Round:
    """Prompts to score on servers that were alive when it began."""

    def __init__(
        self, servers: Sequence[Server], keys: Sequence[tuple], at_once: int, found: dict
    ) -> None:
        ends = np.linspace(0, len(keys), len(servers) + 1).astype(int)
        self.shares = {
            server: deque(keys[first:end])
            for server, first, end in zip(servers, ends, ends[1:], strict=False)
        }
        self.at_once, self.found = at_once, found
        self.in_flight = dict.fromkeys(servers, 0)
        self.gone, self.failure = dict[Server, str](), list[BaseException]()
        self._lock = threading.Lock()

    def run(self) -> dict[Server, str]:
        """Return the servers that did not reply, and why."""
        threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True)
            for server in self.shares
            for _ in range(self.at_once)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: threads end with their requests
            self.failure.append(error)
            raise
        if self.failure:
            raise self.failure[0]
        return self.gone

    def _work(self, server: Server) -> None:
        while not self.failure and server not in self.gone:
            key = self._take(server)
            if key is None:
                return
            try:
                server.recognize()
                log_p = server.score([*key[0], *key[1]], len(key[0]))
                server.recognize()  # it may have been restarted meanwhile
                self.found[key] = log_p
            except _Gone as error:
                self.gone[server] = str(error)
            except BaseException as error:
                self.failure.append(error)
            with self._lock:
                self.in_flight[server] -= 1

    def _take(self, server: Server) -> tuple | None:
        """Return the next of the server's own share, or the last of another share that is larger
        than its server can begin now."""
        with self._lock:
            owner = server if self.shares[server] else max(self.shares, key=self._num_spare)
            share = self.shares[owner]
            if not share or (owner is not server and self._num_spare(owner) <= 0):
                return None
            self.in_flight[server] += 1
            return share.popleft() if owner is server else share.pop()

    def _num_spare(self, server: Server) -> int:
        idle = 0 if server in self.gone else self.at_once - self.in_flight[server]
        return len(self.shares[server]) - idle
