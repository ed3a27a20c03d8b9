"""Encode the text or prompt that an explanation is about.

    text            → EncodedPrompt: its tokens; targets may be anywhere
    prompt, answer  → EncodedPrompt: the tokens of both, and the place of the answer, which is the
                      target

"Who opened it?" with the answer "Anna Weiss", of 4 and 2 tokens, in a chat template that closes
the prompt with 3 tokens:

    tokens   Who opened it ? <end> <assistant> <break> Anna Weiss
    place      0      1  2 3     4           5       6    7     8     answer=(7, 9), num_closing=3
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.analysis.explain.chat_template import chat_ids
from olmo_sparsity.analysis.explain.generation import generate
from olmo_sparsity.analysis.options import ExplainSettings
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.loaded import LoadedModel

DEFAULT_MAX_NEW_TOKENS = 32
"""Default length limit of a generated answer, in tokens."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A text as token IDs, and the place of the answer if it is a prompt with an answer."""

    tokens: list[int]
    prefix_ids: list[int]
    answer: tuple[int, int] | None = None
    """The place of the answer in `tokens`: first token, and one past the last."""

    num_closing: int = 0
    """How many tokens a chat template puts between prompt and answer."""

    @staticmethod
    def of_text(model: LoadedModel, text: str, prefix: str) -> EncodedPrompt:
        """Encode a text without an answer."""
        return EncodedPrompt(model.encode([text])[0], model.prefix_ids(prefix, text))

    @staticmethod
    def with_answer(
        model: LoadedModel, prompt: str, target: str | None, prefix: str, settings: ExplainSettings
    ) -> EncodedPrompt:
        """Encode a prompt and its answer.

        Args:
            model: The model, whose tokenizer encodes.
            prompt: The prompt.
            target: The answer. None if the model is to generate one.
            prefix: The option `prefix`, which a chat template replaces.
            settings: `chat` and `max_new_tokens` are read.
        """
        closing_ids: list[int] = []
        # What a chat template writes before the prompt is the prefix of all windows, so that also
        # the local window alone begins as a conversation does.
        if settings.chat:
            ids = chat_ids(model, prompt)
            prefix_ids = ids.before
            closing_ids = ids.after
            prompt_ids = ids.prompt + closing_ids
        else:
            prefix_ids = model.prefix_ids(prefix, prompt)
            prompt_ids = model.encode([prompt])[0]
        if not prompt_ids:
            raise DataError("prompt is empty; pass a text")
        if target is None:
            max_tokens = settings.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
            answer_ids = generate(model, [*prefix_ids, *prompt_ids], max_tokens)
        else:
            # As a continuation: some tokenizers put a space before a text of its own.
            answer_ids = model.encode([target], follow=True)[0]
        if not answer_ids:
            raise DataError("the target is empty, or the model generated nothing; pass target=")
        answer = (len(prompt_ids), len(prompt_ids) + len(answer_ids))
        return EncodedPrompt([*prompt_ids, *answer_ids], prefix_ids, answer, len(closing_ids))
