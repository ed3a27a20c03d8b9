"""Put prompts into the chat template of a model's tokenizer, and find what it adds around them.

    <|user|> | Who opened it? | <|end|><|assistant|> | Anna Weiss
     before       prompt             after              answer

A template is a program that writes `before` and `after` for any prompt; `split_template` finds out
what it writes. `chat_ids` encodes a prompt in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import ConfigError, DataError, one_line
from olmo_sparsity.models.loaded import LoadedModel


class ChatIds(NamedTuple):
    """A prompt in a chat template, as token IDs."""

    before: list[int]
    """The template's tokens before the prompt."""

    prompt: list[int]
    after: list[int]
    """The template's tokens between the prompt and the answer."""


def chat_ids(model: LoadedModel, prompt: str) -> ChatIds:
    """Encode a prompt in the chat template of the model's tokenizer."""
    # Most templates strip a message, and those that do not would keep the white space of a file.
    stripped = prompt.strip()
    before, after = split_template(
        model, lambda texts: [{"role": "user", "content": text} for text in texts], [stripped]
    )
    prompt_ids, after_ids = model.encode([stripped, after], follow=True)
    return ChatIds(model.encode([before])[0], prompt_ids, after_ids)


def split_template(
    model: LoadedModel,
    messages: Callable[[Sequence[str]], list[dict[str, Any]]],
    texts: Sequence[str],
) -> list[str]:
    """Return what the chat template writes before the first text, between each two, and after the
    last: three pieces for two texts.

    Args:
        model: The model, whose tokenizer has the template.
        messages: A function from texts to the messages that hold them, in their order.
        texts: The texts.
    """
    # Unique marks in place of the texts show where the template puts these. A template may also
    # change a text, such as by stripping it. So the pieces, joined with the real texts, must be
    # what the template makes of these.
    marks = [f"⟦{number}⟧" for number in range(len(texts))]
    pieces = re.split(r"⟦\d+⟧", through_template(model, messages(marks)))
    inserted = chain(*zip_longest(pieces, texts, fillvalue=""))
    whole = through_template(model, messages(texts))
    if len(pieces) != len(texts) + 1 or "".join(inserted) != whole:
        problem = "drops, repeats, moves or changes messages; write the text that it makes"
        raise DataError(f"the chat template of '{model.name}' {problem}")
    return pieces


def through_template(model: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the tokenizer's chat template makes of messages, up to where the answer
    begins."""
    tokenizer = model.transformers_tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat: the tokenizer of '{model.name}' has no chat template")
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # the template's own errors, and any of a broken one
        reason = one_line(f"{type(error).__name__}: {error}")
        problem = f"does not take a prompt ({reason})"
        raise DataError(f"the chat template of '{model.name}' {problem}") from None
