"""Declare the functions that users call, `explain` and `measure`, and `estimate_cost`, which counts
the cost of such a call.

    explain("gpt2", text="…", k=4)
        → ExplainRequest.of(model="gpt2", text="…", k=4, units="tokens", …)   checks the arguments
        → analysis.explain.answer.explain(request)                           answers
        → Explanation

Both functions consist of a signature and a docstring: `@entry_point` gives them their body, which
makes these steps and is the same for both. It imports the module that answers with the first call,
because that module imports torch, which takes seconds.

The arguments have the names, types and defaults of options.py; a test compares them. The command
line shows the sentences on arguments in these docstrings as its help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.options import KS, MIN_GAP, Dtype
from olmo_sparsity.analysis.request import Request
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import current_keys
from olmo_sparsity.config.text import Control, SplitAt
from olmo_sparsity.config.windows import Long

if TYPE_CHECKING:
    from torch import nn

    from olmo_sparsity.analysis.explain.explanation import Explanation
    from olmo_sparsity.analysis.measurement.at import At
    from olmo_sparsity.analysis.results.results import Results
    from olmo_sparsity.analysis.scoring.cost import Cost
    from olmo_sparsity.models.loaded import LoadedModel
    from olmo_sparsity.text.documents import Documents
    from olmo_sparsity.text.windows import Windows

    Model = str | Path | LoadedModel | nn.Module
    # A tokenizer of `transformers` or of `tokenizers`: the two have no type in common.
    Tokenizer = Any
    Text = str | PathLike[str] | Iterable[str | Mapping[str, Any]]

P = ParamSpec("P")
Result = TypeVar("Result")


class EntryPoint(NamedTuple):
    """What a public function of this module, such as `explain`, needs to answer its calls."""

    request: type[Request]
    """The class that holds the arguments of a call, and checks them."""

    answer: Callable[[Any], Any]
    """The function that takes a request and returns what the call returns."""

    count_cost: Callable[[Any], Any]
    """The function that takes a request and returns its `Cost`, without answering it."""


def _load_explain() -> EntryPoint:
    """Import what answers a call of `explain`."""
    from olmo_sparsity.analysis.explain.answer import count_cost, explain
    from olmo_sparsity.analysis.explain.request import ExplainRequest

    return EntryPoint(ExplainRequest, explain, count_cost)


def _load_measure() -> EntryPoint:
    """Import what answers a call of `measure`."""
    from olmo_sparsity.analysis.measurement.estimate import estimate
    from olmo_sparsity.analysis.measurement.measurement import measure, wait_for_results
    from olmo_sparsity.analysis.measurement.planning import make_plan
    from olmo_sparsity.analysis.measurement.request import MeasureRequest

    return EntryPoint(
        MeasureRequest,
        # Of several processes, only the first gets results from `measure`; the others read them.
        answer=lambda request: measure(request) or wait_for_results(request.out or ""),
        count_cost=lambda request: estimate(make_plan(request)),
    )


def entry_point(
    load: Callable[[], EntryPoint],
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorate a function that has a signature and a docstring, and give it its body.

    Args:
        load: Imports what answers. It is called by each call of the decorated function, and not
            when this module is imported.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            entry = load()
            request = _request_of_call(entry.request, function, *args, **kwargs)
            result: Result = entry.answer(request)
            return result

        call._load_entry_point = load  # type: ignore[attr-defined] # estimate_cost reads it
        return call

    return decorate


def _request_of_call(
    request_class: type[Request], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the checked request of the call `function(*args, **kwargs)`, with old names of
    arguments replaced."""
    # By the signature of the function that the user called: Python's error about a wrong keyword
    # then names this function, not the request.
    bound = inspect.signature(function).bind(*args, **current_keys(kwargs))
    bound.apply_defaults()
    return request_class.of(**bound.arguments)


@entry_point(_load_explain)
def explain(
    model: Model,
    tokenizer: Tokenizer = None,
    *,
    text: str | Path | None = None,
    at: At | None = None,
    prompt: str | None = None,
    target: str | None = None,
    unrelated: Text = "builtin:embedded",
    k: int = 8,
    units: str = "tokens",
    selector: str | None = None,
    long: Long = "all",
    short: int | None = None,
    distant_states: InterpretationName = "contextual",
    replacements: int | None = None,
    chat: bool = False,
    max_new_tokens: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: Dtype = "auto",
    device_map: str | None = None,
    prefix: str = "auto",
    batch_tokens: int | None = None,
) -> Explanation:
    """Find the k distant units that reduce the loss of each target most.

    Args:
        model: A folder, GGUF file or hub name, or a causal LM in memory.
        tokenizer: The tokenizer of a model in memory.
        text: One document, or a `Path` to read it from.
        at: Targets in the text: words (every occurrence), a regular expression (`re.compile`), a
            token's place, a slice of places, or several of these. Default: the tokens with the
            largest gaps (in a text of more than 1,024 tokens, neighbours share a local window for
            this).
        prompt: A prompt, in place of `text`. Its answer is the target.
        target: The answer to the prompt. Default: the model generates one, greedily.
        unrelated: Unrelated texts for `Explanation.check` and distant_states="replaced", in any
            form that `open_documents` reads.
        k: Number of distant units for each target.
        units: What is ranked: tokens, words, sentences, paragraphs or span:W.
        selector: The rule that ranks units; `add_one_nested` is faster on long texts. Default:
            add_one, or halving with distant_states="replaced".
        long: The largest number of tokens before a target that the model sees; "all": as many as
            it takes.
        short: The size of the local window. Default: 32, or less for a short prompt.
        distant_states: "contextual": the k units keep the states that they have in the long window;
            "isolated": they are shown alone; "replaced": unrelated text replaces all other distant
            text. This masks nothing, so any model will do: also a recurrent one,
            `llama:FILE.gguf`, or a server's URL.
        replacements: Number of unrelated texts that replace distant text. Default: 2.
        chat: Put the prompt into the tokenizer's chat template.
        max_new_tokens: Length limit of a generated answer. Default: 32.
        seed: Seed of all random draws.
        device, dtype, device_map: How to load a model that is not in memory.
        prefix: Tokens in front of the text: auto (what the tokenizer adds), bos, none, or a text.
        batch_tokens: Tokens of one forward. Default: 4,096 on CPU, 16,384 to 131,072 on a GPU.
    """
    raise NotImplementedError  # `entry_point` answers


@entry_point(_load_measure)
def measure(
    model: Model,
    documents: Documents | Text | None = None,
    windows: Windows | None = None,
    *,
    tokenizer: Tokenizer = None,
    out: str | Path | None = None,
    targets: Results | str | Path | None = None,
    choices: Results | str | Path | None = None,
    losses: Results | str | Path | None = None,
    at: At | None = None,
    quick: bool = False,
    long: Long = "all",
    short: int | None = None,
    stride: int | None = None,
    sample: float | str = 1.0,
    blocks: int | None = None,
    units: str | Sequence[str] = ("tokens",),
    selectors: str | Sequence[str] = (),
    ks: int | Iterable[int] = KS,
    share: float | str = 0.1,
    min_gap: float = MIN_GAP,
    sets: str | Sequence[str] = (),
    max_targets: int | Literal["all"] | None = None,
    distant_states: InterpretationName = "contextual",
    replacements: int | None = None,
    control: Control = "unrelated",
    draws: int | None = None,
    halves: int | None = None,
    seed: int = 0,
    field: str = "text",
    group_field: str | None = None,
    prompt_field: str | None = None,
    target_field: str | None = None,
    split_at: SplitAt = "whole",
    split_long: bool = False,
    max_documents: int | None = None,
    min_tokens: int | None = None,
    control_tokens: bool = False,
    device: str = "auto",
    dtype: Dtype = "auto",
    device_map: str | None = None,
    prefix: str = "auto",
    batch_tokens: int | None = None,
) -> Results:
    """Measure which distant tokens the losses on many documents depend on.

    Processes of one launch share a measurement; to share it otherwise, use `--shard`.

    Args:
        model: A folder, GGUF file or hub name, or a model in memory, loaded by `load_model` or not.
        documents: Documents, or text in any form that `open_documents` reads. Default: the held-out
            documents of the run that the model comes from.
        tokenizer: The tokenizer of a model in memory, or on a server.
        windows: `Windows(long, short, stride)`, in place of these three options.
        out: The folder of the results. The same call resumes. Default: a temporary folder.
        targets: Another measurement of the same text, or its folder: evaluate its targets. With
            another tokenizer, targets are matched by the characters of the text.
        choices: The same, and also the units that it ranked, with its settings. With another
            tokenizer, units must be words, sentences, paragraphs or your own, and windows are
            those given here.
        losses: A measurement with the same model, text and windows: reuse its losses.
        at: Targets, as in `explain`.
        quick: Measure four random blocks of 16 tokens in each of at most 30 documents.
        long: Size of the long window in tokens; "all": the document so far, which costs one pass of
            a document for all its targets.
        short: Size of the local window. Default: 128, or a quarter of a shorter `long`.
        stride: Number of neighbouring targets that share windows. Default: 64 with long="all",
            else 1.
        sample: The share of blocks to measure, such as 0.05 or 5%. A block is `stride` neighbouring
            targets; blocks are drawn at random from all documents.
        blocks: The same as a number: how many random blocks to measure of each document, on
            average.
        units: What is ranked: tokens, words, sentences, span:W, or several of these.
        selectors: The rules that rank units. Default, for any window: add_one_screened and random;
            halving with distant_states="replaced".
        ks: Numbers of units.
        share: The share of tokens that become targets, by largest gap: all, or for example
            top10%.
        min_gap: Nats; tokens with a smaller gap are not targets.
        sets: Target sets: gap, bigram, every (gap).
        max_targets: The largest number of targets of each set and document, drawn at random, or
            "all". Default: 4 with long="all", else all.
        distant_states, replacements: As in `explain`.
        control: What replaces the distant text of the control: unrelated, matched or shuffled.
        draws: Number of unrelated texts for each target. Default: 1 with long="all", else 3.
        halves: Number of random halves of the units for LDS; with 0 it is not computed. Default: 0
            with long="all", else 16.
        seed: Seed of all random draws.
        field, group_field, prompt_field, target_field, split_at, max_documents, min_tokens,
            control_tokens: How to read the text; see `open_documents`.
        split_long: Split documents that are longer than the model's limit into consecutive parts,
            at the border of a paragraph or sentence. Default: their ends are left out.
        device, dtype, device_map, prefix, batch_tokens: As in `explain`.
    """
    raise NotImplementedError  # `entry_point` answers


def estimate_cost(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Cost:
    """Return what a call of `explain`, `attribute` or `measure` costs, without making it.

        cost = estimate_cost(explain, model, text=text, k=4)     # explain(model, text=text, k=4)
        print(cost.token_forwards)

    For `explain` with a prompt and no target, the model generates the target. For `attribute`
    without an answer, the answer counts as long as it may become. For `measure`, `details` holds
    documents, targets, memory and time.
    """
    load: Callable[[], EntryPoint] | None = getattr(function, "_load_entry_point", None)
    if load is None:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"function={name} has no cost; pass explain, attribute or measure")
    entry = load()
    cost: Cost = entry.count_cost(_request_of_call(entry.request, function, *args, **kwargs))
    return cost
