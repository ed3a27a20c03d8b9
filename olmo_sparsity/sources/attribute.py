"""Declare the entry point `attribute`: which source each statement of an answer relies on.

Place in the flow: on top of the package `sources`, as analysis/api.py is on top of `analysis`. This
module has the signature and its explanation, which `--help` shows, too. `entry_point` turns a call
into an `AttributeRequest` (request.py), which run_request.py answers. Importing this module imports
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from olmo_sparsity.analysis.api import EntryPoint, entry_point
from olmo_sparsity.analysis.options import Dtype

if TYPE_CHECKING:
    from olmo_sparsity.analysis.api import Model, Text, Tokenizer
    from olmo_sparsity.sources.attribution import Attribution
    from olmo_sparsity.sources.reading.answer_pieces import Answer
    from olmo_sparsity.sources.reading.chat_log import Messages
    from olmo_sparsity.sources.reading.read_sources import Sources


def _load_attribute() -> EntryPoint:
    """Import what answers a call of `attribute`, and what counts its cost."""
    from olmo_sparsity.sources.cost import count_cost
    from olmo_sparsity.sources.request import AttributeRequest
    from olmo_sparsity.sources.run_request import run_request

    return EntryPoint(AttributeRequest, run_request, count_cost)


@entry_point(_load_attribute)
def attribute(
    model: Model,
    tokenizer: Tokenizer = None,
    *,
    sources: Sources | None = None,
    question: str | None = None,
    messages: Messages | None = None,
    message: int = -1,
    passages: str | None = None,
    answer: str | Sequence[str] | Answer | None = None,
    reasoning: str | None = None,
    candidates: Sequence[str] | None = None,
    decoys: Text | Mapping[str, str] | None = None,
    draws: int = 8,
    units: str = "sources",
    rate: float = 0.05,
    chat: bool = False,
    control_tokens: bool = False,
    max_new_tokens: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: Dtype = "auto",
    device_map: str | None = None,
    prefix: str = "auto",
    batch_tokens: int | None = None,
    timeout: float | None = None,
    patience: float | None = None,
) -> Attribution:
    """Report which source each statement of an answer relies on, or that it relies on none.

    Args:
        model: A folder, GGUF file or hub name, or a causal LM in memory; or where another program
            computes: `llama:FILE.gguf`, or the URL of a server.
        tokenizer: The tokenizer of a model in memory, or on a server.
        sources: `{name: text, …}`; or a list of `Segment(name, text)` and of texts without a name,
            which stay in view; or chat messages that contain these.
        question: The question, which follows the sources.
        messages: In place of sources, question and answer: the log of an agent, as OpenAI's or
            Anthropic's API takes it. Blocks of the system prompt, outputs of tools and earlier
            messages of the user are sources.
        message: The number of the message in the log that is the answer. Default: the last.
        passages: What in the last message of the user is a source: a tag, as `document` for
            `<document>…</document>`, or a regular expression, whose groups may be
            `(?P<name>…)` and `(?P<text>…)`. Default: nothing.
        answer: The answer, which is split into sentences; a list of statements; or
            `Answer(text, spans)`, with the spans of characters of its statements. Default: the
            model generates one, greedily.
        reasoning: What the model wrote between question and answer, with its tags. Statements may
            rely on its sentences, and these on sources. Default: an answer's text up to `</think>`.
        candidates: Names of the sources to choose from; the others stay in view. Default: all.
        decoys: Unrelated texts that replace sources, about ten from the same collection as the
            sources, in any form that `open_documents` reads.
        draws: Largest number of decoys of each source; fewer are evaluated if they decide.
        units: What is judged: sources, or paragraphs, sentences, words, … of each.
        rate: Of the sources that verdicts name, the share that is expected to be named by chance.
        chat: Put the prompt into the tokenizer's chat template.
        control_tokens: Encode words of sources that are names of control tokens, such as
            `<|im_end|>`, as these tokens. Default: as letters.
        max_new_tokens: Length limit of a generated answer. Default: 256, or what fits the model.
        seed: Seed of all random draws.
        device, dtype, device_map, prefix, batch_tokens: As in `explain`.
        timeout: Seconds that a server may take for one request. Default: 600.
        patience: Seconds for which a request is repeated that a server did not answer, also while
            it starts. Default: 300, and 5 for a server that has never replied.
    """
    raise NotImplementedError  # `entry_point` answers
