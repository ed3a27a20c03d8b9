"""Report which source each statement of an answer relies on: tokens → losses → **verdicts**.

`Attributing` lays out the prompt (prompt.py), draws decoys (decoys.py), has losses evaluated
(trials.py), and returns an `Attribution`. Its verdicts (verdicts.py) go by two numbers of each
statement and source: what is lost when a decoy replaces the source, and what the source gives among
decoys of all others.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.measurement.plan import load
from olmo_sparsity.analysis.results.summary import describe_noise
from olmo_sparsity.analysis.results.tables import to_json_value
from olmo_sparsity.analysis.results.view import quoted, sentence, strong
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs, logprobs_of
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.use import in_use
from olmo_sparsity.sources.decoys import draw_decoys, read_decoys
from olmo_sparsity.sources.documents import Answer
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.page import AnswerPage
from olmo_sparsity.sources.prompt import AnswerIds, Layout, Piece, SourcePrompt
from olmo_sparsity.sources.reasoning import sentences
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.trials import (
    NOTHING,
    TrialCount,
    Trials,
    count_at_most,
    count_if_clear,
)
from olmo_sparsity.sources.verdicts import (
    Evidence,
    Losses,
    Verdict,
    in_words,
    judge,
    looks,
    mean_of_tried,
    needed_for_parts,
)

NEW_TOKENS = 256
"""Tokens of a generated answer at most, unless the user says otherwise."""

HOW_TO_READ = (
    "A nat is a unit of loss: 1 nat less means that the words are 2.7 times as likely. A decoy is "
    "an unrelated text that replaces a source. A statement rests on a source if it loses much more "
    "without it than decoys explain. How often this is right: of 52 test questions that lost 2 "
    "nats or more without the right source, SmolLM2-135M's verdicts named that source, and no "
    "other, in 92%. Of 83 whose right source was missing, they named another one in 0%."
)
"""Printed above the verdicts. The rates are those of docs/sources.md."""

SHOWN = 3
"""Statements that a failed assertion shows."""

JSON_VERSION = 4
"""Of `to_json`. It grows when a key is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True)
class Reliance:
    """True or false. A failed `assert` shows its words, in the 240 characters that pytest prints of
    an object."""

    holds: bool
    words: str

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return self.words


@dataclass(frozen=True, eq=False)
class Attribution:
    """Which source each statement of an answer relies on. Printed, it is the answer with a verdict
    below each statement."""

    prompt: SourcePrompt
    layout: Layout
    settings: SourceSettings
    losses: Losses
    token_forwards: int
    token_losses: Losses | None = None
    """Losses of each token of the answer. None: statements are not judged by their parts."""

    steps: dict[str, Attribution] = field(default_factory=dict, repr=False)
    """By name, the attribution of each sentence of the reasoning that the answer relies on, also
    through other sentences."""

    def __getstate__(self) -> dict[str, Any]:
        # Pickled without the model's weights, which are large and may be on a GPU.
        prompt = replace(self.prompt, model=self.prompt.model.without_weights())
        return vars(self) | {"prompt": prompt}

    @property
    def names(self) -> list[str]:
        """The names of the sources, then those of the sentences of the reasoning."""
        return self.prompt.names

    @property
    def named_reasoning(self) -> list[int]:
        """Numbers of the sentences of the reasoning that a verdict names, from 0."""
        num_sources = len(self.names) - self.prompt.num_reasoning
        named = set[str]().union(*self.statements.sources)
        return [i for i, name in enumerate(self.names[num_sources:]) if name in named]

    def origins(self, named: Sequence[str]) -> tuple[str, ...]:
        """Replace sentences of the reasoning among these names by the sources they rely on."""
        origins = {name for name in named if name not in self.steps}
        for name in set(named) & set(self.steps):
            origins.update(self.steps[name].statements.origins[0])
        return tuple(name for name in self.names if name in origins)

    @cached_property
    def pieces(self) -> list[tuple[str, int | None]]:
        """Texts that together are the answer, each with the number of the statement that it is;
        None: it is part of no statement."""
        texts = self.layout.document.texts[self.layout.block.start :]
        pieces = list[tuple[str, int | None]]()
        last_end = 0
        for number, (first, end) in enumerate(self.layout.statements):
            pieces.append(("".join(texts[last_end:first]), None))
            pieces.append(("".join(texts[first:end]), number))
            last_end = end
        pieces.append(("".join(texts[last_end:]), None))
        return [(text, number) for text, number in pieces if text or number is not None]

    @property
    def texts(self) -> list[str]:
        """The text of each statement."""
        return [text for text, number in self.pieces if number is not None]

    @property
    def error_rate(self) -> str:
        """The error rate of the verdicts, in words, with its condition."""
        counts = f"statements: {len(self.texts)}, sources: {len(self.names)}, decoys of each"
        words = (
            "This is what the model uses, not whether a source supports the statement. "
            f"Of the sources named, {self.settings.rate:.0%} or less are expected to be named by "
            "chance, on average over answers, if the decoys (default: prose) are of the kind that "
            f"the sources are (Benjamini–Hochberg; {counts}: {self.settings.draws} at most)."
        )
        noise = describe_noise({"batch_noise": self.prompt.model.batch_noise})
        return f"{words} {sentence(noise)}" if noise else words

    @cached_property
    def _judged(self) -> tuple[Evidence, list[Verdict]]:
        if self.token_losses is None:
            return judge(self.losses, self.settings.rate)
        parts_TS = needed_for_parts(self.token_losses, self.layout.statements)
        return judge(self.losses, self.settings.rate, parts_TS)

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """A row for each statement and source: `gives`, nats among decoys of all others; `lost`,
        when a decoy replaces it; and what docs/sources.md explains."""
        evidence = self._judged[0]
        columns = dict[str, np.ndarray]()
        effects = {"gives": self.losses.gives_TSD, "lost": self.losses.lost_TSD}
        for p_TS, (name, nats_TSD) in zip(evidence.p_2TS, effects.items(), strict=True):
            num_tried_TS = np.isfinite(nats_TSD).sum(-1)
            columns[name] = mean_of_tried(nats_TSD)
            # By the spread of the statement: that of a few decoys may be far too small.
            columns[f"se_{name}"] = (
                evidence.spread_TS / np.where(num_tried_TS > 0, num_tried_TS, np.nan) ** 0.5
            )
            columns[f"beyond_{name}"] = (nats_TSD > 0).sum(-1)
            columns[f"tried_{name}"] = num_tried_TS
            columns[f"p_{name}"] = p_TS
        columns["above"] = np.where(np.isfinite(evidence.above_TS), evidence.above_TS, np.nan)
        keys = [range(len(self.texts)), self.names]
        index = pd.MultiIndex.from_product(keys, names=["statement", "source"])
        return pd.DataFrame({name: values.ravel() for name, values in columns.items()}, index)

    @cached_property
    def statements(self) -> pd.DataFrame:
        """A row for each statement; docs/sources.md explains the columns."""
        evidence, verdicts = self._judged
        # Bonferroni: the least of two tests of each source.
        p_T = (2 * len(self.names) * evidence.p_2TS.min((0, 2))).clip(max=1.0)
        rows = list[dict[str, Any]]()
        for number, (kind, chosen) in enumerate(verdicts):
            nats = self.losses.gap_T[number]
            named = [self.names[s] for s in chosen]
            is_open_S = evidence.open_TS[number]
            open_names = [self.names[s] for s in np.flatnonzero(is_open_S)]
            cells = self.matrix.loc[number].loc[open_names if kind == "undecided" else named]
            spread = evidence.spread_TS[number].mean()
            row = {
                "text": self.texts[number].strip(),
                "nats": nats,
                "spread": spread,
                "p": p_T[number],
                "kind": kind,
                "sources": tuple(named),
                "open": tuple(open_names),
                "verdict": in_words(kind, cells, nats, spread, self.settings.draws),
                "origins": self.origins(named),
            }
            rows.append(row)
        return pd.DataFrame(rows)

    def is_undecided(self, row: Any) -> bool:
        """Return whether a statement, or a sentence of the reasoning that it relies on, is
        undecided. `row`: of `statements`."""
        steps = [step for _, _, step in self.chain(row.sources)]
        return any(item.kind == "undecided" for item in (row, *steps))

    def relies_on(self, source: str | None, statement: int | None = None) -> Reliance:
        """Return whether a statement (default: any) relies on a source, also through reasoning;
        with None, whether it (default: each) relies on none."""
        if source is not None and source not in self.names:
            raise ConfigError(f"no source is named {source}; the names are {', '.join(self.names)}")
        if statement is not None and not 0 <= statement < len(self.texts):
            raise ConfigError(f"statement={statement} must be 0 to {len(self.texts) - 1}")
        rows = self.statements if statement is None else self.statements.iloc[[statement]]
        if source is None:
            # Undecided is not "no source".
            relies = [bool(row.origins) or self.is_undecided(row) for row in rows.itertuples()]
            holds = not any(relies)
        else:
            relies = [source in {*row.sources, *row.origins} for row in rows.itertuples()]
            holds = any(relies)
        # Those that rely on it come first, as not all are shown.
        order = np.argsort(np.logical_not(relies), kind="stable")
        shown = [_in_short(row) for row in rows.iloc[order[:SHOWN]].itertuples()]
        if len(rows) > SHOWN:
            shown.append(f"{len(rows) - SHOWN} more")
        words = f"expected: {source or 'no source'}; found: {'; '.join(shown)}"
        return Reliance(holds, printable(words))

    @property
    def sources(self) -> pd.DataFrame:
        """A row for each source: statements that rely on it, by number from 0; nats, the most of
        any statement; verdict."""
        rows_of = [{*row.sources, *row.origins} for row in self.statements.itertuples()]
        nats = self.matrix[["gives", "lost"]].max(axis=1).groupby("source").max()
        rows = list[dict[str, Any]]()
        for name in self.names:
            numbers = tuple(i for i, named in enumerate(rows_of) if name in named)
            most = f"{nats[name] + 0.0:.1f} nats"  # no -0.0
            if numbers:
                which = ", ".join(str(i + 1) for i in numbers)
                verdict = f"statement {which} relies on it ({most})"
            elif any(name in row.open for row in self.statements.itertuples()):
                verdict = f"neither named nor excluded (at most {most})"
            else:
                verdict = f"changes nothing beyond its decoys (at most {most})"
            rows.append(
                {"source": name, "statements": numbers, "nats": nats[name], "verdict": verdict}
            )
        return pd.DataFrame(rows)

    def text(self, citations: str = "[1]", references: bool = True) -> str:
        """Return the answer with a citation behind each statement that relies on a source: as
        `[1]`, `(1)`, `[^1]`, or `[name]`. Sources that each suffice share one (`[1/2]`).
        `references`: add a line for each source that is cited."""
        if (citations.count("1"), citations.count("name")) not in ((1, 0), (0, 1)):
            raise ConfigError(f"citations={citations} must hold 1 or name once, as in [1]")
        by_name = "name" in citations
        cited = list[str]()

        def mark(*names: str) -> str:
            cited.extend(name for name in dict.fromkeys(names) if name not in cited)
            if by_name:
                return citations.replace("name", "/".join(names))
            numbers = "/".join(str(cited.index(name) + 1) for name in names)
            return citations.replace("1", numbers)

        answer = ""
        for text, number in self.pieces:
            marks = ""
            if number is not None:
                row = self.statements.iloc[number]
                # Alternatives share a mark; of sources that are needed together, each has one.
                is_either = row.kind == "either" and row.origins == row.sources
                groups = [row.sources] if is_either else [(name,) for name in row.origins]
                marks = "".join(mark(*names) for names in groups)
            body = text.rstrip()
            if marks:
                is_fence = body.endswith(("```", "~~~"))  # which must be alone in its line
                body_with_marks = f"{body}\n{marks}" if is_fence else f"{body} {marks}"
            else:
                body_with_marks = body
            answer += body_with_marks + text[len(body) :]
        if references and cited and not by_name:
            colon = ":" if citations.startswith("[^") else ""  # a footnote of Markdown
            lines = [f"{mark(name)}{colon} {name}" for name in cited]
            answer = "\n".join([answer.rstrip() + "\n", *lines])
        return answer.strip()

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes (docs/sources.md)."""
        records = self.statements.to_dict("records")
        statements = [
            {"first": first, "end": end} | record
            for (first, end), record in zip(self._spans(), records, strict=True)
        ]
        first_sentence = len(self.names) - self.prompt.num_reasoning
        reasoning = [
            {"name": name, "text": self.source_text(number).strip()} | self._step(name)
            for number, name in enumerate(self.names[first_sentence:], start=first_sentence)
        ]
        return {
            "schema": "olmo-sparsity/attribution",
            "version": JSON_VERSION,
            "model": self.prompt.model.name,
            "fingerprint": self.prompt.model.weights_sha256,
            "settings": asdict(self.settings),
            "token_forwards": self.token_forwards,
            "error_rate": self.error_rate,
            "answer": "".join(text for text, _ in self.pieces),
            "sources": self.names,
            "statements": statements,
            "matrix": self.matrix.reset_index().to_dict("records"),
            "reasoning": reasoning,
        }

    def _spans(self) -> list[tuple[int, int]]:
        """Return first and end character of each statement in the answer, without white space."""
        spans = list[tuple[int, int]]()
        first = 0
        for text, number in self.pieces:
            if number is not None:
                inner = text.strip()
                begin = first + text.find(inner)
                spans.append((begin, begin + len(inner)))
            first += len(text)
        return spans

    def _step(self, name: str) -> dict[str, Any]:
        """Return what a sentence of the reasoning relies on, if the answer relies on it."""
        if name not in self.steps:
            return {}
        step = self.steps[name]
        (record,) = step.statements.to_dict("records")
        return record | {"matrix": step.matrix.reset_index().to_dict("records")}

    def source_text(self, number: int) -> str:
        """Return the text of a source, as the model reads it."""
        first = self.layout.units.first[number]
        return "".join(self.layout.document.texts[first : self.layout.text_ends[number]])

    def to_json(self) -> str:
        """Return the answer, its statements and verdicts as JSON, in a versioned schema."""
        return json.dumps(to_json_value(self.to_dict()), ensure_ascii=False, indent=1)

    def to_html(self, path: str | Path) -> None:
        """Write the answer as a page, each statement in the colour of its source."""
        page = AnswerPage(
            model=self.prompt.model.name,
            error_rate=self.error_rate,
            names=self.names,
            draws=self.settings.draws,
            pieces=self.pieces,
            statements=self.statements,
            matrix=self.matrix,
            sources=self.sources,
            prompt=self._prompt_texts(),
            chains=[list(self.chain(named)) for named in self.statements.sources],
        )
        page.write(Path(path))

    def _prompt_texts(self) -> list[tuple[str, int | None]]:
        """Return the texts that precede the answer, each with the number of the source it is."""
        texts = self.layout.document.texts
        prompt_texts = list[tuple[str, int | None]]()
        first = 0
        for piece in [*self.prompt.pieces, Piece(self.prompt.local_ids, [])]:
            end = first + len(piece.text_ids)
            prompt_texts.append(("".join(texts[first:end]), piece.source))
            first = end + len(piece.after_ids)
        return prompt_texts

    def describe(self, bold: bool = False) -> str:
        """Return the verdicts as text for a terminal, with how to read them and their error rate.
        `bold`: whether it understands ANSI codes."""
        lines = [HOW_TO_READ, ""]
        for row in self.statements.itertuples():
            lines.append(strong(quoted(row.text), bold))
            lines.append(f"  {printable(row.verdict)}")
            for depth, name, step in self.chain(row.sources):
                indent = "  " * depth
                lines.append(f"{indent}{name}, '{quoted(step.text)}', {printable(step.verdict)}")
        return "\n".join([*lines, "", self.error_rate])

    def chain(self, named: Sequence[str], depth: int = 2) -> Iterator[tuple[int, str, Any]]:
        """Yield the sentences of the reasoning among these names, each followed by the sentences
        that it relies on: depth, name, and row of `statements`."""
        for name in named:
            if name in self.steps:
                (row,) = self.steps[name].statements.itertuples()
                yield depth, name, row
                yield from self.chain(row.sources, depth + 1)

    def __repr__(self) -> str:
        return self.describe()


def _in_short(row: Any) -> str:
    """Describe the verdict of a statement for a failed assertion. `row`: of `statements`."""
    if row.kind == "undecided":
        verdict = "is undecided"
    else:
        joint = {"either": " or ", "both": " and "}.get(row.kind, "")
        verdict = f"relies on {joint.join(row.sources) or 'no source'}"
    text = shorten(row.text, 24, placeholder="…")
    return f"statement {row.Index}, '{text}', {verdict} ({row.nats:.1f} nats)"


def attribute(request: AttributeRequest) -> Attribution:
    """Answer a request."""
    with in_use(request.model):
        return Attributing(_load(request), request).run()


def count_cost(request: AttributeRequest) -> Cost:
    """Return what a request costs, without computing it."""
    return cost_of([Attributing(_load(request, only_counts=True), request)])


def cost_of(questions: Sequence[Attributing]) -> Cost:
    """Return what these questions cost together."""
    at_most = sum((question.count_at_most() for question in questions), NOTHING)
    if_clear = sum((question.count_if_clear() for question in questions), NOTHING)
    num_parameters = questions[0].model.num_parameters
    cost = Cost(at_most.token_forwards, num_parameters)
    lines = [
        f"token-forwards  {if_clear.token_forwards:,} in {if_clear.num_prompts:,} prompts if the "
        "first source is clear at once",
        f"at most         {at_most.token_forwards:,} in {at_most.num_prompts:,} prompts",
    ]
    if num_parameters and torch.cuda.is_available():
        lines.append(f"FLOPs at most   {cost.flops:.2e} (2 per parameter)")
    elif num_parameters:
        speed = flops_per_second()
        clear_seconds = Cost(if_clear.token_forwards, num_parameters).flops / speed
        most_seconds = cost.flops / speed
        rule = f"2 FLOPs per parameter; {speed / 1e9:,.0f} GFLOP/s in products of matrices"
        lines.append(f"FLOPs at most   {cost.flops:.2e}")
        lines.append(
            f"on this CPU     about {clear_seconds:,.0f} s if clear at once, at most "
            f"{most_seconds:,.0f} s ({rule})"
        )
    return replace(cost, details="\n".join(lines))


def flops_per_second() -> float:
    """Time a product of matrices on this machine, which takes a fraction of a second."""
    size = 768
    matrix = torch.ones(size, size)
    seconds = list[float]()
    for _ in range(5):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return float(2 * size**3 / np.median(seconds))


def _load(request: AttributeRequest, **how: Any) -> LoadedModel:
    how |= {"whole_prompts": True} | request.serving.loading
    return load(request.model, request.tokenizer, request.loading, True, **how)


@dataclass(frozen=True)
class Attributing:
    """A request to a model, to run or to count."""

    model: LoadedModel
    request: AttributeRequest
    quiet: bool = False
    """Show no progress."""

    def run(self) -> Attribution:
        """Generate the answer unless the request has one, and judge its statements."""
        request = self.request
        prompt = self._prompt
        with using(self.model):
            # Raises before an answer is generated, which may take minutes.
            self._decoy_texts(prompt)
            ids = prompt.answer_ids(
                request.answer, self._num_new, quiet=self.quiet, reasoning=request.reasoning
            )
            (answer_prompt, answer_ids), *sentence_parts = self._chain(ids)
            answer = self._judge("explaining", answer_prompt, answer_ids)
            steps = dict[str, Attribution]()
            waiting = [*answer.named_reasoning]
            for number in waiting:  # grows, by the sentences that a sentence relies on
                name = f"reasoning {number + 1}"
                step = self._judge(f"explaining {name}", *sentence_parts[number])
                steps[name] = replace(step, steps=steps)
                waiting += [other for other in step.named_reasoning if other not in waiting]
        forwards_of_steps = sum(step.token_forwards for step in steps.values())
        token_forwards = answer.token_forwards + forwards_of_steps
        return replace(answer, steps=steps, token_forwards=token_forwards)

    def count_at_most(self) -> TrialCount:
        """Count all trials that may be needed; with reasoning, as if the answer relied on each
        sentence."""
        draws = self.request.settings.draws
        counts = [count_at_most(prompt, layout, draws) for prompt, layout in self._layouts]
        return sum(counts, NOTHING)

    def count_if_clear(self) -> TrialCount:
        """Count the trials if two decoys decide; with reasoning, as if the answer relied on each
        sentence."""
        draws = self.request.settings.draws
        counts = [count_if_clear(prompt, layout, draws) for prompt, layout in self._layouts]
        return sum(counts, NOTHING)

    @cached_property
    def _layouts(self) -> list[tuple[SourcePrompt, Layout]]:
        """Prompt and layout of the answer, as long as it may become, and of each sentence of the
        reasoning."""
        request = self.request
        prompt = self._prompt
        if request.answer is None:
            placeholder = Answer("?", [(0, 1)])
            ids = prompt.answer_ids(placeholder, self._num_new, True, request.reasoning)
            ids = replace(ids, pieces=[prompt.local_ids[:1] * self._num_new])
        else:
            ids = prompt.answer_ids(request.answer, self._num_new, True, request.reasoning)
        return [(part, part.lay_out(part_ids)) for part, part_ids in self._chain(ids)]

    def _chain(self, ids: AnswerIds) -> list[tuple[SourcePrompt, AnswerIds]]:
        """Return the answer, and each sentence of the reasoning as an answer of its own, with the
        prompt that precedes it."""
        tokens = ids.reasoning
        spans = sentences(tokens, self.model.tokenizer)
        links = [(self._prompt.through(tokens, spans), ids)]
        for number, (first, end) in enumerate(spans):
            # The sentences before it are sources of a sentence, too.
            before = self._prompt.through(tokens[:first], spans[:number])
            links.append((before, AnswerIds([tokens[first:end]], [True])))
        return links

    def _decoy_texts(self, prompt: SourcePrompt) -> list[np.ndarray]:
        decoys = self.request.decoys
        return read_decoys(self.model, prompt, "builtin:embedded" if decoys is None else decoys)

    def _judge(self, doing: str, prompt: SourcePrompt, ids: AnswerIds) -> Attribution:
        """Evaluate as many decoys as the verdicts of this answer need. `doing`: shown as the name
        of the progress bar."""
        settings = self.request.settings
        decoys = draw_decoys(prompt, self._decoy_texts(prompt), settings.draws, settings.seed)
        layout = prompt.lay_out(ids)
        logprobs = logprobs_of(self.model, self.request.loading.batch_tokens)
        forwards_before = logprobs.token_forwards
        if isinstance(logprobs, ModelLogprobs):
            # Computed once here, because most prompts begin with them.
            logprobs.scorer.states(layout.before_question)
        num_rounds = 1 + len(looks(settings.draws))
        with Progress(doing, num_rounds, "rounds", enabled=not self.quiet) as progress:
            trials = Trials(logprobs, layout, decoys)
            losses = trials.run(settings.rate, progress.update)
            progress.update(num_rounds)
        self._refuse_unread(trials, prompt, layout)
        return Attribution(
            prompt=prompt,
            layout=layout,
            settings=settings,
            losses=losses,
            token_forwards=logprobs.token_forwards - forwards_before,
            token_losses=trials.token_losses,
        )

    def _refuse_unread(self, trials: Trials, prompt: SourcePrompt, layout: Layout) -> None:
        """Raise if a server has cut sources off the prompt: no statement would rely on them."""
        if self.model.prompt_model is None:
            return  # A model in this process reads whole prompts, whatever it makes of them.
        unread = trials.unread_sources()
        if unread:
            names = ", ".join(prompt.names[source] for source in unread)
            raise DataError(
                f"{self.model.name} did not read {names}: decoys there change no digit of the "
                f"answer's loss; raise its limit for prompts, here of {len(layout.block.tokens):,} "
                "tokens"
            )

    @property
    def _num_new(self) -> int:
        return self.request.settings.max_new_tokens or NEW_TOKENS

    @cached_property
    def _prompt(self) -> SourcePrompt:
        return SourcePrompt.of(self.model, self.request)
