"""Send requests to an HTTP server, again where that may help, and never show what is secret.

Place in the flow: server.py asks; `Connection.request` returns parsed JSON, or raises a sentence
that the user can act on. What may happen to a request:

    reply                     parsed JSON
    busy, late, cut off       sent again, until `patience_s` is over: `ServerGone`
    connection lost           the same, and the server may be another one afterwards
    another status, a page    an error at once, as the same request would fail again

With a patience of 10 s, a server that stays busy gets a request at second 0, 0.5, 1.5, 3.5 and 7.5;
the next wait of 8 s would end after the 10 s.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from olmo_sparsity.base.errors import ConfigError, DataError, one_line, printable
from olmo_sparsity.base.progress import say

API_KEY = "OLMO_SPARSITY_API_KEY"
"""Environment variable. Its value is sent as a bearer token and written nowhere."""

PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which the same request may succeed."""

TIMEOUT_S = 600.0
"""Seconds that one request may take, by default. A long prompt on a slow machine takes minutes."""

PATIENCE_S = 300.0
"""Seconds for which a request is repeated that was not answered, by default."""

NEW_PATIENCE_S = 5.0
"""The same for a server that has never replied, as its URL may be wrong; also the seconds that
connecting may take."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
"""Seconds between two tries, which double from the first to the longest."""

HANGING_S = 30.0
"""Seconds without a reply after which a line says what is waited for."""

MAX_REPLY_BYTES = 2**20
MAX_REPLY_BYTES_PER_BYTE = 2**7
"""A reply may have `MAX_REPLY_BYTES`, and `MAX_REPLY_BYTES_PER_BYTE` for each byte of the request.
That is twice what any server needs. A reply without end would fill the memory."""


class ServerGone(DataError):
    """A server has not replied for as long as we wait."""


class _NoReply(Exception):
    """A request was not answered. It may succeed when it is sent again."""

    def __init__(self, reason: str, after_s: float = 0.0, is_lost: bool = False) -> None:
        """Say why there is no reply.

        Args:
            reason: In words, for the user.
            after_s: Seconds after which the server asks to try again.
            is_lost: Whether the connection broke, so that the server may have been restarted.
        """
        super().__init__(reason)
        self.after_s = after_s
        self.is_lost = is_lost


class ServerAddress(NamedTuple):
    """Where a server is, and which of its models is meant."""

    url: str
    model: str
    """The name after the # of the URL; empty if it has none."""


def parse_url(url: str) -> ServerAddress:
    """Return the URL of a server and the name of a model on it: `http://host:8000/v1#NAME` is the
    model NAME at `http://host:8000`. No message repeats a URL that could hold a password."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        parts = httpx.URL("")
    # A password in a URL would be repeated by messages and in the results.
    if parts.userinfo or parts.query or "@" in url:
        raise ConfigError(f"a server's URL must have no user, password or query; set {API_KEY}")
    is_url = parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 80) < 65536
    if not is_url:
        raise ConfigError(f"'{printable(url)[:100]}' is not a URL like http://127.0.0.1:8000")
    # The base URL of OpenAI's clients ends with /v1.
    root = parts.path.rstrip("/").removesuffix("/v1")
    return ServerAddress(f"{parts.scheme}://{parts.netloc.decode()}{root}", parts.fragment)


def safe(text: object) -> str:
    """Return a text from outside as it may be shown: in one line, without control characters, and
    without the user's key, which a server may repeat."""
    key = os.environ.get(API_KEY, "").strip()
    if key:
        # A server may quote the request that it refuses.
        text = str(text).replace(key, "…")
    return printable(one_line(str(text)))


class WaitLimits(NamedTuple):
    """How long a server is waited for, in seconds."""

    timeout_s: float = TIMEOUT_S
    """How long one request may take."""

    patience_s: float = PATIENCE_S
    """For how long a request that fails is sent again."""

    first_patience_s: float | None = None
    """The same for a server that has never replied, which may still load its model. None means a
    few seconds, as its URL may be wrong."""


class Connection:
    """Requests to one server."""

    def __init__(self, url: str, limits: WaitLimits) -> None:
        """Prepare requests; nothing is sent yet.

        Args:
            url: As `parse_url` returns it.
            limits: How long the server is waited for.
        """
        self.url = url
        self.limits = limits
        self.has_replied = False
        self.may_be_another = True
        """Whether the connection was lost since somebody set this to False: the server may have
        been restarted, with another model."""

        # Since the last reply; requests of several threads share it.
        self._has_reported = False
        self._client = httpx.Client(
            verify=ssl.create_default_context() if url.startswith("https") else False,
            timeout=httpx.Timeout(limits.timeout_s, connect=min(limits.timeout_s, NEW_PATIENCE_S)),
            # Idle connections end before servers close them, which would look like a restart.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
            trust_env=False,  # use no proxy and no .netrc of the environment
        )
        weakref.finalize(self, self._client.close)

    def error(self, problem: str) -> DataError:
        """Return the error that says what is wrong with this server."""
        return DataError(f"{self.url} {problem}")

    def request(self, path: str, body: Mapping | None = None) -> Any:
        """Return the reply to a request as parsed JSON. A request that fails is sent again for the
        seconds of patience, with growing waits between.

        Args:
            path: Of the URL, such as /v1/models.
            body: What is sent as JSON. None means that the request is a GET.
        """
        wait_s = FIRST_WAIT_S
        deadline = math.inf
        while True:
            try:
                return self._send(path, body)
            except _NoReply as error:
                if self._client.is_closed:  # the command ends, after an error in another thread
                    raise ServerGone(f"{self.url} is asked no more") from None
                self.may_be_another |= error.is_lost
                # Patience counts from the first failure: the request itself may take long.
                if deadline == math.inf:
                    patience_s = self._current_patience_s
                    deadline = time.monotonic() + patience_s
                    say(f"{self.url}: {error}; trying again for {patience_s:g} s")
                # What the server asks for, but not hours.
                wait_s = max(wait_s, min(error.after_s, 2 * LONGEST_WAIT_S))
                if time.monotonic() + wait_s > deadline:
                    raise ServerGone(f"{self.url} {_problem_of(error)}") from None
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    @property
    def _current_patience_s(self) -> float:
        """Seconds for which a request that fails now is sent again."""
        if self.has_replied:
            return self.limits.patience_s
        if self.limits.first_patience_s is None:
            return min(self.limits.patience_s, NEW_PATIENCE_S)
        return self.limits.first_patience_s

    def _send(self, path: str, body: Mapping | None) -> Any:
        """Return the reply to one request, sent once."""
        headers = _headers()
        method = "GET" if body is None else "POST"
        # Encoded here, as the length of the request limits the length of the reply.
        content = b"" if body is None else json.dumps(body).encode()
        most_bytes = MAX_REPLY_BYTES + MAX_REPLY_BYTES_PER_BYTE * len(content)
        deadline = time.monotonic() + self.limits.timeout_s
        too_late = _NoReply(f"no whole reply within {self.limits.timeout_s:g} s")
        raw = bytearray()

        try:
            with (
                self._reporting(path),
                self._client.stream(
                    method, self.url + path, content=content, headers=headers
                ) as response,
            ):
                self.has_replied = True
                for part in response.iter_raw():
                    raw += part
                    # httpx limits the seconds between two parts, not the seconds of the whole
                    # reply.
                    if time.monotonic() > deadline:
                        raise too_late
                    if len(raw) > most_bytes:
                        raise self.error(f"replied with more than {most_bytes:,} bytes to {path}")
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise too_late from None
        except httpx.HTTPError as error:
            reason = safe(f"{type(error).__name__}: {error}")
            raise _NoReply(reason, is_lost=True) from None

        self._check_status(response, path, raw)
        return self._parsed(path, raw)

    def _check_status(self, response: httpx.Response, path: str, raw: bytearray) -> None:
        """Raise unless the request succeeded: `_NoReply` for a status that may pass, DataError for
        any other."""
        status = response.status_code
        if status in PASSING_STATUS:
            retry_after = response.headers.get("Retry-After", "")
            # Nine digits, as a number of thousands of digits cannot be read.
            after_s = float(retry_after[:9]) if retry_after.isdecimal() else 0.0
            raise _NoReply(f"status {status}", after_s)

        if status != 200:
            remedy = f"; set {API_KEY}" if status in (401, 403) else ""
            if response.has_redirect_location:
                remedy = (
                    f", a redirect; pass the URL behind it: {safe(response.headers['Location'])}"
                )
            text = safe(raw.decode(errors="replace"))
            raise self.error(f"replied to {path} with status {status} ({text}){remedy}")

        encoding = safe(response.headers.get("Content-Encoding", "identity"))
        if encoding != "identity":
            remedy = "turn compression off, in the server or its proxy"
            raise self.error(f"compressed its reply to {path} ({encoding}), unasked; {remedy}")

    def _parsed(self, path: str, raw: bytearray) -> Any:
        """Return the JSON of a reply. Raise `_NoReply` if another try may bring it, and DataError
        if none will."""
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            # A page would be the same each time, unlike a reply that was cut off.
            # It is the page of a proxy, or of the server's own interface.
            if raw.lstrip()[:1] == b"<":
                remedy = "pass the URL of its API, such as http://127.0.0.1:8000"
                problem = f"replied to {path} with a web page, not JSON; {remedy}"
                raise self.error(problem) from None
            raise _NoReply("its reply is cut off, or not JSON") from None

    @contextmanager
    def _reporting(self, path: str) -> Iterator[None]:
        """Print a line if what happens inside takes long: the time limit may be many minutes
        away."""
        waiting = f"has not replied to {path} for {HANGING_S:g} s"
        line = f"{self.url} {waiting}; a request ends after {self.limits.timeout_s:g} s (--timeout)"
        timer = threading.Timer(HANGING_S, self._report_once, (line,))
        timer.daemon = True
        timer.start()
        try:
            yield
            self._has_reported = False
        finally:
            timer.cancel()

    def _report_once(self, line: str) -> None:
        """Print a line unless one was printed since the last reply: requests of other threads hang
        at the same time."""
        if not self._has_reported:
            self._has_reported = True
            say(line)


def _problem_of(error: _NoReply) -> str:
    """Return what was wrong with all replies to a request, or that there were none."""
    if error.is_lost:
        return f"did not reply ({error}); start it"
    return f"did not reply as it should ({error}); see its log, or raise --timeout or --patience"


def _headers() -> dict[str, str]:
    """Return the headers of a request, with the user's key if there is one."""
    key = os.environ.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY} holds letters that HTTP does not allow; use ASCII alone")
    # A compressed reply could be larger than its limit allows.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers
