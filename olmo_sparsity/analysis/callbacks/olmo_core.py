"""Log the loss by place of a fixed text while OLMo-core's trainer trains."""

from __future__ import annotations

from typing import Any

from olmo_core.distributed.utils import get_full_tensor  # type: ignore[attr-defined] # of 3.0
from olmo_core.nn.hf import convert_state_to_hf, get_hf_config
from olmo_core.train.callbacks import Callback
from transformers import AutoModelForCausalLM

from olmo_sparsity.analysis.scoring.losses_by_place import losses_by_place


class OLMoCoreLosses(Callback):
    """Record `loss_by_place/FIRST-END` every `interval` steps, of a copy of the model for
    transformers. `text` and `settings` are those of `losses_by_place`. All processes make the copy,
    as weights may be spread over them."""

    def __init__(self, interval: int, tokenizer: Any, text: Any, **settings: Any) -> None:
        self.interval, self.tokenizer, self.text = interval, tokenizer, text
        self.settings = settings

    def post_step(self) -> None:
        if self.step % self.interval:
            return
        module = self.trainer.train_module
        config = get_hf_config(module.model)
        config.max_position_embeddings = module.max_sequence_length
        weights = module.model.state_dict()
        weights = {name: get_full_tensor(part) for name, part in weights.items()}
        copy = AutoModelForCausalLM.from_config(config)
        copy.load_state_dict(convert_state_to_hf(config, weights))
        found = losses_by_place(copy, self.tokenizer, text=self.text, **self.settings)
        for row in found.table.itertuples():
            self.trainer.record_metric(f"loss_by_place/{row.first}-{row.end}", row.loss)
