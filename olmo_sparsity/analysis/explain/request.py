"""A call of `explain`, checked: the first thing made of it, and what all that follows takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from olmo_sparsity.analysis.measurement.targets import At
from olmo_sparsity.analysis.selectors.selector import find_selector
from olmo_sparsity.analysis.settings import AskSettings, ModelOptions, Request
from olmo_sparsity.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(Request):
    model: Any
    tokenizer: Any = None
    text: str | Path | None = None
    at: At | None = None
    prompt: str | None = None
    target: str | None = None
    foreign: Any = "builtin:embedded"
    settings: AskSettings = field(default_factory=AskSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        self.settings.check()
        find_selector(self.settings.selector)
        text, prompt, target, settings = self.text, self.prompt, self.target, self.settings
        if (text is None) == (prompt is None):
            raise ConfigError("pass either text= or prompt=, not both and not neither")
        of_prompt = target is not None or settings.chat
        if (text is None and self.at is not None) or (prompt is None and of_prompt):
            raise ConfigError("`at` names places of a text; `target` and `chat` belong to a prompt")
        if settings.max_new_tokens is not None and (prompt is None or target is not None):
            raise ConfigError("max_new_tokens limits a generated answer, and none is generated")
        for name, given in (("prompt", prompt), ("target", target)):
            if given is not None and not isinstance(given, str):
                raise ConfigError(f"{name} must be a string, not {type(given).__name__}")
        if text is not None and not isinstance(text, str | Path):
            raise ConfigError(f"text must be a string, not {type(text).__name__}")
        if isinstance(text, str) and os.path.isfile(text):
            raise ConfigError(f"text={text} is a file name; pass Path('{text}') or its text")
        if settings.chat and self.loading.prefix != "auto":
            raise ConfigError(f"prefix={self.loading.prefix} cannot be combined with chat=True")
        return self
