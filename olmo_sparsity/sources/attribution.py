"""Hold an attribution: which source each statement of an answer relies on.

Place in the flow: run_request.py evaluates losses and makes an **`Attribution`**, the result e that
a user gets. It has verdicts/verdict.py turn the losses into verdicts, once, and shows these as

    e.statements, e.matrix, e.sources   tables (statement_rows.py, report/tables.py)
    e.relies_on("faq.md")               an assertion (reliance.py)
    e.text()                            the answer with citations (citations.py)
    e.to_json(), e.to_html(path)        what other programs and people read (page.py)
    print(e)                            a line for each statement

For example, of an answer of two statements `print(e)` shows, below how to read it,

    "It opened in 1921."
      rests on bridge.txt (gives 9.2 nats; beats 8 of 8 decoys)
    "The sun rises in the east."
      rests on no source (all together: 0.1 nats)

If the model reasons before it answers, the sentences of the reasoning count as sources, too. The
answer's attribution then has in `steps` the attribution of each sentence that it relies on:

    statement     rests on reasoning 2
    reasoning 2   rests on bridge.txt      (steps["reasoning 2"])
    so the statement's `sources` are (reasoning 2,), and its `origins` are (bridge.txt,)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.json_values import to_json_value
from olmo_sparsity.analysis.results.notes import describe_noise
from olmo_sparsity.analysis.results.view import quoted, sentence, strong
from olmo_sparsity.base.errors import ConfigError, check_type, printable
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.prompt.layout import AnswerText, Layout, character_spans
from olmo_sparsity.sources.prompt.pieces import SourcePrompt
from olmo_sparsity.sources.report.citations import cite
from olmo_sparsity.sources.report.how_to_read import how_to_read
from olmo_sparsity.sources.report.page import AnswerPage, ReasoningStep
from olmo_sparsity.sources.report.reliance import Reliance, describe_reliance
from olmo_sparsity.sources.report.statement_rows import StatementRows
from olmo_sparsity.sources.report.table_rows import StatementRow
from olmo_sparsity.sources.report.tables import matrix_of, sources_table
from olmo_sparsity.sources.verdicts.losses import StatementLosses
from olmo_sparsity.sources.verdicts.verdict import Judgement, find_exclusive_tokens, judge

JSON_VERSION = 4
"""Version of `to_json`. It grows when a key is removed or changes its meaning, not when one is
added."""

STATEMENT_COLUMNS = [
    "text",
    "nats",
    "spread",
    "p",
    "kind",
    "sources",
    "open",
    "verdict",
    "origins",
    "by_word",
]
"""The columns of the table of statements, in order."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """Which source each statement of an answer relies on. Printed, it is the answer with a verdict
    below each statement."""

    prompt: SourcePrompt
    layout: Layout
    """The prompt with the answer."""

    settings: SourceSettings
    losses: StatementLosses
    """Losses of each statement."""

    token_forwards: int
    """How many token-forwards the losses took."""

    token_losses: StatementLosses | None = None
    """Losses of each token of the answer. None means that statements are judged as wholes."""

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
    def named_sentences(self) -> list[int]:
        """The sentences of the reasoning that a verdict names, by their index in the reasoning."""
        named = set[str]().union(*self.statements.sources)
        sentence_names = self.names[self._num_sources :]
        return [index for index, name in enumerate(sentence_names) if name in named]

    @cached_property
    def answer_texts(self) -> list[AnswerText]:
        """Texts that together are the answer, each with the index of its statement."""
        return self.layout.answer_texts()

    @property
    def texts(self) -> list[str]:
        """The text of each statement."""
        return [text for text, statement in self.answer_texts if statement is not None]

    def source_text(self, number: int) -> str:
        """Return the text of a source, as the model reads it. `number`: the index of the source,
        from 0."""
        return self.layout.source_text(number)

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
    def _judgement(self) -> Judgement:
        """The verdicts and their evidence, computed once."""
        if self.token_losses is None:
            return judge(self.losses, self.settings.rate)
        has_exclusive_tokens_TS = find_exclusive_tokens(self.token_losses, self.layout.statements)
        return judge(self.losses, self.settings.rate, has_exclusive_tokens_TS)

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """A row for each statement and source: `gives`, nats among decoys of all others; `lost`,
        when a decoy replaces it; and what docs/sources.md explains."""
        return matrix_of(self.losses, self._judgement.evidence, self.names)

    @cached_property
    def statements(self) -> pd.DataFrame:
        """A row for each statement; docs/sources.md explains the columns."""
        statement_rows = StatementRows(
            names=self.names,
            texts=self.texts,
            layout=self.layout,
            losses=self.losses,
            token_losses=self.token_losses,
            judgement=self._judgement,
            matrix=self.matrix,
            draws=self.settings.draws,
        )
        rows: list[dict[str, Any]] = []
        for index in range(len(self._judgement.verdicts)):
            row = statement_rows.row(index)
            # Added here, as they need the attributions of the reasoning's sentences.
            rows.append(row | {"origins": self.origins(row["sources"])})
        return pd.DataFrame(rows, columns=STATEMENT_COLUMNS)

    @property
    def sources(self) -> pd.DataFrame:
        """A row for each source: statements that rely on it, by index; nats, the most of
        any statement; verdict."""
        return sources_table(self.statements, self.matrix, self.names)

    # --- reasoning ---

    def origins(self, named: Sequence[str]) -> tuple[str, ...]:
        """Return these names in the order of the prompt, with each sentence of the reasoning among
        them replaced by the sources that it relies on."""
        origins = {name for name in named if name not in self.steps}
        for name in set(named) & set(self.steps):
            origins.update(self.steps[name].statements.origins[0])
        return tuple(name for name in self.names if name in origins)

    def chain(self, named: Sequence[str], depth: int = 2) -> Iterator[ReasoningStep]:
        """Yield the sentences of the reasoning among these names, each followed by the sentences
        that it relies on. It ends, as a sentence relies on earlier ones only. `depth`: the depth of
        the sentences among these names (`ReasoningStep`)."""
        for name in named:
            if name in self.steps:
                (row,) = self.steps[name].statements.itertuples()
                yield ReasoningStep(depth, name, row)
                yield from self.chain(row.sources, depth + 1)

    def is_undecided(self, row: StatementRow) -> bool:
        """Return whether a statement, or a sentence of the reasoning that it relies on, is
        undecided."""
        reasoning_rows = [step.row for step in self.chain(row.sources)]
        return any(item.kind == "undecided" for item in (row, *reasoning_rows))

    # --- assertions ---

    def relies_on(self, source: str | None, statement: int | None = None) -> Reliance:
        """Return whether a statement (default: any) relies on a source, also through reasoning;
        with None, whether it (default: each) relies on none."""
        if source is not None and source not in self.names:
            raise ConfigError(f"no source is named {source}; the names are {', '.join(self.names)}")
        rows = self.statements
        if statement is not None:
            self._check_statement_number(statement)
            rows = rows.iloc[[statement]]

        # Without a source, all statements must rely on none; with one, any must rely on it.
        if source is None:
            # An undecided statement may rely on a source, so "no source" does not hold.
            relies = [bool(row.origins) or self.is_undecided(row) for row in rows.itertuples()]
            return Reliance(not any(relies), describe_reliance("no source", rows, relies))
        relies = [source in {*row.sources, *row.origins} for row in rows.itertuples()]
        return Reliance(any(relies), describe_reliance(source, rows, relies))

    def _check_statement_number(self, statement: int) -> None:
        """Raise unless a user has passed the number of a statement."""
        accepted = f"a whole number from 0 to {len(self.texts) - 1}"
        check_type("statement", statement, Integral, accepted)
        if not 0 <= statement < len(self.texts):
            raise ConfigError(f"statement={statement} must be {accepted}")

    # --- text, JSON and page ---

    def text(self, citations: str = "[1]", references: bool = True) -> str:
        """Return the answer with a citation after each statement that relies on a source.

        Args:
            citations: How a citation is written, such as `[1]`, `(1)`, `[^1]` or `[name]`. Sources
                that each suffice share one, as `[1/2]`.
            references: Whether to append a line for each source that is cited.
        """
        return cite(self.answer_texts, self.statements, citations, references)

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes (docs/sources.md)."""
        rows = self.statements.to_dict("records")
        # Spans come first in a record, before the columns of the table.
        spans = character_spans(self.answer_texts)
        statements = [span._asdict() | row for span, row in zip(spans, rows, strict=True)]
        reasoning: list[dict[str, Any]] = []
        for index in range(self._num_sources, len(self.names)):  # sentences follow the sources
            name = self.names[index]
            record = {"name": name, "text": self.source_text(index).strip()}
            reasoning.append(record | self._step_record(name))
        return {
            "schema": "olmo-sparsity/attribution",
            "version": JSON_VERSION,
            "model": self.prompt.model.name,
            "fingerprint": self.prompt.model.weights_sha256,
            "settings": asdict(self.settings),
            "token_forwards": self.token_forwards,
            "error_rate": self.error_rate,
            "answer": "".join(text for text, _ in self.answer_texts),
            "sources": self.names,
            "statements": statements,
            "matrix": self.matrix.reset_index().to_dict("records"),
            "reasoning": reasoning,
        }

    def _step_record(self, name: str) -> dict[str, Any]:
        """Return the keys of `to_dict` that say what a sentence of the reasoning relies on; none if
        no statement relies on the sentence, as it is not attributed then."""
        if name not in self.steps:
            return {}
        step = self.steps[name]
        (row,) = step.statements.to_dict("records")
        return row | {"matrix": step.matrix.reset_index().to_dict("records")}

    def to_json(self) -> str:
        """Return the answer, its statements and verdicts as JSON, in a versioned schema."""
        return json.dumps(to_json_value(self.to_dict()), ensure_ascii=False, indent=1)

    def to_html(self, path: str | Path) -> None:
        """Write the answer as a page, each statement in the colour of its source."""
        page = AnswerPage(
            model=self.prompt.model.name,
            error_rate=self.error_rate,
            source_names=self.names,
            draws=self.settings.draws,
            answer_texts=self.answer_texts,
            statements=self.statements,
            matrix=self.matrix,
            source_table=self.sources,
            prompt_texts=self.layout.prompt_texts(self.prompt),
            reasoning=[list(self.chain(named)) for named in self.statements.sources],
        )
        page.write(path_of("path", path))

    def describe(self, bold: bool = False) -> str:
        """Return the verdicts as text for a terminal, with how to read them and their error rate.
        `bold`: whether the terminal understands ANSI codes."""
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
