"""Hold a call of `attribute`: what a user passes, checked once where it enters.

Place in the flow: Python call, command line or a line of a questions file → an
**`AttributeRequest`**, which `checked` completes → run_request.py. A request of a log becomes one
of sources there:

    messages, message, passages   →   sources, answer, reasoning

For example, the log of a tool's output and an answer:

    messages   [{"role": "tool", "content": "It opened in 1921."},
                {"role": "user", "content": "When did it open?"},
                {"role": "assistant", "content": "In 1921."}]
    sources    the first two messages, in which the tool's output is the source "tool: result"
    answer     "In 1921."
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.analysis.request import Request
from olmo_sparsity.base.errors import ConfigError, check_unset
from olmo_sparsity.base.progress import say
from olmo_sparsity.sources.options import ServerOptions, SourceSettings
from olmo_sparsity.sources.reading.answer_pieces import Answer
from olmo_sparsity.sources.reading.chat_log import LAST_MESSAGE, Messages
from olmo_sparsity.sources.reading.messages import read_messages
from olmo_sparsity.sources.reading.prompt_parts import parts_of
from olmo_sparsity.sources.reading.read_sources import Sources, read_turns
from olmo_sparsity.sources.reading.reasoning import CLOSING, OPENING
from olmo_sparsity.sources.reading.surrogates import check_no_lone_surrogates


@dataclass(frozen=True, kw_only=True)
class AttributeRequest(Request):
    """The arguments of `attribute`, whose docstring explains them."""

    model: Any
    tokenizer: Any = None
    sources: Sources | None = None

    question: str | None = None
    """None means that sources are messages, and the question is in the last one."""

    messages: Messages | None = None
    """The log of an agent, which `checked` turns into sources and an answer."""

    message: int = LAST_MESSAGE
    """The number of the message of the log that is the answer."""

    passages: str | None = None
    """A tag or a regular expression of the sources in the last message of the user."""

    answer: str | Sequence[str] | Answer | None = None
    """None means that the model generates it."""

    reasoning: str | None = None
    """None means the answer up to `</think>`, if it has that."""

    candidates: Sequence[str] | None = None
    decoys: Any = None
    settings: SourceSettings = field(default_factory=SourceSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)
    serving: ServerOptions = field(default_factory=ServerOptions)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return the request of one call, whose options must each have an effect."""
        request = super().of(**options)
        check_options_are_used([request])
        return request

    def checked(self) -> Self:
        """Return the request, with sources and an answer in place of a log. Raise ConfigError if an
        argument is wrong, or has no effect."""
        self.settings.check()
        if self.messages is not None:
            return self._with_log_read().checked()

        # What belongs to a log has no effect without one.
        if self.passages is not None:
            raise ConfigError(f"passages={self.passages!r:.40} belongs to `messages`; leave it out")
        if self.message != LAST_MESSAGE:
            raise ConfigError(f"message={self.message} belongs to `messages`; leave it out")

        self._check_question()
        if self.reasoning is not None and not isinstance(self.reasoning, str):
            raise ConfigError(f"reasoning={self.reasoning!r:.60} must be a text")

        # Half of a letter would be an error of the tokenizer, without a word about where it is.
        check_no_lone_surrogates(self.question, "question")
        check_no_lone_surrogates(self.reasoning, "reasoning")
        answer = self.answer.text if isinstance(self.answer, Answer) else self.answer
        check_no_lone_surrogates(answer, "answer")
        _check_reasoning_is_apart(self.answer, self.reasoning)
        if not isinstance(self.decoys, str):  # the name of a file may hold any bytes
            check_no_lone_surrogates(self.decoys, "decoys")
        return self

    def _check_question(self) -> None:
        """Raise ConfigError unless there is a question. It may be missing only if the sources end
        with a message, which then has it."""
        turns = read_turns(self.sources)
        ends_in_message = bool(turns) and turns[-1].role != ""
        has_question = isinstance(self.question, str) and self.question.strip() != ""
        if not has_question and not (self.question is None and ends_in_message):
            raise ConfigError(
                f"question={self.question!r:.60} must be a text, which follows the sources"
            )

    def _with_log_read(self) -> Self:
        """Return the request with sources, answer and reasoning in place of `messages`. Raise
        ConfigError if it has these, too, or if the log has no source."""
        # Either would win silently over what the messages hold.
        for name in ("sources", "question", "answer", "reasoning"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} cannot be combined with messages; leave it out")

        assert self.messages is not None
        logged = read_messages(self.messages, self.message, self.passages)
        if not any(part.is_source for part in parts_of(read_turns(logged.sources))):
            raise ConfigError(
                "messages: none before the answer is a source, as blocks of the system, outputs of "
                "tools and earlier messages of the user are; set passages to what is one in the "
                "user's last message"
            )
        for warning in logged.warnings:
            say(warning)

        return replace(
            self,
            messages=None,
            message=LAST_MESSAGE,
            passages=None,
            sources=logged.sources,
            answer=logged.answer,
            reasoning=logged.reasoning,
        )

    @property
    def is_chat(self) -> bool:
        """Whether a chat template writes the prompt. Nothing else can write messages."""
        return self.settings.chat or any(turn.role for turn in read_turns(self.sources))

    @property
    def question_text(self) -> str:
        """The text of the question. Where sources are messages, it is what the last message of the
        user says besides sources."""
        if self.question is not None:
            return self.question
        turns = read_turns(self.sources)
        user_turns = [turn for turn in turns if turn.role == "user"]
        last_turn = user_turns[-1] if user_turns else turns[-1]
        # Without its sources, unless the message has nothing else.
        texts_in_view = [part.text for part in last_turn.parts if not part.is_source]
        return "\n".join(texts_in_view or [part.text for part in last_turn.parts])


def check_options_are_used(requests: Sequence[AttributeRequest]) -> None:
    """Raise ConfigError if an option has no effect on any of these requests, which share their
    options: the user would believe that it had one."""
    options = requests[0]
    if all(request.is_chat for request in requests):
        reason = "a chat template begins the prompt, with a prefix of its own"
        check_unset(reason, prefix=options.loading.prefix)
    if all(request.answer is not None for request in requests):
        reason = "it limits an answer that the model writes, and the answer is given"
        check_unset(reason, max_new_tokens=options.settings.max_new_tokens)


def _check_reasoning_is_apart(answer: Any, reasoning: str | None) -> None:
    """Raise ConfigError if a block `<think>` would be judged as statements of the answer. Only a
    text is split at its end, and only if no other reasoning is given."""
    if isinstance(answer, str):
        texts = [answer]
    elif isinstance(answer, Answer):
        texts = [answer.text]
    elif isinstance(answer, Sequence):
        texts = [text for text in answer if isinstance(text, str)]
    else:  # None; anything else is refused where the answer is read
        texts = []

    if any(CLOSING in text for text in texts):
        if reasoning:
            raise ConfigError(
                f"answer has {CLOSING}, and reasoning is given, too; pass all reasoning as "
                "reasoning, and the answer without it"
            )
        if not isinstance(answer, str):
            raise ConfigError(
                f"answer has {CLOSING} among its statements; pass what precedes it as reasoning"
            )
    elif texts and texts[0].lstrip().startswith(OPENING):
        raise ConfigError(
            f"answer begins with {OPENING} and has no {CLOSING}: the model was cut off before it "
            "answered; pass an answer, or remove the tag"
        )
