"""Score prompts on HTTP servers that return log-probabilities of a prompt's own tokens.

Servers are not trusted: each proves what its numbers are, and every reply which prompt it is of.
"""

from __future__ import annotations

import json
import math
import os
import re
import ssl
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import torch

from olmo_sparsity.base.errors import ConfigError, DataError, one_line, printable
from olmo_sparsity.base.files import read_json, write_atomically
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.prompts import Engine, Prompt
from olmo_sparsity.sources.dialects import DIALECTS

API_KEY = "OLMO_SPARSITY_API_KEY"
"""Environment variable. Its value is sent as a bearer token and written nowhere."""

PROBE = (
    "The capital of France is Paris, and the capital of Italy is Rome. One, two, three, four, "
    "five, six, seven. To be, or not to be, that is the question."
)
"""A text; a server scores its tokens several times before anything else."""

FILLER = (
    "Bread is baked early in the morning. The old clock on the market square has stopped again, "
    "and nobody knows who should repair it before the winter comes."
)
"""Another text, between two copies of the probe."""

FILLERS, REPEATED = 3, 12
"""A model with context predicts the last tokens of the second copy otherwise if the first one is
missing, which stands so many fillers before it. A server that reads only the last tokens of a
prompt returns the same numbers."""

CONTEXT_NATS = 0.01
"""Nats a token by which they must differ: a copy mostly has several, rounding a thousandth."""

MORE_THAN_ALL = 1.02
"""The sum of probabilities of candidates must be less, with room for rounding to 8 bits."""

UNEXPLAINED = 0.005
"""Probability that candidates lack, beyond what all other tokens can have."""

HANGING_S = 30.0
"""Seconds without a reply after which a line says what is waited for."""

PROBE_FILE = "server.json"
"""In a folder of results: the log-probabilities of the probe."""

PROBES = 4
MISPLACED_NATS, OTHER_NATS, NOISIEST_NATS = 0.5, 0.05, 0.2
"""A number that belongs to another token differs by several nats. Means over the probe of one model
differ by less than the second, or three times the noise that the server showed; with more noise
than the third, models cannot be told apart."""

AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which the same request may succeed."""

TIMEOUT_S, PATIENCE_S = 600.0, 300.0
"""By default: of one request, and of repeating one that was not answered."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
NEW_PATIENCE_S = 5.0  # for a server that has never replied
REPLY_BYTES, REPLY_SHARE = 2**20, 2**7
"""The most bytes of a reply, and more for each byte of the request: twice what any needs."""

LEAST_LOG_P, FEW = -1e3, 8
"""Servers write −9,999 for minus infinity; this many different tokens never have one number."""


class _NoReply(Exception):
    """A request may succeed when it is sent again, after so many seconds."""

    def __init__(self, reason: str, after_s: float = 0.0, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.is_lost = after_s, is_lost


class _Gone(DataError):
    """A server has not replied for as long as we wait."""


def parse_url(url: str) -> tuple[str, str]:
    """Return the URL of a server, and the name of the model behind its #. No message repeats a
    URL that could hold a password."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        parts = httpx.URL("")
    is_url = parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 80) < 65536
    if parts.userinfo or parts.query or "@" in url:
        raise ConfigError(f"a server's URL must have no user, password or query; set {API_KEY}")
    if not is_url:
        raise ConfigError(f"'{printable(url)[:100]}' is not a URL like http://127.0.0.1:8000")
    root = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.decode()}{root}", parts.fragment


class Server:
    """One server at one URL: `http://host:8000`, or with the name of a model, `…#NAME`."""

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        timeout_s: float,
        patience_s: float,
        first_patience_s: float | None = None,
    ) -> None:
        """`first_patience_s`: for a server that has never replied, which may still load its
        model; None: a few seconds, as its URL may be wrong."""
        self.url, self.model = parse_url(url)
        self.tokenizer, self.timeout_s, self.patience_s = tokenizer, timeout_s, patience_s
        self.first_patience_s = first_patience_s
        self._client = httpx.Client(
            verify=ssl.create_default_context() if self.url.startswith("https") else False,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, NEW_PATIENCE_S)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2),  # less than servers'
            trust_env=False,
        )
        weakref.finalize(self, self._client.close)
        self.dialect, self.card = DIALECTS["echo"], dict[str, Any]()
        self.has_replied = self.is_known = False
        self._recognizing = threading.Lock()
        self.names_requests = self.tells_prompts = False
        self.ids = self._encoded(PROBE) or []
        self.probe, self.noise = np.empty(0), 0.0
        self._has_said = False
        self._spelling = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))

    # --- requests ---

    def _safe(self, text: object) -> str:
        """What may be shown of a text from outside."""
        key = os.environ.get(API_KEY, "").strip()
        return printable(one_line(str(text).replace(key, "…") if key else text))

    def _wrong(self, problem: str) -> DataError:
        return DataError(f"{self.url} {problem}")

    def send(self, path: str, body: Mapping | None = None) -> Any:
        """Return the reply to one request, sent once."""
        key = os.environ.get(API_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{API_KEY} holds letters that HTTP does not allow")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        content = b"" if body is None else json.dumps(body).encode()
        method, most = "GET" if body is None else "POST", REPLY_BYTES + REPLY_SHARE * len(content)
        ends, raw = time.monotonic() + self.timeout_s, bytearray()
        late = _NoReply(f"no whole reply within {self.timeout_s:g} s")
        try:
            given: dict[str, Any] = {"content": content, "headers": headers}
            with (
                self._reporting(path),
                self._client.stream(method, self.url + path, **given) as response,
            ):
                self.has_replied = True
                for part in response.iter_raw():
                    raw += part
                    if time.monotonic() > ends:
                        raise late
                    if len(raw) > most:
                        raise self._wrong(f"replied with more than {most:,} bytes to {path}")
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise late from None
        except httpx.HTTPError as error:
            reason = self._safe(f"{type(error).__name__}: {error}")
            raise _NoReply(reason, is_lost=True) from None
        status = response.status_code
        if status in AGAIN:
            after = response.headers.get("Retry-After", "")
            raise _NoReply(f"status {status}", float(after[:9]) if after.isdecimal() else 0.0)
        if status != 200:
            remedy = f"; set {API_KEY}" if status in (401, 403) else ""
            text = self._safe(raw.decode(errors="replace"))
            raise self._wrong(f"replied to {path} with status {status} ({text}){remedy}")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            if raw.lstrip()[:1] == b"<":
                remedy = "pass the URL of its API, such as http://127.0.0.1:8000"
                raise self._wrong(
                    f"replied to {path} with a web page, not JSON; {remedy}"
                ) from None
            raise _NoReply("its reply is cut off, or not JSON") from None

    @contextmanager
    def _reporting(self, path: str) -> Iterator[None]:
        """Print a line if a reply takes long: the time limit may be many minutes away."""
        waiting = f"has not replied to {path} for {HANGING_S:g} s"
        line = f"{self.url} {waiting}; a request ends after {self.timeout_s:g} s (--timeout)"
        timer = threading.Timer(HANGING_S, self._say_once, (line,))
        timer.daemon = True
        timer.start()
        try:
            yield
            self._has_said = False
        finally:
            timer.cancel()

    def _say_once(self, line: str) -> None:
        """Print a line unless it was printed since the last reply, as for a request beside."""
        if not self._has_said:
            self._has_said = True
            say(line)

    def request(self, path: str, body: Mapping | None = None) -> Any:
        """Return the reply to a request, sent again for as long as `patience_s`."""
        wait_s, ends = FIRST_WAIT_S, math.inf
        while True:
            try:
                return self.send(path, body)
            except _NoReply as error:
                self.is_known &= not error.is_lost
                if ends == math.inf:
                    most_s = self.patience_s
                    if not self.has_replied:
                        first_s = self.first_patience_s
                        most_s = min(most_s, NEW_PATIENCE_S) if first_s is None else first_s
                    ends = time.monotonic() + most_s
                    say(f"{self.url}: {error}; trying again for {most_s:g} s")
                wait_s = max(wait_s, min(error.after_s, 2 * LONGEST_WAIT_S))
                if time.monotonic() + wait_s > ends:
                    raise _Gone(f"{self.url} did not reply ({error}); start it") from None
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    # --- replies ---

    def score(self, ids: list[int], first: int) -> np.ndarray:
        """Return log p of the tokens from number `first` on."""
        return self._score(ids, first)[0]

    def _score(self, ids: list[int], first: int) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return log p of the tokens from number `first` on, and the token generated after them."""
        name = uuid.uuid4().hex
        bodies = self.dialect.bodies(ids, first, name)
        sent = [self.request(self.dialect.path, {"model": self.model} | body) for body in bodies]
        try:
            reply = self.dialect.read(sent, ids, first)
            read = list(zip(reply.tokens, ids[reply.first :], strict=True))
            found = [_number(given) for given, _ in zip(reply.log_p, read, strict=True)]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            rule = "it must be vLLM, SGLang, llama-server, or support `echo`"
            reason = f"{self._safe(repr(error))[:100]}; {rule}"
            raise self._wrong(f"returns no log-probabilities of the prompt ({reason})") from None
        if self.names_requests and reply.request != name:
            raise self._wrong("returned the reply to another request")
        self.names_requests |= reply.request == name
        self.tells_prompts = self.names_requests or reply.first <= 1
        for token, own in read:
            if not self._is_same(token, own):
                both = f"{self._safe(repr(token))[:40]} for {self._spelling(own)!r} ({own})"
                raise self._wrong(f"replied about other tokens than were sent ({both})")
        scored = found[first - reply.first :]
        if None in scored:
            given = reply.log_p[first - reply.first + scored.index(None)]
            raise self._wrong(f"returned {self._safe(repr(given))[:40]} as a log-probability")
        refuse_constant(ids[reply.first :], found, self.url)
        return np.array(scored, dtype=float), reply.generated

    def _is_same(self, token: Any, own: int) -> bool:
        if not isinstance(token, str) or token.startswith("token_id:"):
            return self._id_of(token) == own
        text, spelt = self._spelling(own), token.replace("\ufffd", "").replace("▁", " ").strip()
        if "\ufffd" in text:  # part of a letter
            is_bytes = token.startswith(("bytes:", "<0x"))
            return is_bytes or text.replace("\ufffd", "").strip() in spelt
        is_special = not spelt and own in self.tokenizer.get_added_tokens_decoder()
        return spelt == text.strip() or is_special

    def _id_of(self, token: Any) -> int | None:
        """The ID of a token as a server writes it, if it is one."""
        if isinstance(token, str) and (written := re.fullmatch(r"token_id:(\d{1,9})", token)):
            return int(written[1])
        if isinstance(token, str):
            ids = self._encoded(token) or []
            return ids[0] if len(ids) == 1 else None
        return token if type(token) is int else None

    def _encoded(self, text: Any) -> list[int] | None:
        """Token IDs of a text from outside; None if it is not one."""
        if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
            return None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        body = {"model": self.model, "prompt": ids, "max_tokens": max_new_tokens, "temperature": 0}
        reply = self.request("/v1/completions", body)
        try:
            encoded = self._encoded(reply["choices"][0]["text"])
        except (KeyError, TypeError, IndexError):
            encoded = None
        if encoded is None:
            raise self._wrong("returned no text to /v1/completions")
        return encoded

    # --- which model it is ---

    def meet(self, like: Server) -> None:
        """Find out which requests the server takes, and whether its numbers can be used."""
        listed = self.request("/v1/models")
        try:
            models = {str(one["id"]): dict(one) for one in listed["data"]}
        except (KeyError, TypeError, ValueError):
            raise self._wrong("does not list models at /v1/models") from None
        if not self.model and len(models) != 1:
            names = self._safe(", ".join(models))
            raise ConfigError(f"{self.url} has the models {names}; append one: {self.url}#NAME")
        self.model = self.model or next(iter(models))
        card = models.get(self.model, {})
        self.dialect = DIALECTS.get(str(card.get("owned_by")), DIALECTS["echo"])
        # `created` is the time of the request or of the start in vLLM and llama-cpp-python.
        self.card = {key: card.get(key) for key in ("root", "max_model_len") if key in card}
        found = [self.score(self.ids, 1), *in_threads([lambda: self.score(self.ids, 1)] * PROBES)]
        self.probe, self.is_known = np.mean(found, axis=0), True
        self.noise = max(distance(a, b) for a, b in combinations(found, 2))
        if self.noise > NOISIEST_NATS:
            numbers = f"{self.noise:.2f} nats a token between requests (most: {NOISIEST_NATS})"
            raise self._wrong(f"gives one text log-probabilities that vary by {numbers}")
        self.refuse_other(self.probe, like.probe, f"than {like.url}")
        self._check_places()
        self._check_context()
        self._check_sums()

    def recognize(self) -> None:
        """Compare the server's numbers with its first ones."""
        with self._recognizing:
            if not self.is_known:
                self.refuse_other(self.score(self.ids, 1), self.probe, "since it was restarted")
                self.is_known = True

    def refuse_other(self, now: np.ndarray, before: np.ndarray, than: str) -> None:
        if (nats := distance(now, before)) > max(OTHER_NATS, 3 * self.noise):
            numbers = f"{nats:.2f} nats a token, between requests by {self.noise:.2f}"
            raise self._wrong(f"serves another model {than}: one text's loss differs by {numbers}")

    def _check_places(self) -> None:
        """Reject numbers that belong to the token before or after."""
        tried, ids = 0, self.ids
        for num in (len(ids) // 4, len(ids) // 2, len(ids)):
            _, (token, log_p) = self._score(ids[:num], 1)
            own = self._id_of(token)
            if own is None or _number(log_p) is None:
                continue
            tried += 1
            again = self.score([*ids[:num], own], num)[0]
            if not abs(again - log_p) <= MISPLACED_NATS + 3 * self.noise:
                both = f"{log_p:.2f} when it is generated, {again:.2f} in a prompt"
                raise self._wrong(f"gives a token numbers that do not belong to it: {both}")
        if not tried:
            raise self._wrong("does not return the token that it generates, to check its numbers")

    def _check_context(self) -> None:
        """Reject numbers that do not change with what precedes the last tokens: no source would
        matter to any statement."""
        passage, filler = self._two_passages()
        between = filler * FILLERS
        with_copy = [*passage, *between, *passage]
        without_copy = [*np.resize(filler, len(passage)).tolist(), *between, *passage]
        first = len(with_copy) - min(REPEATED, len(passage))
        nats = distance(self.score(with_copy, first), self.score(without_copy, first))
        least = max(CONTEXT_NATS, 3 * self.noise)
        if nats < least:
            numbers = f"{nats:.3f} nats a token (at least: {least:.3f})"
            what = f"a passage {len(between)} tokens before changes its numbers by {numbers}"
            remedy = "check that it does not truncate prompts, and scores them in context"
            raise self._wrong(f"does not read its context: {what}; {remedy}")

    def _two_passages(self) -> tuple[list[int], list[int]]:
        """Return the probe and the filler; or, of a tokenizer that knows few of their words, such
        as one of another language, two halves of its vocabulary."""
        filler = self._encoded(FILLER) or []
        if min(len({*self.ids}), len({*filler})) >= FEW:
            return self.ids, filler
        known = {*self.tokenizer.get_vocab().values()} - {
            *self.tokenizer.get_added_tokens_decoder()
        }
        tokens = sorted(known)[: 2 * len(self.ids)]
        return tokens[::2], tokens[1::2]

    def _check_sums(self) -> None:
        """Reject numbers that are no natural logarithms of probabilities: those of the most
        probable tokens add up to at most 1, and the others have less than the last of them."""
        vocabulary = 1.1 * self.tokenizer.get_vocab_size()  # models may have a few more
        # Where a model is nearly certain, as in further copies of a text, the rest is small, and
        # numbers on a smaller scale show as a rest that no other tokens account for.
        num, repeated = len(self.ids), self.ids * 4
        for end in (num // 2, *range(2 * num, 4 * num, max(1, num // 6))):
            body = {"model": self.model} | self.dialect.candidates(repeated[:end])
            reply = self.request(self.dialect.path, body)
            try:
                found = [_number(given) for given in self.dialect.read_candidates(reply)]
            except (KeyError, TypeError, ValueError, IndexError, AttributeError):
                found = []
            log_p = [number for number in found if number is not None]
            if len(log_p) < 2:
                say(f"{self.url} returns no candidates, so the scale of its numbers is not checked")
                return
            total = sum(map(math.exp, log_p))
            others = vocabulary * math.exp(min(log_p))
            if total > MORE_THAN_ALL or 1 - total > others + UNEXPLAINED:
                numbers = f"those of {len(log_p)} tokens add up to {total:.2f}"
                rule = "it must return natural logarithms, at temperature 1"
                raise self._wrong(
                    f"gives numbers that are no log-probabilities ({numbers}); {rule}"
                )


def _number(given: Any) -> float | None:
    """The log-probability, if it is one."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return min(float(given), 0.0) if is_number and LEAST_LOG_P < given < 1e-3 else None


def refuse_constant(ids: Sequence[int], log_p: Sequence[float | None], url: str) -> None:
    known = {token: number for token, number in zip(ids, log_p, strict=True) if number is not None}
    if len(known) >= FEW and len(set(known.values())) == 1:
        raise DataError(f"{url} gives {len(known)} different tokens the same log-probability")


def distance(now: np.ndarray, before: np.ndarray) -> float:
    """Return the mean difference of log-probabilities of the probe; infinity: other tokens."""
    return float(np.abs(now - before).mean()) if now.shape == before.shape else math.inf


def read_probe(folder: Path) -> np.ndarray | None:
    """Return what a server returned for the probe when the results in this folder were begun."""
    file = folder / PROBE_FILE
    if not file.exists():
        return None
    return np.array(read_json(file, list, "restore it, or name a new folder"), dtype=float)


# --- several servers of one model -----------------------------------------------------------------


class Servers(Engine):
    """Servers of one model, each with `at_once` requests at a time; with one, if nothing in a reply
    tells which prompt it is of."""

    device = torch.device("cpu")  # nothing is left to compute here

    dtype_name = "of the server"
    vocab_size = 0

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        *,
        at_once: int = 8,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        first_patience_s: float | None = None,
        meet: bool = True,
    ) -> None:
        self.servers = [
            Server(url, tokenizer, timeout_s, patience_s, first_patience_s) for url in urls
        ]
        self.at_once, self.vocab_size = at_once, 1 + max(tokenizer.get_vocab().values())
        for server in self.servers if meet else ():
            server.meet(self.servers[0])

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Threads take the sorted prompts in turn, so that neighbours meet what a server's cache
        holds of them. `token_forwards` counts what is sent."""
        different = sorted({prompt.key for prompt in prompts})
        left, found = deque(different), dict[tuple, np.ndarray]()
        gone = dict[Server, str]()
        for server in self.servers:
            server.is_known = False
        while left and (alive := [server for server in self.servers if server not in gone]):
            workers = [s for i in range(self.at_once) for s in alive if not i or s.tells_prompts]
            in_threads([partial(_work, server, left, found, gone) for server in workers])
        if left:
            raise DataError(f"no server is left: {'; '.join(gone.values())}")
        every = np.concatenate([np.empty(0), *found.values()]).tolist()
        ids = [token for _, after in found for token in after]
        refuse_constant(ids, every, self.servers[0].url)
        self.token_forwards += sum(len(a) + len(b) - 1 for a, b in different)
        return [found[prompt.key] for prompt in prompts]

    def recognize_in(self, folder: Path) -> None:
        """Write the first server's numbers for the probe into a folder of results, or raise if
        they differ from those in it."""
        first, before = self.servers[0], read_probe(folder)
        if before is None:
            write_atomically(folder / PROBE_FILE, json.dumps(first.probe.tolist()))
        else:
            first.refuse_other(first.probe, before, f"than when {folder} was begun")

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        return self.servers[0].generate(ids, max_new_tokens)


def _work(
    server: Server, left: deque[tuple], found: dict[tuple, np.ndarray], gone: dict[Server, str]
) -> None:
    """Score the prompts that are left, until the server does not reply."""
    while server not in gone:
        try:
            before, after = left.popleft()
        except IndexError:
            return
        try:
            server.recognize()
            log_p = server.score([*before, *after], len(before))
            server.recognize()  # it may have been restarted meanwhile
            found[before, after] = log_p
        except _Gone as error:
            left.append((before, after))
            gone[server] = str(error)
        except BaseException:
            left.clear()  # other threads end, too
            raise


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at once. The first failure, or an interrupt, does not
    wait for the others."""
    done = SimpleQueue[tuple[int, Any, BaseException | None]]()

    def run(number: int) -> None:
        try:
            done.put((number, calls[number](), None))
        except BaseException as error:
            done.put((number, None, error))

    for number in range(len(calls)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    found = dict[int, Any]()
    for number, result, error in (done.get() for _ in calls):
        if error is not None:
            raise error
        found[number] = result
    return [found[number] for number in range(len(calls))]
