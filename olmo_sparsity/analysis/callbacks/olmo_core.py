"""Log the loss by place of a fixed text while OLMo-core's trainer trains."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from olmo_sparsity.analysis.scoring.losses_by_place import losses_by_place
from olmo_sparsity.base.errors import ConfigError, one_line

try:
    from olmo_core.distributed.utils import get_full_tensor  # type: ignore[attr-defined] # of 3.0
    from olmo_core.nn.hf import convert_state_to_hf, get_hf_config
    from olmo_core.train.callbacks import Callback
except ImportError as error:
    # The package `olmo` brings an olmo_core of its own, which has no trainer.
    raise ConfigError(
        f"OLMoCoreLosses requires OLMo-core 3.0 or later ({one_line(error)}); "
        "pip install 'ai2-olmo-core>=3'"
    ) from None


class OLMoCoreLosses(Callback):
    """Record `loss_by_place/FIRST-END` every `interval` steps. Losses are computed with a copy of
    the model for transformers.

        OLMoCoreLosses(interval=1000, tokenizer=tokenizer, text=texts, length=1024)
    """

    def __init__(self, interval: int, tokenizer: Any, text: Any, **settings: Any) -> None:
        """Declare what is measured, and when.

        Args:
            interval: Steps between two measurements.
            tokenizer: The tokenizer of the model.
            text: Held-out text, as in `losses_by_place`.
            settings: Settings of `losses_by_place`.
        """
        self.interval = interval
        self.tokenizer = tokenizer
        self.text = text
        self.settings = settings

    def post_step(self) -> None:
        """Measure and record every `interval` steps. OLMo-core calls this after each step."""
        if self.step % self.interval:
            return
        module = self.trainer.train_module
        config = get_hf_config(module.model)
        config.max_position_embeddings = module.max_sequence_length
        # Weights may be spread over processes, so all of them take part, and each has a copy.
        shards = module.model.state_dict()
        weights = {name: get_full_tensor(shard) for name, shard in shards.items()}
        copy = AutoModelForCausalLM.from_config(config)
        copy.load_state_dict(convert_state_to_hf(config, weights))
        losses = losses_by_place(copy, self.tokenizer, text=self.text, **self.settings)
        for row in losses.table.itertuples():
            self.trainer.record_metric(f"loss_by_place/{row.first}-{row.end}", row.loss)
