"""Hold an attribution: which source each statement of an answer relies on.

Place in the flow: attributing.py evaluates losses and makes an **`Attribution`**, which has
verdicts.py turn them into verdicts, and shows these as

    e.statements, e.matrix, e.sources   tables (attribution_tables.py)
    e.relies_on("faq.md")               an assertion (reliance.py)
    e.text()                            the answer with citations (citations.py)
    e.to_json(), e.to_html(path)        what other programs and people read (page.py)
    print(e)                            a line for each statement

If the model reasons before it answers, the sentences of the reasoning count as sources, too. The
answer's attribution then has in `steps` the attribution of each sentence that it relies on.

Dimension key: T statements, S sources, W tokens of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.notes import describe_noise
from olmo_sparsity.analysis.results.tables import to_json_value
from olmo_sparsity.analysis.results.view import quoted, sentence, strong
from olmo_sparsity.base.errors import ConfigError, check_type, printable
from olmo_sparsity.base.files import path_of
from olmo_sparsity.sources.attribution_tables import matrix_of, sources_table
from olmo_sparsity.sources.citations import cite
from olmo_sparsity.sources.layout import Layout
from olmo_sparsity.sources.losses import StatementLosses, mean_over_decoys
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.page import AnswerPage, NumberedText, ReasoningStep
from olmo_sparsity.sources.prompt import Piece, SourcePrompt
from olmo_sparsity.sources.reliance import Reliance, describe_reliance
from olmo_sparsity.sources.verdict_text import shows_what_it_gives, verdict_in_words
from olmo_sparsity.sources.verdicts import (
    Judgement,
    Verdict,
    find_exclusive_tokens,
    judge,
)
from olmo_sparsity.sources.words import describe_words, nats_by_word

HOW_TO_READ = (
    "A nat is a unit of loss: 1 nat less means that the words are 2.7 times as likely. A decoy is "
    "an unrelated text that replaces a source. A statement rests on a source if it loses much more "
    "without it than decoys explain. How often this is right: of 52 test questions that lost 2 "
    "nats or more without the right source, SmolLM2-135M's verdicts named that source, and no "
    "other, in 92%. Of 83 whose right source was missing, they named another one in 0%."
)
"""Printed above the verdicts. The rates are those of docs/sources.md."""

MEASURED_MODEL = re.compile(r"\bsmollm2(-135m| \(|$)", re.IGNORECASE)
"""Matches the names of the model whose rates these are, such as `smollm2`, `smollm2 (Q4_1)` and
`HuggingFaceTB/SmolLM2-135M-Instruct`."""


def how_to_read(model_name: str) -> str:
    """Return what is printed above the verdicts of a model."""
    if MEASURED_MODEL.search(model_name):
        return HOW_TO_READ
    name = printable(model_name)
    return f"{HOW_TO_READ} {name} has rates of its own, which are not known until you measure them."


JSON_VERSION = 4
"""Version of `to_json`. It grows when a key is removed or changes its meaning, not when one is
added."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """Which source each statement of an answer relies on. Printed, it is the answer with a verdict
    below each statement."""

    prompt: SourcePrompt
    layout: Layout
    settings: SourceSettings
    losses: StatementLosses
    token_forwards: int
    token_losses: StatementLosses | None = None
    """Losses of each token of the answer. None: statements are not judged by their parts."""

    steps: dict[str, Attribution] = field(default_factory=dict, repr=False)
    """By name, the attribution of each sentence of the reasoning that the answer relies on, also
    through other sentences."""

    def __getstate__(self) -> dict[str, Any]:
        # Pickled without the model's weights, which are large and may be on a GPU.
        prompt = replace(self.prompt, model=self.prompt.model.without_weights())
        return vars(self) | {"prompt": prompt}

    # --- texts and names ---

    @property
    def names(self) -> list[str]:
        """The names of the sources, then those of the sentences of the reasoning."""
        return self.prompt.names

    @property
    def _num_sources(self) -> int:
        """Number of sources, without the sentences of the reasoning."""
        return len(self.names) - self.prompt.num_reasoning

    @property
    def named_reasoning(self) -> list[int]:
        """Numbers of the sentences of the reasoning that a verdict names, from 0."""
        named = set[str]().union(*self.statements.sources)
        sentence_names = self.names[self._num_sources :]
        return [i for i, name in enumerate(sentence_names) if name in named]

    @cached_property
    def pieces(self) -> list[NumberedText]:
        """Texts that together are the answer, each with the number of the statement that it is;
        None: it is part of no statement."""
        texts = self.layout.document.texts[self.layout.block.start :]
        pieces = list[NumberedText]()
        last_end = 0
        for number, (first, end) in enumerate(self.layout.statements):
            pieces.append(NumberedText("".join(texts[last_end:first]), None))
            pieces.append(NumberedText("".join(texts[first:end]), number))
            last_end = end
        pieces.append(NumberedText("".join(texts[last_end:]), None))
        return [piece for piece in pieces if piece.text or piece.number is not None]

    @property
    def texts(self) -> list[str]:
        """The text of each statement."""
        return [text for text, number in self.pieces if number is not None]

    def source_text(self, number: int) -> str:
        """Return the text of a source, as the model reads it."""
        first = self.layout.units.first[number]
        return "".join(self.layout.document.texts[first : self.layout.text_ends[number]])

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

    # --- tables ---

    @cached_property
    def _judged(self) -> Judgement:
        if self.token_losses is None:
            return judge(self.losses, self.settings.rate)
        has_exclusive_tokens_TS = find_exclusive_tokens(self.token_losses, self.layout.statements)
        return judge(self.losses, self.settings.rate, has_exclusive_tokens_TS)

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """A row for each statement and source: `gives`, nats among decoys of all others; `lost`,
        when a decoy replaces it; and what docs/sources.md explains."""
        return matrix_of(self.losses, self._judged.evidence, self.names)

    @cached_property
    def statements(self) -> pd.DataFrame:
        """A row for each statement; docs/sources.md explains the columns."""
        return pd.DataFrame(
            [self._statement_row(number) for number in range(len(self._judged.verdicts))]
        )

    def _statement_row(self, number: int) -> dict[str, Any]:
        """Return the row of a statement."""
        evidence, verdicts = self._judged
        verdict = verdicts[number]
        named = [self.names[source] for source in verdict.sources]
        open_sources = np.flatnonzero(evidence.is_open_TS[number])
        open_names = [self.names[source] for source in open_sources]
        # An undecided verdict is about the sources that may matter.
        described_names = open_names if verdict.kind == "undecided" else named
        cells = self.matrix.loc[number].loc[described_names]
        nats = self.losses.gap_T[number]
        spread = evidence.spread_TS[number].mean()
        # Bonferroni over both effects of each source.
        smallest_p = evidence.p_ETS[:, number].min()
        p = (2 * len(self.names) * smallest_p).clip(max=1.0)
        return {
            "text": self.texts[number].strip(),
            "nats": nats,
            "spread": spread,
            "p": p,
            "kind": verdict.kind,
            "sources": tuple(named),
            "open": tuple(open_names),
            "verdict": verdict_in_words(verdict.kind, cells, nats, spread, self.settings.draws),
            "origins": self.origins(named),
            "by_word": self._describe_words(number, verdict, cells),
        }

    def _describe_words(self, number: int, verdict: Verdict, cells: pd.DataFrame) -> str:
        """Return how the nats of a statement that rests on sources are spread over its words. Empty
        if it rests on none.

        cells: The rows of the matrix for this statement and the sources of its verdict.
        """
        if self.token_losses is None or not verdict.sources:
            return ""
        first, end = self.layout.statements[number]
        place = self.layout.block.start + first
        nats_W_by_source = self._nats_of_tokens(self.token_losses, verdict, cells)
        return describe_words(
            {
                name: nats_by_word(self.layout.document, place, nats_W[first:end])
                for name, nats_W in nats_W_by_source.items()
            }
        )

    def _nats_of_tokens(
        self, token_losses: StatementLosses, verdict: Verdict, cells: pd.DataFrame
    ) -> dict[str, np.ndarray]:
        """Return nats_W, which explain a verdict by the tokens of the answer, for each source. The
        name is empty if there is one entry alone, since the verdict has the name."""
        lost_WS = mean_over_decoys(token_losses.lost_TSD)
        if verdict.kind == "either":
            # Alternatives replace each other, so nothing is lost without one of them.
            return {"": token_losses.gap_T}
        if verdict.kind == "both":
            return {self.names[source]: lost_WS[:, source] for source in verdict.sources}
        (source,) = verdict.sources
        gives_WS = mean_over_decoys(token_losses.gives_TSD)
        nats_WS = gives_WS if shows_what_it_gives(cells.iloc[0]) else lost_WS
        return {"": nats_WS[:, source]}

    @property
    def sources(self) -> pd.DataFrame:
        """A row for each source: statements that rely on it, by number from 0; nats, the most of
        any statement; verdict."""
        return sources_table(self.statements, self.matrix, self.names)

    # --- reasoning ---

    def origins(self, named: Sequence[str]) -> tuple[str, ...]:
        """Replace sentences of the reasoning among these names by the sources they rely on."""
        origins = {name for name in named if name not in self.steps}
        for name in set(named) & set(self.steps):
            origins.update(self.steps[name].statements.origins[0])
        # In the order of the prompt.
        return tuple(name for name in self.names if name in origins)

    def chain(self, named: Sequence[str], depth: int = 2) -> Iterator[ReasoningStep]:
        """Yield the sentences of the reasoning among these names, each followed by the sentences
        that it relies on."""
        for name in named:
            if name in self.steps:
                (row,) = self.steps[name].statements.itertuples()
                yield ReasoningStep(depth, name, row)
                yield from self.chain(row.sources, depth + 1)

    def is_undecided(self, row: Any) -> bool:
        """Return whether a statement, or a sentence of the reasoning that it relies on, is
        undecided. `row`: of `statements`."""
        reasoning_rows = [step.row for step in self.chain(row.sources)]
        return any(item.kind == "undecided" for item in (row, *reasoning_rows))

    # --- assertions ---

    def relies_on(self, source: str | None, statement: int | None = None) -> Reliance:
        """Return whether a statement (default: any) relies on a source, also through reasoning;
        with None, whether it (default: each) relies on none."""
        if source is not None and source not in self.names:
            raise ConfigError(f"no source is named {source}; the names are {', '.join(self.names)}")
        if statement is not None:
            accepted = f"a whole number from 0 to {len(self.texts) - 1}"
            check_type("statement", statement, Integral, accepted)
            if not 0 <= statement < len(self.texts):
                raise ConfigError(f"statement={statement} must be {accepted}")
        rows = self.statements if statement is None else self.statements.iloc[[statement]]
        if source is None:
            # Undecided is not "no source".
            relies = [bool(row.origins) or self.is_undecided(row) for row in rows.itertuples()]
            holds = not any(relies)
        else:
            relies = [source in {*row.sources, *row.origins} for row in rows.itertuples()]
            holds = any(relies)

        return Reliance(holds, describe_reliance(source or "no source", rows, relies))

    # --- text, JSON and page ---

    def text(self, citations: str = "[1]", references: bool = True) -> str:
        """Return the answer with a citation behind each statement that relies on a source.

        citations: How a citation is written, such as `[1]`, `(1)`, `[^1]` or `[name]`. Sources that
            each suffice share one, as `[1/2]`.
        references: Whether to append a line for each source that is cited.
        """
        return cite(self.pieces, self.statements, citations, references)

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes (docs/sources.md)."""
        records = self.statements.to_dict("records")
        statements = [
            {"first": first, "end": end} | record
            for (first, end), record in zip(self._spans(), records, strict=True)
        ]
        reasoning = [
            {"name": name, "text": self.source_text(number).strip()} | self._step_record(name)
            for number, name in enumerate(self.names)
            if number >= self._num_sources
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
        piece_first = 0
        for text, number in self.pieces:
            if number is not None:
                words = text.strip()
                first = piece_first + text.find(words)
                spans.append((first, first + len(words)))
            piece_first += len(text)
        return spans

    def _step_record(self, name: str) -> dict[str, Any]:
        """Return what a sentence of the reasoning relies on, if the answer relies on it."""
        if name not in self.steps:
            return {}
        step = self.steps[name]
        (record,) = step.statements.to_dict("records")
        return record | {"matrix": step.matrix.reset_index().to_dict("records")}

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
        page.write(path_of("path", path))

    def _prompt_texts(self) -> list[NumberedText]:
        """Return the texts that precede the answer, each with the number of the source it is."""
        texts = self.layout.document.texts
        prompt_texts = list[NumberedText]()
        first = 0
        for piece in [*self.prompt.pieces, Piece(self.prompt.local_ids, [])]:
            end = first + len(piece.text_ids)
            prompt_texts.append(NumberedText("".join(texts[first:end]), piece.source))
            first = end + len(piece.after_ids)
        return prompt_texts

    def describe(self, bold: bool = False) -> str:
        """Return the verdicts as text for a terminal, with how to read them and their error rate.
        `bold`: whether it understands ANSI codes."""
        lines = [how_to_read(self.prompt.model.name), ""]
        for row in self.statements.itertuples():
            lines.append(strong(quoted(row.text), bold))
            lines.append(f"  {printable(row.verdict)}")
            if row.by_word:
                lines.append(f"  {printable(row.by_word)}")
            for depth, name, step_row in self.chain(row.sources):
                indent = "  " * depth
                words = f"{name}, '{quoted(step_row.text)}', {printable(step_row.verdict)}"
                lines.append(f"{indent}{words}")
        return "\n".join([*lines, "", self.error_rate])

    def __repr__(self) -> str:
        return self.describe()
