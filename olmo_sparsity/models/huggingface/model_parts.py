"""Name the parts of a causal LM of transformers, whose families name them in several ways.

    LlamaForCausalLM                          here
      model        embedding and layers       `body`, `layers`
        embed_tokens                          `embedding`, `device`
      lm_head      the last linear map        `unembedding`, `raw_logits`
      config                                  `text_config`, `vocab_size`

`ModelParts` is the first half of `HuggingFaceLM` (model.py), which adds what it computes. Nothing
here runs a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.huggingface.attention_names import OWN_SDPA, REPLACEABLE
from olmo_sparsity.models.huggingface.recomputing import checkpoint_layers, layers_of

if TYPE_CHECKING:  # importing transformers takes two seconds, so only its models do
    from peft import PeftModel
    from transformers import PreTrainedModel


class ModelParts(nn.Module):
    """A causal LM of transformers and its parts."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        """Wrap a model. Of a PEFT model the base model is used, which contains the adapters."""
        super().__init__()
        get_base: Callable[[], Any] = getattr(model, "get_base_model", lambda: model)
        self.model: PreTrainedModel = get_base()
        # In a tuple, so that it is not a module of this one, whose weights would count twice.
        self._original = (model,)
        self.has_own_attention = False
        """Whether `keep_own_attention` has set our attention permanently."""

    # --- weights ----------------------------------------------------------------------------------

    @property
    def body(self) -> nn.Module:
        """Return the model without its last linear map, which computes hidden states."""
        body = self.model.base_model
        if body is not self.model:
            return body
        # Some families name no base model, and keep it as `model`.
        return getattr(self.model, "model", body)

    @property
    def layers(self) -> list[Any]:
        """Return the layers, from the first to the last."""
        return layers_of(self.body)

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """Return weight_VD and bias_V of the last linear map, which training differentiates."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"the last map of {type(self.model).__name__} is a {type(head).__name__}, which "
                "cannot be trained here; merge its adapter first"
            )
        return head.weight, head.bias

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Return the output of the last linear map, before logits are scaled or capped."""
        head = cast(nn.Module, self.model.get_output_embeddings())
        # With a device map the head may be on another device than the inputs.
        return head(hidden).to(hidden.device)

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs. Offloaded weights are on the meta device between uses;
        the hook that moves them knows their device."""
        hook = getattr(self.embedding, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        return self.embedding.weight.device if device is None else torch.device(device)

    # --- what its config says ---------------------------------------------------------------------

    @property
    def text_config(self) -> Any:
        """Return the configuration of the language model, which is an inner one in models that read
        images, too."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Return the number of logits, which may be larger than the tokenizer's vocabulary."""
        head = self.model.get_output_embeddings()
        return getattr(head, "out_features", self.embedding.weight.shape[0])

    @property
    def _kinds_of_layers(self) -> list[str]:
        """Return the kind of each layer, as `windows` and masks name it; "" if all are alike."""
        kinds = getattr(self.text_config, "layer_types", None)
        return kinds or [""] * self.text_config.num_hidden_layers

    @cached_property
    def _cache_name(self) -> str:
        """Return the name of the argument for a cache, which transformers 5.24 renames."""
        names = inspect.signature(self.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    # --- attention and layers that are replaced ---------------------------------------------------

    def _collect_configs(self) -> None:
        """Find the configurations of all layers. Called whenever the model is tried, as its user
        may have put other modules into it."""
        configs = [getattr(module, "config", None) for module in self.model.modules()]
        # Each one once: most layers have that of the model.
        self._configs = list({id(config): config for config in configs if config}.values())

    @property
    def _usual_configs(self) -> list[Any]:
        """Return the configurations of layers in which our attention may replace theirs: those
        whose attention is a usual kernel, or ours already."""
        return [
            config
            for config in self._configs
            if getattr(config, "_attn_implementation", None) in REPLACEABLE
        ]

    def keep_own_attention(self) -> None:
        """Set our attention permanently. Training needs it, because compiled code cannot enter the
        context that sets it for one forward pass."""
        from olmo_sparsity.models.huggingface import own_attention  # noqa: F401 (which registers it)

        self.has_own_attention = True
        for config in self._usual_configs:
            # Not by the property, which would set it in inner configurations, too. These are in
            # the list themselves, if ours may replace the attention of their layers.
            config._attn_implementation_internal = OWN_SDPA

    def checkpoint_activations(self, every: int = 1) -> None:
        """Let every n-th layer be computed again in the backward passes of training. `every`: n."""
        checkpoint_layers(self.model, self.body, every)
