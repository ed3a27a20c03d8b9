"""The variable assignment task: follow a chain of copies from the queried name to a constant.

Place in the flow: a task → samples.

A prompt is m statements `name = source`, written `name source` without the sign, then `?` and a
name. A source is a constant or another name; the k statements of the chain lead from the queried
name to a constant. The others form chains of the same length, so that only the query distinguishes
them. Statements are in random order. Response: the source of each statement of the chain, in turn.
Coupled IDs: prompt tokens have their place, a response token the place of the source it repeats.

The settings vary what the paper leaves open. All statements are equally wide: a name is
`name_length` letters, a constant `value_length` digits, the shorter one is padded with `.`.

Dimension key: B samples, M statements, K statements of the chain, W width of a source, N names,
A letters of a name, P prompt length, R response length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.errors import ConfigError
from study.tasks.samples import Ks, Samples, Task

_QUESTION, _FILL = 0, 1
_DIGITS = 2
_LETTERS = 12
_NAME_ORDER_SEED = 0


@dataclass(frozen=True)
class VariableAssignment(Task):
    num_letters: int = 60
    name_length: int = 1
    num_names: int = 60
    """Names in use, of all num_letters ** name_length, in a fixed order spread over all letters.
    With more of them at test than in training, a model meets new names of known letters."""

    value_length: int = 1

    def __post_init__(self) -> None:
        for name in ("num_letters", "name_length", "num_names", "value_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.{name}={getattr(self, name)} must be at least 1")
        if self.num_names < 2:
            raise ConfigError(f"task.num_names={self.num_names} must be at least 2")
        if self.num_names > self.num_letters**self.name_length:
            raise ConfigError(
                f"task.num_names={self.num_names} is more than {self.num_letters} letters make at "
                f"task.name_length={self.name_length}; raise one of the two"
            )

    @property
    def vocabulary(self) -> tuple[str, ...]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        names = (
            letters[i % 26] + ("" if i < 26 else str(i // 26)) for i in range(self.num_letters)
        )
        return ("?", ".", *"0123456789", *names)

    @property
    def source_width(self) -> int:
        return max(self.name_length, self.value_length)

    @property
    def statement_width(self) -> int:
        return self.name_length + self.source_width

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        """`k`: statements of the chain, one number for all samples, so that responses have one
        length; None: uniform in 1 … length, drawn once."""
        if isinstance(k, np.ndarray):
            raise ConfigError(
                "variable_assignment takes one k for all samples; leave train_ks empty"
            )
        if k is None:
            k = int(generator.integers(1, length + 1))
        if not 1 <= k <= length:
            raise ConfigError(f"a chain of k={k} does not fit into {length} statements; lower k")
        return self._write(generator, *self._shuffled(generator, num_samples, length, k))

    def _shuffled(
        self, generator: np.random.Generator, num_samples: int, num_statements: int, k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """targets_BM, sources_BM (-1: a constant) and chain_BK, the places of its statements."""
        if num_statements > self.num_names:
            raise ConfigError(
                f"{num_statements} statements need as many names, task.num_names={self.num_names}; "
                "raise it"
            )
        names_BN = generator.random((num_samples, self.num_names), dtype=np.float32).argsort(1)
        targets_BM = names_BN[:, :num_statements]
        # Logical order: chains of k statements, each copying the next one; the last is a constant.
        sources_BM = np.roll(targets_BM, -1, axis=1)
        sources_BM[:, k - 1 :: k] = -1
        sources_BM[:, -1] = -1
        places_BM = generator.random((num_samples, num_statements), dtype=np.float32).argsort(1)
        written = [np.empty_like(array) for array in (targets_BM, sources_BM)]
        for array, logical in zip(written, (targets_BM, sources_BM), strict=True):
            np.put_along_axis(array, places_BM, logical, axis=1)
        return written[0], written[1], places_BM[:, :k]

    def _write(
        self,
        generator: np.random.Generator,
        targets_BM: np.ndarray,
        sources_BM: np.ndarray,
        chain_BK: np.ndarray,
    ) -> Samples:
        num_samples, num_statements = targets_BM.shape
        shape_BMW = (num_samples, num_statements, self.source_width)
        names_NA = self._spell_names()
        constants_BMW = generator.integers(_DIGITS, _DIGITS + 10, size=shape_BMW)
        constants_BMW[:, :, self.value_length :] = _FILL
        copies_BMW = np.full(shape_BMW, _FILL)
        copies_BMW[:, :, : self.name_length] = names_NA[sources_BM]
        sources_BMW = np.where(sources_BM[:, :, None] < 0, constants_BMW, copies_BMW)
        statements = np.concatenate((names_NA[targets_BM], sources_BMW), axis=2)
        queried_B = np.take_along_axis(targets_BM, chain_BK[:, :1], axis=1)[:, 0]
        question_B1 = np.full((num_samples, 1), _QUESTION)
        prompt_BP = np.concatenate(
            (statements.reshape(num_samples, -1), question_B1, names_NA[queried_B]), axis=1
        )
        places_BK = chain_BK * self.statement_width + self.name_length
        copied = places_BK[:, :-1, None] + np.arange(self.name_length)
        places_BR = np.concatenate(
            (copied.reshape(num_samples, -1), places_BK[:, -1:] + np.arange(self.value_length)),
            axis=1,
        )
        return Samples(
            prompt_BP=prompt_BP,
            response_BR=np.take_along_axis(prompt_BP, places_BR, axis=1),
            prompt_ids_BP=np.tile(np.arange(1, prompt_BP.shape[1] + 1), (num_samples, 1)),
            response_ids_BR=places_BR + 1,
            unit=self.statement_width,
        )

    def _spell_names(self) -> np.ndarray:
        """names_NA: the letters of each name in use."""
        num_spellings = self.num_letters**self.name_length
        chosen_N = np.random.default_rng(_NAME_ORDER_SEED).permutation(num_spellings)
        powers_A = self.num_letters ** np.arange(self.name_length)[::-1]
        return _LETTERS + chosen_N[: self.num_names, None] // powers_A % self.num_letters

    def solve(self, samples: Samples) -> np.ndarray:
        at, width = self.name_length, self.statement_width
        rows = []
        for prompt in samples.prompt_BP.tolist():
            name, rest = prompt[-at:], prompt[: -1 - at]
            statements = [rest[i : i + width] for i in range(0, len(rest), width)]
            row: list[int] = []
            while not row or row[-1] >= _LETTERS:
                (assigned,) = (s for s in statements if s[:at] == name)
                source = [token for token in assigned[at:] if token != _FILL]
                row, name = row + source, source
            rows.append(row)
        return np.array(rows)

    def largest_k(self, length: int) -> int:
        return length

    def largest_id(self, length: int) -> int:
        return length * self.statement_width + 1 + self.name_length
