"""Read the text or prompt that an explanation is about, and generate an answer to a prompt.

    text or prompt → Prompt (token IDs) → Prepared (windows, targets, scorer), which evaluates
    targets

Below them are functions for files, unrelated texts, chat templates and generation, which
`attribute` uses, too.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.targets import At, find_spans
from olmo_sparsity.analysis.options import ExplainSettings
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError, DataError, one_line
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.windows import LOCAL_OF_ONE_PREDICTION, default_local, long_window
from olmo_sparsity.models.identity import State
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.use import check_unchanged, state_of
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.records import LARGEST_DOCUMENT
from olmo_sparsity.text.units import Spans
from olmo_sparsity.text.windows import Block, Windows

MAX_WINDOWS = 1024
"""To select targets, at most so many local windows are computed."""

MAX_TOKENS = 2**16
"""To select targets, at most so many tokens of long windows are computed that begin later than the
text. All long windows that begin with the text take one pass over it, which is not limited."""

MAX_PROMPTS = 32
"""To select targets, at most so many local windows are computed where each is a whole prompt."""

NEW_TOKENS = 32
"""Default length limit of a generated answer, in tokens."""

SAME_TEXT = 32
"""Two texts that share so many tokens in a row count as copies of one text."""


@dataclass(frozen=True)
class Prompt:
    """A text as token IDs, and the place of the answer if it is a prompt with an answer."""

    tokens: list[int]
    prefix_ids: list[int]
    answer: tuple[int, int] | None = None
    """The place of the answer in `tokens`: first token, and one past the last."""

    num_closing: int = 0
    """How many tokens a chat template puts between prompt and answer."""

    @staticmethod
    def of_text(model: LoadedModel, text: str, prefix: str) -> Prompt:
        """Encode a text without an answer."""
        return Prompt(model.encode([text])[0], model.prefix_ids(prefix, text))

    @staticmethod
    def with_answer(
        model: LoadedModel, prompt: str, target: str | None, prefix: str, settings: ExplainSettings
    ) -> Prompt:
        """Encode a prompt and its answer, which the model generates if `target` is None."""
        closing_ids: list[int] = []
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
            max_tokens = settings.max_new_tokens or NEW_TOKENS
            answer_ids = generate(model, [*prefix_ids, *prompt_ids], max_tokens)
        else:
            answer_ids = model.encode([target], follow=True)[0]
        if not answer_ids:
            raise DataError("the target is empty, or the model generated nothing; pass target=")
        answer = (len(prompt_ids), len(prompt_ids) + len(answer_ids))
        return Prompt([*prompt_ids, *answer_ids], prefix_ids, answer, len(closing_ids))


@dataclass(frozen=True)
class Prepared:
    """Holds everything that an explanation needs, and evaluates targets: a document, its windows,
    its targets and a model."""

    model: LoadedModel
    scorer: Scorer
    document: Document
    windows: Windows
    settings: ExplainSettings
    spans: Spans | None
    """The targets; None: those with the largest gaps are selected."""

    state: State | None = None
    """The state of the model at that time, by which a change is noticed."""

    @staticmethod
    def of(
        model: LoadedModel,
        prompt: Prompt,
        at: At | None,
        settings: ExplainSettings,
        *,
        unrelated: Any,
        batch_tokens: int | None = None,
    ) -> Prepared:
        """Settle windows and targets of a prompt. `at`: names of targets in a text. `unrelated`:
        the texts that replace distant tokens, where the interpretation replaces them."""
        document = Document(np.array(prompt.tokens, dtype=np.int64), tokenizer=model.tokenizer)
        spans: Spans | None = None
        if prompt.answer is not None:
            spans = [prompt.answer]
        elif at is not None:
            spans = find_spans(document, at)
        windows = _windows_of(model, prompt, spans, settings)
        scorer = scorer_of(model, settings, batch_tokens)
        if settings.interpretation.replaces:
            others = unrelated_documents(model, unrelated, document)
            controls = Controls(others, windows, num_draws=1, seed=settings.seed)
            scorer = scorer.of_document(document, controls)
        return Prepared(
            model=model,
            scorer=scorer,
            document=document,
            windows=windows,
            settings=settings,
            spans=spans,
            state=state_of(model.model),
        )

    def blocks_to_select(self) -> list[Block]:
        """Return the blocks in which targets are looked for if none is named.

        In a long text, neighbouring targets share windows. A long window that does not begin where
        the text begins takes a pass of its own. If all these windows have more than `MAX_TOKENS`
        tokens, only some of them are taken, evenly spaced.
        """
        windows = self.windows
        tokens = self.document.tokens
        replaces = self.settings.interpretation.replaces
        max_blocks = MAX_PROMPTS if replaces else MAX_WINDOWS
        stride = math.ceil(len(tokens) / max_blocks)
        longest = windows.most
        if longest is not None:
            # The last target of a block sees stride − 1 tokens more than the first.
            longest = max(windows.short + 1, longest - stride + 1)
        blocks = list(replace(windows, stride=stride, most=longest).blocks(tokens))
        later = [block for block in blocks if block.first > 0]
        step = math.ceil(sum(len(block.tokens) for block in later) / MAX_TOKENS)
        if step > 1:
            later = later[::step]
            say(f"targets are selected from one in {step} of its later tokens; name others (--at)")
        return [block for block in blocks if block.first == 0] + later

    def max_num_units(self, spans: Iterable[Sequence[int]]) -> int:
        """Return the number of distant units of the target that has most of them."""
        largest = 0
        for first, _ in spans:
            begin = int(self.windows.first_distant(int(first)))
            end = int(first) - self.windows.short
            num_units = len(self.document.units(self.settings.units, begin, end))
            largest = max(largest, num_units)
        return largest

    def recover(
        self, targets: Mapping[str, np.ndarray], controls: Controls | None = None
    ) -> dict[str, pd.DataFrame]:
        """Evaluate targets with 0 to k units, or with 0 to all if there are fewer than k."""
        settings = self.settings
        spans = list(chain(*targets.values()))
        largest_k = min(settings.k, self.max_num_units(spans))
        return recover(
            self.scorer,
            self.document,
            self.windows,
            targets,
            units=settings.units,
            selectors=settings.selector,
            ks=range(largest_k + 1),
            controls=controls,
            seed=settings.seed,
        )

    def check_model_unchanged(self) -> None:
        """Raise DataError if the model is not what it was when the explanation was prepared."""
        check_unchanged(self.scorer.model, self.state, "explain")

    def without_model(self) -> Prepared:
        """Return a copy without weights, which is stored with an explanation: it is enough to show
        the explanation, and not to compute it again."""
        model = self.model.without_weights()
        # Only a stored explanation lacks these two, so their types do not allow None.
        return replace(self, model=model, scorer=None, state=None)  # type: ignore[arg-type]


def _windows_of(
    model: LoadedModel, prompt: Prompt, spans: Spans | None, settings: ExplainSettings
) -> Windows:
    """Return windows for the targets `spans`, which fit the positions that the model takes;
    ConfigError if none do. `spans`: None for single tokens anywhere in the text."""
    num_tokens = len(prompt.tokens)
    last_end = num_tokens
    longest_target = 1
    if spans:
        last_end = max(end for _, end in spans)
        longest_target = max(end - first for first, end in spans)

    short = settings.short
    if short is None:
        num_before_target = prompt.answer[0] if prompt.answer else num_tokens
        local = default_local(LOCAL_OF_ONE_PREDICTION, num_before_target)
        # What a chat template puts after the prompt is never distant.
        short = max(prompt.num_closing, local)
    windows = Windows("all", short, prefix=tuple(prompt.prefix_ids))
    windows = replace(windows, most=long_window(settings.long).longest)

    if model.max_positions is not None:
        longest = model.max_positions - len(windows.prefix) - longest_target + 1
        if longest <= short:
            raise ConfigError(
                f"prefix ({len(windows.prefix):,} tokens), local window (short={short}) and "
                f"target ({longest_target:,}) need more than the {model.max_positions:,} positions "
                f"of '{model.name}'; pass shorter ones, or lower short"
            )
        is_text_longer = last_end - longest_target > longest
        if is_text_longer and longest < (windows.most or math.inf):
            say(f"the text is longer than the model takes: long windows of {longest:,} tokens")
            windows = replace(windows, most=longest)
    windows.check()
    model.check_positions(replace(windows, stride=longest_target).num_positions(last_end))
    return windows


def read_text(path: str, inline: bool = False) -> str:
    """Read a file, or standard input for `-`. `inline`: `path` is the text itself, unless it begins
    with @, as in @FILE."""
    if inline and not path.startswith("@"):
        return path
    path = path.removeprefix("@") if inline else path
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            raw = file.read(LARGEST_DOCUMENT + 1)
        if len(raw) > LARGEST_DOCUMENT:
            raise DataError(f"{path} has more than {LARGEST_DOCUMENT:,} bytes; pass a part of it")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 from byte {error.start + 1:,} on") from None
    if "\0" in text[:200]:
        raise DataError(f"{path} is not text in UTF-8: it has a zero byte")
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def unrelated_documents(model: LoadedModel, unrelated: Any, document: Document) -> Documents:
    """Join documents into one long text, from which unrelated texts are drawn. Documents that share
    a passage with the explained text are left out, as they may be the same text."""
    length = len(document.tokens)
    # Enough that several draws do not overlap.
    num_needed = max(20 * length, 20_000)
    own_passages = set(passages(document.tokens))
    texts = []
    num_tokens = 0
    for other in open_documents(unrelated, model, limit=max(2, num_needed // 50)):
        if not own_passages.isdisjoint(passages(other.tokens)):
            continue
        texts.append(other.tokens)
        num_tokens += len(other.tokens)
        if num_tokens >= num_needed:
            break
    if num_tokens < length:
        raise DataError(
            f"unrelated: {num_tokens:,} of its tokens share no passage with this text, of "
            f"{length:,} needed; pass more text"
        )
    joined = Document(np.concatenate(texts), number=1, tokenizer=model.tokenizer)
    return Documents("unrelated text", [joined])


def passages(tokens: np.ndarray, length: int = SAME_TEXT) -> Iterator[bytes]:
    """Yield all runs of `length` tokens as bytes, or the text itself if it is shorter."""
    tokens = tokens.astype("<i8")
    num_runs = max(1, len(tokens) - length + 1)
    for first in range(num_runs):
        yield tokens[first : first + length].tobytes()


class ChatIds(NamedTuple):
    """A prompt in a chat template, as token IDs."""

    before: list[int]
    """The template's tokens before the prompt."""

    prompt: list[int]
    after: list[int]
    """The template's tokens between the prompt and the answer."""


def chat_ids(model: LoadedModel, prompt: str) -> ChatIds:
    """Encode a prompt in the chat template of the model's tokenizer."""
    prompt = prompt.strip()
    before, after = split_template(
        model, lambda texts: [{"role": "user", "content": text} for text in texts], [prompt]
    )
    prompt_ids, after_ids = model.encode([prompt, after], follow=True)
    return ChatIds(model.encode([before])[0], prompt_ids, after_ids)


def split_template(
    model: LoadedModel,
    messages: Callable[[Sequence[str]], list[dict[str, Any]]],
    texts: Sequence[str],
) -> list[str]:
    """Return what the chat template writes before the first of these texts, between two of them,
    and after the last. `messages`: a function from texts to the messages that hold them."""
    # Unique marks in place of the texts show where the template puts these.
    # Unique placeholders show where the template puts the texts.
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


@torch.no_grad()
def generate(
    model: LoadedModel,
    tokens: list[int],
    max_new_tokens: int,
    done: Callable[[list[int]], None] = lambda generated: None,
) -> list[int]:
    """Generate tokens greedily, until the model's end-of-text token. `done` is called after each
    token, with all so far."""
    if model.prompt_model is not None:
        answer: list[int] = model.prompt_model.generate(tokens, max_new_tokens)
        return answer
    language_model = model.model
    end_ids = _end_ids(model)
    device = model.device
    generated: list[int] = []
    states = None
    inputs = torch.tensor([tokens], device=device)
    for num_before in range(len(tokens), len(tokens) + max_new_tokens):
        positions = torch.arange(num_before - inputs.shape[1], num_before, device=device)[None]
        states = language_model.distant_states(inputs, positions, before=states)
        next_token = int(language_model.unembed(states.hidden_BFD[:, -1]).argmax())
        if next_token in end_ids:
            break
        generated.append(next_token)
        done(generated)
        inputs = torch.tensor([[next_token]], device=device)
    else:
        say(f"the answer ends at {max_new_tokens} tokens (max_new_tokens), unfinished")
    return generated


def _end_ids(model: LoadedModel) -> set[int]:
    """Return the tokens at which a generated answer ends."""
    inner = getattr(model.model, "model", None)
    configs = [getattr(owner, "config", None) for owner in (model.model, inner)]
    # Some chat models name the end of a turn in their generation_config only.
    owners = (model.transformers_tokenizer, *configs, getattr(inner, "generation_config", None))
    end_ids = set()
    for owner in owners:
        # One token ID, a list of them, or none.
        tokens: Any = getattr(owner, "eos_token_id", None)
        for token in np.atleast_1d(tokens):
            if token is None:
                continue
            if not isinstance(token, int | np.integer):
                raise ConfigError(
                    f"eos_token_id of '{model.name}' is {token!r:.60}, not a token ID; correct its "
                    "config.json"
                )
            end_ids.add(int(token))
    return end_ids
