"""The result of `explain`: targets with their distant units, shown, checked, kept in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.check import Check, check
from olmo_sparsity.analysis.explain.prompt import Prepared, Prompt, read_text
from olmo_sparsity.analysis.measurement.plan import SMALLER_UNITS, load
from olmo_sparsity.analysis.measurement.recovery import DOCUMENT
from olmo_sparsity.analysis.measurement.targets import At, first_place, largest_gaps
from olmo_sparsity.analysis.options import (
    AskSettings,
    ModelOptions,
    Request,
    is_whole_number,
)
from olmo_sparsity.analysis.report.report import note, subtitle, write_page
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.summary import describe_noise, describe_sink
from olmo_sparsity.analysis.results.tables import SCHEMAS, to_json_value
from olmo_sparsity.analysis.results.view import Shown, escape, num_of, sentence, spell
from olmo_sparsity.analysis.scoring.cost import Cost, counting
from olmo_sparsity.analysis.scoring.induction import losses_of_repetition
from olmo_sparsity.analysis.scoring.scorer import Scorer, context_losses, refuse_no_numbers
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError, check_encodable
from olmo_sparsity.base.files import check_suffix, path_of, write_atomically
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.renamed import OldAttribute, accepts_old_names
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.use import in_use
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Spans, Windows

NOT_CHECKED = "Not checked against unrelated texts:"
WHY_CHECK = "any text lowers a loss by something. Use --check, or check() in Python."

_KEPT = ("units", "selector", "k", "distant_states", "replacements", "seed")


@dataclass
class Explanation:
    """The targets of one text, with the distant units that reduce their losses most.

    It shows as the text with highlighted units in a notebook, as a list in a terminal.

        explanation = explain(model, tokenizer, text=text, at="Ayrton")
        explanation.top(3)              # a table: the first three units of each target
        explanation.check(draws=8)      # the same with unrelated texts: is it more than chance?
        explanation.to_html("page.html")
    """

    prepared: Prepared = field(repr=False)
    targets: pd.DataFrame  # target, end (tokens), text, loss_short, loss_long, gap
    distant: pd.DataFrame
    """target, rank, first, end, text of a distant unit; nats: the fall in loss when it alone is
    added; loss_set: the loss with it and all units before it in rank; loss_without: the loss with
    the long window without these."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """The tables of `recover`, as in a measurement (docs/measure.md)."""

    unrelated: Any = field(repr=False, default="builtin:embedded")
    checked: Check | None = None
    sink: dict[str, Any] = field(default_factory=dict, repr=False)
    """The sink check, where no prefix precedes the text."""

    far = OldAttribute("distant")
    token_forwards: int = 0  # token-forwards of the explanation, without the check

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"prepared": self.prepared.without_model(), "unrelated": None}

    @property
    def model(self) -> LoadedModel:
        return self.prepared.model

    @property
    def document(self) -> Document:
        return self.prepared.document

    @property
    def windows(self) -> Windows:
        return self.prepared.windows

    @property
    def settings(self) -> AskSettings:
        return self.prepared.settings

    @property
    def chosen_by_gap(self) -> bool:
        """Targets were chosen by their outcome instead of named."""
        return self.prepared.spans is None

    @property
    def results(self) -> Results:
        """The explanation as tables of a measurement of one document. Its targets are in no target
        set."""
        settings = self.settings
        check = self.checked
        texts = self.document.texts
        tokens = {"place": range(len(texts)), "token_id": self.document.tokens, "text": texts}
        # The tables of the check hold the text's own distant tokens and the unrelated texts.
        evaluated = self.tables if check is None else check.tables
        tables = {
            "tokens": pd.DataFrame(tokens),
            "losses": self.targets,
            "influence": evaluated["influence"],
            "recovery": evaluated["recovery"],
        }
        meta = Meta(
            model=self._model_meta,
            windows=asdict(self.windows) | {"distant_states": settings.distant_states},
            units=[settings.units],
            selectors=[settings.selector],
            seed=settings.seed,
            controls={"draws": check.draws} if check else {},
            targets={"chosen_by_gap": self.chosen_by_gap},
        )
        empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
        filled = {name: rows.assign(document=0) for name, rows in tables.items()}
        return Results(**empty | filled, meta=meta)

    @property
    def reliability(self) -> float | None:
        """Mean agreement of two halves of the unrelated texts, where these replace distant text."""
        lds = self.tables["lds"].lds
        return float(lds.mean()) if len(lds) else None

    @property
    def _model_meta(self) -> dict[str, Any]:
        names = ("name", "num_parameters", "batch_noise")
        return {name: getattr(self.model, name) for name in names}

    def top(self, n: int | None = None) -> pd.DataFrame:
        """Return the first n units of every target: by default all k."""
        if n is not None and (not is_whole_number(n) or n < 1):
            raise ConfigError(f"top({n!r}): n must be a whole number of at least 1")
        rows = self.distant[self.distant["rank"] <= (n or self.settings.k)]
        rows = rows.assign(unit=rows["first"].astype(str) + "–" + (rows["end"] - 1).astype(str))
        is_token = rows["end"] - rows["first"] == 1
        rows.loc[is_token, "unit"] = rows["first"].astype(str)
        rows = rows.assign(back=rows.target - rows["first"]).rename(columns={"first": "place"})
        return rows[
            ["target", "rank", "unit", "text", "place", "back", "nats", "loss_set", "loss_without"]
        ]

    @accepts_old_names
    def check(self, draws: int = 8, unrelated: Any = None) -> Check:
        """Evaluate the same targets with unrelated texts in place of the distant context.
        `unrelated`: these texts (default: those given to `explain`)."""
        if unrelated is not None:
            self.unrelated = unrelated
        if self.prepared.scorer is None:
            raise ConfigError("check() needs the model, which was not kept; call explain again")
        with using(self.model):
            self.prepared.refuse_changed_model()
            self.checked = check(self.prepared, self.targets, self.unrelated, draws)
        return self.checked

    def to_dict(self) -> dict[str, Any]:
        """Return all that JSON can hold."""
        settings = self.settings
        return {
            "model": self.model.name,
            "fingerprint": self.model.weights_sha256,
            "num_parameters": self.model.num_parameters,
            "batch_noise": self.model.batch_noise,
            "text": "".join(self.document.texts),
            "texts": self.document.texts,
            "token_ids": self.document.tokens.tolist(),
            "windows": asdict(self.windows),
            **{name: getattr(settings, name) for name in _KEPT},
            "chosen_by_gap": self.chosen_by_gap,
            "reliability": self.reliability,
            "sink": self.sink,
            "token_forwards": self.token_forwards,
            "targets": self.targets.to_dict("records"),
            "far": self.distant.to_dict("records"),
            "check": self.checked.to_dict() if self.checked else None,
            "tables": {
                name: (self.checked or self).tables[name].to_dict("list")
                for name in ("influence", "recovery")
            },
        }

    def to_html(self, path: str | Path) -> None:
        """Write a page that needs no other file."""
        settings = self.settings
        check = self.checked
        results = self.results
        how = (
            f"{settings.units} ranked by {spell(settings.selector)} · text of "
            f"{len(self.document.tokens):,} tokens"
        )
        slots = {
            "subtitle": escape(subtitle(results, how)),
            "note": self._notes,
            "headline": "",
            "shown": "",
            "numbers_title": "Against unrelated texts",
            "numbers": check.html if check else "",
        }
        parts = {"explanation", "numbers"} if check else {"explanation"}
        write_page(path_of("path", path), results, [0], slots, parts)

    @property
    def _notes(self) -> str:
        """HTML of the check's verdict, and of warnings."""
        notes = [self.checked.note if self.checked else note(False, NOT_CHECKED, WHY_CHECK)]
        for warning in (describe_sink(self.sink), self.with_all_units):
            if warning:
                notes.append(note(False, sentence(warning)))
        return "".join(notes)

    @property
    def with_all_units(self) -> str:
        """A warning where the units are all distant tokens of a target; empty if there are more."""
        windows = self.windows
        rows = self.tables["recovery"]
        most = rows[rows.draw == 0].groupby("target").num_tokens.max()
        starts = most.index.to_numpy()
        num_distant = np.array([windows.tokens_before(start) - windows.short for start in starts])
        num_with_all = int((most.to_numpy() >= num_distant).sum())
        if not num_with_all:
            return ""
        return (
            f"warning: at {num_with_all} of {num_of(len(most), 'target')} the units are all "
            "distant tokens, so that their loss says nothing about which matter; pass a smaller k"
        )

    def save(self, path: str | Path) -> None:
        """Write .json, or .parquet: a row for each distant unit, with the columns of its target."""
        check_suffix("path", path, ".json", ".parquet")
        path = path_of("path", path)
        if path.suffix == ".json":
            return write_atomically(path, to_json(self))
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = self.targets.rename(columns={"text": "target_text", "end": "target_end"})
        self.distant.merge(targets, on="target").to_parquet(path)

    @property
    def shown(self) -> Shown:
        return Shown(self.document.texts, self.targets, self.distant, self.windows.short)

    def describe(self, bold: bool = False) -> str:
        """Return the explanation for a terminal. `bold`: whether it understands ANSI codes."""
        parts = [self.shown.describe(bold)]
        if self.reliability is not None:
            parts.append(f"reliability of the unrelated texts: {self.reliability:.2f} (two halves)")
        parts += [describe_sink(self.sink), self.with_all_units, describe_noise(self._model_meta)]
        if self.checked is not None:
            parts.append(str(self.checked))
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return self.shown._repr_html_()


def to_json(explanation: Explanation) -> str:
    return json.dumps(to_json_value(explanation.to_dict()), ensure_ascii=False, indent=1)


DECODE = "decode token IDs first, with tokenizer.decode(ids)"


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(Request):
    """A call of `explain`, or of its command."""

    model: Any
    tokenizer: Any = None
    text: str | Path | None = None
    at: At | None = None
    prompt: str | None = None
    target: str | None = None
    unrelated: Any = "builtin:embedded"
    settings: AskSettings = field(default_factory=AskSettings)
    loading: ModelOptions = field(default_factory=ModelOptions)

    def checked(self) -> Self:
        """Return the request if its options are right and go together."""
        self.settings.check()
        find_selector(self.settings.selector, self.settings.interpretation)
        text = self.text
        prompt = self.prompt
        target = self.target
        settings = self.settings
        if (text is None) == (prompt is None):
            raise ConfigError("pass either text= or prompt=, not both and not neither")
        if text == "":
            raise ConfigError("text is empty; pass a text with distant tokens and a target")
        has_options_of_prompt = target is not None or settings.chat
        if (text is None and self.at is not None) or (prompt is None and has_options_of_prompt):
            raise ConfigError("`at` names places of a text; `target` and `chat` belong to a prompt")
        if settings.max_new_tokens is not None and (prompt is None or target is not None):
            raise ConfigError("max_new_tokens limits a generated answer, and none is generated")
        for name, value in (("prompt", prompt), ("target", target)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r:.80} must be a string; {DECODE}")
        if text is not None and not isinstance(text, str | Path):
            raise ConfigError(f"text={text!r:.80} must be a string, or a Path to a file; {DECODE}")
        for name, words in (("text", text), ("prompt", prompt), ("target", target)):
            if isinstance(words, str):
                check_encodable(words, name)
        if isinstance(text, str) and os.path.isfile(text):
            raise ConfigError(f"text={text} is a file name; pass Path('{text}') or its text")
        if settings.chat and self.loading.prefix != "auto":
            raise ConfigError(f"prefix={self.loading.prefix} cannot be combined with chat=True")
        return self


LOSSES = ["loss_short", "loss_long"]

MANY_UNITS = 4096
"""From so many distant tokens on, a cheaper selector is recommended."""


def explain(request: ExplainRequest) -> Explanation:
    """Answer a request."""
    with in_use(request.model), _prepared(request) as (prepared, spans):
        return _answer(prepared, spans, request.unrelated)


def count_cost(request: ExplainRequest, with_check: bool = False) -> Cost:
    """Return what answering a request costs. `with_check`: and checking the answer."""
    with _prepared(request) as (prepared, spans):
        cost = count(prepared, spans, request.unrelated if with_check else None)
        return replace(cost, seconds=_seconds(prepared, cost))


TRIED_TOKENS = 64
"""Tokens of the passage by which the speed of the model is tried."""


def _seconds(prepared: Prepared, cost: Cost) -> float | None:
    """Return how long so many token-forwards take here, by the time of a passage and its
    repetition. None for distant_states="replaced", whose model may compute elsewhere."""
    if prepared.settings.interpretation.replaces:
        return None
    passage = prepared.document.tokens[:TRIED_TOKENS]
    for _ in range(2):  # the first forward is slower
        before = prepared.scorer.token_forwards
        began = time.perf_counter()
        losses_of_repetition(prepared.scorer, [passage])
        seconds = time.perf_counter() - began
    return cost.token_forwards * seconds / (prepared.scorer.token_forwards - before)


@contextmanager
def _prepared(request: ExplainRequest) -> Iterator[tuple[Prepared, Spans]]:
    """Read the model and the text, and yield the prepared explanation and its targets. The model
    stays in use until the caller is done."""
    settings = request.settings
    loading = request.loading
    text = request.text
    if isinstance(text, Path):
        text = read_text(str(text))
    replaces = settings.interpretation.replaces
    loaded = load(request.model, request.tokenizer, loading, is_read=True, whole_prompts=replaces)
    with using(loaded):
        if text is not None:
            prompt = Prompt.of_text(loaded, text, loading.prefix)
        else:
            prompt = Prompt.with_answer(
                loaded, str(request.prompt), request.target, loading.prefix, settings
            )
        prepared = Prepared.of(
            loaded,
            prompt,
            request.at,
            settings,
            unrelated=request.unrelated,
            batch_tokens=loading.batch_tokens,
        )
        yield prepared, _targets_with_distant_part(prepared)


def _targets_with_distant_part(prepared: Prepared) -> Spans:
    """Return the targets that have distant units: those that were named, or else those with the
    largest gaps."""
    document = prepared.document
    windows = prepared.windows
    units = prepared.settings.units
    first = first_place(windows, units)
    spans = prepared.spans
    if spans is None:
        blocks = prepared.blocks_to_select()
        losses = context_losses(prepared.scorer, document, windows, blocks=blocks)
        refuse_no_numbers(losses[LOSSES].to_numpy(), "targets")
        spans = largest_gaps(losses[losses.target >= first])
    # Tables tell targets apart by their first tokens: of spans with one first token, keep the
    # longest.
    longest_end = dict(sorted(spans))
    spans = list(longest_end.items())
    kept = [span for span in spans if span[0] >= first]
    if not kept:
        raise DataError(
            f"no target has distant {units}, which begin at token {first:,} of "
            f"{len(document.tokens):,}; lower short={windows.short}"
        )
    num_units = prepared.most_units(kept)
    if num_units == 1:
        raise DataError(
            f"units={units}: the distant text is one of them, so there is nothing to rank; "
            f"{SMALLER_UNITS}"
        )
    if prepared.settings.k > num_units:
        say(
            f"k={prepared.settings.k:,} is more than the {num_units:,} distant {units}, "
            "which are all shown"
        )
    if len(kept) < len(spans):
        say(
            f"{len(spans) - len(kept)} of {len(spans)} targets precede token {first:,} and have no "
            f"distant {units}: left out"
        )
    return kept


def count(prepared: Prepared, spans: Spans, unrelated: Any = None) -> Cost:
    """Count what evaluating the targets costs. `unrelated`: also count their check on these
    texts."""
    scorer = counting(prepared.scorer)
    counted = replace(prepared, scorer=scorer)
    with in_use(scorer.model):
        targets, _, _ = _evaluate(counted, spans)
        if unrelated is not None:
            check(counted, targets, unrelated)
    return Cost(scorer.token_forwards, prepared.model.num_parameters)


def _answer(prepared: Prepared, spans: Spans, unrelated: Any) -> Explanation:
    """Evaluate targets, and look for signs that their numbers mislead."""
    settings = prepared.settings
    windows = prepared.windows
    num_distant = windows.tokens_before(max(first for first, _ in spans)) - windows.short
    evaluates_every = find_selector(settings.selector).evaluates_every_unit
    if evaluates_every and num_distant > MANY_UNITS:
        say(
            f"selector={settings.selector} evaluates {num_distant:,} distant tokens; "
            "add_one_nested a few hundred"
        )
    scorer = prepared.scorer
    before = scorer.token_forwards
    # Rules that evaluate few units depend on losses, which the count does not have.
    total = count(prepared, spans).token_forwards if evaluates_every else None
    with Progress("explaining", total, "token-forwards") as progress:
        scorer.after_batch = lambda: progress.update(scorer.token_forwards - before)
        targets, distant, tables = _evaluate(prepared, spans)
    scorer.after_batch = lambda: None
    refuse_no_numbers(targets[LOSSES].to_numpy(), "targets")
    spent = scorer.token_forwards
    sink: dict[str, Any] = {}
    if not windows.prefix and settings.interpretation.keeps_states:
        line_break = prepared.model.encode(["\n"])[0]
        sink = sink_check(scorer, [prepared.document], (), line_break)
    return Explanation(
        prepared=prepared,
        targets=targets,
        distant=distant,
        tables=tables,
        unrelated=unrelated,
        sink=sink,
        token_forwards=spent,
    )


def _evaluate(
    prepared: Prepared, spans: Spans
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, pd.DataFrame]]:
    """Return the targets, their distant units, and the tables of `recover`."""
    windows = prepared.windows
    document = prepared.document
    tables = prepared.recover({DOCUMENT: np.array(spans)})
    rows = tables["recovery"]
    rows = rows[rows.draw == 0].set_index(["target", "k"])[["loss_set", "loss_without"]]
    targets = pd.DataFrame(spans, columns=["target", "end"])
    targets["text"] = ["".join(document.texts[first:end]) for first, end in spans]
    # With 0 units the set is the local window alone, and all but the set the long window.
    no_units = rows.xs(0, level="k").loc[targets.target]
    targets["loss_short"] = no_units.loss_set.to_numpy()
    targets["loss_long"] = no_units.loss_without.to_numpy(float)
    distant = tables["influence"].rename(columns=lambda name: name.removeprefix("distant_"))
    distant = distant[["target", "rank", "first", "end", "text"]]
    distant["nats"] = _falls_alone(prepared.scorer, document, windows, targets, distant)
    targets["gap"] = targets.loss_short - targets.loss_long
    # The loss with k units belongs to the unit of rank k.
    losses_by_rank = rows.rename_axis(index={"k": "rank"}).reset_index()
    distant = distant.merge(losses_by_rank, on=["target", "rank"])
    return targets, distant, tables


def _falls_alone(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    targets: pd.DataFrame,
    distant: pd.DataFrame,
) -> pd.Series:
    """Return how far the loss falls when each distant unit alone is added to the local window,
    whatever the selector's score is."""
    nats = pd.Series(0.0, distant.index)
    for target in targets.itertuples():
        block = windows.block(document.tokens, target.target, target.end)
        context = scorer.context(block)
        units = distant[distant.target == target.target]
        alone = [
            context.set_row(np.arange(first, end) - block.first)
            for first, end in zip(units["first"], units["end"], strict=True)
        ]
        losses = np.array([loss_W.sum() for loss_W in scorer.losses(alone)])
        nats[units.index] = target.loss_short - losses
    return nats
