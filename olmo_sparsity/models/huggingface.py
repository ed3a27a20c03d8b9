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

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import (
    OWN_ATTENTION,
    USUAL,
    Documents,
    can_share_distant,
    causal_bias,
    keeps_much,
)
from olmo_sparsity.models.compatibility import (
    LogitMap,
    position_limit,
    refuse_unfit,
    windows_of,
)
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.identity import State
from olmo_sparsity.models.use import in_this_thread, in_use, state_of

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
    can_share_distant: bool = False
    batch_noise: float = 0.0
    knows_windows: bool = False
    """Whether windows by position IDs are its own, where these count places."""


_trials: WeakKeyDictionary[nn.Module, _Trial] = WeakKeyDictionary()
"""So that a model in memory, wrapped anew in each call, is tried once."""


class HuggingFaceLM(nn.Module):
    """A transformers causal LM as a LanguageModel. Models that do not fit are rejected."""

    def __init__(self, model: PreTrainedModel | PeftModel, is_tried: bool = True) -> None:
        """`model`: for a PEFT model, its base model is used, which contains the adapters.
        `is_tried`: False for one without memory, of which sizes are read only."""
        super().__init__()
        get_base: Callable[[], Any] = getattr(model, "get_base_model", lambda: model)
        self.model: PreTrainedModel = get_base()
        self._original = (model,)  # no module of this one
        self.has_own_attention = False
        self.fitted: State | None = None
        if not is_tried:
            return
        with in_use(self):  # which calls `fit`
            pass

    def keep_own_attention(self) -> None:
        """For training: compiled code enters no context."""
        from olmo_sparsity.models import shared_states  # noqa: F401 (which registers it)

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
        self.windows = windows_of(config) if tried.knows_windows else {}
        self.limit = position_limit(config, tried.knows_windows)
        self.wrong_beyond = None
        if tried.state is not None:  # a trial is short
            self.wrong_beyond = position_limit(config, tried.knows_windows, only_wrong_beyond=True)
        configs = [getattr(module, "config", None) for module in self.model.modules()]
        self._configs = list({id(config): config for config in configs if config}.values())
        self.logit_map, self.can_share_distant = tried.logit_map, tried.can_share_distant
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
    def reach(self) -> int | None:
        sizes = [window.size for window in self.windows.values() if window is not None]
        return max(sizes, default=None) if len(sizes) == len(self.windows) else None

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
            kinds = f"the last map of {type(self.model).__name__} is a {type(head).__name__}"
            raise ConfigError(f"{kinds}, which cannot be trained here; merge its adapter first")
        return head.weight, head.bias

    @property
    def logit_scale(self) -> float:
        if self.logit_map.cap is not None:
            kind = f"{type(self.model).__name__} caps its logits at {self.logit_map.cap}"
            raise ConfigError(f"{kind}, which training does not support; choose another family")
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
        distant: DistantStates | None = None,
        last: int | None = None,
    ) -> Tensor:
        positions_BL = positions_BL.expand_as(tokens_BL)
        if distant is not None and self.shares_distant(distant.num_places, tokens_BL.shape[1]):
            return self.hidden_sharing(tokens_BL, positions_BL, distant, last)
        is_plain = all(given is None for given in (distant, attention_bias, documents, added_BLD))
        is_long = tokens_BL.shape[1] ** 2 > MASKED_AT_ONCE and not torch.is_grad_enabled()
        if is_plain and is_long and self._is_windowed(positions_BL):
            hidden_BLD = self.distant_states(tokens_BL, positions_BL).hidden_BFD  # a part at a time
            assert hidden_BLD is not None
            return hidden_BLD if last is None else hidden_BLD[:, -last:]
        cache: Cache | None = None
        keys_BK = positions_BL
        if distant is not None:
            assert attention_bias is None
            from olmo_sparsity.models.shared_states import DistantCache

            cache, attention_bias = DistantCache(distant), distant.window_bias(tokens_BL.shape[1])
            keys_BK = torch.cat((distant.positions_BF.expand(len(tokens_BL), -1), positions_BL), 1)
        masks = self._masks(positions_BL, keys_BK, attention_bias)
        more = {}
        with ExitStack() as stack:
            if documents is not None:
                from olmo_sparsity.models.shared_states import own_attention

                more = {"documents": documents}
                if not self.has_own_attention:
                    stack.enter_context(own_attention(self._usual_configs))
            if added_BLD is not None:  # not inputs_embeds: some families look up more by token
                add = in_this_thread(lambda *called: called[-1] + added_BLD)
                stack.enter_context(self.embedding.register_forward_hook(add))
            num_keys = 0 if distant is None else keys_BK.shape[1]
            if torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_keys):
                stack.enter_context(_recomputing(self.body))
            return self._last_hidden(tokens_BL, positions_BL, masks, cache, last, **more)

    def _masks(
        self, queries_BL: Tensor, keys_BK: Tensor, bias: Tensor | None = None
    ) -> Tensor | dict[str, Tensor | None]:
        """What transformers takes: a mask, or one for each kind of layer."""
        (num_rows, length), num_keys = queries_BL.shape, keys_BK.shape[1]
        if self.wrong_beyond is not None:
            num_positions = max(int(keys_BK.max()) + 1, num_keys)
            self.wrong_beyond.check(num_positions, type(self.model).__name__)
        if not self._is_windowed(keys_BK):
            if bias is not None:
                return _additive(bias, self.model.dtype).expand(num_rows, -1, -1, -1)
            # Without a mask, transformers takes a gap in the position IDs for the start of another
            # packed sequence. A mask of ones means one sequence, and transformers drops it again,
            # so that attention still runs the fused causal kernel.
            return queries_BL.new_ones(num_rows, num_keys)
        is_fused = bias is None and num_keys == length
        is_fused &= self.text_config._attn_implementation in ("sdpa", OWN_ATTENTION)
        bias = causal_bias(num_keys, keys_BK.device, length) if bias is None else bias
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.windows.items():
            of_kind = bias
            if window is not None:
                hides_B1LK = window.hides(queries_BL, keys_BK)[:, None]
                of_kind = bias.masked_fill(hides_B1LK, torch.finfo(bias.dtype).min)
            mask = _additive(of_kind, self.model.dtype).expand(num_rows, -1, -1, -1)
            masks[kind] = None if is_fused and window is None else mask
        return masks if "" not in masks else cast(Tensor, masks[""])

    def _is_windowed(self, keys_BK: Tensor) -> bool:
        """Whether a window hides one of these places from another."""
        windows = [window for window in self.windows.values() if window is not None]
        if not windows:
            return False
        first, last = (int(edge) for edge in keys_BK.aminmax())
        return not all(window.holds(first, last) for window in windows)

    def recomputes(self, num_tokens: int, num_keys: int = 0) -> bool:
        text = self.text_config  # in training, transformers does so itself
        shape = (text.hidden_size, text.num_attention_heads, text.num_hidden_layers)
        itemsize = self.embedding.weight.element_size()
        return not self.training and keeps_much(num_tokens, num_keys, *shape, itemsize)

    def shares_distant(self, num_distant: int, length: int) -> bool:
        kernel = self.text_config._attn_implementation
        dtype, head_width = self.embedding.weight.dtype, 64  # its own was tried when it was loaded
        return (
            self.can_share_distant
            and kernel in ("sdpa", OWN_ATTENTION)
            and can_share_distant(self.device, dtype, head_width, num_distant, length)
        )

    def hidden_sharing(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        distant: DistantStates,
        last: int | None = None,
    ) -> Tensor:
        """`hidden` where rows share the distant states. Only where `can_share_distant`."""
        from olmo_sparsity.models.shared_states import LayerView, SharedCache, attending_to

        keys_BK = torch.cat((distant.positions_BF.expand(len(tokens_BL), -1), positions_BL), 1)
        causal = causal_bias(tokens_BL.shape[1], self.device)
        masks = self._masks(positions_BL, positions_BL, causal)
        kinds = [""] * self.text_config.num_hidden_layers
        if self._is_windowed(keys_BK):
            kinds = getattr(self.text_config, "layer_types", None) or kinds
        views = {}
        for kind in set(kinds):
            mask, window = masks[kind] if isinstance(masks, dict) else masks, self.windows.get(kind)
            assert mask is not None
            views[kind] = LayerView(mask, distant.bias_BF)
            if window is not None:
                views[kind] = LayerView.through(window, mask, distant, positions_BL)
        with attending_to(distant, [views[kind] for kind in kinds], self._usual_configs):
            return self._last_hidden(tokens_BL, positions_BL, masks, SharedCache(distant), last)

    @cached_property
    def _cache_name(self) -> str:
        """Name of the argument, which transformers 5.24 renames."""
        names = inspect.signature(self.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    def _last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        mask: Tensor | dict[str, Tensor | None],
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

    @torch.no_grad()
    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        at_once: int | None = None,
        before: DistantStates | None = None,
    ) -> DistantStates:
        from transformers import DynamicCache

        cache = DynamicCache() if before is None else _as_cache(before)
        positions_BL = positions_BL.expand_as(tokens_BL)
        earlier = 0 if before is None else before.num_places
        most = max(1, MASKED_AT_ONCE // (earlier + tokens_BL.shape[1]))
        at_once = min(at_once or tokens_BL.shape[1], most)
        parts = zip(tokens_BL.split(at_once, 1), positions_BL.split(at_once, 1), strict=True)
        known_BF, hidden = positions_BL[:, :0] if before is None else before.positions_BF, []
        for part_BL, at_BL in parts:
            known_BF = torch.cat((known_BF, at_BL), 1)
            masks = self._masks(at_BL, known_BF)
            hidden.append(self._last_hidden(part_BL, at_BL, masks, cache, None))
        kept: list[Any] = cache.layers
        layers = [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in kept]
        return DistantStates(known_BF, layers).predicting(torch.cat(hidden, 1), before)

    @torch.no_grad()
    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        assert distant.bias_BF is None
        from olmo_sparsity.models.shared_states import reading_weights

        before = distant
        if tokens_BL.shape[1] > 1:
            before = self.distant_states(tokens_BL[:, :-1], positions_BL[:, :-1], before=distant)
        last = (tokens_BL[:, -1:], positions_BL[:, -1:].expand(len(tokens_BL), -1))
        masks = self._masks(last[1], torch.cat((before.positions_BF, last[1]), 1))
        with reading_weights(self._usual_configs) as weights:
            self._last_hidden(*last, masks, _as_cache(before), 1)
        if len(weights) < self.text_config.num_hidden_layers:
            raise ConfigError(f"{type(self.model).__name__} does not return its attention weights")
        return torch.cat([of_layer[:, :, 0].to(tokens_BL.device) for of_layer in weights], 1)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.logit_map(self.raw_logits(hidden))

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Output of the last linear map, before scaling or capping."""
        head = cast(nn.Module, self.model.get_output_embeddings())
        return head(hidden).to(hidden.device)

    @property
    def layers(self) -> list[Any]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [m for m in self.body.modules() if isinstance(m, GradientCheckpointingLayer)]

    def checkpoint_activations(self, every: int = 1) -> None:
        older = self.model.gradient_checkpointing_enable  # the name in early releases of 5
        getattr(self.model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = number % every == 0


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


def _as_cache(distant: DistantStates) -> Cache:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (k_BFHK, v_BFHK) in enumerate(distant.layers):
        cache.update(k_BFHK.transpose(1, 2), v_BFHK.transpose(1, 2), index)
    return cache


def _additive(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite in the dtype of attention: the lowest fp32 number would overflow to -inf."""
    if torch.is_autocast_enabled(bias.device.type):
        dtype = torch.get_autocast_dtype(bias.device.type)
    return bias.clamp(min=torch.finfo(dtype).min).to(dtype)
