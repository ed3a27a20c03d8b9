"""Wrap causal LMs of transformers in this project's model protocol. B batch, L length, D width,
H heads, V vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.analysis.kernels.attention import (
    OWN_ATTENTION,
    USUAL,
    Documents,
    can_share_far,
    causal_bias,
    keeps_much,
)
from olmo_sparsity.analysis.kernels.far_states import FarStates
from olmo_sparsity.analysis.models.compatibility import LogitMap, position_limit, refuse_unfit
from olmo_sparsity.analysis.models.identity import State
from olmo_sparsity.analysis.models.use import in_this_thread, in_use, state_of
from olmo_sparsity.errors import ConfigError

if TYPE_CHECKING:  # importing transformers takes two seconds, so only its models do
    from peft import PeftModel
    from transformers import Cache, PreTrainedModel


MASKED_AT_ONCE = 2**27
"""Places of an attention mask, which transformers builds whole where tokens follow others: 0.6 GiB
with its copy in fp32. From 32,768 tokens of context, fewer than 4,096 are computed at once."""


@dataclass(frozen=True)
class _Trial:
    """The outcome of trying a model in one state."""

    state: State | None
    device: torch.device
    """`batch_noise` depends on its kernels."""

    logit_map: LogitMap = LogitMap()
    can_share_far: bool = False
    batch_noise: float = 0.0


_trials: WeakKeyDictionary[nn.Module, _Trial] = WeakKeyDictionary()
"""So that a model in memory, wrapped anew in each call, is tried once."""


class HuggingFaceLM(nn.Module):
    """A transformers causal LM as a LanguageModel. Models that do not fit are rejected."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        """`model`: for a PEFT model, its base model is used, which contains the adapters."""
        super().__init__()
        get_base: Callable[[], Any] = getattr(model, "get_base_model", lambda: model)
        self.model: PreTrainedModel = get_base()
        self._original = (model,)  # no module of this one
        self.has_own_attention = False
        self.fitted: State | None = None
        with in_use(self):  # which calls `fit`
            pass

    def keep_own_attention(self) -> None:
        """For training: compiled code enters no context."""
        from olmo_sparsity.analysis.kernels import sharing  # noqa: F401 (which registers it)

        self.has_own_attention = True
        for config in self._usual_configs:
            config._attn_implementation_internal = OWN_ATTENTION

    def fit(self) -> None:
        """Read and try the model as it is now, unless another wrapper has. Called in use."""
        original, state = self._original[0], state_of(self)
        tried = _trials.get(original)
        if tried is None or tried.state is not state or tried.device != self.device:
            self._take(_Trial(None, self.device))  # shares nothing while it is tried
            tried = _Trial(state, self.device, *refuse_unfit(self, original=original))
            _trials[original] = tried
        self._take(tried)

    def _take(self, tried: _Trial) -> None:
        config = self.model.config
        self.limit = position_limit(config)
        self.wrong_beyond = position_limit(config, only_wrong_beyond=True)
        configs = [getattr(module, "config", None) for module in self.model.modules()]
        self._configs = list({id(config): config for config in configs if config}.values())
        self.logit_map, self.can_share_far = tried.logit_map, tried.can_share_far
        self.batch_noise, self.fitted = tried.batch_noise, tried.state

    @property
    def _usual_configs(self) -> list[Any]:
        """Configurations of layers in which ours may replace the attention."""
        usual = {*USUAL, *USUAL.values()}
        return [c for c in self._configs if getattr(c, "_attn_implementation", None) in usual]

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        head = self.model.get_output_embeddings()
        return getattr(head, "out_features", self.embedding.weight.shape[0])

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def body(self) -> nn.Module:
        """The model without the last linear map."""
        body = self.model.base_model
        return body if body is not self.model else getattr(self.model, "model", body)

    @property
    def device(self) -> torch.device:
        """Device of the inputs. With offloaded weights, their hook names it."""
        hook = getattr(self.embedding, "_hf_hook", None)
        where = getattr(hook, "execution_device", None)
        return self.embedding.weight.device if where is None else torch.device(where)

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"the last map of {type(self.model).__name__} is a {type(head).__name__}, which "
                "cannot be trained here; merge its adapter first"
            )
        return head.weight, head.bias

    @property
    def logit_scale(self) -> float:
        if self.logit_map.cap is not None:
            raise ConfigError(
                f"{type(self.model).__name__} caps its logits at {self.logit_map.cap}, which the "
                "training loss here does not support; choose another family"
            )
        return self.logit_map.scale

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
        documents: Documents | None = None,
        added_BLD: Tensor | None = None,
        cache: Cache | None = None,
        far: FarStates | None = None,
        last: int | None = None,
    ) -> Tensor:
        if far is not None:
            assert cache is None
            assert attention_bias is None
            if self.shares_far(far.num_places, tokens_BL.shape[1]):
                return self.hidden_sharing(tokens_BL, positions_BL, far, last)
            from olmo_sparsity.analysis.kernels.sharing import FarCache

            cache, attention_bias = FarCache(far), far.window_bias(tokens_BL.shape[1])
        num_earlier = cache.get_seq_length() if cache is not None else 0
        self._refuse_beyond(positions_BL, num_earlier + tokens_BL.shape[1])
        if attention_bias is None:
            # Without a mask, transformers takes a gap in the position IDs for the start of another
            # packed sequence. A mask of ones means one sequence, and transformers drops it again,
            # so that attention still runs the fused causal kernel.
            mask = tokens_BL.new_ones(len(tokens_BL), num_earlier + tokens_BL.shape[1])
        else:
            mask = _additive(attention_bias, self.model.dtype).expand(len(tokens_BL), -1, -1, -1)
        more = {}
        num_keys = 0 if far is None else mask.shape[-1]
        with ExitStack() as stack:
            if documents is not None:
                from olmo_sparsity.analysis.kernels.sharing import own_attention

                more = {"documents": documents}
                if not self.has_own_attention:
                    stack.enter_context(own_attention(self._usual_configs))
            if added_BLD is not None:  # not inputs_embeds: some families look up more by token
                add = in_this_thread(lambda *called: called[-1] + added_BLD)
                stack.enter_context(self.embedding.register_forward_hook(add))
            if torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_keys):
                stack.enter_context(_recomputing(self.body))
            return self._last_hidden(tokens_BL, positions_BL, mask, cache, last, **more)

    def recomputes(self, num_tokens: int, num_keys: int = 0) -> bool:
        text = self.text_config  # in training, transformers does so itself
        shape = (text.hidden_size, text.num_attention_heads, text.num_hidden_layers)
        itemsize = self.embedding.weight.element_size()
        return not self.training and keeps_much(num_tokens, num_keys, *shape, itemsize)

    def shares_far(self, num_far: int, length: int) -> bool:
        kernel = self.text_config._attn_implementation
        dtype, head_width = self.embedding.weight.dtype, 64  # its own was tried when it was loaded
        return (
            self.can_share_far
            and kernel in ("sdpa", OWN_ATTENTION)
            and can_share_far(self.device, dtype, head_width, num_far, length)
        )

    def hidden_sharing(
        self, tokens_BL: Tensor, positions_BL: Tensor, far: FarStates, last: int | None = None
    ) -> Tensor:
        """`hidden` where rows share the far states. Only where `can_share_far`."""
        from olmo_sparsity.analysis.kernels.sharing import SharedCache, attending_to

        num_rows, length = tokens_BL.shape
        self._refuse_beyond(positions_BL, far.num_places + length)
        mask = _additive(causal_bias(length, self.device), self.model.dtype)
        mask = mask.expand(num_rows, -1, -1, -1)
        num_layers = self.text_config.num_hidden_layers
        with attending_to(far, mask, self._usual_configs, num_layers):
            return self._last_hidden(tokens_BL, positions_BL, mask, SharedCache(far), last)

    @cached_property
    def _cache_name(self) -> str:
        """Name of the argument, which transformers 5.24 renames."""
        names = inspect.signature(self.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def _last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        mask: Tensor,
        cache: Cache | None,
        last: int | None,
        **more: Any,
    ) -> Tensor:
        hidden_BLD = self.body(
            input_ids=tokens_BL,
            position_ids=positions_BL.expand_as(tokens_BL),
            attention_mask=mask,
            use_cache=cache is not None,
            return_dict=True,
            **{self._cache_name: cache},
            **more,
        ).last_hidden_state
        if last is not None:
            hidden_BLD = hidden_BLD[:, -last:]
        return hidden_BLD.to(tokens_BL.device)  # a device map may have put it elsewhere

    def _refuse_beyond(self, positions_BL: Tensor, num_places: int) -> None:
        if self.wrong_beyond is not None:
            num_positions = max(int(positions_BL.max()) + 1, num_places)
            self.wrong_beyond.check(num_positions, type(self.model).__name__)

    @torch.no_grad()
    def far_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        at_once: int | None = None,
        before: FarStates | None = None,
    ) -> FarStates:
        from transformers import DynamicCache

        cache = DynamicCache() if before is None else _as_cache(before)
        positions_BL = positions_BL.expand_as(tokens_BL)
        earlier = 0 if before is None else before.num_places
        most = max(1, MASKED_AT_ONCE // (earlier + tokens_BL.shape[1]))
        at_once = min(at_once or tokens_BL.shape[1], most)
        parts = zip(tokens_BL.split(at_once, 1), positions_BL.split(at_once, 1), strict=True)
        hidden_BLD = torch.cat([self.hidden(*part, cache=cache) for part in parts], 1)
        kept: list[Any] = cache.layers
        layers = [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in kept]
        if before is not None:
            positions_BL = torch.cat([before.positions_BF, positions_BL], 1)
        return FarStates(positions_BL, layers).predicting(hidden_BLD, before)

    @torch.no_grad()
    def last_attention(self, tokens_BL: Tensor, positions_BL: Tensor, far: FarStates) -> Tensor:
        self._refuse_beyond(positions_BL, far.num_places + tokens_BL.shape[1])
        assert far.bias_BF is None
        from olmo_sparsity.analysis.kernels.sharing import reading_weights

        cache = _as_cache(far)
        if tokens_BL.shape[1] > 1:
            self.hidden(tokens_BL[:, :-1], positions_BL[:, :-1], cache=cache)
        mask = tokens_BL.new_ones(len(tokens_BL), cache.get_seq_length() + 1)
        with reading_weights(self._usual_configs) as weights:
            self._last_hidden(tokens_BL[:, -1:], positions_BL[:, -1:], mask, cache, 1)
        if len(weights) < self.text_config.num_hidden_layers:
            raise ConfigError(f"{type(self.model).__name__} does not return its attention weights")
        return torch.cat([of_layer[:, :, 0].to(tokens_BL.device) for of_layer in weights], 1)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.logit_map(self.raw_logits(hidden))

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Output of the last linear map, before scaling or capping."""
        head = cast(nn.Module, self.model.get_output_embeddings())
        return head(hidden).to(hidden.device)

    def checkpoint_activations(self) -> None:
        older = self.model.gradient_checkpointing_enable  # the name in early releases of 5
        enable = getattr(self.model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False})


@contextmanager
def _recomputing(body: nn.Module) -> Iterator[None]:
    """Inside, layers keep only their inputs for a backward pass, also outside of training."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    with ExitStack() as stack:
        for layer in body.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                stack.callback(setattr, layer, "forward", layer.forward)
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield


def _as_cache(far: FarStates) -> Cache:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (k_BFHK, v_BFHK) in enumerate(far.layers):
        cache.update(k_BFHK.transpose(1, 2), v_BFHK.transpose(1, 2), index)
    return cache


def _additive(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite in the dtype of attention: the lowest fp32 number would overflow to -inf."""
    if torch.is_autocast_enabled(bias.device.type):
        dtype = torch.get_autocast_dtype(bias.device.type)
    return bias.clamp(min=torch.finfo(dtype).min).to(dtype)
