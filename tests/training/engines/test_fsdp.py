"""The engine of `fully_shard` takes the steps of one process; each process holds a part."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from benchmarks.memory import PHASES, launch
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig, TrainingConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models.build import build_model
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.engines.choose import build_engine
from olmo_sparsity.training.engines.deferred import Deferred
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.engines.fsdp import check_ranks
from olmo_sparsity.training.engines.model_parts import layers_of
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.process_group import connect
from tests.support import children

# 101 rows of the vocabulary and layers of 50 rows are divided by neither two nor four.
OLMO: dict[str, Any] = {"d_model": 30, "n_heads": 3, "n_layers": 3, "vocab_size": 101}
OLMO |= {"max_sequence_length": 64, "layer_norm_type": "rms", "mlp_hidden_size": 100}
GPT_NEOX: dict[str, Any] = {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 101}
GPT_NEOX |= {"architecture": "gpt_neox", "max_sequence_length": 64}
GPT_NEOX |= {"activation_type": "gelu", "include_bias": True}
NUM_STEPS = 4


@dataclass(frozen=True)
class Work:
    """Steps of an engine, in each of its processes."""

    out: Path
    engine: str = "fsdp"
    model: dict[str, Any] = field(default_factory=lambda: OLMO)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    node_size: int | None = None


def batch_of(step: int) -> Batch:
    """Eight sequences with unequal numbers of labels."""
    tokens_BL = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(step))
    labels_BL = tokens_BL.roll(-1, 1)
    labels_BL[:, -1] = IGNORED
    labels_BL[0, 3:9] = IGNORED
    return Batch(tokens_BL, torch.arange(16).expand(8, 16), labels_BL)


def take_steps(work: Work) -> int:
    """In each process; the first writes what it saw."""
    if work.node_size is not None:
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = str(rank % work.node_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(work.node_size)
    if work.training.get("compile"):
        # Kernels are those of one process, and take minutes. A break of the graph is an error.
        torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)
    with connect() as processes:
        seen = steps_of(work, processes)
        if processes.is_first:
            work.out.write_text(json.dumps(seen))
    return 0


def steps_of(work: Work, processes: Processes) -> dict[str, Any]:
    sizes = ModelConfig(**work.model)
    torch.manual_seed(5)
    is_sharded_at_birth = work.engine == "fsdp" and sizes.architecture == "olmo"
    source = Deferred(partial(build_model, sizes)) if is_sharded_at_birth else None
    model = source.model if source else build_model(sizes)
    training = TrainingConfig(**{"precision": "fp32", "length": 16, "device": "cpu"})
    training = replace(training, **{"micro_batch_size": 1, "max_grad_norm": 0.5} | work.training)
    engine_settings = EngineConfig(name=work.engine, **work.settings)  # type: ignore[arg-type]
    sections = engine_settings, training, OptimizerConfig(**work.optimizer)
    engine = build_engine(model, *sections, processes, source)
    share = slice(processes.rank, None, processes.world_size)
    born = digest(engine.copy_weights(whole=True))
    calls = Counter[int]() if training.compile else count_calls(engine)  # would be compiled, too
    engine.logs_layer_norms = True
    steps = [engine.step(batch_of(step).rows(share), 3e-3) for step in range(NUM_STEPS)]
    calls_in_training = dict(calls)
    graphs_of_training = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    heldout = engine.token_losses(batch_of(99))
    weights = engine.copy_weights(whole=True)
    return {
        "born": born,
        "calls": [calls_in_training[layer] for layer in sorted(calls)],
        "losses": [float(loss) for loss, _ in steps],
        "norms": [float(norm) for _, norm in steps],
        "layer_norms": {part: float(norm) for part, norm in engine.layer_norms.items()},
        "heldout": float(heldout.mean()),
        "weights": {name: float(weight.double().norm()) for name, weight in weights.items()},
        "mesh": engine.describe().get("mesh"),
        "graphs": graphs_of_training,
    }


def digest(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """A sum of the bytes of each weight."""
    return {
        name: hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        for name, weight in weights.items()
    }


def count_calls(engine: Engine) -> Counter[int]:
    """Counts how often a linear map of each layer is computed."""
    calls: Counter[int] = Counter()
    for number, layer in enumerate(layers_of(engine.model)):
        linear = next(module for module in layer.modules() if isinstance(module, nn.Linear))
        linear.register_forward_hook(lambda *_, n=number: calls.update([n]))
    return calls


def run(work: Work, world_size: int) -> dict[str, Any]:
    settings = {"run_folder": str(work.out.with_suffix(""))}
    job = children.start_each(settings, take_steps, [work] * world_size)
    assert job.wait(300) == [0] * world_size, "\n".join(job.texts())
    return json.loads(work.out.read_text())


def alone(work: Work) -> dict[str, Any]:
    return steps_of(replace(work, engine="single", settings={}), Processes())


def check_difference(ours: dict[str, Any], expected: dict[str, Any], nats: float = 2e-6) -> None:
    assert ours["born"] == expected["born"], "the weights of the seed, to the bit"
    assert ours["losses"] == pytest.approx(expected["losses"], abs=nats)
    assert ours["heldout"] == pytest.approx(expected["heldout"], abs=nats)
    assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert ours["weights"] == pytest.approx(expected["weights"], rel=1e-5)


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """Also with weights of three numbers, one for each head, of which one process has two."""
    work = Work(tmp_path / "two.json", model=OLMO | {"query_scale_learned": True})
    ours = run(work, 2)
    assert ours["mesh"] == [2]
    check_difference(ours, alone(work))


@pytest.mark.accept
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_have_the_layer_gradient_norms_of_one(tmp_path: Path, engine: str) -> None:
    work = Work(tmp_path / "norms.json", engine=engine, model=OLMO | {"weight_tying": False})
    ours = run(work, 2)
    parts = {"embedding", "block_0", "block_1", "block_2", "unembedding", "other"}
    assert ours["layer_norms"].keys() == parts
    assert ours["layer_norms"] == pytest.approx(alone(work)["layer_norms"], rel=1e-5)


def test_muon_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    """Matrices of 50 rows are divided unequally."""
    work = Work(tmp_path / "muon.json", optimizer={"name": "muon"})
    ours = run(work, 2)
    expected = alone(work)
    check_difference(ours, expected)
    with_adamw = alone(replace(work, optimizer={}))
    assert abs(with_adamw["heldout"] - expected["heldout"]) > 1e-3, "Muon makes other steps"


@pytest.mark.accept
def test_muon_with_a_copy_of_the_model_in_each_node_changes_nothing(tmp_path: Path) -> None:
    settings = {"shard_over": "node"}
    work = Work(tmp_path / "nodes.json", settings=settings, node_size=2, optimizer={"name": "muon"})
    ours = run(work, 4)
    assert ours["mesh"] == [2, 2]
    check_difference(ours, alone(work))


@pytest.mark.accept
def test_four_processes_take_the_steps_of_one_and_of_ddp(tmp_path: Path) -> None:
    work = Work(tmp_path / "four.json")
    ours = run(work, 4)
    check_difference(ours, alone(work))
    check_difference(ours, run(replace(work, out=tmp_path / "ddp.json", engine="ddp"), 4))


@pytest.mark.accept
@pytest.mark.parametrize("reduces_often", [False, True])
def test_a_copy_of_the_model_in_each_of_two_nodes_changes_nothing(
    tmp_path: Path, reduces_often: bool
) -> None:
    settings = {"shard_over": "node", "reduce_every_micro_batch": reduces_often}
    work = Work(tmp_path / "nodes.json", settings=settings, node_size=2)
    ours = run(work, 4)
    assert ours["mesh"] == [2, 2]
    check_difference(ours, alone(work))


@pytest.mark.accept
@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"reduce_every_micro_batch": True}},
        {"model": OLMO | {"weight_tying": False, "include_bias": True}},
        {"model": GPT_NEOX},
    ],
    ids=["reduced often", "untied", "gpt_neox"],
)
def test_settings_and_models_take_the_steps_of_one_process(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    work = Work(tmp_path / "changed.json", **changes)
    check_difference(run(work, 2), alone(work))


@pytest.mark.accept
@pytest.mark.parametrize(
    ("model", "every", "passes"), [(OLMO, 2, [2, 1, 2]), (GPT_NEOX, 1, [2, 2])]
)
def test_layers_are_computed_again_in_the_backward_pass(
    tmp_path: Path, model: dict[str, Any], every: int, passes: list[int]
) -> None:
    training = {"activation_checkpointing": True, "checkpoint_every": every}
    work = Work(tmp_path / "again.json", model=model, training=training)
    ours = run(work, 2)
    num_micro_batches = 4
    assert ours["calls"] == [NUM_STEPS * num_micro_batches * number for number in passes]
    check_difference(ours, alone(work))


@pytest.mark.accept
@pytest.mark.parametrize("recomputes", [False, True])
def test_each_layer_is_compiled_without_a_break(tmp_path: Path, recomputes: bool) -> None:
    training = {"compile": True, "activation_checkpointing": recomputes, "micro_batch_size": 4}
    work = Work(tmp_path / "compiled.json", training=training)
    ours = run(work, 2)
    assert ours["graphs"] == 2, "of a layer, and of the loss"
    eager = replace(work, training={"micro_batch_size": 4})
    check_difference(ours, alone(eager), nats=1e-5)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.accept
def test_four_processes_hold_less_than_40_percent_of_ddp() -> None:
    """Peaks of resident memory, with 83M parameters in bf16."""
    ours, ddp = (launch(engine, layers=12, count=4) for engine in ("fsdp", "ddp"))
    assert ours["step"] < 0.4 * ddp["step"]
    assert max(ours[phase] for phase in PHASES) < 0.4 * max(ddp[phase] for phase in PHASES)


# --- nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size", "is_accepted"),
    [(3, 1, 2, True), (2, 1, 2, False), (3, 3, 3, False)],
)
def test_a_node_that_is_not_a_row_of_ranks_is_refused(
    rank: int, local_rank: int, local_size: int, is_accepted: bool
) -> None:
    processes = Processes(rank, 4, local_rank, local_size)
    check_ranks(EngineConfig(name="fsdp"), processes)
    settings = EngineConfig(name="fsdp", shard_over="node")
    if is_accepted:
        check_ranks(settings, processes)
    else:
        with pytest.raises(ConfigError, match=r"engine\.shard_over=node"):
            check_ranks(settings, processes)
