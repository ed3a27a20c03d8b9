"""Evaluate a copy of a model in training on tasks of lm_eval (`evaluation.lm_eval`).

    tasks = Tasks(config, tokenizer, device, processes)    # setup/inputs.py
    tasks(1000, weights)    # {"arc_easy/acc": 0.31, "arc_easy/acc_norm": 0.29}, to the metrics

The weights are exported to transformers, so the numbers are those of `lm_eval --model hf` on an
exported checkpoint. lm_eval divides tasks into requests, such as "the log-probability of this
answer". Each process has a whole copy of the model, and answers a share of the requests:

    100 requests, 4 processes    process 0 answers 0 … 24, process 1 answers 25 … 49, …
                                 all of them receive all 100 answers, and compute the same numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError, naming_extras, one_line
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.exchange import hugging_face_model, hugging_face_tokenizer
from olmo_sparsity.training.processes.distributed import Processes


class Tasks:
    """The tasks of `evaluation.lm_eval`, loaded once and called at each evaluation."""

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, device: torch.device, processes: Processes
    ) -> None:
        self.config = config
        self.device = device
        self.processes = processes
        self.tokenizer = hugging_face_tokenizer(tokenizer, config.model)
        self.loaded = load_tasks(config.evaluation.lm_eval)
        """What lm_eval loads: with its groups, and under "tasks" each task by its name."""

    def __call__(self, step: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the value of each TASK/METRIC, as `lm_eval --model hf` computes it for the
        exported model of a step."""
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        for task in self.loaded["tasks"].values():
            # The default seed of lm_eval's command. Otherwise each evaluation would have other
            # examples in its prompts.
            task.set_fewshot_seed(1234)
        model_config = self.config.at(step).model
        exported: Any = hugging_face_model(model_config, weights, origin="the engine")
        is_bf16 = self.config.training.precision == "bf16"
        model = HFLM(
            exported.to(self.device),
            tokenizer=self.tokenizer,
            batch_size=self.config.evaluation.batch_size,
            mixed_precision_dtype=torch.bfloat16 if is_bf16 else None,
        )
        # lm_eval answers each kind of requests by one of these methods. Here each is replaced by a
        # function that divides its requests among processes: HFLM does so only with accelerate,
        # which would need a process group of its own.
        for method in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, method, self._divided(getattr(model, method)))
        # Without a bootstrap, whose standard errors would take longer than the tasks.
        evaluated = evaluate(model, self.loaded, bootstrap_iters=0, log_samples=False)
        return _numbers_of(evaluated["results"])

    def _divided(self, answer: Callable[..., list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """Return a function that answers requests as `answer` does, but divides them among the
        processes. Each returns all answers, in the order of the requests.

        Args:
            answer: A method of `HFLM`, which answers requests on this process.
        """
        rank = self.processes.rank
        count = self.processes.world_size

        def answer_all(requests: list[Any]) -> list[Any]:
            first = len(requests) * rank // count
            end = len(requests) * (rank + 1) // count
            own_answers = answer(requests[first:end], disable_tqdm=True)
            # By rank, which is the order of the shares.
            return list(chain(*self.processes.gather(own_answers)))

        return answer_all


def _numbers_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all tasks, by TASK/METRIC."""
    numbers = {}
    for task, values in results.items():
        for name, value in values.items():
            # Besides metrics, lm_eval lists names, and errors that need a bootstrap.
            if isinstance(value, float) and math.isfinite(value):
                metric = name.removesuffix(",none")  # no filter was applied
                numbers[f"{task}/{metric}"] = float(value)
    return numbers


def load_tasks(names: list[str]) -> Any:
    """Load tasks with their data, from lm_eval's cache or the hub. Raise ConfigError if one cannot
    be loaded."""
    with naming_extras():
        from lm_eval.tasks import TaskManager
    try:
        return TaskManager().load(names)
    except Exception as error:  # of the task's own code, or of the hub
        raise ConfigError(
            f"evaluation.lm_eval={names} cannot be loaded: {one_line(error)}; name tasks of "
            "lm_eval, or YAML files"
        ) from None
