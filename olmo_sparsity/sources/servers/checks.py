"""Meet a server: find out how it is asked, and prove that its numbers can be used.

Place in the flow: servers/pool.py opens servers → **`meet`**, once for each → prompts (server.py).

A wrong number looks like any other, so each way in which servers were seen to return one is tried
on texts whose numbers are known to differ or to agree. `meet` raises an error for

    noise            two requests for the same text give numbers that differ much
    another model    the probe has other numbers than on the first server
    misplaced        a token has another number in a prompt than when it is generated
    without context  numbers do not change with what precedes the last tokens
    another scale    numbers are no natural logarithms, or of probabilities at another temperature

For example, a server that returns each number one token too late, which looks sound by itself:

    tokens                      The     bridge   opened   in
    it should return             –      −7.2     −3.1    −0.9
    it returns                   –       –       −7.2    −3.1     "in", when generated: −0.9

The *probe* is a text of 30 words that every server scores first (probe.py). A *number* is what a
server returns as the log-probability of a token.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.sources.dialects import DIALECTS, ECHO
from olmo_sparsity.sources.servers.connection import safe
from olmo_sparsity.sources.servers.log_probabilities import MANY_TOKENS, as_log_p
from olmo_sparsity.sources.servers.probe import distance
from olmo_sparsity.sources.servers.server import NOISE_FACTOR, REQUIRED, Server
from olmo_sparsity.sources.servers.threads import in_threads


def meet(server: Server, reference: Server) -> None:
    """Find out which requests the server takes, and check its numbers. Raise DataError if they
    cannot be used, or if `reference` has another model. `reference`: the first of several servers,
    which was met before; or this server itself."""
    card = _read_card(server)
    server.dialect = DIALECTS.get(str(card.get("owned_by")), ECHO)
    # Not `created`, the time of the request or of the start in vLLM and llama-cpp-python.
    server.card = {key: card[key] for key in ("root", "max_model_len") if key in card}

    # In this order: the checks after the first need the noise that it measures.
    _score_probe(server)
    server.check_same_model(server.probe_log_p, reference.probe_log_p, f"than {reference.url}")
    _check_not_misplaced(server)
    _check_context_is_read(server)
    _check_scale(server)


def _read_card(server: Server) -> dict[str, Any]:
    """Return what the server lists about its model at /v1/models. If the user has named no model,
    choose the only one."""
    listed = server.list_models()
    try:
        cards = {str(card["id"]): dict(card) for card in listed["data"]}
    except (KeyError, TypeError, ValueError):
        problem = f"does not list models at /v1/models; {REQUIRED}"
        raise server.error(problem) from None
    if server.model:
        # A server may take names that it does not list, such as those of adapters.
        return cards.get(server.model, {})
    if not cards:
        raise server.error("lists no model; load one there, or append its name: URL#NAME")
    if len(cards) != 1:
        names = safe(", ".join(cards))
        raise ConfigError(f"{server.url} has the models {names}; append one: {server.url}#NAME")
    ((server.model, card),) = cards.items()
    return card


# --- noise ----------------------------------------------------------------------------------------

NUM_PROBES = 4
"""How often the probe is scored at once, to measure by how much the server's numbers vary: batching
changes the order of sums, and with it the last digits."""

NOISIEST_NATS = 0.2
"""With more noise than this, models cannot be told apart."""


def _score_probe(server: Server) -> None:
    """Score the probe several times. Keep its mean numbers and by how much they vary, and raise if
    that is much."""
    # The first alone, as it shows whether several may be under way.
    log_p_of_probes = [server.score(server.probe_ids, 1)]
    log_p_of_probes += in_threads([lambda: server.score(server.probe_ids, 1)] * NUM_PROBES)
    server.probe_log_p = np.mean(log_p_of_probes, axis=0)
    server.trust()
    server.noise = max(distance(a, b) for a, b in combinations(log_p_of_probes, 2))
    if server.noise > NOISIEST_NATS:
        numbers = f"{server.noise:.2f} nats a token between requests (most: {NOISIEST_NATS})"
        problem = f"gives one text log-probabilities that vary by {numbers}"
        raise server.error(problem)


# --- misplaced ------------------------------------------------------------------------------------

MISPLACED_NATS = 0.5
"""A generated token and the same token in a prompt differ by rounding only; a number that belongs
to the token beside it usually differs by several nats."""


def _check_not_misplaced(server: Server) -> None:
    """Raise if numbers belong to the token before or after. A token must have the same number when
    it is generated after a prompt and when it is sent as the last token of this prompt."""
    num_compared = 0
    num_tokens = len(server.probe_ids)
    # At several places, as a single token may be as probable as the one beside it.
    for end in (num_tokens // 4, num_tokens // 2, num_tokens):
        ids = server.probe_ids[:end]
        generated = server.score_and_generate(ids, 1).generated
        if generated is None:
            continue
        token = server.tokens.id_of(generated.token)
        if token is None or as_log_p(generated.log_p) is None:
            continue
        num_compared += 1
        log_p_in_prompt = server.score([*ids, token], end)[0]
        tolerance = MISPLACED_NATS + NOISE_FACTOR * server.noise
        if abs(log_p_in_prompt - generated.log_p) > tolerance:
            numbers = (
                f"{generated.log_p:.2f} when it is generated, {log_p_in_prompt:.2f} in a prompt"
            )
            problem = f"gives a token numbers that do not belong to it: {numbers}"
            raise server.error(f"{problem}; use another server")
    if num_compared == 0:
        problem = "does not return the token that it generates, to check its numbers"
        raise server.error(f"{problem}; {REQUIRED}")


# --- without context ------------------------------------------------------------------------------

FILLER = (
    "Bread is baked early in the morning. The old clock on the market square has stopped again, "
    "and nobody knows who should repair it before the winter comes."
)
"""Another text than the probe, to stand between two copies of it."""

NUM_FILLERS = 3
REPEATED_TOKENS = 12
"""How many tokens at the end of the second copy are compared. Before the copy are `NUM_FILLERS`
other tokens."""

CONTEXT_NATS = 0.01
"""Nats a token by which they must differ: a copy mostly has several, rounding a thousandth."""


class _CopiedPassage(NamedTuple):
    """Tokens of two texts for the check of context."""

    passage: list[int]
    """What is repeated."""

    filler: list[int]
    """What stands between both copies."""


def _check_context_is_read(server: Server) -> None:
    """Raise if numbers do not change with what precedes the last tokens: no source would then
    matter to any statement.

    A model that reads its context predicts a passage better if it has read the passage before:

        with a copy      passage   filler filler filler   passage
        without one      filler    filler filler filler   passage
                                                             └── numbers of these are compared
    """
    passage, filler = _copied_passage(server)
    between = filler * NUM_FILLERS
    with_copy = [*passage, *between, *passage]
    # Of the same length, so that positions stay.
    without_copy = [*np.resize(filler, len(passage)).tolist(), *between, *passage]
    first = len(with_copy) - min(REPEATED_TOKENS, len(passage))
    nats = distance(server.score(with_copy, first), server.score(without_copy, first))
    min_nats = max(CONTEXT_NATS, NOISE_FACTOR * server.noise)
    if nats < min_nats:
        numbers = f"{nats:.3f} nats a token (at least: {min_nats:.3f})"
        change = f"a passage {len(between)} tokens before changes its numbers by {numbers}"
        remedy = "check that it does not truncate prompts, and scores them in context"
        raise server.error(f"does not read its context: {change}; {remedy}")


def _copied_passage(server: Server) -> _CopiedPassage:
    """Return the probe and the filler as tokens. A tokenizer that knows few of their words, such as
    one of another language, gets two halves of its vocabulary instead."""
    filler = server.tokens.encode(FILLER) or []
    if min(len({*server.probe_ids}), len({*filler})) >= MANY_TOKENS:
        return _CopiedPassage(server.probe_ids, filler)
    vocabulary = {*server.tokens.tokenizer.get_vocab().values()}
    special = {*server.tokens.tokenizer.get_added_tokens_decoder()}
    tokens = sorted(vocabulary - special)[: 2 * len(server.probe_ids)]
    return _CopiedPassage(tokens[::2], tokens[1::2])


# --- another scale --------------------------------------------------------------------------------

MORE_THAN_ALL = 1.02
"""The sum of probabilities of candidates must not be more, with room for rounding to 8 bits."""

UNEXPLAINED = 0.005
"""Probability that candidates may lack, beyond what all other tokens can have."""

MIN_CONCENTRATED = 0.5
MAX_CONCENTRATED = 0.99
"""Sums of the candidates' probabilities between which the other tokens are compared with the last
candidate: a flat distribution has no candidates that stand out, and rounding hides a small rest."""

LONGEST_TAIL = 8.0
"""All other tokens together have at most this many times what the candidates would have if each had
the probability of the last one, after one prompt at least. With SmolLM2 and the demo model it is
0.5 to 1.3 times after the prompt where it is least; with logarithms of base 2 it would be 21 to
173."""

MIN_PROMPTS = 4
"""Prompts with a concentrated distribution that this comparison requires."""

FEW_TOKENS = 512
"""With at most this many tokens in the vocabulary, such as bytes, all are scored. Five candidates
may be too few to tell there: with 45 tokens, these may have what is missing at base 2."""

LEAST_OF_ALL = 0.85
MOST_OF_ALL = 1.1
"""Between these is the sum of the probabilities of all tokens. With logarithms of base 2 it is at
most the largest probability to the power of 0.44, with those of base 10 mostly far above 1."""


class _Candidates(NamedTuple):
    """The probabilities of the most probable tokens after a prompt, summed up."""

    num_tokens: int
    total: float
    """The sum of their probabilities."""

    last: float
    """The probability of the least probable one."""

    @property
    def tail(self) -> float:
        """The probability of all other tokens, in multiples of `num_tokens` times `last`."""
        return (1 - self.total) / (self.num_tokens * self.last)


def _check_scale(server: Server) -> None:
    """Raise if numbers are no natural logarithms of probabilities. The probabilities of the most
    probable tokens add up to at most 1, and each other token has less than the last of them."""
    num_tokens = server.tokens.tokenizer.get_vocab_size()
    # A model may have more tokens than its tokenizer: its matrices are padded.
    max_tokens = 1.1 * num_tokens
    tails: list[float] = []
    # The prompt after which the candidates have least in all, and how much they have.
    flattest_prompt = _prompts_of_scale(server.probe_ids)[0]
    least_total = math.inf
    for prompt in _prompts_of_scale(server.probe_ids):
        log_p = server.candidates(prompt)
        if len(log_p) < 2 and num_tokens > FEW_TOKENS:
            say(f"{server.url} returns no candidates, so the scale of its numbers is not checked")
            return
        if len(log_p) < 2:
            break
        candidates = _Candidates(
            num_tokens=len(log_p), total=sum(map(math.exp, log_p)), last=math.exp(min(log_p))
        )

        # If every other token were as probable as the last candidate, they would have this much.
        num_others = max(0.0, max_tokens - candidates.num_tokens)
        most_of_others = num_others * candidates.last + UNEXPLAINED
        if candidates.total > MORE_THAN_ALL or 1 - candidates.total > most_of_others:
            raise _scale_error(
                server, f"those of {len(log_p)} tokens add up to {candidates.total:.2f}"
            )
        if MIN_CONCENTRATED < candidates.total < MAX_CONCENTRATED:
            tails.append(candidates.tail)
        if candidates.total < least_total:
            least_total = candidates.total
            flattest_prompt = prompt

    # Probabilities fall slowly with their rank. Logarithms of another base raise them to a power,
    # so that they fall fast and still leave much to the other tokens.
    if len(tails) >= MIN_PROMPTS and min(tails) > LONGEST_TAIL:
        others = f"other tokens would have {min(tails):.0f} times what the last candidates have"
        raise _scale_error(server, f"{others}, as with logarithms of base 2")
    if num_tokens <= FEW_TOKENS:
        _check_sum_of_all(server, flattest_prompt)


def _check_sum_of_all(server: Server, prompt: list[int]) -> None:
    """Raise unless the probabilities of all tokens after a prompt add up to about 1. Each is scored
    as the last token of a prompt, which only a small vocabulary allows.

    Args:
        prompt: The less certain the model is after it, the more another scale changes the sum.
    """
    ids = sorted(server.tokens.tokenizer.get_vocab().values())
    # One by one, as the replies of some servers do not show which prompt they are of.
    log_p = [server.score([*prompt, token], len(prompt))[0] for token in ids]
    total = sum(map(math.exp, log_p))
    # Padding may have the rest of a sum below 1. Noise may lower or raise all numbers.
    room = math.exp(NOISE_FACTOR * server.noise)
    if not LEAST_OF_ALL / room <= total <= MOST_OF_ALL * room:
        raise _scale_error(server, f"those of all {len(ids)} tokens add up to {total:.2f}")


def _prompts_of_scale(probe_ids: list[int]) -> list[list[int]]:
    """Return beginnings of the probe, and of further copies of it. Where a model is nearly certain,
    as in these copies, the other tokens have little. Numbers on a smaller scale then leave a rest
    that no other tokens account for."""
    num_tokens = len(probe_ids)
    repeated = probe_ids * 4
    ends_in_first_copy = range(max(1, num_tokens // 4), num_tokens, max(1, num_tokens // 8))
    ends_in_further_copies = range(2 * num_tokens, 4 * num_tokens, max(1, num_tokens // 6))
    return [repeated[:end] for end in (*ends_in_first_copy, *ends_in_further_copies)]


def _scale_error(server: Server, numbers: str) -> DataError:
    """Return the error of a server whose numbers are on another scale. `numbers`: what shows it."""
    remedy = "it must return natural logarithms, at temperature 1"
    return server.error(f"gives numbers that are no log-probabilities ({numbers}); {remedy}")
