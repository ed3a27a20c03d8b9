"""Score prompts on one HTTP server that returns log-probabilities of a prompt's own tokens.

Place in the flow: prompts as token IDs → requests (dialects.py, connection.py) → **log p**
(`Server.score`) → pool.py, which shares prompts among several servers.

    server.score([464, 7696, 9721], first_index=1)  →  [-7.2, -3.1]    log p of 7696 and of 9721

A server is not trusted. checks.py proves what its numbers are before any is used. Here every reply
must show which prompt it is of, and a server must show that it is still the same model:

    score          request → reply → is it of this prompt? → are they numbers? → log p
                                     (server_tokens.py)      (log_probabilities.py)
    recognize      connection lost, or all prompts of a call scored → score the probe again → as at
                   the first time? → go on

The *probe* is a fixed text by whose numbers a model is recognized (probe.py). A *dialect* is the
form of requests and replies that a kind of server has, such as vLLM's (dialects.py).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.sources.dialects import ECHO, Dialect, Reply, Scored
from olmo_sparsity.sources.servers.connection import Connection, WaitLimits, parse_url, safe
from olmo_sparsity.sources.servers.log_probabilities import as_log_p, check_not_constant
from olmo_sparsity.sources.servers.probe import OTHER_NATS, PROBE, distance
from olmo_sparsity.sources.servers.server_tokens import ServerTokens

NOISE_FACTOR = 3
"""Two numbers may be of one model if they differ by this many times the server's noise: the noise
is the largest of a few differences, and others may be larger."""

REQUIRED = "it must be vLLM, SGLang, llama-server, or support `echo`"
"""The end of messages about a server that cannot be used."""

OF_ANOTHER_FORM = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What reading a reply of another form may raise. OverflowError: JSON's integers may be larger than
any float."""


class ScoredPrompt(NamedTuple):
    """A reply whose prompt and numbers were checked."""

    log_p: np.ndarray
    """log p of the tokens of the prompt, from the first that was asked for."""

    generated: Scored | None
    """The token that the server generates after the prompt, unchecked. None means that it returned
    none."""


class Server:
    """One server at one URL: `http://host:8000`, or with the name of a model, `…#NAME`.

    Before it is used, `meet` (checks.py) finds out its dialect and checks its numbers."""

    def __init__(self, url: str, tokenizer: Any, limits: WaitLimits) -> None:
        """Prepare requests; none is sent yet.

        Args:
            url: As in the class's docstring.
            tokenizer: The tokenizer of its model, of the package tokenizers.
            limits: How long it is waited for.
        """
        self.url, self.model = parse_url(url)
        self.tokens = ServerTokens(tokenizer)
        # Until `meet` has read which kind of server it is.
        self.dialect: Dialect = ECHO
        self.card: dict[str, Any] = {}
        """Keys of /v1/models that identify the model."""

        self.probe_ids = self.tokens.encode(PROBE) or []
        self.probe_log_p = np.empty(0)
        """log p of `probe_ids` from the second token on, when the server was met."""

        self.noise = 0.0
        """Nats a token by which two replies to the same request differed at most, when the server
        was met."""

        self._connection = Connection(self.url, limits)
        # After a restart all threads would score the probe; one is enough.
        self._recognition_lock = threading.Lock()
        # Whether replies repeat the identifier of their request. The first reply shows it.
        self._replies_name_requests = False
        self._named_models = dict[str, str]()
        """The model that the first reply on each path named."""

    # --- scoring ---

    @property
    def identifies_prompts(self) -> bool:
        """Whether a reply shows which prompt it is of. If not, the server gets one request at a
        time: a proxy that exchanges two replies would not be noticed."""
        return self._replies_name_requests or self.dialect.repeats_prompts

    def score(self, ids: list[int], first_index: int) -> np.ndarray:
        """Return log p of the tokens from the index `first_index` on: [len(ids) − first_index], in
        nats."""
        return self.score_and_generate(ids, first_index).log_p

    def score_and_generate(self, ids: list[int], first_index: int) -> ScoredPrompt:
        """Return log p of the tokens from the index `first_index` on, and the token generated after
        them. Raise DataError for a reply that is to another prompt or holds no usable numbers."""
        # A name that no other request has, so that an exchanged reply is noticed.
        request_name = uuid.uuid4().hex
        bodies = self.dialect.score_requests(ids, first_index, request_name)
        replies = [self._request(self.dialect.path, body) for body in bodies]

        # Is it the reply to this request, about this prompt?
        reply = self._read_scores(replies, ids, first_index)
        self._check_request(reply, request_name)
        sent_ids = ids[reply.first_index :]
        self._check_tokens(reply.tokens, sent_ids)

        # Are they log-probabilities?
        log_p = [as_log_p(written) for written in reply.log_p]
        # A reply may begin before `first_index`. The numbers before it may be null, such as that of
        # the first token of a text.
        num_before = first_index - reply.first_index
        scored = log_p[num_before:]
        if None in scored:
            written = reply.log_p[num_before + scored.index(None)]
            problem = f"returned {safe(repr(written))[:40]} as a log-probability"
            raise self.error(problem)
        check_not_constant(sent_ids, log_p, self.url)
        return ScoredPrompt(np.array(scored, dtype=float), reply.generated)

    def _read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        """Return the tokens and numbers of a reply. Raise DataError if it has another form, or has
        not as many tokens and numbers as were sent."""
        try:
            reply = self.dialect.read_scores(replies, ids, first_index)
            num_sent = len(ids) - reply.first_index
            if len(reply.tokens) != num_sent:
                raise ValueError(f"{len(reply.tokens)} tokens where {num_sent} were sent")
            if len(reply.log_p) != num_sent:
                raise ValueError(f"{len(reply.log_p)} numbers of {num_sent} tokens")
            return reply
        except OF_ANOTHER_FORM as error:
            # Only the messages of ValueErrors say what is wrong with a reply.
            cause = error if isinstance(error, ValueError) else "its reply has another form"
            reason = f"{safe(cause)[:100]}; {REQUIRED}"
            problem = f"returns no log-probabilities of the prompt ({reason})"
            raise self.error(problem) from None

    def _check_request(self, reply: Reply, request_name: str) -> None:
        """Raise DataError if the reply is to another request. A server that has named a request
        once must name all of them."""
        if self._replies_name_requests and reply.request_name != request_name:
            raise self.error("returned the reply to another request")
        # Once True it stays True: two threads may both set it, and no lock is needed.
        self._replies_name_requests |= reply.request_name == request_name

    def _check_tokens(self, tokens: Sequence[Any], sent_ids: list[int]) -> None:
        """Raise DataError unless the tokens of a reply are those that were sent."""
        for token, sent_id in zip(tokens, sent_ids, strict=True):
            if not self.tokens.is_sent(token, sent_id):
                expected = f"{self.tokens.text_of(sent_id)!r} ({sent_id})"
                difference = f"{safe(repr(token))[:40]} for {expected}"
                remedy = "pass the tokenizer of its model"
                problem = f"replied about other tokens than were sent ({difference}); {remedy}"
                raise self.error(problem)

    def candidates(self, ids: list[int]) -> list[float]:
        """Return log p of the most probable tokens after a prompt; empty if the server does not
        return them."""
        body = self.dialect.candidates_request(ids)
        if body is None:
            return []
        reply = self._request(self.dialect.path, body)
        try:
            written = self.dialect.read_candidates(reply)
            numbers = [as_log_p(value) for value in written]
        except OF_ANOTHER_FORM:
            return []
        return [number for number in numbers if number is not None]

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that the server generates greedily. They are encoded from its text, as
        servers do not agree on how to return IDs."""
        # All servers that are supported have this part of OpenAI's API.
        body = {"prompt": ids, "max_tokens": max_new_tokens, "temperature": 0}
        reply = self._request("/v1/completions", body)
        try:
            encoded = self.tokens.encode(reply["choices"][0]["text"])
        except (KeyError, TypeError, IndexError):
            encoded = None
        if encoded is None:
            raise self.error("returned no text to /v1/completions; pass an answer")
        return encoded

    def list_models(self) -> Any:
        """Return what the server writes about its models."""
        return self._connection.request("/v1/models")

    def _request(self, path: str, body: dict[str, Any]) -> Any:
        """Return the parsed reply to a request for the model of this server."""
        reply = self._connection.request(path, {"model": self.model} | body)
        self._check_named_model(path, reply)
        return reply

    def error(self, problem: str) -> DataError:
        """Return the error that says what is wrong with this server."""
        return self._connection.error(problem)

    def _check_named_model(self, path: str, reply: Any) -> None:
        """Raise DataError if a reply names another model than the first reply on this path. A proxy
        may exchange the model for single requests, between two probes."""
        name = reply.get("model") if isinstance(reply, dict) else None
        if not isinstance(name, str):
            return  # not every server names it
        first_name = self._named_models.setdefault(path, name)
        if name != first_name:
            names = f"{safe(name)[:60]}, and first {safe(first_name)[:60]}"
            raise self.error(f"replied as another model ({names}); keep it from changing models")

    # --- which model it is ---

    def trust(self) -> None:
        """Let `recognize` do nothing until the connection is lost: its model was just compared."""
        self._connection.may_be_another = False

    def distrust(self) -> None:
        """Let the next `recognize` compare the server with its first numbers again."""
        self._connection.may_be_another = True

    def recognize(self) -> None:
        """Raise DataError if the server may be another one by now, and its numbers for the probe
        are others than when it was met."""
        with self._recognition_lock:
            # Asked within the lock: a thread that has waited for it finds the answer of another.
            if self._connection.may_be_another:
                log_p = self.score(self.probe_ids, 1)
                self.check_same_model(log_p, self.probe_log_p, "than when it was first asked")
                self.trust()

    def check_same_model(
        self, probe_log_p: np.ndarray, other_log_p: np.ndarray, compared_with: str
    ) -> None:
        """Raise DataError if two models gave these numbers for the probe: they differ by more than
        rounding and the server's noise. `compared_with`: what the other numbers are from, for the
        message: "than …"."""
        nats = distance(probe_log_p, other_log_p)
        if nats > max(OTHER_NATS, NOISE_FACTOR * self.noise):
            numbers = f"{nats:.2f} nats a token, between requests by {self.noise:.2f}"
            problem = f"serves another model {compared_with}: one text's loss differs by {numbers}"
            raise self.error(problem)
