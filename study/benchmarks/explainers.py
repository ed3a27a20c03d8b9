"""The contestants of explain.py. Each is made ready with a model and its tokenizer, and then gives
a score to every far token of a question.

This project is imported only where it is evaluated, so that a package with requirements that
conflict with ours can run in an environment of its own:

    python -m study.benchmarks.explainers NAME MODEL QUESTIONS ANSWERS CPU_SECONDS

appends to ANSWERS, a line for each question: scores, seconds, token-forwards, memory.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

K = 16
"""How many distant tokens those of our selectors choose that look at few of them exactly."""


@dataclass(frozen=True)
class Question:
    """Which tokens of `distant` does `answer` depend on, with `local` between them?"""

    distant: list[int]
    local: list[int]
    answer: list[int]
    tokenizer: Any

    @property
    def ids(self) -> list[int]:
        return [*self.distant, *self.local, *self.answer]

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token, with the white space before it."""
        text = self.tokenizer.decode(self.ids, clean_up_tokenization_spaces=False)
        read = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ends = [end for _, end in read["offset_mapping"]]
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def distant_pieces(self) -> list[str]:
        return self.pieces[: len(self.distant)]

    @property
    def local_text(self) -> str:
        return "".join(self.pieces[len(self.distant) : -len(self.answer)])

    @property
    def answer_text(self) -> str:
        return "".join(self.pieces[-len(self.answer) :])

    @property
    def prompt(self) -> str:
        return "".join(self.distant_pieces) + self.local_text

    def shorter(self) -> Question:
        """To warm up with."""
        return replace(self, distant=self.distant[-40:])

    def told(self, found: Any) -> dict[str, Any]:
        """What is kept of the scores."""
        scores_F = torch.as_tensor(found).double()[: len(self.distant)]
        assert scores_F.shape == (len(self.distant),), scores_F.shape
        return {"scores": scores_F.tolist()}

    def is_read_back(self) -> bool:
        """Whether its text, its prompt and its answer are cut into its tokens again. Most packages
        are given texts."""
        texts = ["".join(self.pieces), self.prompt, self.answer_text]
        read = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return read == [self.ids, self.distant + self.local, self.answer]


Scores = Callable[[Question], Any]
"""Scores of each distant token, or of each token of the text from its beginning."""


# --- ours -----------------------------------------------------------------------------------------


def ours(selector: str, model: Any, tokenizer: Any, *, most: int | None = None) -> Scores:
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors.influence import SELECTORS
    from olmo_sparsity.analysis.selectors.influence import Question as Asked
    from olmo_sparsity.models.load import wrap_model
    from olmo_sparsity.text.units import Units
    from olmo_sparsity.text.windows import Windows

    wrapped = wrap_model(model, tokenizer).model

    def scores(question: Question) -> np.ndarray:
        tokens, num_distant = np.array(question.ids), len(question.distant)
        first = num_distant + len(question.local)
        block = Windows("all", len(question.local)).block(tokens, first, len(tokens))
        scorer = Scorer(wrapped)
        asked = Asked(
            scorer.context(block),
            Units.of_tokens(num_distant),
            [(0, len(question.answer))],
            most or num_distant,
            np.random.default_rng(0),
        )
        choice = SELECTORS[selector](scorer, asked)
        found = np.zeros(num_distant)
        found[choice.unit_TK[0]] = choice.influence_TK[0]
        return found

    return scores


# --- others ---------------------------------------------------------------------------------------


def one_forward(model: Any, tokenizer: Any) -> Scores:
    """What plain transformers takes to read the question once, with the logits of the answer; it
    scores nothing."""

    @torch.no_grad()
    def scores(question: Question) -> np.ndarray:
        model(
            torch.tensor([question.ids]), logits_to_keep=len(question.answer) + 1, use_cache=False
        )
        return np.zeros(len(question.distant))

    return scores


def context_cite(num_ablations: int, model: Any, tokenizer: Any) -> Scores:
    """Its sources are the distant tokens; a source that is left out is cut from the text."""
    from context_cite import ContextCiter
    from context_cite.context_partitioner import BaseContextPartitioner

    class Tokens(BaseContextPartitioner):
        def __init__(self, pieces: list[str]) -> None:
            super().__init__("".join(pieces))
            self.pieces = pieces

        @property
        def num_sources(self) -> int:
            return len(self.pieces)

        def split_context(self) -> None:
            pass  # they are split

        def get_source(self, index: int) -> str:
            return self.pieces[index]

        def get_context(self, mask: Any = None) -> str:
            kept = self.pieces if mask is None else np.array(self.pieces)[mask]
            return "".join(kept)

    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.padding_side = "left"

    def scores(question: Question) -> np.ndarray:
        sources = Tokens(question.distant_pieces)
        citer = ContextCiter(
            model,
            tokenizer,
            sources.context,
            question.local_text,
            num_ablations=num_ablations,
            prompt_template="{context}{query}",
            partitioner=sources,
        )
        # It explains what the model writes; an answer that is given goes where that is kept.
        citer._cache["output"] = question.prompt + question.answer_text
        assert citer._response_ids == question.answer
        return citer.get_attributions(verbose=False)

    return scores


def captum_perturbed(method: str, model: Any, tokenizer: Any, **settings: Any) -> Scores:
    """A distant token that is absent is cut from the text."""
    import captum.attr

    attribution = captum.attr.LLMAttribution(getattr(captum.attr, method)(model), tokenizer)

    def scores(question: Question) -> Any:
        local_text = question.local_text
        text = captum.attr.TextTemplateInput(
            lambda *distant: "".join(distant) + local_text, question.distant_pieces
        )
        target = torch.tensor(question.answer)
        # One forward for the whole answer, not one for each token of it.
        return attribution.attribute(
            text, target=target, forward_in_tokens=False, **settings
        ).seq_attr

    return scores


def inseq(method: str, model: Any, tokenizer: Any) -> Scores:
    import inseq

    if method == "attention":
        model.set_attn_implementation("eager")  # the fused kernels keep no weights
    if model.config.bos_token_id is None:
        model.config.bos_token_id = (
            model.config.eos_token_id
        )  # it requires one, and does not use it
    attribution = inseq.load_model(model, method, tokenizer=tokenizer)

    def scores(question: Question) -> Any:
        found = attribution.attribute(
            question.prompt, question.prompt + question.answer_text, show_progress=False
        )
        # Rows: tokens of the text; columns: tokens of the answer.
        return found[0].aggregate().target_attributions.nan_to_num().sum(1)

    return scores


def lxt(model: Any, tokenizer: Any) -> Scores:
    from lxt.efficient import monkey_patch

    monkey_patch(sys.modules[type(model).__module__])
    model.requires_grad_(False)

    def scores(question: Question) -> Any:
        embedded = model.get_input_embeddings()(torch.tensor([question.ids])).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        places = torch.arange(-len(question.answer) - 1, -1)
        logits[places, torch.tensor(question.answer)].sum().backward()
        return (embedded * embedded.grad).sum(-1)[0].detach()

    return scores


def flashtrace(model: Any, tokenizer: Any) -> Scores:
    from flashtrace import FlashTrace

    model.set_attn_implementation("eager")  # as above
    tracer = FlashTrace(model, tokenizer)

    def scores(question: Question) -> Any:
        span = (0, len(question.answer) - 1)
        found = tracer.trace(prompt=question.prompt, target=question.answer_text, output_span=span)
        return found.scores

    return scores


OURS = "ours"
CONTESTANTS: dict[str, tuple[str, Callable[..., Scores]]] = {
    "add_one": (OURS, partial(ours, "add_one")),
    f"add_one_nested, k = {K}": (OURS, partial(ours, "add_one_nested", most=K)),
    f"add_one_screened, k = {K}": (OURS, partial(ours, "add_one_screened", most=K)),
    "gradient": (OURS, partial(ours, "gradient")),
    "attention": (OURS, partial(ours, "attention")),
    "one forward": ("transformers", one_forward),
    "context-cite, 64 ablations": ("context-cite", partial(context_cite, 64)),
    "context-cite, 256 ablations": ("context-cite", partial(context_cite, 256)),
    "captum FeatureAblation": ("captum", partial(captum_perturbed, "FeatureAblation")),
    "captum KernelShap, 256 samples": (
        "captum",
        partial(captum_perturbed, "KernelShap", n_samples=256),
    ),
    "inseq attention": ("inseq", partial(inseq, "attention")),
    "inseq saliency": ("inseq", partial(inseq, "saliency")),
    "inseq input_x_gradient": ("inseq", partial(inseq, "input_x_gradient")),
    "lxt AttnLRP": ("lxt", lxt),
    "flashtrace": ("flashtrace", flashtrace),
    "random": (OURS, partial(ours, "random")),
}
"""Name → package (as on PyPI), and what makes it ready."""

ELSEWHERE = {"lxt": "transformers below 5", "flashtrace": "NumPy 2"}
"""Packages with requirements that conflict with ours."""


MEMORY_GIB = 12
"""What a contestant may take."""


# --- one of them in a process of its own ----------------------------------------------------------


class TokenForwards:
    """Batch × length of every forward of a model; a backward through it counts as two more."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        body = model.base_model  # what all of them call, with the head or without
        forward = body.forward

        @wraps(forward)  # no hook: ours rejects those of other packages
        def counted(*given: Any, **named: Any) -> Any:
            output = forward(*given, **named)
            self._add(output.last_hidden_state)
            return output

        body.forward = counted

    def _add(self, hidden_BLD: Any) -> None:
        num_tokens = hidden_BLD.shape[0] * hidden_BLD.shape[1]
        self.count += num_tokens
        if hidden_BLD.requires_grad:
            hidden_BLD.register_hook(partial(self._add_backward, num_tokens))

    def _add_backward(self, num_tokens: int, gradient_BLD: Any) -> None:
        self.count += 2 * num_tokens


def memory_mib(begin: bool = False) -> float:
    """The most this process has held since it last said `begin`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    (held,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(held) / 2**10


def limit(cpu_seconds: int, counter: TokenForwards) -> None:
    """End this process after this many seconds, or with too much memory."""

    def give_up(*_: Any) -> None:
        sys.exit(f"more than {cpu_seconds} s, {counter.count:,} token-forwards till then")

    signal.signal(signal.SIGXCPU, give_up)
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, resource.RLIM_INFINITY))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_GIB * 2**30, most))


def be_quiet_and_repeatable() -> None:
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.manual_seed(0)
    np.random.seed(0)
    torch.set_num_threads(1)


def version_of(package: str) -> str:
    try:
        return version("olmo-sparsity" if package == OURS else package)
    except PackageNotFoundError:
        sys.exit(f"not installed: pip install {package}")


def answer(
    scores: Scores, asked: list[Any], answers: str, counter: TokenForwards, more: dict[str, Any]
) -> None:
    """A line for each question: its input, its cost, and `more`."""
    with open(answers, "a") as file:
        for question in asked:
            held, counter.count = memory_mib(begin=True), 0
            wall, cpu = time.perf_counter(), time.process_time()
            found = scores(question)
            row = {
                "cpu_s": time.process_time() - cpu,
                "wall_s": time.perf_counter() - wall,
                "token_forwards": counter.count,
                "memory_mib": memory_mib() - held,
                **more,
                **question.told(found),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()


def main(name: str, folder: str, questions: str, answers: str, cpu_seconds: str) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    be_quiet_and_repeatable()
    package, make_ready = CONTESTANTS[name]
    about = {"version": version_of(package)}
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    scores = make_ready(model=model, tokenizer=tokenizer)
    with open(questions) as file:
        asked = [Question(**row, tokenizer=tokenizer) for row in json.load(file)]
    scores(asked[0].shorter())
    counter = TokenForwards(model)
    limit(int(cpu_seconds), counter)
    answer(scores, asked, answers, counter, about)


def ask(
    python: str, module: str, words: list[Any], questions: Any, cpu_seconds: int
) -> tuple[list[dict[str, Any]], str]:
    """Answers of a contestant in its own process, and the reason why the rest has none. `module`:
    what runs it; `words`: its name, and the folder of the model."""
    with tempfile.TemporaryDirectory() as place:
        asked, answers = Path(place, "questions.json"), Path(place, "answers.jsonl")
        asked.write_text(json.dumps(questions))
        answers.touch()
        command = [python, "-m", module, *map(str, words), str(asked), str(answers)]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        try:
            done = subprocess.run(
                [*command, str(cpu_seconds)],
                capture_output=True,
                text=True,
                env=os.environ | environment,
                timeout=10 * cpu_seconds,
            )
        except subprocess.TimeoutExpired:
            return [], f"did not end in {10 * cpu_seconds} s"
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return rows, last[:160].replace("|", "/")
    return rows, ""


if __name__ == "__main__":
    main(*sys.argv[1:])
