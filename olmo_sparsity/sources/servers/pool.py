"""Share prompts among servers of one model.

Place in the flow: prompts of trials.py → **`Servers.score`** → log p. Threads take prompts from one
queue, and each asks one server (server.py). A server that stops replying leaves its prompts to the
others:

    queue     p1 p2 p3 p4 p5 …        sorted, so that neighbours begin alike
    threads   A: p1   B: p2   A: p3   …
    A stops   p3 goes back to the end of the queue, and B takes all that is left
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.models.prompts import Prompt, PromptModel
from olmo_sparsity.sources.servers.checks import meet
from olmo_sparsity.sources.servers.connection import (
    PATIENCE_S,
    TIMEOUT_S,
    ServerGone,
    WaitLimits,
)
from olmo_sparsity.sources.servers.log_probabilities import check_not_constant
from olmo_sparsity.sources.servers.probe import PROBE_FILE, read_probe
from olmo_sparsity.sources.servers.server import Server
from olmo_sparsity.sources.servers.threads import in_threads

PromptKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Token IDs of a prompt and of its continuation: `Prompt.key`. Equal prompts are sent once."""


@dataclass(frozen=True)
class _Work:
    """Prompts that threads score together. Each operation on the queue and the dictionaries is
    atomic in Python, so no lock is needed."""

    waiting: deque[PromptKey]
    log_p: dict[PromptKey, np.ndarray] = field(default_factory=dict)
    """log p of the continuation, by prompt."""

    gone: dict[Server, str] = field(default_factory=dict)
    """Servers that have stopped replying, with the reason."""


class Servers(PromptModel):
    """Servers of one model. Each gets `at_once` requests at a time, or one if nothing in its
    replies tells which prompt they are of."""

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
        are_checked: bool = True,
    ) -> None:
        """Meet the servers.

        Args:
            urls: One URL for each server.
            tokenizer: The tokenizer of the model.
            at_once: Number of requests that a server gets at a time.
            timeout_s, patience_s, first_patience_s: How long a server is waited for (`WaitLimits`).
            are_checked: Whether to check the servers' numbers. Without it, no request is sent.
        """
        limits = WaitLimits(timeout_s, patience_s, first_patience_s)
        self.servers = [Server(url, tokenizer, limits) for url in urls]
        self.at_once = at_once
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        if are_checked:
            for server in self.servers:
                meet(server, reference=self.servers[0])

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log p of each prompt's continuation. `token_forwards` counts what is sent."""
        # Sorted, so that prompts with the same beginning meet what a server's cache holds of it.
        different = sorted({prompt.key for prompt in prompts})
        work = _Work(deque(different))

        # Again if a server has put its prompt back when the threads of the others had ended.
        while work.waiting:
            alive = self._alive(work)
            in_threads([partial(_score_waiting, server, work) for server in self._workers(alive)])
        if different:
            # Only numbers between two probes of the same model are returned: a proxy may exchange
            # the model behind it without closing a connection.
            in_threads([partial(_recognize_again, server, work) for server in self._alive(work)])
            self._alive(work)
        self._check_replies(work)
        self.token_forwards += sum(
            len(prefix) + len(continuation) - 1 for prefix, continuation in different
        )
        return [work.log_p[prompt.key] for prompt in prompts]

    def _alive(self, work: _Work) -> list[Server]:
        """Return the servers that reply; raise DataError if none does."""
        alive = [server for server in self.servers if server not in work.gone]
        if not alive:
            raise DataError(f"no server is left: {'; '.join(work.gone.values())}")
        return alive

    def _workers(self, alive: Sequence[Server]) -> list[Server]:
        """Return the server that each thread asks. Servers take turns, so that few prompts are
        shared fairly, too."""
        workers = [*alive]
        for _ in range(self.at_once - 1):
            workers += [server for server in alive if server.identifies_prompts]
        return workers

    def _check_replies(self, work: _Work) -> None:
        """Raise DataError if the tokens of all replies together have one and the same number: a
        single reply may be too short to show it."""
        ids: list[int] = []
        every_log_p: list[float] = []
        for (_, continuation), log_p in work.log_p.items():
            ids += continuation
            every_log_p += log_p.tolist()
        check_not_constant(ids, every_log_p, self.servers[0].url)

    def recognize_in(self, folder: Path) -> None:
        """Write the first server's numbers for the probe into a folder of results. If the folder
        has such numbers, raise DataError unless they are of the same model."""
        server = self.servers[0]
        stored_log_p = read_probe(folder)
        if stored_log_p is None:
            write_atomically(folder / PROBE_FILE, json.dumps(server.probe_log_p.tolist()))
        else:
            when = f"than when {folder} was begun"
            server.check_same_model(server.probe_log_p, stored_log_p, when)

    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        return self.servers[0].generate(ids, max_new_tokens)


def _score_waiting(server: Server, work: _Work) -> None:
    """Score prompts of the queue with one server, until the queue is empty or the server is
    gone."""
    while server not in work.gone:
        try:
            prefix, continuation = work.waiting.popleft()
        except IndexError:
            return
        try:
            # Before, as the server may be another one since the last prompt; and after, as it may
            # have been restarted meanwhile, and the number would be of another model.
            server.recognize()
            log_p = server.score([*prefix, *continuation], len(prefix))
            server.recognize()
            work.log_p[prefix, continuation] = log_p
        except ServerGone as error:
            work.waiting.append((prefix, continuation))
            work.gone[server] = str(error)
        except BaseException:
            work.waiting.clear()  # other threads end, too
            raise


def _recognize_again(server: Server, work: _Work) -> None:
    """Raise if a server has become another model, as its numbers for the probe show."""
    server.distrust()
    try:
        server.recognize()
    except ServerGone as error:
        work.gone[server] = str(error)
