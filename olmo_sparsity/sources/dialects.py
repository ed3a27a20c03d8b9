"""Write the requests and read the replies of servers: vLLM, SGLang, llama.cpp's own, and those that
follow OpenAI's `echo`.

Place in the flow: server.py sends what a dialect writes, and checks what it reads:

    token IDs → **`score_requests`** → JSON → the server → JSON → **`read_scores`** → a `Reply`

For example, `Echo` asks for the prompt [464, 7696, 9721] from index 1 on with the first line, and
is answered with the second, shortened to its two lists:

    {"prompt": [464, 7696, 9721], "max_tokens": 1, "logprobs": 1, "echo": true, …}
    "tokens": ["The", " bridge", " opened", " in"]    "token_logprobs": [null, -7.2, -3.1, -0.9]

    Reply(first_index=0, tokens=["The", " bridge", " opened"], log_p=[None, -7.2, -3.1],
          generated=Scored(" in", -0.9))

All log-probabilities are natural logarithms (base e, nats), of probabilities at temperature 1. All
four kinds of servers write them so. servers/checks.py looks for numbers of another base, such as 2,
and refuses them, so a dialect has to convert what its server writes otherwise.

To support another server, write one subclass of `Dialect` here and add it to `DIALECTS` at the end
of this file; docs/extend.md has an example of ten lines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

FORCING_BIAS = 1e6
"""Added to the logit of a token, it makes the token the most probable one, whatever the model
computes: logits are below a hundred."""


class Scored(NamedTuple):
    """A token and its log-probability, as a server writes them; nothing is checked yet."""

    token: Any
    """The token's ID, or its text."""

    log_p: Any
    """The natural logarithm of its probability."""


@dataclass(frozen=True)
class Reply:
    """What a server returned for a prompt: its last tokens with their log-probabilities, and the
    token that the server generates after it."""

    first_index: int
    """The index in the prompt of the first of `tokens`."""

    tokens: Sequence[Any]
    """Tokens of the prompt, each an ID or a text: those from `first_index` to the last."""

    log_p: Sequence[Any]
    """The log-probability of each of these tokens, a natural logarithm."""

    generated: Scored | None
    """The generated token. None means that the reply does not have it."""

    request_name: Any = None
    """The `request_name` that the request had, if the reply repeats it."""


class Dialect(ABC):
    """How one kind of server is asked for log-probabilities, and where its replies have them.

    Numbers are used only after checks, so three things are required of a server:

    1. It takes a prompt as token IDs. A dialect has no tokenizer: a prompt that is sent as text is
       tokenized again by the server, perhaps into other tokens.
    2. Its replies repeat the tokens that they score. Each is compared with the token that was sent.
    3. It generates one token after a prompt and returns its log-probability. The token is then
       sent as part of the prompt and must get the same number; otherwise the server's numbers
       belong to the token before or after (servers/checks.py).
    """

    owner: ClassVar[str]
    """What the server writes as `owned_by` of its models at /v1/models."""

    path: ClassVar[str]
    """Where requests are sent to."""

    repeats_prompts: ClassVar[bool]
    """Whether a reply repeats all tokens of the prompt but perhaps the first. False if it repeats
    only those that are scored. Many prompts share these, so a reply to another prompt would not be
    noticed: the server gets one request at a time, unless its replies name their requests."""

    num_candidates: ClassVar[int] = 20
    """How many of the most probable tokens `candidates_request` asks for."""

    @abstractmethod
    def score_requests(
        self, ids: list[int], first_index: int, request_name: str
    ) -> list[dict[str, Any]]:
        """Return the requests for log p of a prompt's tokens from an index on.

        Args:
            ids: The token IDs of the prompt.
            first_index: The index of the first token whose log p is needed, at least 1. The token
                that is generated after the prompt is needed only where it is 1.
            request_name: An identifier that a reply may repeat.
        """

    @abstractmethod
    def read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        """Read the parsed replies to `score_requests`. A reply of another form may raise any
        KeyError, TypeError, ValueError, IndexError, AttributeError or OverflowError."""

    def candidates_request(self, ids: list[int]) -> dict[str, Any] | None:
        """Return the request for the most probable tokens after a prompt. Return None for a server
        that returns none. The scale of its numbers is then not checked, and a line says so."""
        return None

    def read_candidates(self, reply: Any) -> list[Any]:
        """Return the log-probabilities of these tokens from the parsed reply. A reply of another
        form raises the same errors as in `read_scores`."""
        return []


class Echo(Dialect):
    """OpenAI's completions with `echo`, which return the prompt before the generated token."""

    owner = ""  # any server that names no other dialect
    path = "/v1/completions"
    repeats_prompts = True
    num_candidates = 5  # the limit of OpenAI's API

    def score_requests(
        self, ids: list[int], first_index: int, request_name: str
    ) -> list[dict[str, Any]]:
        return [self._completion(ids) | {"echo": True}]

    def read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        logprobs = replies[0]["choices"][0]["logprobs"]
        tokens = [_read_token(written) for written in logprobs["tokens"]]
        log_p = logprobs["token_logprobs"]

        # Some servers do not return the generated token, or return none at the end of a text.
        if len(tokens) != len(ids) + 1:
            return Reply(first_index=0, tokens=tokens, log_p=log_p, generated=None)
        return Reply(
            first_index=0,
            tokens=tokens[:-1],
            log_p=log_p[:-1],
            generated=Scored(token=tokens[-1], log_p=log_p[-1]),
        )

    def candidates_request(self, ids: list[int]) -> dict[str, Any]:
        return self._completion(ids) | {"logprobs": self.num_candidates}

    def read_candidates(self, reply: Any) -> list[Any]:
        return [*reply["choices"][0]["logprobs"]["top_logprobs"][0].values()]

    def _completion(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1}


class Vllm(Echo):
    """vLLM's completions: `prompt_logprobs` has the prompt's tokens by their IDs."""

    owner = "vllm"
    num_candidates = 20  # the default of --max-logprobs

    def score_requests(
        self, ids: list[int], first_index: int, request_name: str
    ) -> list[dict[str, Any]]:
        own_fields = {"prompt_logprobs": 0, "return_tokens_as_token_ids": True}
        return [self._completion(ids) | own_fields]

    def read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        # vLLM returns `prompt_logprobs` and the generated token's `logprobs` side by side:
        #     "prompt_logprobs": [null, {"7696": {"logprob": -7.2, …}}, {"9721": {…}}]
        #     "logprobs": {"tokens": ["token_id:287"], "token_logprobs": [-0.9]}
        # The first token has no number. The dictionary of another one may also hold the token that
        # is the most probable there.
        choice = replies[0]["choices"][0]
        candidates_of_tokens = choice["prompt_logprobs"][1:]
        if len(candidates_of_tokens) != len(ids) - 1:
            raise ValueError(f"{len(candidates_of_tokens) + 1} tokens where {len(ids)} were sent")

        tokens: list[Any] = []
        log_p: list[Any] = []
        for sent, candidates in zip(map(str, ids[1:]), candidates_of_tokens, strict=True):
            # Where the sent token is missing, another one is returned, so that the comparison with
            # the sent tokens names both.
            written = sent if sent in candidates else next(iter(candidates), None)
            tokens.append(_read_token(f"token_id:{written}"))
            log_p.append(candidates[written]["logprob"])

        generated = choice["logprobs"]
        token = _read_token(generated["tokens"][0])
        return Reply(
            first_index=1,
            tokens=tokens,
            log_p=log_p,
            generated=Scored(token=token, log_p=generated["token_logprobs"][0]),
        )


class Sglang(Dialect):
    """SGLang's own /generate."""

    owner = "sglang"
    path = "/generate"
    repeats_prompts = False

    def score_requests(
        self, ids: list[int], first_index: int, request_name: str
    ) -> list[dict[str, Any]]:
        # SGLang returns null for the first token that it scores, so one more is asked for.
        return [self._generate(ids) | {"logprob_start_len": first_index - 1, "rid": request_name}]

    def read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        # Everything but the text is in `meta_info`.
        answer = replies[0]["meta_info"]
        num_tokens = answer["prompt_tokens"]
        if num_tokens != len(ids):
            raise ValueError(f"{num_tokens!r:.20} tokens where {len(ids)} were sent")

        # The last rows, without the one more that was asked for.
        num_scored = len(ids) - first_index
        scored = [_read_row(row) for row in answer["input_token_logprobs"][-num_scored:]]
        return Reply(
            first_index=first_index,
            tokens=[token for token, _ in scored],
            log_p=[log_p for _, log_p in scored],
            generated=_read_row(answer["output_token_logprobs"][0]),
            request_name=answer.get("id"),
        )

    def candidates_request(self, ids: list[int]) -> dict[str, Any]:
        return self._generate(ids) | {"top_logprobs_num": self.num_candidates}

    def read_candidates(self, reply: Any) -> list[Any]:
        return [_read_row(row).log_p for row in reply["meta_info"]["output_top_logprobs"][0]]

    def _generate(self, ids: list[int]) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
        }


def _read_row(row: Any) -> Scored:
    """Read a row as SGLang writes it: [log-probability, token ID, text or null]."""
    return Scored(token=_read_token(row[1]), log_p=row[0])


class LlamaServer(Dialect):
    """llama.cpp's own server, which scores only what it generates. A bias makes it generate each
    token of the prompt in turn, and the log-probability that it returns leaves the bias out:

        prompt to score         [464, 7696, 9721], from index 1 on
        requests                [464] with a bias on 7696, and [464, 7696] with one on 9721
        and as first_index = 1  [464, 7696, 9721] without a bias: what it generates by itself
    """

    owner = "llamacpp"
    path = "/completion"
    repeats_prompts = False

    def score_requests(
        self, ids: list[int], first_index: int, request_name: str
    ) -> list[dict[str, Any]]:
        # A request for each token that is scored, with the tokens before it as the prompt.
        requests = [
            self._completion(ids[:end]) | {"logit_bias": [[ids[end], FORCING_BIAS]]}
            for end in range(first_index, len(ids))
        ]
        # Only then is the generated token needed (`Dialect.score_requests`), and each request costs
        # a forward.
        if first_index == 1:
            requests.append(self._completion(ids) | {"logit_bias": []})
        return requests

    def read_scores(self, replies: list[Any], ids: list[int], first_index: int) -> Reply:
        if any(reply.get("truncated") for reply in replies):
            raise ValueError(
                f"a prompt of {len(ids)} tokens was truncated; start the server with a larger -c"
            )

        # Replies are in the order of the requests: the forced tokens, then the other one, if any.
        generated = [reply["completion_probabilities"][0] for reply in replies]
        tokens = [_read_token(item["id"]) for item in generated]
        log_p = [item["logprob"] for item in generated]
        num_forced = len(ids) - first_index
        unforced = None
        if len(generated) > num_forced:
            unforced = Scored(tokens[num_forced], log_p[num_forced])
        return Reply(
            first_index=first_index,
            tokens=tokens[:num_forced],
            log_p=log_p[:num_forced],
            generated=unforced,
        )

    def candidates_request(self, ids: list[int]) -> dict[str, Any]:
        return self._completion(ids) | {"n_probs": self.num_candidates}

    def read_candidates(self, reply: Any) -> list[Any]:
        most_probable = reply["completion_probabilities"][0]["top_logprobs"]
        return [candidate["logprob"] for candidate in most_probable]

    def _completion(self, ids: list[int]) -> dict[str, Any]:
        return {"n_predict": 1, "n_probs": 1, "temperature": 0, "prompt": ids}


def _read_token(written: Any) -> Any:
    """Return the ID of a token that is written as `token_id:ID`, as vLLM does on request. Return
    anything else as it is."""
    if not isinstance(written, str):
        return written
    token_id = re.fullmatch(r"token_id:(\d{1,9})", written)
    return int(token_id[1]) if token_id else written


ECHO = Echo()
DIALECTS: dict[str, Dialect] = {
    dialect.owner: dialect for dialect in (Vllm(), Sglang(), LlamaServer())
}
"""By `owner`. A server of another owner is asked by `ECHO`."""
