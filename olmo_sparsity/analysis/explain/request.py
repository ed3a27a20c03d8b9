"""Define the request of `explain`, and check its options.

    ExplainRequest.of(model="gpt2", text="…", at="Ayrton", k=4)   # ConfigError if options are wrong

api.py and the command `explain` make one from what the user passed, and answer.py answers it. What
needs the model or the text, such as whether the text is long enough, is checked there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.options import ExplainSettings, ModelOptions
from olmo_sparsity.analysis.request import Request
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, check_encodable

DECODE = "decode token IDs first, with tokenizer.decode(ids)"
"""The advice of an error to a user who passed token IDs in place of text."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(Request):
    """A call of `explain`, or of its command. The fields are described in the docstring of
    `explain` in api.py."""

    model: Any
    tokenizer: Any = None
    text: str | Path | None = None
    at: At | None = None
    prompt: str | None = None
    target: str | None = None
    unrelated: Any = "builtin:embedded"
    settings: ExplainSettings = field(default_factory=ExplainSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Return the request. Raise ConfigError if options are wrong or exclude each other."""
        settings = self.settings
        settings.check()
        # An unknown selector, and one that needs states where there are none, are errors before the
        # model is read.
        find_selector(settings.selector, settings.interpretation)
        self._check_text_or_prompt()
        self._check_strings()
        # A chat template writes its own prefix.
        if settings.chat and self.loading.prefix != "auto":
            raise ConfigError(f"prefix={self.loading.prefix} cannot be combined with chat=True")
        return self

    def _check_text_or_prompt(self) -> None:
        """Raise ConfigError unless there is either a text or a prompt, without options that belong
        to the other."""
        if (self.text is None) == (self.prompt is None):
            raise ConfigError("pass either text= or prompt=, not both and not neither")
        if self.text == "":
            raise ConfigError("text is empty; pass a text with distant tokens and a target")
        if self.prompt == "":
            raise ConfigError("prompt is empty; pass a prompt with distant tokens")
        lacks_text = self.at is not None and self.text is None
        has_options_of_prompt = self.target is not None or self.settings.chat
        lacks_prompt = has_options_of_prompt and self.prompt is None
        if lacks_text or lacks_prompt:
            raise ConfigError("`at` names places of a text; `target` and `chat` belong to a prompt")
        generates = self.prompt is not None and self.target is None
        if self.settings.max_new_tokens is not None and not generates:
            raise ConfigError("max_new_tokens limits a generated answer, and none is generated")

    def _check_strings(self) -> None:
        """Raise ConfigError if a text is not a string, or is the name of a file, which the user
        meant to be read."""
        for name, value in (("prompt", self.prompt), ("target", self.target)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r:.80} must be a string; {DECODE}")
        text = self.text
        if text is not None and not isinstance(text, str | Path):
            raise ConfigError(f"text={text!r:.80} must be a string, or a Path to a file; {DECODE}")
        for name, words in (("text", text), ("prompt", self.prompt), ("target", self.target)):
            if isinstance(words, str):
                check_encodable(words, name)
        # Otherwise the name itself would be explained.
        if isinstance(text, str) and os.path.isfile(text):
            raise ConfigError(f"text={text} is a file name; pass Path('{text}') or its text")
