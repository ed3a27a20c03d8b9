"""A real HTTP server on loopback, whose model is a table, and which fails as servers do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 45

WRONG: dict[str | None, Any] = {
    **{"nan": float("nan"), "positive": 0.7, "null": None, "text": "-1.0", "far": -9999.0},
    **{"list": [], "true": True, "large": 10**400},
}
"""Faults, and what they put in place of a log-probability."""

PROMPT_KEYS = ("input_ids", "prompt")
"""The keys under which a dialect's requests may have the prompt. A new dialect adds its own."""

SCORING_KEYS = {"logprobs", "return_logprob", "n_probs"}
"""A request with one of these keys asks for log-probabilities; any other one for text. A new
dialect adds its own."""


class TableModel:
    """Each token depends on the two before it, and a little on all."""

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.last_VV, self.before_VV = generator.normal(size=(2, VOCABULARY, VOCABULARY))

    def log_p(self, ids: Sequence[int]) -> np.ndarray:
        """log_p_LV behind each token."""
        before = [0, *ids[:-1]]
        logits_LV = 2 * self.last_VV[list(ids)] + self.before_VV[before]
        # A token that a text has is more probable from there on.
        seen_LV = np.maximum.accumulate(np.eye(VOCABULARY)[list(ids)], axis=0)
        logits_LV = logits_LV + seen_LV
        return logits_LV - np.log(np.exp(logits_LV).sum(1, keepdims=True))

    def truth(self, prefix: Sequence[int], continuation: Sequence[int]) -> np.ndarray:
        log_p_LV = self.log_p([*prefix, *continuation])
        places = np.arange(len(prefix), len(prefix) + len(continuation))
        return log_p_LV[places - 1, list(continuation)]


class FakeServer:
    """`fault`: what goes wrong with the request of this number, or None. Requests of a prompt are
    counted, from 0."""

    def __init__(
        self,
        tokenizer: Any,
        owner: str = "me",
        fault: Callable[[int], str | None] = lambda number: None,
        seed: int = 0,
        key: str = "",
        broken: str = "",
    ) -> None:
        """`broken`: how numbers are wrong from the first one on."""
        self.broken = broken
        self.tokenizer, self.owner, self.fault, self.key = tokenizer, owner, fault, key
        self.model, self.number, self.delay_s = TableModel(seed), 0, 0.0
        self.noise, self._rng = 0.0, np.random.default_rng(seed)
        self.card = dict[str, Any]()
        self.named = "table"  # the model that replies name
        self.num_now = self.most_now = 0
        self.prompts, self.bodies = list[list[int]](), list[dict[str, Any]]()
        self.port, self._lock = 0, threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = [{"id": "table", "owned_by": server.owner.split()[0]} | server.card]
                server._reply(self, {"data": [] if server.broken == "no models" else listed}, None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                    given = self.headers.get("Authorization")
                    server._reply(self, {"error": f"{given} is wrong"}, "401")
                    return
                with server._lock:
                    number, server.number = server.number, server.number + 1
                    server.prompts.append(server._prompt(body))
                    server.bodies.append(body)
                    server.num_now += 1
                    server.most_now = max(server.most_now, server.num_now)
                server._answer(self, body, server.fault(number))

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def restart(self, after_s: float, seed: int = 0) -> None:
        """Stop now, and start on the same port later."""
        self.stop()
        self.model = TableModel(seed)
        threading.Timer(after_s, self.start).start()

    def _answer(self, handler: Any, body: dict[str, Any], fault: str | None) -> None:
        time.sleep(self.delay_s)
        if fault == "slow":
            time.sleep(0.5)
        with self._lock:  # before the reply is written: its reader may send the next request
            self.num_now -= 1
        if self.owner in ("misplaced", "constant"):
            fault = self.owner
        if fault == "swapped":
            body = self._other(body)
        ids = self._prompt(body)
        ids += [token for token, _ in body.get("logit_bias", [])]
        log_p_LV = self._log_p(ids)
        best = int(log_p_LV[-1].argmax())
        values: list[Any] = [None, *log_p_LV[np.arange(len(ids) - 1), ids[1:]].tolist()]
        if fault == "misplaced":
            values = [None, *log_p_LV[np.arange(1, len(ids)), ids[1:]].tolist()]
        if fault == "constant":
            values = [None, *[0.0] * (len(ids) - 1)]
        if self.noise:
            with self._lock:
                noise = self._rng.normal(scale=self.noise, size=len(values) - 1)
            values = [None, *np.minimum(np.array(values[1:], float) + noise, 0).tolist()]
        if fault in WRONG:
            values[-1] = WRONG[fault]
        seen = list[Any](ids)
        if fault == "other":
            seen[-1] = (seen[-1] + 1) % VOCABULARY
        if fault in ("abc", "half a letter"):
            seen[-1] = {"abc": "token_id:abc", "half a letter": "\ud800"}[fault]
        if fault == "fewer":
            seen, values = seen[:-1], values[:-1]
        generated = best, float(log_p_LV[-1, best])
        if not SCORING_KEYS & body.keys():
            self._reply(handler, {"choices": [{"text": self._text(best)}]}, fault)
            return
        makers = {"vllm": self._vllm, "sglang": self._sglang, "sglang without id": self._sglang}
        makers["llamacpp"] = self._llamacpp
        make = makers.get(self.owner, self._echo)
        self._reply(handler, make(body, seen, values, generated), fault)

    @staticmethod
    def _prompt(body: dict[str, Any]) -> list[int]:
        return next(list(body[key]) for key in PROMPT_KEYS if body.get(key))

    def _log_p(self, ids: list[int]) -> np.ndarray:
        log_p_LV = self.model.log_p(ids)
        if self.broken == "truncated":
            parts = [
                self.model.log_p(ids[max(0, end - 40) : end])[-1] for end in range(1, len(ids))
            ]
            return np.array([*parts, self.model.log_p(ids[-40:])[-1]])
        if self.broken == "context-free":
            return np.repeat(self.model.log_p([3])[-1:], len(ids), axis=0)
        scales = {"base 2": 1 / np.log(2), "base 10": 1 / np.log(10), "halved": 0.5}
        scale = scales.get(self.broken, 1.0)
        return scale * log_p_LV

    def _top(self, ids: list[int], num: int) -> dict[int, float]:
        log_p_V = self._log_p(ids)[-1]
        return {int(token): float(log_p_V[token]) for token in np.argsort(-log_p_V)[:num]}

    def _other(self, body: dict[str, Any]) -> dict[str, Any]:
        """Another request of as many tokens and the same last ones."""
        key = next(key for key in PROMPT_KEYS if key in body)
        for other in self.bodies:
            a, b = other.get(key, []), body[key]
            if a != b and len(a) == len(b) and a[-4:] == b[-4:]:
                return other
        return body

    def _text(self, token: Any) -> str:
        if isinstance(token, str):
            return token
        return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def _echo(self, body: Any, ids: list[int], values: list[Any], best: Any) -> dict[str, Any]:
        log_p = {
            "tokens": [self._text(token) for token in [*ids, best[0]]],
            "token_logprobs": [*values, best[1]],
        }
        if not body.get("echo"):
            top = self._top(body["prompt"], body["logprobs"])
            log_p = {
                "tokens": [self._text(best[0])],
                "token_logprobs": [best[1]],
                "top_logprobs": [{self._text(token): value for token, value in top.items()}],
            }
        return {"choices": [{"text": self._text(best[0]), "logprobs": log_p}]}

    def _vllm(self, body: Any, ids: list[int], values: list[Any], best: Any) -> dict[str, Any]:
        if "prompt_logprobs" not in body:
            return self._echo(body, ids, values, best)
        assert body["prompt_logprobs"] == 0
        assert body["return_tokens_as_token_ids"]
        of_prompt: list[Any] = [
            {str(token): {"logprob": value, "rank": 1, "decoded_token": self._text(token)}}
            for token, value in zip(ids, values, strict=True)
        ]
        generated = {"tokens": [f"token_id:{best[0]}"], "token_logprobs": [best[1]]}
        choice = {"prompt_logprobs": [None, *of_prompt[1:]], "logprobs": generated}
        return {"choices": [choice | {"text": self._text(best[0])}]}

    def _sglang(self, body: Any, ids: list[int], values: list[Any], best: Any) -> dict[str, Any]:
        if "top_logprobs_num" in body:
            top = self._top(ids, body["top_logprobs_num"])
            rows = [[value, token, None] for token, value in top.items()]
            return {"meta_info": {"output_top_logprobs": [rows]}}
        first = body["logprob_start_len"]
        rows = [[value, token, None] for token, value in zip(ids, values, strict=True)][first:]
        if rows:
            rows[0][0] = None
        about = {"prompt_tokens": len(ids), "input_token_logprobs": rows}
        if self.owner == "sglang":
            about["id"] = body["rid"]
        return {"meta_info": about | {"output_token_logprobs": [[best[1], best[0], None]]}}

    def _llamacpp(self, body: Any, ids: list[int], values: list[Any], best: Any) -> dict[str, Any]:
        assert (body["n_predict"], body["temperature"]) == (1, 0)
        if body["n_probs"] > 1:
            rows = [{"logprob": value} for value in self._top(ids, body["n_probs"]).values()]
            return {"completion_probabilities": [{"top_logprobs": rows}]}
        token, value = (ids[-1], values[-1]) if body["logit_bias"] else best
        return {"completion_probabilities": [{"id": token, "logprob": value}]}

    def _reply(self, handler: Any, reply: dict[str, Any], fault: str | None) -> None:
        raw = json.dumps({"model": self.named} | reply).encode()
        raw = {
            "brackets": b"[" * 200_000,
            "huge": b" " * 2**22,
            "web page": b"<!DOCTYPE html><html><title>Sign in</title></html>",
        }.get(fault or "", raw)
        with suppress(OSError):  # who waits no longer has closed the connection
            if fault == "closed":
                return
            status = int(fault) if fault is not None and fault.isdecimal() else 200
            handler.send_response(status)
            if fault == "429":
                handler.send_header("Retry-After", "0")
            if fault == "307":
                handler.send_header("Location", "/elsewhere")
            if fault == "gzip":
                handler.send_header("Content-Encoding", "gzip")
            handler.send_header("Content-Length", str(len(raw)))
            handler.end_headers()
            handler.wfile.write(raw[: len(raw) // 2] if fault == "cut off" else raw)
            handler.close_connection = True
