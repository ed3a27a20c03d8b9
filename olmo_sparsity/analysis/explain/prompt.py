"""Read the text or prompt that an explanation is about, and generate an answer to a prompt."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.targets import At, find_spans
from olmo_sparsity.analysis.options import AskSettings
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
from olmo_sparsity.text.windows import Block, Spans, Windows

MOST_WINDOWS = 1024
"""How many local windows are computed to select targets, at most."""

MOST_TOKENS = 2**16
"""How many tokens of long windows are computed besides the one pass for those that begin with the
text."""

MOST_PROMPTS = 32
"""How many local windows are computed to select targets, where each is a whole prompt."""

NEW_TOKENS = 32
"""Tokens of a generated answer, if no number is given."""

SAME_TEXT = 32
"""Two texts that have so many tokens in a row in common count as one, of which one was copied."""


@dataclass(frozen=True)
class Prompt:
    """A text as token IDs, and the place of the answer if it is a prompt with an answer."""

    tokens: list[int]
    prefix_ids: list[int]
    answer: tuple[int, int] | None = None
    num_closing: int = 0  # tokens that a chat template puts between prompt and answer

    @staticmethod
    def of_text(model: LoadedModel, text: str, prefix: str) -> Prompt:
        return Prompt(model.encode([text])[0], model.prefix_ids(prefix, text))

    @staticmethod
    def with_answer(
        model: LoadedModel, prompt: str, target: str | None, prefix: str, settings: AskSettings
    ) -> Prompt:
        """Read a prompt and its answer, which the model generates if `target` is None."""
        closing: list[int] = []
        if settings.chat:
            prefix_ids, before, closing = chat_ids(model, prompt)
            before = before + closing
        else:
            prefix_ids = model.prefix_ids(prefix, prompt)
            before = model.encode([prompt])[0]
        if not before:
            raise DataError("prompt is empty; pass a text")
        if target is None:
            most = settings.max_new_tokens or NEW_TOKENS
            after = generate(model, [*prefix_ids, *before], most)
        else:
            after = model.encode([target], follow=True)[0]
        if not after:
            raise DataError("the target is empty, or the model generated nothing; pass target=")
        answer = (len(before), len(before) + len(after))
        return Prompt([*before, *after], prefix_ids, answer, len(closing))


@dataclass(frozen=True)
class Prepared:
    """Everything that an explanation needs: a document, its windows, its targets and a model."""

    model: LoadedModel
    scorer: Scorer
    document: Document
    windows: Windows
    settings: AskSettings
    spans: Spans | None  # none: the targets with the largest gaps are selected
    state: State | None = None  # what the model was

    @staticmethod
    def of(
        model: LoadedModel,
        prompt: Prompt,
        at: At | None,
        settings: AskSettings,
        *,
        unrelated: Any,
        batch_tokens: int | None = None,
    ) -> Prepared:
        """Settle windows and targets. `unrelated`: the texts that replace distant tokens, where
        the interpretation replaces them."""
        answer = prompt.answer
        num_tokens = len(prompt.tokens)
        document = Document(np.array(prompt.tokens, dtype=np.int64), tokenizer=model.tokenizer)
        short = settings.short
        if short is None:
            local = default_local(LOCAL_OF_ONE_PREDICTION, answer[0] if answer else num_tokens)
            # What a chat template puts after the prompt is never distant.
            short = max(prompt.num_closing, local)
        spans: Spans | None = None
        last = num_tokens
        longest = 1
        if answer is not None:
            spans = [answer]
        elif at is not None:
            spans = find_spans(document, at)
        if spans:
            last = max(end for _, end in spans)
            longest = max(end - first for first, end in spans)
        windows = Windows("all", short, prefix=tuple(prompt.prefix_ids))
        windows = replace(windows, most=long_window(settings.long).longest)
        if model.max_positions is not None:
            most = model.max_positions - len(windows.prefix) - longest + 1
            if most <= short:
                raise ConfigError(
                    f"prefix ({len(windows.prefix):,} tokens), local window (short={short}) and "
                    f"target ({longest:,}) need more than the {model.max_positions:,} positions of "
                    f"'{model.name}'; pass shorter ones, or lower short"
                )
            if last - longest > most and most < (windows.most or math.inf):
                say(f"the text is longer than the model takes: long windows of {most:,} tokens")
                windows = replace(windows, most=most)
        windows.check()
        model.check_positions(replace(windows, stride=longest).num_positions(last))
        scorer = scorer_of(model, settings, batch_tokens)
        if settings.interpretation.replaces:
            others = unrelated_documents(model, unrelated, document)
            controls = Controls(others, windows, num_draws=1, seed=settings.seed)
            scorer = scorer.of_document(document, controls)
        state = state_of(model.model)
        return Prepared(
            model=model,
            scorer=scorer,
            document=document,
            windows=windows,
            settings=settings,
            spans=spans,
            state=state,
        )

    def blocks_to_select(self) -> list[Block]:
        """Return the blocks in which targets are looked for if none is named.

        Neighbours in a long text share windows. A long window that does not begin where the text
        begins is a pass of its own. If these have more than `MOST_TOKENS` tokens together, only
        some of them are taken, evenly spaced."""
        windows = self.windows
        tokens = self.document.tokens
        replaces = self.settings.interpretation.replaces
        most_blocks = MOST_PROMPTS if replaces else MOST_WINDOWS
        stride = math.ceil(len(tokens) / most_blocks)
        most = windows.most
        if most is not None:
            # The last target of a block sees stride − 1 tokens more than the first.
            most = max(windows.short + 1, most - stride + 1)
        blocks = list(replace(windows, stride=stride, most=most).blocks(tokens))
        later = [block for block in blocks if block.first > 0]
        step = math.ceil(sum(len(block.tokens) for block in later) / MOST_TOKENS)
        if step > 1:
            later = later[::step]
            say(f"targets are selected from one in {step} of its later tokens; name others (--at)")
        return [block for block in blocks if block.first == 0] + later

    def most_units(self, spans: Iterable[Sequence[int]]) -> int:
        """Return the largest number of distant units of a target."""
        most = 0
        for first, _ in spans:
            begin = int(self.windows.first_distant(int(first)))
            end = int(first) - self.windows.short
            most = max(most, len(self.document.units(self.settings.units, begin, end)))
        return most

    def recover(
        self, targets: Mapping[str, np.ndarray], controls: Controls | None = None
    ) -> dict[str, pd.DataFrame]:
        """Evaluate targets, with 0 to k units, or to as many as there are."""
        settings = self.settings
        spans = list(chain(*targets.values()))
        most = min(settings.k, self.most_units(spans))
        return recover(
            self.scorer,
            self.document,
            self.windows,
            targets,
            units=settings.units,
            selectors=settings.selector,
            ks=range(most + 1),
            controls=controls,
            seed=settings.seed,
        )

    def refuse_changed_model(self) -> None:
        check_unchanged(self.scorer.model, self.state, "explain")

    def without_model(self) -> Prepared:
        """Return what is stored with an answer: enough to show it, not to compute it again."""
        model = self.model.without_weights()
        # Only an answer that is to be shown lacks these two, so their types do not allow None.
        return replace(self, model=model, scorer=None, state=None)  # type: ignore[arg-type]


def read_text(path: str, inline: bool = False) -> str:
    """Read a file, or standard input for `-`; with `inline`, only if the name begins with @."""
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
    """Join documents to a text long enough to draw from. Documents that share a passage
    with the explained text are left out, as they may be the same text."""
    length = len(document.tokens)
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
    """Yield all runs of `length` tokens, or the text itself if it is shorter."""
    tokens = tokens.astype("<i8")
    num_runs = max(1, len(tokens) - length + 1)
    for first in range(num_runs):
        yield tokens[first : first + length].tobytes()


def chat_ids(model: LoadedModel, prompt: str) -> tuple[list[int], list[int], list[int]]:
    """Return the token IDs before the prompt in the chat template, of the prompt, and after it."""
    prompt = prompt.strip()
    before, after = split_template(
        model, lambda texts: [{"role": "user", "content": text} for text in texts], [prompt]
    )
    prompt_ids, after_ids = model.encode([prompt, after], follow=True)
    return model.encode([before])[0], prompt_ids, after_ids


def split_template(
    model: LoadedModel,
    messages: Callable[[Sequence[str]], list[dict[str, Any]]],
    texts: Sequence[str],
) -> list[str]:
    """Return what the chat template writes before, between and after these texts in messages."""
    # Unique placeholders show where the template puts the texts.
    marks = [f"⟦{number}⟧" for number in range(len(texts))]
    around = re.split(r"⟦\d+⟧", through_template(model, messages(marks)))
    inserted = chain(*zip_longest(around, texts, fillvalue=""))
    whole = through_template(model, messages(texts))
    if len(around) != len(texts) + 1 or "".join(inserted) != whole:
        problem = "drops, repeats, moves or changes messages; write the text that it makes"
        raise DataError(f"the chat template of '{model.name}' {problem}")
    return around


def through_template(model: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the messages as the tokenizer's chat template writes them, up to where the answer
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
    """Generate greedily, up to the model's end-of-text token. `done` is called after each token."""
    if model.prompt_model is not None:
        answer: list[int] = model.prompt_model.generate(tokens, max_new_tokens)
        return answer
    lm = model.model
    end_ids = _end_ids(model)
    device = model.device
    generated: list[int] = []
    states = None
    inputs = torch.tensor([tokens], device=device)
    for num_before in range(len(tokens), len(tokens) + max_new_tokens):
        positions = torch.arange(num_before - inputs.shape[1], num_before, device=device)[None]
        states = lm.distant_states(inputs, positions, before=states)
        best = int(lm.unembed(states.hidden_BFD[:, -1]).argmax())
        if best in end_ids:
            break
        generated.append(best)
        done(generated)
        inputs = torch.tensor([[best]], device=device)
    else:
        say(f"the answer ends at {max_new_tokens} tokens (max_new_tokens), unfinished")
    return generated


def _end_ids(model: LoadedModel) -> set[int]:
    """Return the tokens at which a generated answer ends."""
    inner = getattr(model.model, "model", None)
    configs = [getattr(owner, "config", None) for owner in (model.model, inner)]
    # Some chat models name the end of a turn in their generation_config only.
    sources = (model.transformers_tokenizer, *configs, getattr(inner, "generation_config", None))
    end_ids = set()
    for source in sources:
        # One token ID, a list of them, or none.
        tokens: Any = getattr(source, "eos_token_id", None)
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
