"""Report which source each statement of an answer relies on: tokens → losses → **verdicts**.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer, L tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from olmo_sparsity.analysis.results.tables import plain
from olmo_sparsity.analysis.results.view import quoted, sentence, strong
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.logprobs import CountingEngine, ModelLogprobs, logprobs_of
from olmo_sparsity.analysis.scoring.scorer import refuse_no_numbers
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.models.use import in_use
from olmo_sparsity.sources.documents import Answer
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.page import AnswerPage
from olmo_sparsity.sources.segments import (
    AnswerIds,
    AttributeRequest,
    Layout,
    Piece,
    SourcePrompt,
    draw_decoys,
    read_decoys,
    sentences,
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
    sources_to_look_at,
)

Trial = tuple[str, int] | tuple[str, int, int]
"""Way, source and draw: `all` sources, or `decoys` in place of all of them, of all others (`among`)
or of the source alone (`without`)."""

CERTAIN_NATS = 1e-4
"""A token of a smaller loss may have the same one, to the last digit, whatever precedes it."""

LEAST_UNCERTAIN_TOKENS = 4
"""So many tokens of an answer never keep their losses, to the last digit, if a source changes that
the model reads."""

NEW_TOKENS = 256
SHOWN = 3  # statements that a failed assertion shows
JSON_VERSION = 4  # grows when a key is removed or changes its meaning, not when one is added


class Trials:
    """Evaluates losses with decoys in the places of sources, as far as needed. All texts keep their
    positions, so a model reads no prompt with sources missing."""

    def __init__(self, engine: LogprobModel, layout: Layout, decoys: Sequence[np.ndarray]) -> None:
        """`decoys`: decoys_DL of each source."""
        self.engine, self.layout, self.decoys = engine, layout, decoys
        num_T, num_S, self.draws = len(layout.statements), len(decoys), len(decoys[0])
        shapes: dict[str, tuple[int, ...]] = {"all": (1,), "decoys": (self.draws,)}
        shapes |= {"among": (num_S, self.draws), "without": (num_S, self.draws)}
        self.found = {way: np.full((num_T, *shape), np.nan) for way, shape in shapes.items()}
        self._shapes, self._by_token = shapes, dict[str, np.ndarray]()

    def run(self, rate: float, done: Callable[[int], None]) -> Losses:
        """Evaluate one decoy of each source, and of those that may matter 2, 4, 8, … until the
        verdicts are clear."""
        self.evaluate(first_round(len(self.decoys)))
        for number, num in enumerate([1, *looks(self.draws)], start=1):
            done(number)
            gives_S, lost_S = sources_to_look_at(self.losses, rate)
            if not (gives_S | lost_S).any():
                break
            gives, lost = np.flatnonzero(gives_S).tolist(), np.flatnonzero(lost_S).tolist()
            self.evaluate(next_round(gives, lost, num))
        return self.losses

    @property
    def losses(self) -> Losses:
        return _losses(self.found)

    @property
    def token_losses(self) -> Losses:
        """The same of each token of the answer."""
        return _losses(self._by_token)

    def unread_sources(self) -> list[int]:
        """Return the numbers of sources whose replacement by a decoy changes no token's loss in any
        digit: the model has not read them."""
        with_all_W = self._by_token["all"][:, 0]
        without_WS = self._by_token["without"][:, :, 0]
        is_uncertain_W = with_all_W > CERTAIN_NATS
        if is_uncertain_W.sum() < LEAST_UNCERTAIN_TOKENS:
            return []
        is_same_WS = without_WS == with_all_W[:, None]
        is_unread_S = is_same_WS[is_uncertain_W].all(0)
        sources_F = self.distant("all", 0)
        return [
            source
            for source in np.flatnonzero(is_unread_S).tolist()
            if not np.array_equal(self.distant("without", source, 0), sources_F)
        ]

    def evaluate(self, trials: Iterable[Trial]) -> None:
        """Evaluate those that were not evaluated before."""
        new = [one for one in trials if np.isnan(self.found[one[0]][(0, *one[1:])])]
        if not new:
            return
        blocks = [self.layout.block.with_distant(self.distant(*one)) for one in new]
        prompts = [Prompt(one.tokens[: one.num_before], one.targets_W) for one in blocks]
        losses_PW = -np.stack(self.engine.score(prompts))
        losses_TP = self.layout.by_statement(losses_PW)
        refuse_no_numbers(losses_TP, "statements, with these sources and decoys")
        if not self._by_token:
            num_W = losses_PW.shape[1]
            self._by_token = {w: np.full((num_W, *s), np.nan) for w, s in self._shapes.items()}
        for (way, *numbers), losses_T, losses_W in zip(new, losses_TP.T, losses_PW, strict=True):
            self.found[way][(slice(None), *numbers)] = losses_T
            self._by_token[way][(slice(None), *numbers)] = losses_W

    def distant(self, way: str, *numbers: int) -> np.ndarray:
        """distant_F: the distant part of a prompt."""
        distant_F = self.layout.block.distant_F.copy()
        for s in self.replaced(way, numbers[0]):
            first, decoys_DL = self.layout.units.first[s], self.decoys[s]
            distant_F[first : first + decoys_DL.shape[1]] = decoys_DL[numbers[-1]]
        return distant_F

    def replaced(self, way: str, source: int) -> set[int]:
        every, one = set(range(len(self.decoys))), {source}
        return {"all": set(), "decoys": every, "among": every - one, "without": one}[way]


def _losses(found: dict[str, np.ndarray]) -> Losses:
    return Losses(found["all"][:, 0], found["decoys"], found["among"], found["without"])


def first_round(num_sources: int) -> list[Trial]:
    return [("all", 0), ("decoys", 0), *(("without", s, 0) for s in range(num_sources))]


def next_round(gives: Iterable[int], lost: Iterable[int], num: int) -> list[Trial]:
    """Return what the first `num` decoys of these sources need."""
    draws, gives = range(num), list(gives)
    return [
        *(("without", source, draw) for source in lost for draw in draws),
        *(("decoys", draw) for draw in (draws if gives else draws[:2])),
        *(("among", source, draw) for source in gives for draw in draws),
    ]


def count(prompt: SourcePrompt, layout: Layout, draws: int) -> list[tuple[int, int]]:
    """Return token-forwards and prompts at most, and those if one decoy of each source and two of
    the first one are enough: with decoys that share no token."""
    lengths = [len(ids) for parts in prompt.wholes for ids in parts]
    firsts = -1 - np.cumsum([0, *lengths[:-1]]) * draws
    decoys = [
        first - np.arange(draws * length).reshape(draws, length)
        for first, length in zip(firsts, lengths, strict=True)
    ]
    known, every = layout.before_question, range(len(lengths))

    def spent(*rounds: list[Trial]) -> tuple[int, int]:
        own = prompt.model.engine
        engine = CountingEngine(own is None or own.shares, known if own is None else None)
        trials = Trials(engine, layout, decoys)
        for one in (first_round(len(lengths)), *rounds):
            trials.evaluate(one)
        return engine.token_forwards, engine.num_prompts

    most = spent(*(next_round(every, every, num) for num in [1, *looks(draws)]))
    return [most, spent(next_round([], [0], 2))]


@dataclass(frozen=True)
class Reliance:
    """True or false, with words for a failed `assert`, in the 240 characters that pytest prints."""

    holds: bool
    words: str

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return self.words


@dataclass(frozen=True, eq=False)
class Attribution:
    """Shows as the answer with each statement in the colour of its source, as a list in a
    terminal."""

    prompt: SourcePrompt
    layout: Layout
    settings: SourceSettings
    losses: Losses
    token_forwards: int
    token_losses: Losses | None = None
    """Of each token of the answer. None: statements are not judged by their parts."""

    steps: dict[str, Attribution] = field(default_factory=dict, repr=False)
    """Attributions of the sentences of the reasoning that the answer relies on, also indirectly."""

    def __getstate__(self) -> dict[str, Any]:
        prompt = replace(self.prompt, model=self.prompt.model.without_weights())
        return vars(self) | {"prompt": prompt}

    @property
    def names(self) -> list[str]:
        return self.prompt.names

    @property
    def named_reasoning(self) -> list[int]:
        """Numbers of the sentences of the reasoning that a verdict names, from 0."""
        num_sources = len(self.names) - self.prompt.num_reasoning
        names = {name for named in self.statements.sources for name in named}
        return [i for i, name in enumerate(self.names[num_sources:]) if name in names]

    def origins(self, named: Sequence[str]) -> tuple[str, ...]:
        """Replace sentences of the reasoning among these names by the sources they rely on."""
        found = {name for name in named if name not in self.steps}
        for name in set(named) & set(self.steps):
            found.update(self.steps[name].statements.origins[0])
        return tuple(name for name in self.names if name in found)

    @cached_property
    def pieces(self) -> list[tuple[str, int | None]]:
        """Texts that together are the answer, each with its statement's number; None: of none."""
        texts = self.layout.document.texts[self.layout.block.start :]
        found, at = list[tuple[str, int | None]](), 0
        for number, (first, end) in enumerate(self.layout.statements):
            found += [("".join(texts[at:first]), None), ("".join(texts[first:end]), number)]
            at = end
        found.append(("".join(texts[at:]), None))
        return [(text, number) for text, number in found if text or number is not None]

    @property
    def texts(self) -> list[str]:
        """The text of each statement."""
        return [text for text, number in self.pieces if number is not None]

    @property
    def error_rate(self) -> str:
        """The error rate of the verdicts, in words, with its condition."""
        noise = describe_noise({"batch_noise": self.prompt.model.batch_noise})
        counts = f"statements: {len(self.texts)}, sources: {len(self.names)}, decoys of each"
        return (
            "This is what the model uses, not whether a source supports the statement. "
            f"Of the sources named, {self.settings.rate:.0%} or less are expected to be named by "
            "chance, on average over answers, if the decoys (default: prose) are of the kind that "
            f"the sources are (Benjamini–Hochberg; {counts}: {self.settings.draws} at most)."
        ) + (f" {sentence(noise)}" if noise else "")

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
        evidence, columns = self._judged[0], dict[str, np.ndarray]()
        for p_TS, name in zip(evidence.p_2TS, ("gives", "lost"), strict=True):
            nats_TSD = getattr(self.losses, f"{name}_TSD")
            tried_TS, mean_TS = np.isfinite(nats_TSD).sum(-1), mean_of_tried(nats_TSD)
            se_TS = evidence.spread_TS / np.where(tried_TS > 0, tried_TS, np.nan) ** 0.5
            columns |= {name: mean_TS, f"se_{name}": se_TS}
            columns |= {f"beyond_{name}": (nats_TSD > 0).sum(-1), f"tried_{name}": tried_TS}
            columns[f"p_{name}"] = p_TS
        columns["above"] = np.where(np.isfinite(evidence.above_TS), evidence.above_TS, np.nan)
        keys = [range(len(self.texts)), self.names]
        index = pd.MultiIndex.from_product(keys, names=["statement", "source"])
        return pd.DataFrame({name: of.ravel() for name, of in columns.items()}, index)

    @cached_property
    def statements(self) -> pd.DataFrame:
        """A row for each statement; docs/sources.md explains the columns."""
        evidence, verdicts = self._judged
        p_T = (2 * len(self.names) * evidence.p_2TS.min((0, 2))).clip(max=1.0)
        rows = []
        for number, (kind, chosen) in enumerate(verdicts):
            nats, spread = self.losses.gap_T[number], evidence.spread_TS[number].mean()
            names = [self.names[s] for s in chosen]
            open_names = [self.names[s] for s in np.flatnonzero(evidence.open_TS[number])]
            shown = self.matrix.loc[number].loc[open_names if kind == "undecided" else names]
            verdict = in_words(kind, shown, nats, self.settings.draws)
            text, p, origins = self.texts[number].strip(), p_T[number], self.origins(names)
            named = tuple(names), tuple(open_names)
            rows.append((text, nats, spread, p, kind, *named, verdict, origins))
        columns = ["text", "nats", "spread", "p", "kind", "sources", "open", "verdict", "origins"]
        return pd.DataFrame(rows, columns=columns)

    def is_undecided(self, row: Any) -> bool:
        """Return whether a statement, or a sentence of the reasoning that it relies on, is
        undecided. `row`: of `statements`."""
        steps = [step for _, _, step in self.chain(row.sources)]
        return any(item.kind == "undecided" for item in (row, *steps))

    def relies_on(self, source: str | None, statement: int | None = None) -> Reliance:
        """Return whether a statement (default: any) relies on a source, also through reasoning;
        with None, whether it (default: each) relies on none."""
        if source is not None:
            self._number(source)
        if statement is not None and not 0 <= statement < len(self.texts):
            raise ConfigError(f"statement={statement} must be 0 to {len(self.texts) - 1}")
        rows = self.statements if statement is None else self.statements.iloc[[statement]]
        named = [
            bool(row.origins) or self.is_undecided(row)
            if source is None
            else source in {*row.sources, *row.origins}
            for row in rows.itertuples()
        ]
        holds, expected = (not any(named), "no source") if source is None else (any(named), source)
        first = rows.iloc[np.argsort(np.logical_not(named), kind="stable")[:SHOWN]]
        joints = {"either": " or ", "both": " and "}
        found = list[str]()
        for row in first.itertuples():
            relies = f"relies on {joints.get(row.kind, '').join(row.sources) or 'no source'}"
            relies = "is undecided" if row.kind == "undecided" else relies
            text = shorten(row.text, 24, placeholder="…")
            found.append(f"statement {row.Index}, '{text}', {relies} ({row.nats:.1f} nats)")
        found += [f"{len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        return Reliance(holds, printable(f"expected: {expected}; found: {'; '.join(found)}"))

    @property
    def sources(self) -> pd.DataFrame:
        """A row for each source: statements that rely on it, by number from 0; nats, the most of
        any statement; verdict."""
        rows_of = [{*row.sources, *row.origins} for row in self.statements.itertuples()]
        nats = self.matrix[["gives", "lost"]].max(axis=1).groupby("source").max()
        rows = []
        for name in self.names:
            numbers = tuple(i for i, named in enumerate(rows_of) if name in named)
            most = f"{nats[name] + 0.0:.1f} nats"
            verdict = f"changes nothing beyond its decoys (at most {most})"
            if numbers:
                which = ", ".join(str(i + 1) for i in numbers)
                verdict = f"statement {which} relies on it ({most})"
            rows.append((name, numbers, nats[name], verdict))
        return pd.DataFrame(rows, columns=["source", "statements", "nats", "verdict"])

    def _number(self, source: str) -> int:
        if source not in self.names:
            raise ConfigError(f"no source is named {source}; the names are {', '.join(self.names)}")
        return self.names.index(source)

    def text(self, citations: str = "[1]", references: bool = True) -> str:
        """Return the answer with a citation behind each statement that relies on a source: as
        `[1]`, `(1)`, `[^1]`, or `[name]`. Sources that each suffice share one (`[1/2]`).
        `references`: add a line for each source that is cited."""
        if (citations.count("1"), citations.count("name")) not in ((1, 0), (0, 1)):
            raise ConfigError(f"citations={citations} must hold 1 or name once, as in [1]")
        by_name, cited, found = "name" in citations, list[str](), ""

        def mark(*names: str) -> str:
            cited.extend(name for name in dict.fromkeys(names) if name not in cited)
            labels = names if by_name else [str(cited.index(name) + 1) for name in names]
            return citations.replace("name" if by_name else "1", "/".join(labels))

        for text, number in self.pieces:
            groups, body = list[tuple[str, ...]](), text.rstrip()
            if number is not None:
                row = self.statements.iloc[number]
                is_either = row.kind == "either" and row.origins == row.sources
                groups = [row.sources] if is_either else [(name,) for name in row.origins]
            before = "\n" if body.endswith(("```", "~~~")) else " "  # a fence is alone in its line
            marks = "".join(mark(*names) for names in groups)
            found += body + (before + marks if marks else "") + text[len(body) :]
        if references and cited and not by_name:
            colon = ":" if citations.startswith("[^") else ""
            lines = [f"{mark(name)}{colon} {name}" for name in cited]
            found = "\n".join([found.rstrip() + "\n", *lines])
        return found.strip()

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes (docs/sources.md)."""
        first, spans = 0, list[tuple[int, int]]()
        for text, number in self.pieces:
            if number is not None:
                inner = text.strip()
                begin = first + text.find(inner)
                spans.append((begin, begin + len(inner)))
            first += len(text)
        statements = self.statements.to_dict("records")
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
            "statements": [
                {"first": a, "end": b} | row for (a, b), row in zip(spans, statements, strict=True)
            ],
            "matrix": self.matrix.reset_index().to_dict("records"),
            "reasoning": [
                {"name": name, "text": self.source_text(number).strip()} | self._step(name)
                for number, name in enumerate(self.names)
                if number >= len(self.names) - self.prompt.num_reasoning
            ],
        }

    def _step(self, name: str) -> dict[str, Any]:
        if name not in self.steps:
            return {}
        step = self.steps[name]
        (row,) = step.statements.to_dict("records")
        return row | {"matrix": step.matrix.reset_index().to_dict("records")}

    def source_text(self, number: int) -> str:
        units, texts = self.layout.units, self.layout.document.texts
        return "".join(texts[units.first[number] : self.layout.text_ends[number]])

    def to_json(self) -> str:
        return json.dumps(plain(self.to_dict()), ensure_ascii=False, indent=1)

    def to_html(self, path: str | Path) -> None:
        texts, prompt, at = self.layout.document.texts, list[tuple[str, int | None]](), 0
        for piece in [*self.prompt.pieces, Piece(self.prompt.near_ids, [])]:
            end = at + len(piece.text_ids)
            prompt.append(("".join(texts[at:end]), piece.source))
            at = end + len(piece.after_ids)
        chains = [list(self.chain(named)) for named in self.statements.sources]
        AnswerPage(
            self.prompt.model.name, self.error_rate, self.names, self.settings.draws, self.pieces,
            self.statements, self.matrix, self.sources, prompt, chains,
        ).write(Path(path))  # fmt: skip

    def describe(self, bold: bool = False) -> str:
        """For a terminal. `bold`: whether it understands ANSI codes."""
        lines = list[str]()
        for row in self.statements.itertuples():
            lines += [strong(quoted(row.text), bold), f"  {printable(row.verdict)}"]
            lines += [
                f"{'  ' * depth}{name}, '{quoted(step.text)}', {printable(step.verdict)}"
                for depth, name, step in self.chain(row.sources)
            ]
        return "\n".join([*lines, "", self.error_rate])

    def chain(self, named: Sequence[str], depth: int = 2) -> Iterator[tuple[int, str, Any]]:
        """Yield depth, name and row of sentences of the reasoning, before those they rely on."""
        for name in named:
            if name in self.steps:
                (row,) = self.steps[name].statements.itertuples()
                yield depth, name, row
                yield from self.chain(row.sources, depth + 1)

    def __repr__(self) -> str:
        return self.describe()


def attribute(request: AttributeRequest) -> Attribution:
    """Answer a request."""
    with in_use(request.model):
        return Attributing(_load(request), request).run()


def count_cost(request: AttributeRequest) -> Cost:
    return cost_of([Attributing(_load(request, only_counts=True), request)])


def cost_of(questions: Sequence[Attributing]) -> Cost:
    (most, prompts), (clear, few) = np.sum([one.count() for one in questions], 0).tolist()
    num_parameters = questions[0].model.num_parameters
    cost = Cost(most, num_parameters)
    lines = [
        f"token-forwards  {clear:,} in {few:,} prompts if the first source is clear at once",
        f"at most         {most:,} in {prompts:,} prompts",
    ]
    if num_parameters and torch.cuda.is_available():
        lines.append(f"FLOPs at most   {cost.flops:.2e} (2 per parameter)")
    elif num_parameters:
        speed = flops_per_second()
        seconds = Cost(clear, num_parameters).flops / speed, cost.flops / speed
        here = f"about {seconds[0]:,.0f} s if clear at once, at most {seconds[1]:,.0f} s"
        rule = f"2 FLOPs per parameter; {speed / 1e9:,.0f} GFLOP/s in products of matrices"
        lines.append(f"FLOPs at most   {cost.flops:.2e}\non this CPU     {here} ({rule})")
    return replace(cost, details="\n".join(lines))


def flops_per_second() -> float:
    """Time a product of matrices on this machine, which takes a fraction of a second."""
    size, times = 768, list[float]()
    matrix = torch.ones(size, size)
    for _ in range(5):
        began = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began)
    return float(2 * size**3 / np.median(times))


def _load(request: AttributeRequest, **how: Any) -> LoadedModel:
    how |= {"whole_prompts": True} | request.serving.loading
    return load(request.model, request.tokenizer, request.loading, True, **how)


@dataclass(frozen=True)
class Attributing:
    """A request to a model, to run or to count."""

    model: LoadedModel
    request: AttributeRequest
    quiet: bool = False

    def run(self) -> Attribution:
        given, prompt = self.request, self._prompt
        with using(self.model):
            # Raises before an answer is generated.
            self._texts(prompt)
            ids = prompt.answer_ids(given.answer, self._num_new, self.quiet, given.reasoning)
            whole, *of_sentences = self._chain(ids)
            found = self._judge("explaining", *whole)
            steps, waiting = dict[str, Attribution](), [*found.named_reasoning]
            for number in waiting:  # grows
                name = f"reasoning {number + 1}"
                step = self._judge(f"explaining {name}", *of_sentences[number])
                steps[name] = replace(step, steps=steps)
                waiting += [other for other in step.named_reasoning if other not in waiting]
        forwards = found.token_forwards + sum(step.token_forwards for step in steps.values())
        return replace(found, steps=steps, token_forwards=forwards)

    def _chain(self, ids: AnswerIds) -> list[tuple[SourcePrompt, AnswerIds]]:
        """The answer, and each sentence of the reasoning, with what precedes it."""
        prompt, tokens = self._prompt, ids.reasoning
        spans = sentences(tokens, self.model.tokenizer)
        found = [(prompt.through(tokens, spans), ids)]
        for number, (first, end) in enumerate(spans):
            inner = prompt.through(tokens[:first], spans[:number])
            found.append((inner, AnswerIds([tokens[first:end]], [True])))
        return found

    def _texts(self, prompt: SourcePrompt) -> list[np.ndarray]:
        decoys = self.request.decoys
        return read_decoys(self.model, prompt, "builtin:embedded" if decoys is None else decoys)

    def _judge(self, doing: str, prompt: SourcePrompt, ids: AnswerIds) -> Attribution:
        settings, loading = self.request.settings, self.request.loading
        drawn = draw_decoys(prompt, self._texts(prompt), settings.draws, settings.seed)
        layout = prompt.lay_out(ids)
        engine = logprobs_of(self.model, loading.batch_tokens)
        before = engine.token_forwards
        if isinstance(engine, ModelLogprobs):
            engine.scorer.states(layout.before_question)  # which many prompts share
        rounds = 1 + len(looks(settings.draws))
        with Progress(doing, rounds, "rounds", enabled=not self.quiet) as progress:
            trials = Trials(engine, layout, drawn)
            losses = trials.run(settings.rate, progress.update)
            progress.update(rounds)
        unread = trials.unread_sources()
        # A model in this process reads whole prompts, whatever it makes of them.
        if unread and self.model.engine is not None:
            names = ", ".join(prompt.names[s] for s in unread)
            raise DataError(
                f"{self.model.name} did not read {names}: decoys there change no digit of the "
                f"answer's loss; raise its limit for prompts, here of {len(layout.block.tokens):,} "
                "tokens"
            )
        forwards = engine.token_forwards - before
        return Attribution(prompt, layout, settings, losses, forwards, trials.token_losses)

    def count(self) -> np.ndarray:
        """Add what `count` returns; with reasoning, as if the answer relied on each sentence."""
        prompt, given = self._prompt, self.request
        # As long as it may become.
        answer = Answer("?", [(0, 1)]) if given.answer is None else given.answer
        ids = prompt.answer_ids(answer, self._num_new, True, given.reasoning)
        if given.answer is None:
            ids = replace(ids, pieces=[prompt.near_ids[:1] * self._num_new])
        draws, parts = given.settings.draws, self._chain(ids)
        return np.sum([count(inner, inner.lay_out(part), draws) for inner, part in parts], 0)

    @property
    def _num_new(self) -> int:
        return self.request.settings.max_new_tokens or NEW_TOKENS

    @cached_property
    def _prompt(self) -> SourcePrompt:
        return SourcePrompt.of(self.model, self.request)
