"""Score prompts on HTTP servers that return log-probabilities of a prompt's own tokens.

Place in the flow: prompts as token IDs → requests (dialects.py, connection.py) → **log p**.

Servers are not trusted: each proves what its numbers are before any is used, and every reply which
prompt it is of. A server that was restarted proves that it is the same model.
"""

from __future__ import annotations

import json
import math
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import torch

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import read_json, write_atomically
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.prompts import Prompt, PromptModel
from olmo_sparsity.sources.connection import (
    PATIENCE_S,
    TIMEOUT_S,
    Connection,
    ServerGone,
    parse_url,
    safe,
)
from olmo_sparsity.sources.dialects import DIALECTS, ECHO, Dialect, Scored

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

NUM_FILLERS = 3
REPEATED_TOKENS = 12
"""A model with context predicts the last tokens of a second copy otherwise if the first one is
missing, which precedes it by so many fillers. A server that reads only the last tokens of a prompt
returns the same numbers."""

CONTEXT_NATS = 0.01
"""Nats a token by which they must differ: a copy mostly has several, rounding a thousandth."""

MORE_THAN_ALL = 1.02
"""The sum of probabilities of candidates must be less, with room for rounding to 8 bits."""

UNEXPLAINED = 0.005
"""Probability that candidates lack, beyond what all other tokens can have."""

CONCENTRATED = 0.5, 0.99
"""Sums of the candidates' probabilities between which the other tokens are compared with the last
candidate: a flat distribution has no candidates that stand out, and rounding hides a small rest."""

LONGEST_TAIL = 8.0
"""The other tokens together have this many times the last candidate, for each candidate, at one
place at least. With SmolLM2 and the demo model it is 0.5 to 1.3 at the place where it is least;
with logarithms of base 2 it would be 21 to 173."""

LEAST_PLACES = 4
"""Places that must be concentrated for this comparison."""

PROBE_FILE = "server.json"
"""In a folder of results: the log-probabilities of the probe."""

NUM_PROBES = 4
"""How often the probe is scored at once, to measure by how much the server's numbers vary."""

MISPLACED_NATS = 0.5
"""A generated token and the same token in a prompt differ by rounding only; a number that belongs
to the token beside it usually differs by several nats."""

OTHER_NATS = 0.05
"""Means over the probe of one model differ by less, or by less than three times the noise that the
server showed."""

NOISIEST_NATS = 0.2
"""With more noise than this, models cannot be told apart."""

LEAST_LOG_P = -1e3
"""Servers write −9,999 for minus infinity, which JSON lacks."""

MANY_TOKENS = 8
"""So many different tokens never have one and the same number."""

REQUIRED = "it must be vLLM, SGLang, llama-server, or support `echo`"


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
        """For `first_patience_s` see `Connection`."""
        self.url, self.model = parse_url(url)
        self.tokenizer = tokenizer
        self.dialect: Dialect = ECHO
        self.card = dict[str, Any]()
        """What identifies the model, of what the server lists about it."""

        self.ids = self._encoded(PROBE) or []
        self.probe = np.empty(0)
        """log p of `ids`, when the server was met."""

        self.noise = 0.0
        """Nats a token by which two replies to the same request differ at most."""

        self._connection = Connection(self.url, timeout_s, patience_s, first_patience_s)
        self._recognizing = threading.Lock()
        self._names_requests = False
        self._spelling = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))

    @property
    def identifies_prompts(self) -> bool:
        """Whether a reply shows which prompt it is of. If not, one request may be under way."""
        return self._names_requests or self.dialect.repeats_prompts

    def score(self, ids: list[int], first: int) -> np.ndarray:
        """Return log p of the tokens from number `first` on."""
        return self._score(ids, first)[0]

    def _score(self, ids: list[int], first: int) -> tuple[np.ndarray, Scored | None]:
        """Return log p of the tokens from number `first` on, and the token generated after them."""
        name = uuid.uuid4().hex
        bodies = self.dialect.score_requests(ids, first, name)
        replies = [self._request(self.dialect.path, body) for body in bodies]
        try:
            reply = self.dialect.read_scores(replies, ids, first)
            sent = ids[reply.first :]
            pairs = list(zip(reply.tokens, sent, strict=True))
            log_p = [_log_p_of(written) for written in reply.log_p]
            if len(log_p) != len(sent):
                raise ValueError(f"{len(log_p)} numbers of {len(sent)} tokens")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            # Only the messages of ValueErrors say what is wrong with a reply.
            cause = error if isinstance(error, ValueError) else "its reply has another form"
            reason = f"{safe(cause)[:100]}; {REQUIRED}"
            problem = f"returns no log-probabilities of the prompt ({reason})"
            raise self._connection.refused(problem) from None
        # A server that has named a request once names all of them.
        if self._names_requests and reply.request != name:
            raise self._connection.refused("returned the reply to another request")
        self._names_requests |= reply.request == name
        for token, sent_id in pairs:
            if not self._is_same(token, sent_id):
                expected = f"{self._spelling(sent_id)!r} ({sent_id})"
                difference = f"{safe(repr(token))[:40]} for {expected}"
                remedy = "pass the tokenizer of its model"
                problem = f"replied about other tokens than were sent ({difference}); {remedy}"
                raise self._connection.refused(problem)
        scored = log_p[first - reply.first :]
        if None in scored:
            written = reply.log_p[first - reply.first + scored.index(None)]
            problem = f"returned {safe(repr(written))[:40]} as a log-probability"
            raise self._connection.refused(problem)
        refuse_constant(sent, log_p, self.url)
        return np.array(scored, dtype=float), reply.generated

    def _request(self, path: str, body: dict[str, Any]) -> Any:
        return self._connection.request(path, {"model": self.model} | body)

    def _is_same(self, token: Any, sent_id: int) -> bool:
        """Return whether a token of a reply, an ID or a text, is the token that was sent."""
        if not isinstance(token, str):
            return self._id_of(token) == sent_id
        sent_text = self._spelling(sent_id)
        # SentencePiece writes a space as ▁.
        spelt = token.replace("\ufffd", "").replace("▁", " ").strip()
        # A token that is a part of a letter has no text of its own: servers write its bytes, the
        # whole letter, or the mark of what cannot be decoded.
        if "\ufffd" in sent_text:
            is_bytes = token.startswith(("bytes:", "<0x"))
            return is_bytes or sent_text.replace("\ufffd", "").strip() in spelt
        # Some servers write special tokens as nothing.
        is_special = not spelt and sent_id in self.tokenizer.get_added_tokens_decoder()
        return spelt == sent_text.strip() or is_special

    def _id_of(self, token: Any) -> int | None:
        """Return the ID of a token of a reply; None if it is none, or a text of several tokens."""
        if isinstance(token, str):
            ids = self._encoded(token) or []
            return ids[0] if len(ids) == 1 else None
        return token if type(token) is int else None  # True is not the token 1

    def _encoded(self, text: Any) -> list[int] | None:
        """Token IDs of a text from outside; None if it is not one."""
        if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
            return None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that the server generates greedily, of its text: servers do not agree
        on how to return IDs."""
        body = {"prompt": ids, "max_tokens": max_new_tokens, "temperature": 0}
        reply = self._request("/v1/completions", body)
        try:
            encoded = self._encoded(reply["choices"][0]["text"])
        except (KeyError, TypeError, IndexError):
            encoded = None
        if encoded is None:
            raise self._connection.refused("returned no text to /v1/completions; pass an answer")
        return encoded

    # --- which model it is ---

    def meet(self, like: Server) -> None:
        """Find out which requests the server takes, and whether its numbers can be used. Raise if
        its model is another one than that of `like`, which may be this server."""
        card = self._card()
        self.dialect = DIALECTS.get(str(card.get("owned_by")), ECHO)
        # `created` is the time of the request or of the start in vLLM and llama-cpp-python.
        self.card = {key: card[key] for key in ("root", "max_model_len") if key in card}
        # The first alone, as it shows whether several may be under way.
        first = self.score(self.ids, 1)
        probes = [first, *in_threads([lambda: self.score(self.ids, 1)] * NUM_PROBES)]
        self.probe = np.mean(probes, axis=0)
        self._connection.may_be_another = False
        self.noise = max(distance(a, b) for a, b in combinations(probes, 2))
        if self.noise > NOISIEST_NATS:
            numbers = f"{self.noise:.2f} nats a token between requests (most: {NOISIEST_NATS})"
            problem = f"gives one text log-probabilities that vary by {numbers}"
            raise self._connection.refused(problem)
        self.refuse_other(self.probe, like.probe, f"than {like.url}")
        self._check_places()
        self._check_context()
        self._check_sums()

    def _card(self) -> dict[str, Any]:
        """Return what the server lists about the model; choose the model if it has only one."""
        listed = self._connection.request("/v1/models")
        try:
            models = {str(card["id"]): dict(card) for card in listed["data"]}
        except (KeyError, TypeError, ValueError):
            problem = f"does not list models at /v1/models; {REQUIRED}"
            raise self._connection.refused(problem) from None
        if not self.model and len(models) != 1:
            names = safe(", ".join(models))
            raise ConfigError(f"{self.url} has the models {names}; append one: {self.url}#NAME")
        self.model = self.model or next(iter(models))
        return models.get(self.model, {})

    def forget(self) -> None:
        """Compare the server with its first numbers again before the next prompt."""
        self._connection.may_be_another = True

    def recognize(self) -> None:
        """Raise if the server may have been restarted and its numbers are not its first ones."""
        with self._recognizing:
            if self._connection.may_be_another:
                self.refuse_other(self.score(self.ids, 1), self.probe, "since it was restarted")
                self._connection.may_be_another = False

    def refuse_other(self, now: np.ndarray, before: np.ndarray, than: str) -> None:
        """Raise if these are the numbers of two models. `than`: which other model, for the
        message."""
        nats = distance(now, before)
        if nats > max(OTHER_NATS, 3 * self.noise):
            numbers = f"{nats:.2f} nats a token, between requests by {self.noise:.2f}"
            problem = f"serves another model {than}: one text's loss differs by {numbers}"
            raise self._connection.refused(problem)

    def _check_places(self) -> None:
        """Reject numbers that belong to the token before or after: a token must have the same
        number when it is generated and when it is sent as part of the prompt."""
        num_tried = 0
        for end in (len(self.ids) // 4, len(self.ids) // 2, len(self.ids)):
            _, generated = self._score(self.ids[:end], 1)
            if generated is None:
                continue
            token = self._id_of(generated.token)
            if token is None or _log_p_of(generated.log_p) is None:
                continue
            num_tried += 1
            in_prompt = self.score([*self.ids[:end], token], end)[0]
            if not abs(in_prompt - generated.log_p) <= MISPLACED_NATS + 3 * self.noise:
                numbers = f"{generated.log_p:.2f} when it is generated, {in_prompt:.2f} in a prompt"
                problem = f"gives a token numbers that do not belong to it: {numbers}"
                raise self._connection.refused(f"{problem}; use another server")
        if num_tried == 0:
            problem = "does not return the token that it generates, to check its numbers"
            raise self._connection.refused(f"{problem}; {REQUIRED}")

    def _check_context(self) -> None:
        """Reject numbers that do not change with what precedes the last tokens: no source would
        matter to any statement."""
        passage, filler = self._two_passages()
        between = filler * NUM_FILLERS
        with_copy = [*passage, *between, *passage]
        without_copy = [*np.resize(filler, len(passage)).tolist(), *between, *passage]
        first = len(with_copy) - min(REPEATED_TOKENS, len(passage))
        nats = distance(self.score(with_copy, first), self.score(without_copy, first))
        least_nats = max(CONTEXT_NATS, 3 * self.noise)
        if nats < least_nats:
            numbers = f"{nats:.3f} nats a token (at least: {least_nats:.3f})"
            change = f"a passage {len(between)} tokens before changes its numbers by {numbers}"
            remedy = "check that it does not truncate prompts, and scores them in context"
            raise self._connection.refused(f"does not read its context: {change}; {remedy}")

    def _two_passages(self) -> tuple[list[int], list[int]]:
        """Return the probe and the filler; or, of a tokenizer that knows few of their words, such
        as one of another language, two halves of its vocabulary."""
        filler = self._encoded(FILLER) or []
        if min(len({*self.ids}), len({*filler})) >= MANY_TOKENS:
            return self.ids, filler
        vocabulary = {*self.tokenizer.get_vocab().values()}
        special = {*self.tokenizer.get_added_tokens_decoder()}
        tokens = sorted(vocabulary - special)[: 2 * len(self.ids)]
        return tokens[::2], tokens[1::2]

    def _check_sums(self) -> None:
        """Reject numbers that are no natural logarithms of probabilities: those of the most
        probable tokens add up to at most 1, and the others have less than the last of them."""
        vocab_size = 1.1 * self.tokenizer.get_vocab_size()  # models may have a few more
        # Where a model is nearly certain, as in further copies of a text, the rest is small, and
        # numbers on a smaller scale show as a rest that no other tokens account for.
        num = len(self.ids)
        repeated = self.ids * 4
        in_first_copy = range(max(1, num // 4), num, max(1, num // 8))
        in_further_copies = range(2 * num, 4 * num, max(1, num // 6))
        tails = list[float]()
        for end in (*in_first_copy, *in_further_copies):
            log_p = self._candidates(repeated[:end])
            if len(log_p) < 2:
                say(f"{self.url} returns no candidates, so the scale of its numbers is not checked")
                return
            total = sum(map(math.exp, log_p))
            last = math.exp(min(log_p))
            if total > MORE_THAN_ALL or 1 - total > vocab_size * last + UNEXPLAINED:
                self._refuse_scale(f"those of {len(log_p)} tokens add up to {total:.2f}")
            if CONCENTRATED[0] < total < CONCENTRATED[1]:
                tails.append((1 - total) / (len(log_p) * last))
        # Probabilities fall slowly with their rank. Logarithms of another base raise them to a
        # power, so that they fall fast and still leave much to the other tokens.
        if len(tails) >= LEAST_PLACES and min(tails) > LONGEST_TAIL:
            others = f"other tokens would have {min(tails):.0f} times what the last candidates have"
            self._refuse_scale(f"{others}, as with logarithms of base 2")

    def _refuse_scale(self, numbers: str) -> NoReturn:
        remedy = "it must return natural logarithms, at temperature 1"
        problem = f"gives numbers that are no log-probabilities ({numbers}); {remedy}"
        raise self._connection.refused(problem)

    def _candidates(self, ids: list[int]) -> list[float]:
        """Return log p of the most probable tokens behind a prompt; none if it does not tell."""
        body = self.dialect.candidates_request(ids)
        if body is None:
            return []
        reply = self._request(self.dialect.path, body)
        try:
            written = self.dialect.read_candidates(reply)
            numbers = [_log_p_of(value) for value in written]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return []
        return [number for number in numbers if number is not None]


def _log_p_of(written: Any) -> float | None:
    """Return the log-probability that a server wrote; None if it is not a usable number."""
    if not isinstance(written, int | float) or isinstance(written, bool):
        return None
    # NaN is not in this range, either. Rounding may make it a little more than 0.
    return min(float(written), 0.0) if LEAST_LOG_P < written < 1e-3 else None


def refuse_constant(ids: Sequence[int], log_p: Sequence[float | None], url: str) -> None:
    """Raise if many different tokens have one and the same log-probability, as of a server that
    computes nothing."""
    known = {token: number for token, number in zip(ids, log_p, strict=True) if number is not None}
    if len(known) >= MANY_TOKENS and len(set(known.values())) == 1:
        problem = f"{url} gives {len(known)} different tokens the same log-probability"
        raise DataError(f"{problem}; check that it returns those of the prompt")


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


PromptKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Token IDs of a prompt and of its continuation: `Prompt.key`."""


class Servers(PromptModel):
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
        self.at_once = at_once
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        if meet:
            for server in self.servers:
                server.meet(self.servers[0])

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Threads take the sorted prompts in turn, so that neighbours meet what a server's cache
        holds of them. `token_forwards` counts what is sent."""
        different = sorted({prompt.key for prompt in prompts})
        waiting = deque(different)
        scores = dict[PromptKey, np.ndarray]()
        gone = dict[Server, str]()
        for server in self.servers:
            server.forget()
        while waiting:
            alive = [server for server in self.servers if server not in gone]
            if not alive:
                raise DataError(f"no server is left: {'; '.join(gone.values())}")
            workers = self._workers(alive)
            in_threads([partial(_work, server, waiting, scores, gone) for server in workers])
        # Over all replies, as each may be too short to show it.
        ids = list[int]()
        every_log_p = list[float]()
        for (_, after), log_p in scores.items():
            ids += after
            every_log_p += log_p.tolist()
        refuse_constant(ids, every_log_p, self.servers[0].url)
        self.token_forwards += sum(len(before) + len(after) - 1 for before, after in different)
        return [scores[prompt.key] for prompt in prompts]

    def _workers(self, alive: Sequence[Server]) -> list[Server]:
        """Return the server that each thread asks: in turn, so that few prompts are shared."""
        workers = [*alive]
        for _ in range(self.at_once - 1):
            workers += [server for server in alive if server.identifies_prompts]
        return workers

    def recognize_in(self, folder: Path) -> None:
        """Write the first server's numbers for the probe into a folder of results, or raise if
        they differ from those in it."""
        first = self.servers[0]
        before = read_probe(folder)
        if before is None:
            write_atomically(folder / PROBE_FILE, json.dumps(first.probe.tolist()))
        else:
            first.refuse_other(first.probe, before, f"than when {folder} was begun")

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        return self.servers[0].generate(ids, max_new_tokens)


def _work(
    server: Server,
    waiting: deque[PromptKey],
    scores: dict[PromptKey, np.ndarray],
    gone: dict[Server, str],
) -> None:
    """Score the prompts that are waiting, until the server does not reply."""
    while server not in gone:
        try:
            before, after = waiting.popleft()
        except IndexError:
            return
        try:
            server.recognize()
            log_p = server.score([*before, *after], len(before))
            server.recognize()  # it may have been restarted meanwhile
            scores[before, after] = log_p
        except ServerGone as error:
            waiting.append((before, after))
            gone[server] = str(error)
        except BaseException:
            waiting.clear()  # other threads end, too
            raise


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at once. The first failure, or an interrupt, does not
    wait for the others."""
    finished = SimpleQueue[tuple[int, Any, BaseException | None]]()

    def run(number: int) -> None:
        try:
            finished.put((number, calls[number](), None))
        except BaseException as error:
            finished.put((number, None, error))

    for number in range(len(calls)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    results = dict[int, Any]()
    for _ in calls:
        number, result, error = finished.get()
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(len(calls))]
