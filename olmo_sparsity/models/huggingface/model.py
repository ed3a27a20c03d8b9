"""Wrap causal LMs of transformers as a `LanguageModel`: position IDs may have gaps, and kept states
of distant tokens replace these tokens.

    model = HuggingFaceLM(AutoModelForCausalLM.from_pretrained(name))
    states = model.distant_states(tokens_BL, positions_BL)          # of a long text, once
    hidden_BLD = model.hidden(window_BL, window_positions_BL, distant=states)

The model is tried when it is first used, and again when the user has changed it (compatibility.py).
What the trial has shown is a `Fit`, on which `hidden` depends:

    first use, or changed ─ use.py ─> fit ─ try_model ─> Fit ─ _compute_as ─> windows, logit_map, …

`hidden` takes one of three ways to the same numbers, by what fits into memory:

    rows that share distant states    `hidden_sharing`         8 rows of 40 tokens after 30,000
    a long row alone                  `distant_states`         40,000 tokens, in chunks
    all other calls                   `_hidden_in_one_pass`

Each ends in `_run_body`, the call of transformers. Three habits of transformers would give wrong
numbers here, and are worked around:

- Without a mask, transformers takes a gap in the position IDs for the start of another text, and
  hides what is before it. So each call passes a mask (huggingface/masks.py).
- Its attention windows count tokens. Here they go by position IDs, as the masks do.
- A cache of keys and values grows with each call. Kept states must stay as they are, so they are
  passed as a cache that keeps nothing (caches.py), or by our own attention (own_attention.py).

Dimension key: B rows, L tokens of a row, S keys that they may attend to, F distant tokens, C tokens
of a chunk, D width, H heads (in `last_attention` of all layers), V vocabulary. A suffix 1 is a
dimension of size 1.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import causal_bias, keeps_much
from olmo_sparsity.models.distant_attention import can_share_distant
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.document_attention import DocumentStarts
from olmo_sparsity.models.huggingface.attention_names import FUSED
from olmo_sparsity.models.huggingface.compatibility import Fit, try_model
from olmo_sparsity.models.huggingface.known_fits import known_fit, remember_fit
from olmo_sparsity.models.huggingface.layer_views import views_of_layers
from olmo_sparsity.models.huggingface.masks import Masks, build_masks, window_hides_some
from olmo_sparsity.models.huggingface.model_parts import ModelParts
from olmo_sparsity.models.huggingface.position_limits import (
    PositionLimit,
    position_limit,
    windows_of,
)
from olmo_sparsity.models.huggingface.recomputing import recomputing_layers
from olmo_sparsity.models.identity.known_identities import last_identity
from olmo_sparsity.models.identity.use import in_this_thread, in_use

if TYPE_CHECKING:  # importing transformers takes two seconds, so only its models do
    from peft import PeftModel
    from torch.utils.hooks import RemovableHandle
    from transformers import Cache, PreTrainedModel

    from olmo_sparsity.models.identity.model_identity import ModelIdentity


MAX_MASK_ENTRIES = 2**27
"""Entries (queries × keys) of the largest attention mask that is built. transformers builds a mask
whole where tokens follow others: one of this size takes 0.6 GiB with its copy in fp32. A longer row
is computed in chunks; from 32,768 tokens of context, these have fewer than 4,096 tokens."""


class HuggingFaceLM(ModelParts):
    """A causal LM of transformers as a `LanguageModel`. A model that does not fit is rejected.

    Its methods, in the order of the file: trying the model; `hidden`, and the three ways to compute
    it; states of distant tokens, and attention to them; logits. `ModelParts` has the embedding, the
    layers and other parts by name."""

    def __init__(self, model: PreTrainedModel | PeftModel, is_tried: bool = True) -> None:
        """Wrap a model, and try it unless `is_tried` is False, as for a model of which only weights
        or sizes are read, such as one on the meta device."""
        super().__init__(model)
        self.tried_identity: ModelIdentity | None = None
        """The identity that the model had when it was tried; None before the first trial. `in_use`
        calls `fit` if it is another one by now."""

        self.wrong_beyond: PositionLimit | None = None
        """The number of positions beyond which the model computes wrong numbers, if any."""

        if is_tried:
            with in_use(self):
                pass  # the model is tried on entering

    # --- trying the model -------------------------------------------------------------------------

    def fit(self) -> None:
        """Try the model as it is now, unless another wrapper of it has done so, and compute from
        now on as the trial has shown to be right. Called in use (`in_use`)."""
        (original,) = self._original
        identity = last_identity(self)
        fit = known_fit(original, identity, self.device)
        if fit is None:
            # While it is tried, the model computes what any model can, and shares nothing.
            self._compute_as(Fit())
            self.tried_identity = None
            self.wrong_beyond = None  # the eight tokens of a trial reach no limit
            fit = try_model(self, original)
            remember_fit(original, identity, self.device, fit)

        self._compute_as(fit)
        self.tried_identity = identity
        self.wrong_beyond = position_limit(
            self.model.config, fit.knows_windows, only_wrong_beyond=True
        )

    def _compute_as(self, fit: Fit) -> None:
        """Set what `hidden` depends on: windows, logits, and whether rows share states."""
        config = self.model.config
        self.windows = windows_of(config) if fit.knows_windows else {}
        """The attention window of each kind of layer; empty if the model computes them itself."""
        self.limit = position_limit(config, fit.knows_windows)
        self.logit_map = fit.logit_map
        self.can_share_distant = fit.can_share_distant
        self.batch_noise = fit.batch_noise
        self._collect_configs()

    @property
    def reach(self) -> int | None:
        """Return the size of the largest window, in position IDs: no layer sees a token that is
        farther back. Return None if some layers have no window, and see all earlier tokens."""
        sizes = [window.size for window in self.windows.values() if window is not None]
        all_have_windows = len(sizes) == len(self.windows)
        return max(sizes, default=None) if all_have_windows else None

    # --- hidden states ----------------------------------------------------------------------------

    def forward(
        self, tokens_BL: Tensor, positions_BL: Tensor, attention_bias: Tensor | None = None
    ) -> Tensor:
        return self.unembed(self.hidden(tokens_BL, positions_BL, attention_bias))

    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        documents: DocumentStarts | None = None,
        added_BLD: Tensor | None = None,
        distant: DistantStates | None = None,
        num_last: int | None = None,
    ) -> Tensor:
        """Return hidden_BLD after the last norm, as `LanguageModel.hidden` describes it."""
        positions_BL = positions_BL.expand_as(tokens_BL)
        length = tokens_BL.shape[1]

        if distant is not None and self.shares_distant(distant.num_tokens, length):
            return self.hidden_sharing(tokens_BL, positions_BL, distant, num_last)

        # Chunks are computed for plain rows only, with none of the options.
        options = (distant, attention_bias, documents, added_BLD)
        is_plain = all(option is None for option in options)
        if is_plain and self._needs_chunks(positions_BL):
            # The states of all tokens are kept; their hidden states are what is wanted.
            hidden_BLD = self.distant_states(tokens_BL, positions_BL).hidden_BFD
            assert hidden_BLD is not None
            return hidden_BLD if num_last is None else hidden_BLD[:, -num_last:]

        return self._hidden_in_one_pass(
            tokens_BL,
            positions_BL,
            attention_bias,
            documents=documents,
            added_BLD=added_BLD,
            distant=distant,
            num_last=num_last,
        )

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Return whether rows of `length` tokens attend to `num_distant` distant tokens without
        copies of their states."""
        if not self.can_share_distant:
            return False
        if self.text_config._attn_implementation not in FUSED:
            return False
        # Kernels of this device and dtype are asked for any usual width. Whether they take that of
        # the model was seen when the model was tried.
        usual_head_width = 64
        dtype = self.embedding.weight.dtype
        return can_share_distant(self.device, dtype, usual_head_width, num_distant, length)

    def hidden_sharing(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        distant: DistantStates,
        num_last: int | None = None,
    ) -> Tensor:
        """Return what `hidden` returns for rows that share distant states. Only models that
        `can_share_distant` compute right numbers here. The trial calls it to find that out."""
        from olmo_sparsity.models.huggingface.caches import SharedCache
        from olmo_sparsity.models.huggingface.own_attention import attending_to

        # Masks cover the row's own tokens only; the view of each layer adds the distant ones.
        causal = causal_bias(tokens_BL.shape[1], self.device)
        masks = self._masks(positions_BL, positions_BL, causal)
        views = views_of_layers(self._kinds_of_layers, self.windows, masks, positions_BL, distant)
        with attending_to(distant, views, self._usual_configs):
            return self._run_body(tokens_BL, positions_BL, masks, SharedCache(distant), num_last)

    def _needs_chunks(self, positions_BL: Tensor) -> bool:
        """Return whether a row must be computed in chunks, because a mask of the whole row would
        not fit into memory. Rows without windows need no mask, and a backward pass needs all tokens
        in one graph."""
        length = positions_BL.shape[1]
        is_long = length**2 > MAX_MASK_ENTRIES and not torch.is_grad_enabled()
        return is_long and window_hides_some(self.windows, positions_BL)

    def _hidden_in_one_pass(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None,
        *,
        documents: DocumentStarts | None,
        added_BLD: Tensor | None,
        distant: DistantStates | None,
        num_last: int | None,
    ) -> Tensor:
        """Return what `hidden` returns, from one forward pass of whole rows, each with copies of
        the distant states."""
        # What the rows attend to: their own tokens, and distant tokens before these.
        cache: Cache | None = None
        keys_BS = positions_BL
        num_kept_keys = 0
        if distant is not None:
            assert attention_bias is None
            from olmo_sparsity.models.huggingface.caches import DistantCache

            cache = DistantCache(distant)
            attention_bias = distant.window_bias(tokens_BL.shape[1])
            keys_BS = distant.positions_before(positions_BL)
            # Only with distant states does attention keep its scores for a backward pass: without
            # them a fused kernel computes it.
            num_kept_keys = keys_BS.shape[1]
        masks = self._masks(positions_BL, keys_BS, attention_bias)

        with ExitStack() as stack:
            arguments: dict[str, Any] = {}
            if documents is not None:
                # Only our attention keeps documents apart, and takes them by this argument.
                arguments["documents"] = documents
                if not self.has_own_attention:
                    from olmo_sparsity.models.huggingface.own_attention import using_own_attention

                    stack.enter_context(using_own_attention(self._usual_configs))
            if added_BLD is not None:
                stack.enter_context(self._adding(added_BLD))
            if torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_kept_keys):
                stack.enter_context(recomputing_layers(self.body))
            return self._run_body(tokens_BL, positions_BL, masks, cache, num_last, **arguments)

    def _adding(self, added_BLD: Tensor) -> RemovableHandle:
        """Add a tensor to the embeddings of tokens, until the context of the result is left."""

        def add(embedding: nn.Module, inputs: Any, embedded_BLD: Tensor) -> Tensor:
            return embedded_BLD + added_BLD

        # Not by `inputs_embeds`: some families look up more than an embedding by token. A hook sees
        # calls of all threads, and only this thread's get the addition.
        return self.embedding.register_forward_hook(in_this_thread(add))

    def recomputes(self, num_tokens: int, num_keys: int) -> bool:
        """Return whether layers are computed again in a backward pass, to save memory.

        Args:
            num_tokens: Tokens of the batch, in all rows.
            num_keys: Keys that each token attends to, if attention scores are kept; 0 if fused
                kernels keep none.
        """
        if self.training:  # `checkpoint_activations` has set it in the layers themselves
            return False
        text = self.text_config
        shape = (text.hidden_size, text.num_attention_heads, text.num_hidden_layers)
        itemsize = self.embedding.weight.element_size()
        return keeps_much(num_tokens, num_keys, *shape, itemsize)

    # --- what all ways have in common -------------------------------------------------------------

    def _masks(self, queries_BL: Tensor, keys_BS: Tensor, bias: Tensor | None = None) -> Masks:
        """Return attention masks as transformers takes them, after a check that the model computes
        right numbers for these position IDs.

        Args:
            queries_BL: Position IDs of the tokens that attend.
            keys_BS: Position IDs of the tokens that they may attend to.
            bias: bias_B1LS, added to attention scores; None for causal attention.
        """
        if self.wrong_beyond is not None:
            num_positions = max(int(keys_BS.max()) + 1, keys_BS.shape[1])
            self.wrong_beyond.check(num_positions, type(self.model).__name__)
        return build_masks(
            self.windows,
            queries_BL,
            keys_BS,
            bias,
            dtype=self.model.dtype,
            is_causal_without_mask=self.text_config._attn_implementation in FUSED,
        )

    def _run_body(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        masks: Masks,
        cache: Cache | None,
        num_last: int | None,
        **arguments: Any,
    ) -> Tensor:
        """Run one forward pass of transformers. Return hidden_BLD after the last norm.

        Args:
            cache: States of earlier tokens, which `masks` cover, too; None means that there are
                none.
            num_last: Return the hidden states of this many tokens, the last ones. With None those
                of all tokens are returned.
            arguments: Keywords that are passed on to all layers.
        """
        hidden_BLD = self.body(
            input_ids=tokens_BL,
            position_ids=positions_BL.expand_as(tokens_BL),
            attention_mask=masks,
            use_cache=cache is not None,
            return_dict=True,
            **{self._cache_name: cache},
            **arguments,
        ).last_hidden_state
        if num_last is not None:
            hidden_BLD = hidden_BLD[:, -num_last:]
        return hidden_BLD.to(tokens_BL.device)  # a device map may have put it elsewhere

    # --- states of distant tokens, attention to them ----------------------------------------------

    @torch.no_grad()
    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        tokens_at_once: int | None = None,
        earlier: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and hidden states of all tokens, each of which sees those before it.

        Args:
            tokens_at_once: Largest number of tokens of a forward pass. With None only
                `MAX_MASK_ENTRIES` limits it.
            earlier: States of the text before these tokens, which become part of the result.
        """
        from olmo_sparsity.models.huggingface.caches import growing_cache, states_in

        positions_BL = positions_BL.expand_as(tokens_BL)
        length = tokens_BL.shape[1]
        cache = growing_cache(earlier)
        keys_BS = positions_BL[:, :0] if earlier is None else earlier.positions_BF
        # The last chunk attends to all tokens, so its mask is the largest one.
        largest_chunk = max(1, MAX_MASK_ENTRIES // (keys_BS.shape[1] + length))
        chunk_length = min(tokens_at_once or length, largest_chunk)

        hidden_chunks = []
        token_chunks = tokens_BL.split(chunk_length, 1)
        position_chunks = positions_BL.split(chunk_length, 1)
        for tokens_BC, positions_BC in zip(token_chunks, position_chunks, strict=True):
            keys_BS = torch.cat((keys_BS, positions_BC), 1)
            masks = self._masks(positions_BC, keys_BS)
            # The cache grows by this chunk, so that the next one sees it.
            hidden_chunks.append(self._run_body(tokens_BC, positions_BC, masks, cache, None))
        states = DistantStates(keys_BS, states_in(cache))
        return states.with_hidden_after(earlier, torch.cat(hidden_chunks, 1))

    @torch.no_grad()
    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return weights_BHS: how much the last token attends to each token of `distant` and of the
        row, in all heads of all layers."""
        assert distant.bias_BF is None
        from olmo_sparsity.models.huggingface.caches import growing_cache
        from olmo_sparsity.models.huggingface.own_attention import reading_weights

        # Only the last token runs through the attention that returns weights, which is slow. The
        # tokens before it become kept states.
        seen_states = distant
        if tokens_BL.shape[1] > 1:
            seen_states = self.distant_states(
                tokens_BL[:, :-1], positions_BL[:, :-1], earlier=distant
            )
        last_B1 = tokens_BL[:, -1:]
        last_positions_B1 = positions_BL[:, -1:].expand(len(tokens_BL), -1)
        keys_BS = torch.cat((seen_states.positions_BF, last_positions_B1), 1)
        masks = self._masks(last_positions_B1, keys_BS)
        with reading_weights(self._usual_configs) as weights:
            self._run_body(last_B1, last_positions_B1, masks, growing_cache(seen_states), 1)
        # A family that computes attention by a function of its own calls ours in no layer.
        if len(weights) < self.text_config.num_hidden_layers:
            raise ConfigError(
                f"{type(self.model).__name__} does not return its attention weights; choose "
                "another selector than attention"
            )
        # The last token is the only query. Heads of all layers are put one after another.
        return torch.cat([layer_BH1S[:, :, 0].to(tokens_BL.device) for layer_BH1S in weights], 1)

    # --- logits -----------------------------------------------------------------------------------

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.logit_map(self.raw_logits(hidden))

    @property
    def logit_scale(self) -> float:
        """Return the factor of logits after the last linear map, for training."""
        if self.logit_map.cap is not None:
            raise ConfigError(
                f"{type(self.model).__name__} caps its logits at {self.logit_map.cap}, which "
                "training does not support; choose another family"
            )
        return self.logit_map.scale
