"""Write the requests and read the replies of servers: vLLM, SGLang, llama.cpp's own, and OpenAI's
`echo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FORCE = 1e6  # is added to a logit


@dataclass(frozen=True)
class Reply:
    """What a server says of a prompt and of the token that it generates; nothing is checked yet."""

    first: int
    """The number of the token of the prompt with which `tokens` begin."""

    tokens: Sequence[Any]
    """IDs, texts, or `token_id:ID`."""

    log_p: Sequence[Any]
    generated: tuple[Any, Any]
    """A token and its log-probability."""

    request: Any = None
    """The identifier of the request, if the reply has it."""


@dataclass(frozen=True)
class Dialect:
    path: str
    bodies: Callable[[list[int], int, str], list[dict[str, Any]]]
    """The requests for a prompt's tokens, the number of the first that is scored, and the request's
    identifier."""

    read: Callable[[list[Any], list[int], int], Reply]
    """Gets the parsed replies, the prompt's tokens, and the number of the first that is scored."""


def _completion(ids: list[int], **others: Any) -> list[dict[str, Any]]:
    return [{"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1} | others]


def _read_echo(replies: list[Any], ids: list[int], first: int) -> Reply:
    found = replies[0]["choices"][0]["logprobs"]
    tokens, log_p = found["tokens"], found["token_logprobs"]
    generated = None, None
    if len(tokens) == len(ids) + 1:
        generated, tokens, log_p = (tokens[-1], log_p[-1]), tokens[:-1], log_p[:-1]
    return Reply(0, tokens, log_p, generated)


def _read_vllm(replies: list[Any], ids: list[int], first: int) -> Reply:
    choice = replies[0]["choices"][0]
    places, last = choice["prompt_logprobs"][1:], choice["logprobs"]
    tokens, log_p = list[Any](), list[Any]()
    for sent, place in zip(map(str, ids[1:]), places, strict=True):
        token = sent if sent in place else next(iter(place), None)
        tokens.append(f"token_id:{token}")
        log_p.append(place[token]["logprob"])
    return Reply(1, tokens, log_p, (last["tokens"][0], last["token_logprobs"][0]))


def _read_sglang(replies: list[Any], ids: list[int], first: int) -> Reply:
    about = replies[0]["meta_info"]
    if (num := about["prompt_tokens"]) != len(ids):
        raise ValueError(f"{num!r:.20} tokens where {len(ids)} were sent")
    rows = about["input_token_logprobs"][first - len(ids) :]
    (log_p, token, *_), *_ = about["output_token_logprobs"]
    tokens, numbers = [row[1] for row in rows], [row[0] for row in rows]
    return Reply(first, tokens, numbers, (token, log_p), about.get("id"))


def _forced(ids: list[int], first: int, name: str) -> list[dict[str, Any]]:
    """llama.cpp's server scores what it generates: a bias, which the number returned leaves out,
    makes it generate each token. For a whole text one request more, without a bias."""
    forced = [[[token, FORCE]] for token in ids[first:]] + ([[]] if first == 1 else [])
    one = {"n_predict": 1, "n_probs": 1, "temperature": 0}
    return [
        one | {"prompt": ids[:end], "logit_bias": bias} for end, bias in enumerate(forced, first)
    ]


def _read_forced(replies: list[Any], ids: list[int], first: int) -> Reply:
    made = [reply["completion_probabilities"][0] for reply in replies]
    tokens, log_p = [one["id"] for one in made], [one["logprob"] for one in made]
    num, rest = len(ids) - first, [*zip(tokens, log_p, strict=True), (None, None)]
    return Reply(first, tokens[:num], log_p[:num], rest[num])


DIALECTS = {
    "vllm": Dialect(
        "/v1/completions",
        lambda ids, first, name: _completion(
            ids, prompt_logprobs=0, return_tokens_as_token_ids=True
        ),
        _read_vllm,
    ),
    "sglang": Dialect(
        "/generate",
        lambda ids, first, name: [
            {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                # The log-probability of the first token returned is null.
                "logprob_start_len": first - 1,
                "rid": name,
            }
        ],
        _read_sglang,
    ),
    "llamacpp": Dialect("/completion", _forced, _read_forced),
    "echo": Dialect(
        "/v1/completions", lambda ids, first, name: _completion(ids, echo=True), _read_echo
    ),
}
