"""Parameters, FLOPs and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from benchmarks.memory import estimates_of, launch
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.gpus import find_gpu, known_gpu
from olmo_sparsity.base.launch import Launch
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.installed import CONFIGS
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.dry_run import describe_run
from olmo_sparsity.training.engines.choose import check_engine
from olmo_sparsity.training.engines.deepspeed_settings import deepspeed_settings, with_live_weights
from olmo_sparsity.training.estimate.activation_memory import activation_bytes
from olmo_sparsity.training.estimate.compute import flops_per_token, share_of_peak
from olmo_sparsity.training.estimate.cost import RunTime, cost_of_run, with_engine
from olmo_sparsity.training.estimate.device_memory import bytes_of_state, device_memory_of
from olmo_sparsity.training.estimate.failures import failures_of
from olmo_sparsity.training.estimate.fit import check_fits
from olmo_sparsity.training.estimate.hardware import GPU_HOURS_PER_FAILURE, Hardware
from olmo_sparsity.training.estimate.host import (
    COPIED_BYTES_PER_S,
    disk_of,
    main_memory_of,
    pinned_bytes,
    predict_save,
    save_copy_bytes,
)
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.estimate.report import SIGNAL_LEAD_S, estimate
from olmo_sparsity.training.estimate.state_memory import start_bytes, state_bytes
from olmo_sparsity.training.setup.resolve import for_hardware, with_staying_checkpoints
from tests.conftest import MakeConfig

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def test_estimates_count_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512, model__weight_tying=False)
    model, here = build_model(config.model), Hardware.here(torch.device("cpu"))
    assert estimate(config, here)["parameters"] == f"{count_parameters(model):,}"
    names = [name for name, _ in model.named_parameters() if "proj" in name or "out" in name]
    weights = sum(model.get_parameter(name).numel() for name in names)
    for whole, of_keys in ((False, 6), (True, 12)):
        found = flops_per_token(model, config.model, 16, whole)
        assert found == 6 * weights + of_keys * 2 * 16 * 32
    stages = [{"tokens": 4, "until": 2}, {"tokens": 16}]  # the longest is estimated
    staged = make_config(model__vocab_size=512, model__weight_tying=False, training__length=stages)
    assert estimate(staged, here) == estimate(config, here)


def test_memory_is_that_of_stored_steps() -> None:
    """Of every size, in bf16, measured step by step on tensors without numbers."""
    rows = json.loads((ROOT / "study/results/others.json").read_text())["scaling"]
    micro_batches = {"20m": 64, "60m": 32, "150m": 16, "300m": 8, "1b": 4}
    for size, micro in micro_batches.items():
        config = load_config(f"c4_{size}_pose.yaml", ["--training.precision=bf16"])
        training = replace(config.training, compile=False)
        sizes = replace(config.model, vocab_size=50280, embedding_size=50304)
        (row,) = [r for r in rows if (r["config"], r["engine"]) == (f"c4_{size}", "single")]
        stated = state_bytes("bf16", row["parameters"])
        stated += activation_bytes(sizes, training, micro, "cuda")
        assert stated == pytest.approx(row["memory"], rel=0.02)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero3"])
def test_micro_batches_are_as_large_as_memory_allows(make_config: MakeConfig, engine: str) -> None:
    config = make_config(
        model__vocab_size=512,
        training__batch_size=96,
        training__micro_batch_size="auto",
        engine__name=engine,
    )
    cpu = torch.device("cpu")
    for num_sequences, expected in ((48, 48), (17, 16), (15, 12), (0, 1)):
        room = Hardware(2, 1, 1e30, find_gpu("h100"))
        state = bytes_of_state(config, room)
        needed = state + activation_bytes(config.model, config.training, num_sequences, "cuda")
        resolved = for_hardware(config, cpu, replace(room, usable_bytes=needed + 1))
        assert resolved.training.micro_batch_size == expected
    assert config.training.micro_batch_size == 0
    config.training.micro_batch_size = 20
    assert for_hardware(config, cpu, room).training.micro_batch_size == 16, "at most"


def test_the_cost_is_the_same_before_and_after_the_text_is_prepared(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the named hardware: this machine has hardly memory."""
    monkeypatch.setattr(Hardware, "here", lambda *_: Hardware(1, 1, 1.0, None))
    config = make_config(training__batch_size=96, training__micro_batch_size="auto")
    missing = replace(config, data=replace(config.data, folder="missing"))
    for one in (config, missing):
        run = describe_run(one, Hardware(2, 1, 80e9, find_gpu("h100")))
        assert run.config.training.micro_batch_size == 48
        assert run.lines["batch"] == "96 = 2 processes × 48"
        assert ("not prepared" in run.lines["text"]) == (one is missing)


def test_state_is_what_the_table_says() -> None:
    for engine, bf16, fp32 in (
        ("ddp", 18, 16),
        ("zero1", 2 + 4 + 3 + 2, 4 + 4 + 3 + 4),
        ("zero2", 2 + 1 + 3 + 0.3, 4 + 1 + 3 + 0.6),
        ("zero3", 0.5 + 1 + 3 + 2**27 / 1e9, 1 + 1 + 3 + 2**28 / 1e9),
    ):
        found = [state_bytes(name, 10**9, engine, 4) for name in ("bf16", "fp32")]  # type: ignore[arg-type]
        assert found == pytest.approx([1e9 * bf16, 1e9 * fp32]), engine
    sizes = {"ddp": 18, "zero1": 11, "zero2": 6 + 2 * 101, "zero3": 4.5 + 2 * 4}
    for engine, size in sizes.items():
        assert state_bytes("bf16", 10**6, engine, 4) == size * 10**6, engine


def test_state_is_what_the_example_of_the_table_says() -> None:
    """Its last column: GB of 10^9 parameters in bf16, on 8 processes if the engine divides them."""
    assert state_bytes("bf16", 10**9, "ddp") == 18.0e9
    assert state_bytes("bf16", 10**9, "fsdp", 8, gathered=2 * 10**8) == 3.2e9
    assert state_bytes("bf16", 10**9, "zero1", 8) == 9.5e9
    assert state_bytes("bf16", 10**9, "zero2", 8) == 4.3e9
    assert state_bytes("bf16", 10**9, "zero3", 8, largest_weight=10**8) == 3.05e9


def test_buckets_are_those_of_the_shipped_files() -> None:
    for stage, num in ((1, 0), (2, 3), (3, 4)):
        path = CONFIGS / f"deepspeed/zero{stage}.json"
        size = json.loads(path.read_text())["zero_optimization"]["reduce_bucket_size"]
        small, large = (state_bytes("bf16", n, f"zero{stage}", 4) for n in (10**9, 2 * 10**9))
        assert 2 * small - large == 2 * num * size


@pytest.mark.parametrize("count", [1, 8, 16, 64])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("c4_*.yaml")), ids=lambda path: path.stem)
def test_the_ladder_needs_no_option_on_any_number_of_gpus(path: Path, count: int) -> None:
    config, hardware = load_config(path), Hardware.of("h100", count, None)
    config.model.vocab_size, config.model.embedding_size = 50280, 50304
    check_engine(config.engine, config.training, count)
    resolved = for_hardware(config, torch.device("cpu"), hardware)
    assert 512 // count % resolved.training.micro_batch_size == 0
    check_fits(resolved, hardware)


@pytest.mark.accept
def test_a_dry_run_names_what_does_not_divide_or_fit(capsys: pytest.CaptureFixture) -> None:
    words = ["train", "configs/c4_1b_pose.yaml", "--dry-run"]
    assert main([*words, "--gpus=24", "--gpu=a100"]) == 0
    assert "24 processes do not divide it; 504 and 528 do" in capsys.readouterr().out
    seven = ["--model.d_model=4096", "--model.n_heads=32", "--model.n_layers=32"]
    assert main([*words, *seven, "--gpus=8", "--engine.name=ddp"]) == 2
    refusal = capsys.readouterr().err
    assert "engine.name=ddp needs 154.0" in refusal
    assert "--engine.name=zero2 or --engine.name=zero3 --training.compile=false" in refusal
    zero3 = ["--engine.name=zero3", "--training.compile=false"]
    assert main([*words, *seven, *zero3, "--gpus=64"]) == 0
    assert "batch: 512 = 64 processes × 8" in capsys.readouterr().out


@pytest.mark.parametrize("batch_size", [8, 12])
def test_no_more_gpus_are_proposed_than_a_batch_has_sequences(
    batch_size: int, capsys: pytest.CaptureFixture
) -> None:
    words = ["train", "configs/c4_1b_pose.yaml", "--dry-run", "--gpus=4", "--gpu=l4"]
    large = ["--model.d_model=8192", "--model.n_heads=64", "--model.n_layers=48"]
    assert main([*words, *large, f"--training.batch_size={batch_size}"]) == 2
    assert "no engine fits, on up to 8 of these; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--gpus=0", "--gpus=0 must be at least 1"),
        ("--gpus=-1", "--gpus=-1 must be at least 1"),
        ("--nodes=0", "--nodes=0 must be at least 1"),
        ("--nodes=3", "--gpus=8 must be a multiple of --nodes=3"),
        ("--nics-per-node=0", "--nics-per-node=0"),
        ("--gpu-hour=-1", "--gpu-hour=-1"),
        ("--disk-speed=0", "--disk-speed=0.0 must be above 0: GB/s"),
        ("--gpu-hours-per-failure=0", "--gpu-hours-per-failure=0.0 must be above 0"),
        ("--gpu=h101", "--gpu=h101"),
        ("--gpu=a100-20", "--gpu=a100-20"),
    ],
)
def test_hardware_that_cannot_be_is_refused_by_its_option(
    wrong: str, named: str, capsys: pytest.CaptureFixture
) -> None:
    words = ["train", "configs/c4_60m_pose.yaml", "--dry-run", wrong]
    if not wrong.startswith("--gpus="):
        words.append("--gpus=8")
    assert main(words) == 2
    assert named in capsys.readouterr().err


def c4(size: str, *words: str) -> RunConfig:
    config = load_config(f"c4_{size}_pose.yaml", ["--training.precision=bf16", *words])
    config.model.vocab_size = 50280
    config.model.embedding_size = 50304
    return config


def time_of(config: RunConfig, hardware: Hardware) -> RunTime:
    """Return the time of a run on GPUs of known speed."""
    time = cost_of_run(config, hardware).time
    assert time is not None
    return time


def test_zero_1_and_2_need_room_for_two_copies_of_the_weights_at_the_start() -> None:
    thirteen = 13_700_000_000
    assert start_bytes("bf16", thirteen, "zero2", 64) == 4 * thirteen
    assert start_bytes("bf16", thirteen, "zero3", 64) < 0.4 * thirteen
    config = c4("1b", "--engine.name=zero2", "--training.activation_checkpointing=true")
    config.model.n_layers = 200  # 13.5B
    hardware = Hardware.of("h100", 64, None)
    cost = cost_of_run(config, hardware)
    memory = cost.memory
    assert memory.start_bytes > memory.step_bytes
    assert memory.peak_bytes == memory.start_bytes
    assert memory.total_bytes == memory.start_bytes + memory.cuda_bytes
    too_small = replace(hardware, usable_bytes=memory.start_bytes - 1)
    assert not cost_of_run(config, too_small).fits


def test_zero_3_holds_its_largest_weight_whole_at_the_start() -> None:
    on_64 = start_bytes("bf16", 10**9, "zero3", 64, largest_weight=10**8)
    assert on_64 == 2 * 10**9 / 64 + (4 + 2) * 10**8, "when it is made, before other shards"
    on_4 = start_bytes("bf16", 10**9, "zero3", 4, largest_weight=10**8)
    assert on_4 == (2 + 8) * 10**9 / 4 + 4 * 10**8, "beside all shards"


SEVEN_BILLION = ("--model.d_model=4096", "--model.n_heads=32", "--model.n_layers=32")


def test_a_start_takes_the_micro_batches_that_its_dry_run_printed_for_shards_of_a_node() -> None:
    config = seven_billion(*WITHIN_NODES, "--training.micro_batch_size=auto")
    priced = Hardware.of("h100", 64, nodes=8)
    launch = Launch(rank=9, world_size=64, local_rank=1, local_world_size=8)
    started = replace(Hardware.here(CPU, launch), gpu=priced.gpu, usable_bytes=priced.usable_bytes)
    assert started == priced
    costs = [cost_of_run(config, hardware) for hardware in (started, priced)]
    assert costs[0] == costs[1]
    assert costs[0].micro_batch_size == 1
    assert costs[0].memory.start_bytes == 4 * count_parameters(without_memory(config.model)) // 8


@pytest.mark.accept
@pytest.mark.parametrize("engine", ["fsdp", "zero3"])
def test_peaks_of_sharded_engines_are_within_15_percent_of_their_estimates(engine: str) -> None:
    measured = launch(engine, layers=24, count=4)
    for phase, estimated in estimates_of(engine, layers=24, count=4).items():
        assert measured[phase] == pytest.approx(estimated, rel=0.15), phase


def test_recomputed_layers_cost_a_third_more() -> None:
    hardware = Hardware.of("h100", 8, None)
    seconds = [
        time_of(c4("1b", f"--training.activation_checkpointing={recomputes}"), hardware)
        for recomputes in ("false", "true")
    ]
    assert 1.25 < seconds[1].computing_s / seconds[0].computing_s < 4 / 3


def test_a_budget_of_activations_saves_memory_in_proportion_and_costs_time() -> None:
    hardware = Hardware.of("h100", 8, None)
    costs = {
        budget: cost_of_run(
            c4(
                "1b",
                "--training.compile=true",
                "--training.micro_batch_size=4",
                f"--training.activation_memory_budget={budget}",
            ),
            hardware,
        )
        for budget in ("null", 0.75, 0.5, 0.25, 0.0)
    }
    bytes_of = [costs[budget].memory.activation_bytes for budget in (0.75, 0.5, 0.25, 0.0)]
    falls = [more - less for more, less in pairwise(bytes_of)]
    assert falls == pytest.approx([falls[0]] * 3)
    assert costs["null"].memory.activation_bytes > bytes_of[0] > 2 * bytes_of[-1]
    recomputing = c4("1b", "--training.activation_checkpointing=true", "--training.compile=true")
    seconds = {budget: cost.time.computing_s for budget, cost in costs.items() if cost.time}
    assert seconds[0.0] == pytest.approx(time_of(recomputing, hardware).computing_s)
    assert seconds["null"] < seconds[0.5] < seconds[0.25]


def test_tasks_of_lm_eval_need_a_whole_copy_of_the_model_on_each_device_and_in_main_memory() -> (
    None
):
    hardware = Hardware.of("a100-40", 64, None)
    plain = c4(
        "1b",
        "--engine.name=fsdp",
        "--engine.reduce_every_micro_batch=true",
        "--training.micro_batch_size=1",
    )
    with_tasks = replace(plain, evaluation=replace(plain.evaluation, lm_eval=["hellaswag"]))
    whole = 4 * count_parameters(without_memory(plain.model))
    cost = cost_of_run(with_tasks, hardware)
    evaluation_bytes = cost.memory.evaluation_bytes
    assert evaluation_bytes > whole
    assert cost.memory.peak_bytes == evaluation_bytes
    assert cost.memory.total_bytes > cost_of_run(plain, hardware).memory.total_bytes
    too_small = replace(hardware, usable_bytes=evaluation_bytes - 1)
    assert device_memory_of(plain, too_small, 1).peak_bytes < too_small.usable_bytes
    assert device_memory_of(with_tasks, too_small, 1).peak_bytes > too_small.usable_bytes
    lines = estimate(with_tasks, hardware)
    assert f", evaluation {evaluation_bytes / 2**30:.1f}" in lines["memory of a process, fsdp"]
    copied = sum(pinned_bytes(4 * weight.numel()) for weight in weights_of(plain))
    assert copied >= whole
    assert f", one for lm_eval {copied / 2**30:.1f})" in lines["main memory"]
    assert "lm_eval" not in str(estimate(plain, hardware))


def weights_of(config: RunConfig) -> list[torch.nn.Parameter]:
    return list(without_memory(config.model).parameters())


def test_copies_in_pinned_memory_are_counted_as_powers_of_two() -> None:
    """As PyTorch's allocator rounds each of them up."""
    assert [pinned_bytes(number) for number in (0, 1, 2**20, 2**20 + 1)] == [0, 1, 2**20, 2**21]
    seven_billion = (*SEVEN_BILLION, "--model.mlp_hidden_size=22016", "--engine.name=fsdp")
    config = c4("1b", *seven_billion)
    on_gpus = Hardware.of("h100", 8, None)
    num_parameters = count_parameters(without_memory(config.model))
    copied = save_copy_bytes(config, on_gpus)
    assert 1.3 < copied / (12 * num_parameters / 8) < 1.5
    assert f"a copy for a save {copied / 2**30:.1f}" in estimate(config, on_gpus)["main memory"]
    on_cpus = replace(on_gpus, gpu=None)
    assert save_copy_bytes(config, on_cpus) == 12 * num_parameters / 8


def test_each_engine_is_estimated_with_the_micro_batches_that_fit_it() -> None:
    lines = describe_run(c4("1b"), Hardware.of("h100", 16, None)).lines
    assert "micro-batches of 16" in lines["memory of a process, ddp"]
    assert "micro-batches of 32" in lines["memory of a process, zero2"]


def test_network_cards_of_a_node_carry_its_gradients_together() -> None:
    config = c4("1b", "--engine.name=ddp")
    hours = [time_of(config, Hardware.of("h100", 16, 2, nics)).hours for nics in (None, 8, 1)]
    assert hours[0] == hours[1] == pytest.approx(4.1, abs=0.05)
    assert hours[2] == pytest.approx(5.8, abs=0.05)


def seven_billion(*words: str) -> RunConfig:
    """Return a config of 2048 sequences a step, 32 for each of 64 GPUs."""
    return c4("1b", *SEVEN_BILLION, "--training.batch_size=2048", *words)


WITHIN_NODES = ("--engine.name=fsdp", "--engine.shard_over=node")
OVER_ALL = ("--engine.name=fsdp", "--engine.shard_over=all")
ZERO_3 = ("--engine.name=zero3", "--training.compile=false")


def test_weights_that_stay_within_nodes_are_not_sent_through_network_cards() -> None:
    config = seven_billion(*WITHIN_NODES, "--training.micro_batch_size=2")
    num_parameters = count_parameters(without_memory(config.model))
    time = time_of(config, Hardware.of("h100", 64, nodes=8, nics_per_node=1))
    gathered = 16 * 2 * 2 * num_parameters * 7 / 8  # 16 micro-batches, forward and backward, bf16
    scattered = 4 * num_parameters * 7 / 8  # fp32, once a step
    sent_by_node = 2 * 4 * num_parameters * 7 / 8  # its eight shards together make a whole gradient
    assert time.sending_s == pytest.approx((gathered + scattered) / 300e9 + sent_by_node / 25e9)
    lines = estimate(config, Hardware.of("h100", 64, nodes=8, nics_per_node=1))
    assert "at 300 GB/s a GPU within nodes and 25 a node between" in lines["tokens per second"]


def test_with_one_network_card_a_node_shards_within_nodes_are_fastest() -> None:
    hardware = Hardware.of("h100", 64, nodes=8, nics_per_node=1)
    within_nodes, over_all, zero3 = (
        time_of(seven_billion(*words, "--training.micro_batch_size=2"), hardware).sending_s
        for words in (WITHIN_NODES, OVER_ALL, ZERO_3)
    )
    assert within_nodes < over_all < zero3


def test_on_one_node_shards_within_nodes_are_shards_over_all() -> None:
    hardware = Hardware.of("h100", 8, nodes=1)
    within_node, over_all = (
        time_of(seven_billion(*words), hardware).sending_s for words in (WITHIN_NODES, OVER_ALL)
    )
    assert within_node == over_all


def test_gpus_without_nvlink_send_at_the_speed_of_pcie() -> None:
    config = c4("150m", "--engine.name=ddp")
    time = time_of(config, Hardware.of("l40s", 4, 1))
    sent = 4 * 190_513_152 * 2 * 3 / 4
    assert time.sending_s == pytest.approx(sent / 20e9)


def test_a_small_model_is_expected_to_fill_less_of_a_gpu() -> None:
    shares = [share_of_peak(size).share for size in (10**6, 34 * 10**6, 86 * 10**6, 10**9)]
    assert shares == sorted(shares)
    assert shares[1] < 0.2
    assert shares[2:] == [0.306, 0.345]


def test_a_model_that_is_not_compiled_is_expected_to_be_slower_and_is_marked() -> None:
    measured, assumed = (share_of_peak(10**9, is_compiled) for is_compiled in (True, False))
    assert measured.origin == "measured on one H200 (150M)"
    assert assumed.origin == "assumed: 54% of a compiled model's 34%"
    assert assumed.share == 0.54 * measured.share
    lines = describe_run(c4("1b", "--training.compile=true"), Hardware.of("h100", 64, None)).lines
    assert "not compiled" not in lines["memory of a process, fsdp"]
    assert lines["memory of a process, zero3"].endswith(
        "(not compiled, which is assumed to be slower)"
    )


def test_zero_3_is_not_ranked_ahead_of_a_compiled_engine() -> None:
    hardware = Hardware.of("h100", 64, None)
    compiled = seven_billion(*OVER_ALL, "--training.compile=true")
    assert (
        time_of(compiled, hardware).hours < time_of(with_engine(compiled, "zero3"), hardware).hours
    )


def test_zero_3_prefetches_weights_although_a_layer_is_larger_than_its_bucket() -> None:
    """DeepSpeed fetches nothing ahead while the weights in use exceed max_live_parameters."""
    config = seven_billion(*ZERO_3)
    model = without_memory(config.model)
    largest_weight = max(weight.numel() for weight in model.parameters())
    given = deepspeed_settings(config.engine, config.training, 64)
    settings = DeepSpeedZeroConfig(**with_live_weights(given, largest_weight)["zero_optimization"])
    assert largest_weight > settings.prefetch_bucket_size
    assert largest_weight + settings.prefetch_bucket_size <= settings.max_live_parameters


def test_buffers_of_zero_3_hold_its_largest_weight_whole() -> None:
    sizes = [state_bytes("bf16", 10**9, "zero3", 4, largest_weight=n) for n in (2**24, 10**8)]
    assert sizes[1] - sizes[0] == 2 * 4 * (10**8 - 2**24)


@pytest.mark.parametrize(("num_gpus", "engine"), [(1, "single"), (2, "ddp")])
def test_the_automatic_engine_is_that_of_the_number_of_processes(
    make_config: MakeConfig, num_gpus: int, engine: str
) -> None:
    config = make_config(engine__name="auto")
    described = describe_run(config, Hardware.of("h100", num_gpus, None))
    assert described.config.engine.name == engine


def test_a_price_is_that_of_the_gpu_hours(capsys: pytest.CaptureFixture) -> None:
    words = ["train", "configs/c4_1b_pose.yaml", "--dry-run", "--gpus=16", "--gpu-hour=2.5"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    config = with_staying_checkpoints(c4("1b", "--engine.name=ddp"))
    hours = time_of(config, Hardware.of("h100", 16, None)).gpu_hours
    assert f"# price: {2.5 * hours:,.2f}, at 2.5 a GPU-hour" in printed


def test_a_long_run_without_a_limit_of_gpu_hours_is_told_of_one() -> None:
    config = c4("1b", "--engine.name=ddp")
    hardware = Hardware.of("h100", 8, None)
    assert "limit" not in estimate(config, hardware)
    config.training.num_steps *= 20
    assert "--training.max_gpu_hours=1500 " in estimate(config, hardware)["limit"]
    config.training.max_gpu_hours = 5000
    assert "limit" not in estimate(config, hardware)


@pytest.mark.accept
def test_a_step_that_is_longer_than_its_time_out_is_named() -> None:
    config = seven_billion(*OVER_ALL)
    hardware = Hardware.of("h100", 64, None)
    assert "a step" not in estimate(config, hardware)
    config.engine.step_timeout_s = 5
    line = estimate(config, hardware)["a step"]
    assert "more than engine.step_timeout_s=5: after the first step the limit is 5 times" in line
    assert "--engine.work_timeout_s" not in line
    config.engine.work_timeout_s = 6
    assert "--engine.work_timeout_s=600" in estimate(config, hardware)["a step"]


@pytest.mark.accept
@pytest.mark.parametrize(
    ("num_steps", "given", "interval"),
    [(100_000, "auto", 10_000), (9_999, "auto", None), (100_000, "null", None), (800, "50", 50)],
)
def test_a_long_run_keeps_each_tenth_of_its_checkpoints(
    num_steps: int, given: str, interval: int | None
) -> None:
    words = (f"--training.num_steps={num_steps}", f"--checkpoint.keep_every_steps={given}")
    run = describe_run(c4("150m", *words), Hardware.of("h100", 8, None))
    assert run.config.checkpoint.keep_every_steps == interval
    num_kept = num_steps // interval if interval else 0
    disk = disk_of(run.config)
    assert disk.run_folder_bytes == (2 + 1 + num_kept) * disk.checkpoint_bytes
    assert (f"one each {interval or 0:,} steps" in run.lines["disk"]) == bool(interval)


def test_checkpoints_that_may_be_set_aside_have_a_line_of_their_own() -> None:
    hardware = Hardware.of("h100", 8, None)
    config = c4("150m", "--engine.name=ddp")
    assert "set aside" not in estimate(config, hardware)
    config.training.on_nan = "skip"
    config.training.max_skips = 3
    config.checkpoint.keep = 2
    # Twice the last two: a first batch sets nothing aside.
    gigabytes = 4 * 12 * count_parameters(without_memory(config.model)) / 1e9
    line = estimate(config, hardware)["set aside"]
    assert line.startswith(f"up to about 4 more checkpoints, {gigabytes:.1f} GB, ")
    config.checkpoint.keep_every_steps = 50  # two in 100 steps
    assert "about 8 more checkpoints" in estimate(config, hardware)["set aside"]
    config.training.on_nan = "stop"
    config.start_over = True
    assert "GB more in set_aside_1" in estimate(config, hardware)["set aside"]


def test_a_gpu_of_two_sizes_is_the_one_that_is_named() -> None:
    sizes = {"a100-40": 40, "a100-80": 80, "a100": 80, "NVIDIA A100-SXM4-40GB": 40}
    for name, gigabytes in sizes.items():
        assert known_gpu(name, "--gpu").gigabytes == gigabytes, name


def test_stated_peaks_go_by_the_device_name() -> None:
    for name, tflops in {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "h200": 989,
    }.items():
        assert find_gpu(name).tflops == tflops
    for name in ("cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert find_gpu(name) is None


def test_more_gpus_do_not_make_the_file_system_faster() -> None:
    config = seven_billion(*OVER_ALL)
    saved_bytes = 12 * count_parameters(without_memory(config.model))
    for count in (64, 512):
        writing_s = saved_bytes / 1e9
        copying_s = saved_bytes / count / COPIED_BYTES_PER_S
        save = predict_save(config, Hardware.of("h100", count, None))
        assert save.total_s == pytest.approx(copying_s + writing_s)
    save = predict_save(config, Hardware.of("h100", 64, None, disk_speed=1000))
    assert save.total_s - save.pause_s == pytest.approx(saved_bytes / 64 / 0.39e9)


def test_the_example_of_the_module_has_its_numbers() -> None:
    """That of host.py: c4_1b with `fsdp` on 8 H100."""
    config = c4("1b", "--engine.name=fsdp")
    hardware = Hardware.of("h100", 8, None)
    assert disk_of(config).checkpoint_bytes / 1e9 == pytest.approx(14.1, abs=0.05)
    save = predict_save(config, hardware)
    assert save.pause_s == pytest.approx(1.3, abs=0.05)
    assert save.total_s == pytest.approx(15.4, abs=0.05)
    assert main_memory_of(config, hardware) / 1e9 == pytest.approx(6.2, abs=0.05)


def test_a_save_that_takes_longer_than_the_signal_leads_names_the_signal_to_ask_for() -> None:
    script = (ROOT / "slurm/train.sbatch").read_text()
    assert f"#SBATCH --signal=USR2@{SIGNAL_LEAD_S}\n" in script
    config = seven_billion(*OVER_ALL)
    hardware = Hardware.of("h100", 64, None)
    save = predict_save(config, hardware)
    assert save.total_s < SIGNAL_LEAD_S < 180 < save.longest_s < 240, "one save is under way"
    line = estimate(config, hardware)["a save"]
    assert "more than the 120 s of slurm/train.sbatch before a time limit" in line
    assert "sbatch --signal=USR2@240" in line
    fast_disk = Hardware.of("h100", 64, None, disk_speed=10)
    assert "within the 120 s of slurm/train.sbatch" in estimate(config, fast_disk)["a save"]


def test_more_evaluations_and_saves_take_more_hours() -> None:
    hardware = Hardware.of("h100", 64, None)
    at_end = ("--checkpoint.interval_steps=null", "--evaluation.interval_steps=null")
    once = time_of(seven_billion(*OVER_ALL, *at_end), hardware)
    assert once.pauses.num_evaluations == once.pauses.num_saves == 1
    often = time_of(
        seven_billion(
            *OVER_ALL,
            "--checkpoint.interval_steps=500",
            "--evaluation.interval_steps=10",
            "--evaluation.num_sequences=65536",
        ),
        hardware,
    )
    assert often.pauses.num_saves == 40
    assert often.pauses.num_evaluations == 2000
    bytes_of_process = 12 * count_parameters(without_memory(c4("1b", *SEVEN_BILLION).model)) / 64
    assert often.pauses.saving_s == pytest.approx(40 * bytes_of_process / COPIED_BYTES_PER_S)
    outside_steps = often.pauses.total_s - once.pauses.total_s
    assert 3600 * (often.hours - once.hours) == pytest.approx(outside_steps)
    assert often.pauses.evaluating_s > 1000 * once.pauses.evaluating_s


def test_failures_add_half_of_the_time_between_saves_and_a_start_each() -> None:
    hardware = Hardware.of("h100", 64, None)
    config = seven_billion(*OVER_ALL, "--checkpoint.interval_steps=500")
    time = time_of(config, hardware)
    # By the report of Llama 3: 419 failures of 16,384 GPUs in 54 days.
    assert pytest.approx(16_384 * 54 * 24 / 419, rel=0.02) == GPU_HOURS_PER_FAILURE
    failures = failures_of(config, hardware, time)
    assert failures.num == time.gpu_hours / 50_000
    assert failures.lost_s == pytest.approx(time.hours * 3600 / 40 / 2)
    # A checkpoint is read twice, at 1 GB/s.
    read_s = 2 * 12 * count_parameters(without_memory(config.model)) / 1e9
    assert failures.start_s == pytest.approx(300 + read_s)
    added_s = failures.num * (failures.lost_s + failures.start_s)
    assert failures.hours == pytest.approx(time.hours + added_s / 3600)
    assert failures.gpu_hours == 64 * failures.hours
    often = Hardware.of("h100", 64, None, gpu_hours_per_failure=500)
    hours_added = failures_of(config, often, time).hours - time.hours
    assert hours_added == pytest.approx(100 * (failures.hours - time.hours))


def test_a_dry_run_prints_the_hours_with_failures_beside_those_without(
    capsys: pytest.CaptureFixture,
) -> None:
    words = ["train", "configs/c4_1b_pose.yaml", "--dry-run"]
    assert main([*words, "--gpus=16", "--gpu-hours-per-failure=10"]) == 0
    printed = capsys.readouterr().out
    config = with_staying_checkpoints(c4("1b", "--engine.name=ddp"))
    hardware = Hardware.of("h100", 16, None, gpu_hours_per_failure=10)
    time = time_of(config, hardware)
    assert f"# time: {time}\n" in printed
    failures = failures_of(config, hardware, time)
    assert f"# with failures: {failures.hours:,.1f} hours, {failures.gpu_hours:,.0f}" in printed
    assert "failures, at one in 10 GPU-hours (--gpu-hours-per-failure)" in printed
    assert main([*words, "--gpu-hours-per-failure=10"]) == 2
    assert "--gpu-hours-per-failure describes the GPUs of a dry run" in capsys.readouterr().err


def test_training_waits_for_a_save_that_takes_longer_than_the_steps_between() -> None:
    config = seven_billion(*OVER_ALL, "--checkpoint.interval_steps=1")
    hardware = Hardware.of("h100", 64, None, disk_speed=0.5)
    time = time_of(config, hardware)
    writing_s = 12 * count_parameters(without_memory(config.model)) / 0.5e9
    assert writing_s > time.step_s
    waiting_s = time.pauses.saving_s / 20_000 - predict_save(config, hardware).pause_s
    assert waiting_s == pytest.approx(writing_s - time.step_s)


def test_an_evaluation_of_many_sequences_at_once_does_not_fit_and_a_smaller_one_is_named() -> None:
    hardware = Hardware.of("h100", 8, None)
    many = c4("1b", "--engine.name=ddp", "--evaluation.batch_size=1024")
    check_fits(many, hardware)  # each process has 32 of 256 sequences
    many.evaluation.num_sequences = 65_536
    cost = cost_of_run(many, hardware)
    assert not cost.fits
    assert cost.micro_batch_size == 16
    with pytest.raises(
        ConfigError, match=r"an evaluation needs .*; use --evaluation.batch_size="
    ) as e:
        check_fits(many, hardware)
    many.evaluation.batch_size = int(str(e.value).rpartition("=")[2])
    check_fits(many, hardware)
    many.evaluation.batch_size *= 2
    assert not cost_of_run(many, hardware).fits


def test_a_dry_run_names_cheaper_settings_if_they_save_more_than_a_tenth() -> None:
    hardware = Hardware.of("h100", 64, nodes=8, nics_per_node=1)
    slow = seven_billion(*OVER_ALL, "--training.micro_batch_size=2")
    line = estimate(slow, hardware)["cheaper"]
    options = line.partition(" takes ")[0].split()
    assert "--training.micro_batch_size=auto" in options
    assert "--engine.shard_over=node" in options
    changed = cost_of_run(
        seven_billion(*OVER_ALL, "--training.micro_batch_size=2", *options), hardware
    )
    assert changed.fits
    assert changed.time is not None
    hours = time_of(slow, hardware).hours
    assert changed.time.hours < 0.9 * hours
    assert (
        f"takes {changed.time.hours:,.1f} hours, {1 - changed.time.hours / hours:.0%} less" in line
    )
    cheapest = seven_billion(*OVER_ALL, *options)
    assert "cheaper" not in estimate(cheapest, hardware)


def test_an_engine_that_saves_more_than_a_tenth_of_the_hours_is_named() -> None:
    hardware = Hardware.of("h100", 512, None)
    config = c4("1b", "--engine.name=ddp")
    line = estimate(config, hardware)["faster engine"]
    engine = line.partition(" takes ")[0].removeprefix("--engine.name=")
    hours = time_of(config, hardware).hours
    saved_share = 1 - time_of(c4("1b", f"--engine.name={engine}"), hardware).hours / hours
    assert saved_share > 0.1
    assert f" hours, {saved_share:.0%} less " in line
    assert "never tried on several GPUs" in line
    assert "faster engine" not in estimate(c4("1b", f"--engine.name={engine}"), hardware)
    assert "faster engine" not in estimate(config, Hardware.of("h100", 64, None))
    # ZeRO has no whole matrices, which Muon needs.
    config.optimizer.name = "muon"
    assert "zero" not in estimate(config, hardware).get("faster engine", "")


def test_collectives_that_take_more_than_half_of_the_time_are_named() -> None:
    config = c4("1b", "--engine.name=ddp")
    assert "collectives" not in estimate(config, Hardware.of("h100", 64, None))
    hardware = Hardware.of("h100", 512, None)
    time = time_of(config, hardware)
    line = estimate(config, hardware)["collectives"]
    assert line.startswith(f"{time.sending_s / time.step_s:.0%} of a step goes into collectives")


@pytest.mark.parametrize("count", [1, 8, 64])
def test_no_cheaper_settings_are_named_for_the_shipped_1b_config(count: int) -> None:
    lines = describe_run(c4("1b"), Hardware.of("h100", count, None)).lines
    assert "time" in lines
    assert "cheaper" not in lines
