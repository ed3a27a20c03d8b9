"""Log the loss by place of a fixed text while transformers' `Trainer` trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from olmo_sparsity.analysis.scoring.losses_by_place import losses_by_place


class TrainerLosses(TrainerCallback):
    """Log `loss_by_place/FIRST-END` at each evaluation.

        trainer.add_callback(TrainerLosses(trainer, tokenizer, texts, length=1024))

    `text` and `settings` are those of `losses_by_place`. Under DDP, each process reads the whole
    text, and the first one logs.
    """

    def __init__(self, trainer: Any, tokenizer: Any, text: Any, **settings: Any) -> None:
        self.trainer = trainer
        self.tokenizer = tokenizer
        self.text = text
        self.settings = settings

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure and log; transformers calls this after each evaluation."""
        losses = losses_by_place(kwargs["model"], self.tokenizer, text=self.text, **self.settings)
        numbers = {}
        for row in losses.table.itertuples():
            numbers[f"loss_by_place/{row.first}-{row.end}"] = row.loss
        self.trainer.log(numbers)
