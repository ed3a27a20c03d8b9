"""Meet a server: find out how it is asked, and prove that its numbers can be used.

Place in the flow: servers.py opens servers → **checks** (`meet`) → prompts (server.py).

A wrong number looks like any other, so each way in which servers were seen to return one is tried
on texts whose numbers are known to differ or to agree:

    another model    the probe has other numbers than on the first server
    misplaced        a token has another number in a prompt than when it is generated
    without context  numbers do not change with what precedes the last tokens
    another scale    numbers are no natural logarithms, or of probabilities at another temperature
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.sources.connection import safe
from olmo_sparsity.sources.dialects import DIALECTS, ECHO
from olmo_sparsity.sources.probe import distance
from olmo_sparsity.sources.server import MANY_TOKENS, REQUIRED, Server, as_log_p
from olmo_sparsity.sources.threads import in_threads

# --- noise ----------------------------------------------------------------------------------------

NUM_PROBES = 4
"""How often the probe is scored at once, to measure by how much the server's numbers vary."""

NOISIEST_NATS = 0.2
"""With more noise than this, models cannot be told apart."""

# --- places ---------------------------------------------------------------------------------------

MISPLACED_NATS = 0.5
"""A generated token and the same token in a prompt differ by rounding only; a number that belongs
to the token beside it usually differs by several nats."""

# --- context --------------------------------------------------------------------------------------

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

# --- scale ----------------------------------------------------------------------------------------

MORE_THAN_ALL = 1.02
"""The sum of probabilities of candidates must be less, with room for rounding to 8 bits."""

UNEXPLAINED = 0.005
"""Probability that candidates lack, beyond what all other tokens can have."""

MIN_CONCENTRATED = 0.5
MAX_CONCENTRATED = 0.99
"""Sums of the candidates' probabilities between which the other tokens are compared with the last
candidate: a flat distribution has no candidates that stand out, and rounding hides a small rest."""

LONGEST_TAIL = 8.0
"""The other tokens together have this many times the last candidate, for each candidate, at one
place at least. With SmolLM2 and the demo model it is 0.5 to 1.3 at the place where it is least;
with logarithms of base 2 it would be 21 to 173."""

MIN_PLACES = 4
"""Places that must be concentrated for this comparison."""


def meet(server: Server, like: Server) -> None:
    """Find out which requests the server takes, and whether its numbers can be used. Raise if its
    model is another one than that of `like`, which may be this server."""
    card = _read_card(server)
    server.dialect = DIALECTS.get(str(card.get("owned_by")), ECHO)
    # `created` is the time of the request or of the start in vLLM and llama-cpp-python.
    server.card = {key: card[key] for key in ("root", "max_model_len") if key in card}

    # The first alone, as it shows whether several may be under way.
    probes = [server.score(server.probe_ids, 1)]
    probes += in_threads([lambda: server.score(server.probe_ids, 1)] * NUM_PROBES)
    server.probe_log_p = np.mean(probes, axis=0)
    server.trust()
    server.noise = max(distance(a, b) for a, b in combinations(probes, 2))
    if server.noise > NOISIEST_NATS:
        numbers = f"{server.noise:.2f} nats a token between requests (most: {NOISIEST_NATS})"
        problem = f"gives one text log-probabilities that vary by {numbers}"
        raise server.error(problem)
    server.check_same_model(server.probe_log_p, like.probe_log_p, f"than {like.url}")
    _check_places(server)
    _check_context(server)
    _check_scale(server)


def _read_card(server: Server) -> dict[str, Any]:
    """Return what the server lists about the model; choose the model if it has only one."""
    listed = server.list_models()
    try:
        models = {str(card["id"]): dict(card) for card in listed["data"]}
    except (KeyError, TypeError, ValueError):
        problem = f"does not list models at /v1/models; {REQUIRED}"
        raise server.error(problem) from None
    if not server.model and not models:
        raise server.error("lists no model; load one there, or append its name: URL#NAME")
    if not server.model and len(models) != 1:
        names = safe(", ".join(models))
        raise ConfigError(f"{server.url} has the models {names}; append one: {server.url}#NAME")
    server.model = server.model or next(iter(models))
    return models.get(server.model, {})


def _check_places(server: Server) -> None:
    """Reject numbers that belong to the token before or after: a token must have the same number
    when it is generated and when it is sent as part of the prompt."""
    num_tried = 0
    num_tokens = len(server.probe_ids)
    for end in (num_tokens // 4, num_tokens // 2, num_tokens):
        ids = server.probe_ids[:end]
        generated = server.score_and_generate(ids, 1).generated
        if generated is None:
            continue
        token = server.id_of(generated.token)
        if token is None or as_log_p(generated.log_p) is None:
            continue
        num_tried += 1
        in_prompt = server.score([*ids, token], end)[0]
        if not abs(in_prompt - generated.log_p) <= MISPLACED_NATS + 3 * server.noise:
            numbers = f"{generated.log_p:.2f} when it is generated, {in_prompt:.2f} in a prompt"
            problem = f"gives a token numbers that do not belong to it: {numbers}"
            raise server.error(f"{problem}; use another server")
    if num_tried == 0:
        problem = "does not return the token that it generates, to check its numbers"
        raise server.error(f"{problem}; {REQUIRED}")


def _check_context(server: Server) -> None:
    """Reject numbers that do not change with what precedes the last tokens: no source would matter
    to any statement."""
    passage, filler = _passage_and_filler(server)
    between = filler * NUM_FILLERS
    with_copy = [*passage, *between, *passage]
    without_copy = [*np.resize(filler, len(passage)).tolist(), *between, *passage]
    first = len(with_copy) - min(REPEATED_TOKENS, len(passage))
    nats = distance(server.score(with_copy, first), server.score(without_copy, first))
    min_nats = max(CONTEXT_NATS, 3 * server.noise)
    if nats < min_nats:
        numbers = f"{nats:.3f} nats a token (at least: {min_nats:.3f})"
        change = f"a passage {len(between)} tokens before changes its numbers by {numbers}"
        remedy = "check that it does not truncate prompts, and scores them in context"
        raise server.error(f"does not read its context: {change}; {remedy}")


def _passage_and_filler(server: Server) -> tuple[list[int], list[int]]:
    """Return the probe and the filler; or, of a tokenizer that knows few of their words, such as
    one of another language, two halves of its vocabulary."""
    filler = server.encode(FILLER) or []
    if min(len({*server.probe_ids}), len({*filler})) >= MANY_TOKENS:
        return server.probe_ids, filler
    vocabulary = {*server.tokenizer.get_vocab().values()}
    special = {*server.tokenizer.get_added_tokens_decoder()}
    tokens = sorted(vocabulary - special)[: 2 * len(server.probe_ids)]
    return tokens[::2], tokens[1::2]


def _check_scale(server: Server) -> None:
    """Reject numbers that are no natural logarithms of probabilities: those of the most probable
    tokens add up to at most 1, and the others have less than the last of them."""
    max_tokens = 1.1 * server.tokenizer.get_vocab_size()  # models may have a few more
    tails = list[float]()
    for prompt in _prompts_of_scale(server.probe_ids):
        log_p = server.candidates(prompt)
        if len(log_p) < 2:
            say(f"{server.url} returns no candidates, so the scale of its numbers is not checked")
            return
        total = sum(map(math.exp, log_p))
        last_candidate = math.exp(min(log_p))
        if total > MORE_THAN_ALL or 1 - total > max_tokens * last_candidate + UNEXPLAINED:
            raise _scale_error(server, f"those of {len(log_p)} tokens add up to {total:.2f}")
        if MIN_CONCENTRATED < total < MAX_CONCENTRATED:
            tails.append((1 - total) / (len(log_p) * last_candidate))
    # Probabilities fall slowly with their rank. Logarithms of another base raise them to a power,
    # so that they fall fast and still leave much to the other tokens.
    if len(tails) >= MIN_PLACES and min(tails) > LONGEST_TAIL:
        others = f"other tokens would have {min(tails):.0f} times what the last candidates have"
        raise _scale_error(server, f"{others}, as with logarithms of base 2")


def _prompts_of_scale(probe_ids: list[int]) -> list[list[int]]:
    """Return beginnings of the probe, and of further copies of it. Where a model is nearly certain,
    as in these copies, the rest is small, and numbers on a smaller scale show as a rest that no
    other tokens account for."""
    num_tokens = len(probe_ids)
    repeated = probe_ids * 4
    in_first_copy = range(max(1, num_tokens // 4), num_tokens, max(1, num_tokens // 8))
    in_further_copies = range(2 * num_tokens, 4 * num_tokens, max(1, num_tokens // 6))
    return [repeated[:end] for end in (*in_first_copy, *in_further_copies)]


def _scale_error(server: Server, numbers: str) -> DataError:
    remedy = "it must return natural logarithms, at temperature 1"
    return server.error(f"gives numbers that are no log-probabilities ({numbers}); {remedy}")
