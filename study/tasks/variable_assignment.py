"""The variable assignment task: follow a chain of copies from the queried name to a constant.

A prompt is m statements `name = source`, written `name source` without the sign, then `?` and a
name. A source is a constant or another name; the k statements of the chain lead from the queried
name to a constant. The others form chains of the same length, so that only the query distinguishes
them. Response: the source of each statement of the chain, in turn. Coupled IDs: prompt tokens have
their place, a response token the place of the source it repeats.

Two forms:

    order: shuffled    each name is assigned once, statements are in random order
    order: program     names are assigned repeatedly, and a source means the latest assignment
                       before it: a name alone does not determine the next statement

Dimension key: B samples, M statements, K statements of the chain, N names, P prompt length,
R response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.schema import option
from study.tasks.samples import Ks, Samples, Task

_QUESTION = 0
_DIGITS = 2
_LETTERS = 12
_NAME_ORDER_SEED = 0


@dataclass(frozen=True)
class VariableAssignment(Task):
    num_names: int = option(60, least=2)
    order: Literal["shuffled", "program"] = "shuffled"
    """Whether each name is assigned once, in any order, or names are assigned again as in a
    program."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        names = (letters[i % 26] + ("" if i < 26 else str(i // 26)) for i in range(self.num_names))
        return ("?", ".", *"0123456789", *names)

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
        build = self._shuffled if self.order == "shuffled" else self._program
        return self._write(generator, *build(generator, num_samples, length, k))

    def _shuffled(
        self, generator: np.random.Generator, num_samples: int, num_statements: int, k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """targets_BM, sources_BM (-1: a constant) and chain_BK, the places of its statements."""
        if num_statements > self.num_names:
            raise ConfigError(
                f"{num_statements} statements need as many names, task.num_names={self.num_names}; "
                "raise it, or set task.order=program, where names are assigned repeatedly"
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

    def _program(
        self, generator: np.random.Generator, num_samples: int, num_statements: int, k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Build statement by statement. The chain starts with its constant and ends with the
        queried name; its newest name is not assigned elsewhere until the chain continues."""
        rows_B = np.arange(num_samples)
        order_BM = generator.random((num_samples, num_statements)).argsort(1)
        chain_BK = np.sort(order_BM[:, :k], axis=1)
        in_chain_BM = np.zeros((num_samples, num_statements), dtype=bool)
        np.put_along_axis(in_chain_BM, chain_BK, True, axis=1)
        targets_BM = np.empty((num_samples, num_statements), dtype=np.int64)
        sources_BM = np.empty_like(targets_BM)
        newest_B = np.full(num_samples, -1)
        assigned_BN = np.zeros((num_samples, self.num_names), dtype=bool)
        for place in range(num_statements):
            target_B = self._draw_name_except(generator, newest_B)
            keys_BN = generator.random((num_samples, self.num_names)) * assigned_BN
            keys_BN[rows_B, target_B] = 0
            copied_B = np.where(keys_BN.any(1), keys_BN.argmax(1), -1)
            # Constants are as frequent off the chain as on it.
            is_constant_B = generator.random(num_samples) < 1 / k
            off_chain_B = np.where(is_constant_B, -1, copied_B)
            in_chain_B = in_chain_BM[:, place]
            sources_BM[:, place] = np.where(in_chain_B, newest_B, off_chain_B)
            targets_BM[:, place] = target_B
            newest_B = np.where(in_chain_B, target_B, newest_B)
            assigned_BN[rows_B, target_B] = True
        return targets_BM, sources_BM, chain_BK[:, ::-1]

    def _draw_name_except(self, generator: np.random.Generator, except_B: np.ndarray) -> np.ndarray:
        """Draw names uniformly among the others; -1 excepts none."""
        is_excepted_B = except_B >= 0
        num_others_B = self.num_names - is_excepted_B
        name_B = np.floor(generator.random(len(except_B)) * num_others_B).astype(int)
        return name_B + (is_excepted_B & (name_B >= except_B))

    def _write(
        self,
        generator: np.random.Generator,
        targets_BM: np.ndarray,
        sources_BM: np.ndarray,
        chain_BK: np.ndarray,
    ) -> Samples:
        names_N = self._spell_names()
        constants_BM = generator.integers(_DIGITS, _DIGITS + 10, size=targets_BM.shape)
        written_BM = np.where(sources_BM < 0, constants_BM, names_N[sources_BM])
        statements_BP = np.stack((names_N[targets_BM], written_BM), axis=2).reshape(
            len(targets_BM), -1
        )
        queried_B1 = names_N[np.take_along_axis(targets_BM, chain_BK[:, :1], axis=1)]
        question_B1 = np.full_like(queried_B1, _QUESTION)
        prompt_BP = np.concatenate((statements_BP, question_B1, queried_B1), axis=1)
        places_BR = 2 * chain_BK + 1
        return Samples(
            prompt_BP=prompt_BP,
            response_BR=np.take_along_axis(prompt_BP, places_BR, axis=1),
            prompt_ids_BP=np.tile(np.arange(1, prompt_BP.shape[1] + 1), (len(prompt_BP), 1)),
            response_ids_BR=places_BR + 1,
            unit=2,
        )

    def _spell_names(self) -> np.ndarray:
        """names_N: the token of each name, in a fixed order."""
        order = np.random.default_rng(_NAME_ORDER_SEED).permutation(self.num_names)
        return _LETTERS + order

    def solve(self, samples: Samples) -> np.ndarray:
        rows = []
        for prompt in samples.prompt_BP.tolist():
            targets, sources = prompt[:-2:2], prompt[1:-2:2]
            name, end, row = prompt[-1], len(targets), list[int]()
            while name >= _LETTERS:
                place = max(i for i in range(end) if targets[i] == name)
                if self.order == "program":
                    end = place
                name = sources[place]
                row.append(name)
            rows.append(row)
        return np.array(rows)

    def largest_k(self, length: int) -> int:
        return length

    def largest_id(self, length: int) -> int:
        return 2 * length + 2
