"""Explain a prediction in one text or prompt: which far-away tokens or words it depends on.

from analysis import explain
e = explain("model", text=document, at="Katharina")
e.check()

Place in the flow: model + text → **explanation**. It evaluates targets as a measurement does
(recovery.py), with targets that are named instead of chosen.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from analysis.check import Check, ExplanationSettings, check
from analysis.documents import Document
from analysis.influence import SELECTORS, check_can_run
from analysis.recovery import DOCUMENT, recover
from analysis.scoring import Reading, Scorer, context_losses
from analysis.targets import At, find_spans, first_place, largest_gaps
from analysis.view import described, lit_text
from analysis.windows import Spans, Windows, span_width
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel, load_model, wrap_model
from olmo_sparsity.progress import Progress, say

SHORT = 32

PLACEHOLDER = "⟦the prompt⟧"

EXHAUSTIVE = ("add_one", "drop_one", "divergence", "greedy")
"""Selectors that evaluate every unit."""

MANY_UNITS = 4096
"""With more of them, a cheaper selector is recommended."""


def explain(
    model: Any,
    tokenizer: Any = None,
    *,
    text: str | Path | None = None,
    at: At | None = None,
    prompt: str | None = None,
    target: str | None = None,
    k: int = 8,
    units: str = "tokens",
    selector: str = "add_one",
    long: int | Literal["all"] = "all",
    short: int | None = None,
    far_states: Reading = "contextual",
    prefix: str = "auto",
    chat: bool = False,
    foreign: Any = "embedded",
    max_new_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    seed: int = 0,
) -> Explanation:
    """Find the k far units that matter most to each target, and the loss given the first 1 … k.

    `model`: a folder or hub name, or a causal LM in memory with its `tokenizer`.
    `text`: one document, or a `Path` to read it from. `at` names targets in it: words (every
    occurrence), a regular expression (`re.compile`), a token's number, a slice of tokens, or
    several of these. Without it, the tokens with the largest gaps are taken.
    `prompt` and `target`: the target is an answer to the prompt; without one the model generates
    it, greedily, up to `max_new_tokens` (32). `chat` puts the prompt into the tokenizer's chat
    template.
    `long="all"`: a target sees everything before it. `short`: the last tokens of that, which are no
    candidates (default 32, less for a short prompt, at least what a chat template appends).
    `prefix`: `auto` is what the tokenizer puts before a text; else `bos`, `none` or any text.
    `foreign`: text for `check`, in any form that `open_documents` reads.
    """
    if (text is None) == (prompt is None):
        raise ConfigError("give either a text or a prompt")
    if (text is None and at is not None) or (prompt is None and (target is not None or chat)):
        raise ConfigError("`at` names places of a text; `target` and `chat` belong to a prompt")
    if max_new_tokens is not None and (prompt is None or target is not None):
        raise ConfigError("max_new_tokens is for an answer that is generated; leave it out")
    if isinstance(text, Path):
        text = read_text(str(text))
    elif isinstance(text, str) and os.path.isfile(text):
        raise ConfigError(f"text={text} is the name of a file; give Path('{text}') or its content")
    names = [name for name in SELECTORS if name != "attention_learned"]
    if selector not in names:
        unknown = "needs many documents" if selector in SELECTORS else "is unknown"
        raise ConfigError(f"selector={selector} {unknown}; choose from {', '.join(names)}")
    numbers = {"k": k, "short": short, "seed": seed, "max_new_tokens": max_new_tokens}
    for name, value in numbers.items():
        least = 0 if name == "seed" else 1
        if value is not None and (not isinstance(value, int | np.integer) or value < least):
            raise ConfigError(f"{name}={value} must be a whole number from {least} up")
    if long != "all" and not isinstance(long, int | np.integer):
        raise ConfigError(f"long={long!r} must be `all` or a number of tokens")
    for name, given in (("text", text), ("prompt", prompt), ("target", target), ("prefix", prefix)):
        if given is not None and not isinstance(given, str):
            raise ConfigError(f"{name} must be a string, not {type(given).__name__}")
    span_width(units)
    if chat and prefix != "auto":
        raise ConfigError(
            f"prefix={prefix}: with `chat` the template sets how the text begins; leave it out"
        )
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(f"'{model}' brings its own tokenizer; leave yours out")
        loaded = load_model(str(model), device=device, dtype=dtype)
    else:
        if (device, dtype) != ("auto", "auto"):
            raise ConfigError("device and dtype of a model in memory are its own; leave them out")
        loaded = wrap_model(model, tokenizer)
    check_can_run([selector], loaded.model)
    if loaded.tokenizer is None:
        raise DataError(f"'{loaded.name}' has no tokenizer; give one: explain(model, tokenizer, …)")
    start_ids, num_closing = loaded.prefix_ids(prefix), 0
    if text is not None:
        tokens, answer = loaded.encode([text])[0], None
    else:
        assert prompt is not None
        before = loaded.encode([prompt])[0]
        if chat:
            start_ids, before, closing = _chat_ids(loaded, prompt)
            before, num_closing = before + closing, len(closing)
        if not before:
            raise DataError("the prompt is empty; give one for the answer to depend on")
        after = (
            _generate(loaded, [*start_ids, *before], max_new_tokens or 32)
            if target is None
            else loaded.encode([target])[0]
        )
        if not after:
            raise DataError("the target is empty, or the model ends the text at once; give one")
        tokens, answer = [*before, *after], (len(before), len(before) + len(after))
    document = Document(np.array(tokens, dtype=np.int64), tokenizer=loaded.tokenizer)
    if short is None:
        short = max(num_closing, min(SHORT, max(1, (answer[0] if answer else len(tokens)) // 4)))
    windows = Windows(long, short, prefix=tuple(start_ids))
    spans = [answer] if answer else None if at is None else find_spans(document, at)
    last = max((end for _, end in spans), default=0) if spans else len(tokens)
    windows.check()
    longest_target = max((end - first for first, end in spans or []), default=1)
    loaded.check_positions(replace(windows, stride=longest_target).num_positions(last))
    scorer = Scorer(loaded.model, far_states=far_states, batch_tokens=batch_tokens)
    chosen_by_gap = spans is None
    if spans is None:
        losses = context_losses(scorer, document, windows)
        spans = largest_gaps(losses[losses.target >= first_place(windows, units)])
    longest = dict(sorted(spans))  # keeps the longest of the spans with one first token
    spans = _with_far_part(document, windows, list(longest.items()), units)
    num_far = (max(first for first, _ in spans) if long == "all" else long) - short
    if selector in EXHAUSTIVE and num_far > MANY_UNITS:
        say(
            f"{selector} evaluates each of up to {num_far:,} far tokens; add_one_nested evaluates "
            "a few hundred"
        )
    settings = ExplanationSettings(units, selector, k, far_states, chosen_by_gap, seed)
    with Progress("explaining", len(spans), "targets") as progress:
        tables = recover(
            scorer, document, windows, {DOCUMENT: np.array(spans)}, units=units,
            selectors=selector, ks=range(k + 1), seed=seed, done=progress.update,
        )  # fmt: skip
    rows = tables["recovery"]
    rows = rows[rows.draw == 0].set_index(["target", "k"])[["loss_set", "loss_without"]]
    targets = pd.DataFrame(spans, columns=["target", "end"])
    targets["text"] = ["".join(document.texts[a:b]) for a, b in spans]
    no_units = rows.xs(0, level="k").loc[targets.target]
    targets["loss_short"] = no_units.loss_set.to_numpy()
    targets["loss_long"] = no_units.loss_without.to_numpy(float)
    far = tables["influence"].rename(
        columns={"far_first": "first", "far_end": "end", "far_text": "text"}
    )[["target", "rank", "first", "end", "text"]]
    far["nats"] = _falls_alone(scorer, document, windows, targets, far)
    targets["gap"] = targets.loss_short - targets.loss_long
    far = far.merge(rows.rename_axis(index={"k": "rank"}).reset_index(), on=["target", "rank"])
    return Explanation(loaded, document, windows, settings, targets, far, tables, scorer, foreign)


@dataclass
class Explanation:
    """Shows as the text with highlighted far units in a notebook, as a list in a terminal."""

    model: LoadedModel = field(repr=False)
    document: Document = field(repr=False)
    windows: Windows
    settings: ExplanationSettings
    targets: pd.DataFrame
    """target, end (tokens), text, loss_short, loss_long, gap."""

    far: pd.DataFrame
    """target, rank, first, end, text of a far unit; nats: the fall in loss when it alone is added;
    loss_set: the loss with it and all units before it in rank; loss_without: the loss with the long
    window without these."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """The tables of `recover`, as in a measurement (docs/formats.md)."""

    scorer: Scorer = field(repr=False)
    foreign: Any = field(repr=False, default="embedded")
    checked: Check | None = None

    def top(self, n: int | None = None) -> pd.DataFrame:
        """The first n units of every target."""
        if n is not None and n < 1:
            raise ConfigError(f"top({n}): give a number of units from 1 up")
        rows = self.far[self.far["rank"] <= (n or self.settings.k)]
        rows = rows.assign(unit=rows["first"].astype(str) + "–" + (rows["end"] - 1).astype(str))
        single = rows["end"] - rows["first"] == 1
        rows.loc[single, "unit"] = rows["first"].astype(str)
        rows = rows.assign(back=rows.target - rows["first"]).rename(columns={"first": "place"})
        return rows[
            ["target", "rank", "unit", "text", "place", "back", "nats", "loss_set", "loss_without"]
        ]

    def check(self, draws: int = 8) -> Check:
        """Evaluate the same targets with unrelated texts in place of the far part."""
        self.checked = check(
            self.model, self.scorer, self.document, self.windows, self.settings, self.targets,
            self.foreign, draws,
        )  # fmt: skip
        return self.checked

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "text": "".join(self.document.texts),
            "windows": asdict(self.windows),
            **asdict(self.settings),
            "token_forwards": self.scorer.token_forwards,
            "targets": self.targets.to_dict("records"),
            "far": self.far.to_dict("records"),
            "check": self.checked.to_dict() if self.checked else None,
        }

    def to_html(self, path: str | Path) -> None:
        from analysis.report import write_explanation

        write_explanation(self, Path(path))

    def save(self, path: str | Path) -> None:
        """Write one Parquet file: a row for each far unit, with the columns of its target."""
        if Path(path).suffix != ".parquet":
            raise ConfigError(f"{path} must end in .parquet")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        targets = self.targets.rename(columns={"text": "target_text", "end": "target_end"})
        self.far.merge(targets, on="target").to_parquet(path)

    def __repr__(self) -> str:
        return self.describe()

    def describe(self, bold: bool = False) -> str:
        """For a terminal. `bold`: whether it understands ANSI codes."""
        texts, far = self.document.texts, self.far
        short = self.windows.short
        parts = [described(texts, row, far, short, bold) for row in self.targets.itertuples()]
        if self.checked is not None:
            parts.append(str(self.checked))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return lit_text(self.document.texts, self.targets, self.far)


# --- targets --------------------------------------------------------------------------------------


def _with_far_part(document: Document, windows: Windows, spans: Spans, units: str) -> Spans:
    first = first_place(windows, units)
    kept = [span for span in spans if span[0] >= first]
    if not kept:
        raise DataError(
            f"no target has far {units}: the text has {len(document.tokens):,} tokens, and targets "
            f"with a far part begin at {first:,}; name a later place, lower short={windows.short}"
            + ("" if windows.long == "all" else f" or long={windows.long}")
            + ", or give more text"
        )
    if len(kept) < len(spans):
        left_out = f"{len(spans) - len(kept)} of {len(spans)} targets"
        say(f"{left_out} stand before token {first:,} and have no far {units}: left out")
    return kept


def _falls_alone(
    scorer: Scorer, document: Document, windows: Windows, targets: pd.DataFrame, far: pd.DataFrame
) -> pd.Series:
    """The fall in loss when each far unit alone is added, whatever the selector's score is."""
    nats = pd.Series(0.0, far.index)
    for target in targets.itertuples():
        block = windows.block(document.tokens, target.target, target.end)
        context, units = scorer.context(block), far[far.target == target.target]
        alone = [
            context.set_row(np.arange(first, end) - block.first)
            for first, end in zip(units["first"], units["end"], strict=True)
        ]
        losses = np.array([loss_W.sum() for loss_W in scorer.losses(alone)])
        nats[units.index] = target.loss_short - losses
    return nats


def read_text(path: str, inline: bool = False) -> str:
    """Read a file, or standard input for `-`; with `inline`, only if the name begins with @."""
    if inline and not path.startswith("@"):
        return path
    path = path.removeprefix("@") if inline else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path} cannot be read: {reason}; give one file of text") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text in UTF-8; convert it first") from None
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


# --- tokens ---------------------------------------------------------------------------------------


def _chat_ids(model: LoadedModel, prompt: str) -> tuple[list[int], list[int], list[int]]:
    """Token IDs before the prompt in the chat template, of the prompt, and after it."""
    tokenizer = model.transformers_tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"chat: the tokenizer of '{model.name}' has no chat template")

    def shown(content: str) -> str:
        messages = [{"role": "user", "content": content}]
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    # A unique placeholder shows where the template puts the prompt.
    before, separator, after = shown(PLACEHOLDER).partition(PLACEHOLDER)
    text = shown(prompt)
    inside = text[len(before) : len(text) - len(after)]
    if not separator or text != before + inside + after or inside.strip() != prompt.strip():
        raise DataError("the chat template changes the prompt; write the whole text into --prompt")
    return model.encode([before])[0], model.encode([inside])[0], model.encode([after])[0]


@torch.no_grad()
def _generate(model: LoadedModel, tokens: list[int], max_new_tokens: int) -> list[int]:
    """Greedy, up to the model's end-of-text token."""
    lm: Any = model.model
    ends = _end_ids(model)
    cache, generated = lm.new_cache(), list[int]()
    device = model.device
    inputs = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    for _ in range(max_new_tokens):
        hidden = lm.hidden(inputs, positions, cache=cache)
        best = int(lm.unembed(hidden[:, -1]).argmax())
        if best in ends:
            break
        generated.append(best)
        inputs = torch.tensor([[best]], device=device)
        positions = positions[:, -1:] + 1
    else:
        say(f"the answer ends at {max_new_tokens} tokens (max_new_tokens), unfinished")
    return generated


def _end_ids(model: LoadedModel) -> set[int]:
    lm: Any = model.model
    inner = getattr(lm, "model", None)
    configs = [getattr(owner, "config", None) for owner in (lm, inner)]
    # Some chat models name the end of a turn there only.
    configs.append(getattr(inner, "generation_config", None))
    sources = (model.transformers_tokenizer, *configs)
    ids: list[Any] = [getattr(source, "eos_token_id", None) for source in sources]
    return {int(token) for of_one in ids for token in np.atleast_1d(of_one) if token is not None}


def to_json(explanation: Explanation) -> str:
    from analysis.tables import plain

    return json.dumps(plain(explanation.to_dict()), ensure_ascii=False, indent=1)
