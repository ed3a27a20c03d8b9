"""Run one model in batches, keep the states of the last text, and count token-forwards.

    outputs = runner.in_batches(rows, 40, compute)    # rows of 40 tokens: `compute` of each batch
    states = runner.states(tokens)                    # keys and values of each token of a text
    hidden_BWD = runner.hidden_after(states, tokens_BL, num_last=2)    # of texts that begin with it
    loss_N = runner.nll(hidden_ND, targets_N)         # −log p of a token for each hidden state

`Scorer` (scorer.py) is a `ModelRunner` that also evaluates rows; logprobs.py scores whole prompts
with what is here. Every forward is counted in token-forwards, the unit of cost in all results: one
token that goes through the model.

Dimension key: B rows of a batch, L tokens of a row, W targets of a row or block, N items of a list
(the targets of all rows), D width, C targets of a chunk, V vocabulary. A suffix 1 is a dimension of
size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import is_out_of_memory
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.models.identity.known_identities import last_identity
from olmo_sparsity.models.identity.model_identity import ModelIdentity
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.models.losses import rows_per_chunk

Item = TypeVar("Item")
Output = TypeVar("Output")


@dataclass(frozen=True)
class KnownText:
    """A text that a `ModelRunner` has read, with its states."""

    tokens: np.ndarray
    states: DistantStates
    model_identity: ModelIdentity | None
    """The identity of the model that computed them. A change to the model makes them stale."""


class ModelRunner:
    """Runs one model on one device. It knows the size of a batch, which is halved if memory runs
    out, and the states of the text that it read last."""

    def __init__(
        self, model: LanguageModel, device: torch.device | None, batch_tokens: int | None
    ) -> None:
        """Take a model, and count from 0.

        Args:
            model: A model in memory.
            device: Device of the inputs. None: the model's.
            batch_tokens: Tokens of one forward. None: 4,096 on a CPU, more on a GPU.
        """
        assert isinstance(model, nn.Module), "`Scorer` checks it"
        self.model = model
        self.device = device or model.device
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.batch_tokens = batch_tokens or self._default_batch_tokens()
        self.token_forwards = 0
        self.after_batch: Callable[[], None] = lambda: None
        """Called after each batch; `showing_progress` sets it."""

        self._known_text: KnownText | None = None

    def _default_batch_tokens(self) -> int:
        """Return the default size of a batch, in tokens."""
        if self.device.type == "cpu":
            return 4096  # the states of a batch should stay in cache; 2,048 was as fast
        # A small model gets larger batches, as its forward would take less time than the launches
        # of its kernels.
        return int(16384 * min(max(1e9 / max(self.num_parameters, 1), 1), 8))

    @contextmanager
    def showing_progress(self, activity: str, total: int | None = None) -> Iterator[None]:
        """Show how many token-forwards were computed so far, while what runs inside computes them.

        Args:
            activity: What is shown before the number, such as "explaining".
            total: The number of token-forwards of all that runs inside. None if it is not known.
        """
        forwards_before = self.token_forwards
        with Progress(activity, total, "token-forwards") as progress:
            self.after_batch = lambda: progress.update(self.token_forwards - forwards_before)
            try:
                yield
            finally:
                self.after_batch = lambda: None

    # --- batches ---

    def in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Cut items into batches, and return what `compute` returns for each batch. If a batch runs
        out of memory, it and all later ones are halved.

        Args:
            items: What is computed, such as rows of one group.
            num_tokens: The memory of one item, as a number of tokens. A batch has as many items as
                `batch_tokens` allows, and at least one.
            compute: Computes the output of a batch.
        """
        with in_use(self.model), fast_kernels(self.device):
            return self._in_batches(items, num_tokens, compute)

    def _in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Compute all batches while the model is in use; see `in_batches`."""
        outputs: list[Output] = []
        num_done = 0
        while num_done < len(items):
            batch_size = max(1, self.batch_tokens // num_tokens)
            batch = items[num_done : num_done + batch_size]
            forwards_before = self.token_forwards
            fits_in_memory = True
            try:
                outputs.append(compute(batch))
            except Exception as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                fits_in_memory = False

            if fits_in_memory:
                num_done += len(batch)
                self.after_batch()
            else:
                # Outside of `except`, as its traceback would keep the memory alive.
                self.token_forwards = forwards_before  # this batch is computed again
                self._halve_batches(len(batch), num_tokens)
        return outputs

    def _halve_batches(self, num_items: int, num_tokens: int) -> None:
        """Halve the size of all later batches, as one of `num_items` items with `num_tokens` tokens
        each ran out of memory."""
        self.batch_tokens = num_items // 2 * num_tokens
        say(f"out of memory: batches of {self.batch_tokens:,} tokens from here on")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- states of texts ---

    def states(self, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text, in which each token sees those before it.

        The text is computed a few thousand tokens at a time. Its states are kept until the next
        text: as long as the model stays the same, a later call for any beginning of this text
        computes nothing.
        """
        with in_use(self.model), fast_kernels(self.device):
            known_states = self._known_states(tokens)
            if known_states is not None:
                return known_states

            # Freed before new states are computed, as those of two texts may not fit in memory.
            self._known_text = None
            (tokens_1L,) = to_device([tokens[None]], self.device)
            positions_1L = torch.arange(len(tokens), device=self.device)[None]
            self.token_forwards += len(tokens)
            with threads_for(self.num_parameters):
                states = self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens)
            self._known_text = KnownText(tokens, states, last_identity(self.model))
            return states

    def _known_states(self, tokens: np.ndarray) -> DistantStates | None:
        """Return the states of a text if it is a beginning of the known text, else None."""
        known = self.known_text
        if known is None or not np.array_equal(known.tokens[: len(tokens)], tokens):
            return None
        return known.states.first(len(tokens))

    @property
    def known_text(self) -> KnownText | None:
        """Return the text that `states` computed last. Return None if there is none, or if the
        model has changed since, which is noticed when it is used (`in_use`)."""
        known = self._known_text
        if known is None or known.model_identity is not last_identity(self.model):
            return None
        return known

    @torch.no_grad()
    def extended(self, states: DistantStates | None, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text to which tokens are appended.

        Args:
            states: The states of the text. None if there is none, so that the tokens are all.
            tokens: The tokens that are appended.
        """
        num_before = 0 if states is None else states.num_tokens
        (tokens_1L,) = to_device([tokens[None]], self.device)
        positions_1L = num_before + torch.arange(len(tokens), device=self.device)[None]
        self.token_forwards += len(tokens)
        with threads_for(self.num_parameters):
            return self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens, states)

    @torch.no_grad()
    def hidden_after(
        self, states: DistantStates | None, tokens_BL: np.ndarray, num_last: int
    ) -> Tensor:
        """Return hidden_BWD of the last `num_last` tokens of a batch of texts.

        Args:
            states: The states of a text with which all begin; None if they share no beginning.
            tokens_BL: The tokens of each text after that beginning.
            num_last: W, the number of tokens whose hidden states are returned.
        """
        num_before = 0 if states is None else states.num_tokens
        (inputs_BL,) = to_device([tokens_BL], self.device)
        positions_L = num_before + torch.arange(tokens_BL.shape[1], device=self.device)
        positions_BL = positions_L.expand_as(inputs_BL)
        self.token_forwards += tokens_BL.size
        distant = None if states is None else states.expand(len(tokens_BL))
        with threads_for(self.num_parameters):
            return self.model.hidden(inputs_BL, positions_BL, distant=distant, num_last=num_last)

    # --- from hidden states to losses ---

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log p (…, V) of the next token for hidden states (…, D)."""
        return self.model.unembed(hidden).float().log_softmax(-1)

    @property
    def targets_per_chunk(self) -> int:
        """Return how many targets are unembedded at a time."""
        return rows_per_chunk(self.model.vocab_size, self.device)

    @torch.no_grad()
    def nll(self, hidden_ND: Tensor, targets_N: np.ndarray) -> np.ndarray:
        """Return −log p of a target for each hidden state, in nats."""
        return self.nll_on_device(hidden_ND, targets_N).cpu().numpy()

    def nll_on_device(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        """Return what `nll` returns, as a tensor on the device, so that the host need not wait for
        it."""
        (labels_N,) = to_device([targets_N], self.device)
        # One tensor, filled in place: small ones made between chunks would keep the memory of the
        # logits from being reused.
        loss_N = torch.empty(len(labels_N), dtype=torch.float, device=self.device)
        chunk_size = self.targets_per_chunk
        for start in range(0, len(labels_N), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits_CV = self.model.unembed(hidden_ND[chunk]).float()
            loss_N[chunk] = F.cross_entropy(logits_CV, labels_N[chunk], reduction="none")
        return loss_N
