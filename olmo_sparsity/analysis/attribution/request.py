"""A call of `attribute`, checked: the first thing made of it, and what all that follows takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from olmo_sparsity.analysis.attribution.messages import Messages, read_messages
from olmo_sparsity.analysis.attribution.sources import Answer, Sources, read_turns
from olmo_sparsity.analysis.settings import ModelOptions, Request, SourceSettings
from olmo_sparsity.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AttributeRequest(Request):
    model: Any
    tokenizer: Any = None
    sources: Sources | None = None
    question: str | None = None  # None: sources are messages, the last of which is the question
    messages: Messages | None = None  # `checked` turns them into sources and an answer
    message: int = -1
    answer: str | Sequence[str] | Answer | None = None  # None: generated
    reasoning: str | None = None  # None: the answer up to `</think>`, if it has that
    candidates: Sequence[str] | None = None
    decoys: Any = None
    settings: SourceSettings = field(default_factory=SourceSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        self.settings.check()
        own = {name: getattr(self, name) for name in ("sources", "question", "answer", "reasoning")}
        if self.messages is not None:
            if unfit := [name for name, value in own.items() if value is not None]:
                raise ConfigError(f"{unfit[0]} cannot be combined with messages; leave it out")
            sources, answer, reasoning = read_messages(self.messages, self.message)
            read = replace(self, messages=None, sources=sources, answer=answer, reasoning=reasoning)
            return replace(read, message=-1).checked()
        if self.message != -1:
            raise ConfigError(f"message={self.message} belongs to `messages`; leave it out")
        turns = read_turns(self.sources)
        is_log = self.question is None and bool(turns and turns[-1].role)
        if not is_log and (not isinstance(self.question, str) or not self.question.strip()):
            raise ConfigError(f"question={self.question!r:.60} must be a text, after the sources")
        if self.reasoning is not None and not isinstance(self.reasoning, str):
            raise ConfigError(f"reasoning={self.reasoning!r:.60} must be a text")
        return self

    @property
    def asked(self) -> str:
        """The question, or the last message of the user."""
        if self.question is not None:
            return self.question
        turns = read_turns(self.sources)
        last = next((turn for turn in reversed(turns) if turn.role == "user"), turns[-1])
        return "\n".join(part.text for part in last.parts)
