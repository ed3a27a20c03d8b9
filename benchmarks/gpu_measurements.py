"""Measure inside of one process for gpu_check.py, and print each finding as a row of JSON.

    python benchmarks/gpu_measurements.py SUBJECT FOLDER

    SUBJECT                    what is measured
    numbers                    how far numbers of this device are from those of fp32 on the CPU
    stages of zero2            how long each stage takes until the second step with DeepSpeed
    stages of zero2, compiled
    60m, 150m, 300m, 1b        how fast a model of this size trains; small: on the CPU
    measure, small_measure     how fast distant tokens are evaluated

FOLDER gets the checkpoint of a training. Packages are imported inside of functions: what importing
them takes is one of the stages.

Dimension key: B rows, L tokens of a row, F distant tokens, D width.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu_check import ALLOWED, ROOT, Row

if TYPE_CHECKING:
    import torch

    from olmo_sparsity.config.sections import RunConfig
    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.training.engines.engine import Engine
    from olmo_sparsity.training.processes.distributed import Processes

LEARNING_RATE = 1e-4


def main(subject: str, folder: str) -> None:
    """Print the rows of a measurement, each as soon as it is known: a crash may follow."""
    for row in measurement_of(subject, Path(folder))():
        print(json.dumps(asdict(row)), flush=True)


def measurement_of(subject: str, folder: Path) -> Callable[[], Iterator[Row]]:
    """Return the function that measures a subject."""
    if subject.startswith("stages of "):
        return partial(start_by_stages, subject.removeprefix("stages of "))
    if subject == "numbers":
        return compare_numbers
    if subject.endswith("measure"):
        return partial(measure_distant_tokens, is_small=subject == "small_measure")
    return partial(measure_training, subject, folder)


# --- numbers --------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "OLMo-2": {"layer_norm_type": "rms", "attention_layer_norm": True, "norm_after": True},
    "ALiBi, grouped heads": {"rope": False, "alibi": True, "n_kv_heads": 2},
    "GPT-NeoX": {
        "architecture": "gpt_neox",
        "rotary_fraction": 0.5,
        "include_bias": True,
        "activation_type": "gelu",
    },
    "heads of 256": {"d_model": 512, "n_heads": 2, "layer_norm_type": "rms", "init_std": 0.03},
    "Llama of transformers": {},
}
"""The models whose numbers are compared: what differs from a tiny OLMo model, by their names."""

SELECTOR_TOLERANCE = 5
"""Selectors rank by differences of losses that are nearly equal, so that they may be off by this
times what is allowed for other numbers."""

VOCABULARY = 256
NUM_TOKENS = 80


class Answer(NamedTuple):
    """Numbers that a model computes."""

    name: str
    numbers: Any
    """An array of numpy."""


def compare_numbers() -> Iterator[Row]:
    """Yield for each model how far its numbers are from those in fp32 on the CPU."""
    import numpy as np
    import torch

    from olmo_sparsity.analysis.selectors.influence import SELECTORS

    torch.set_num_threads(1)  # for models this small more threads take longer
    cpu = torch.device("cpu")
    device = torch.device("cuda") if torch.cuda.is_available() else cpu
    yield from _compare_shared_states(device)
    for model_name in MODELS:
        expected = {answer.name: answer.numbers for answer in answers_of(model_name, cpu, "fp32")}
        for precision, allowed in ALLOWED.items():
            if device.type == "cpu" and precision == "fp32":
                continue  # that is what the others are compared with
            errors: dict[str, float] = {}
            too_far: dict[str, float] = {}
            for name, numbers in answers_of(model_name, device, precision):
                distance = np.linalg.norm(numbers - expected[name])
                error = float(distance / np.linalg.norm(expected[name]))
                errors[name] = error
                # `not <=`, so that NaN is too far.
                if not error <= allowed * (SELECTOR_TOLERANCE if name in SELECTORS else 1):
                    too_far[name] = error

            furthest_name = max(errors, key=errors.__getitem__)
            furthest = too_far or {furthest_name: errors[furthest_name]}
            described = ", ".join(f"{name} by {error:.1e}" for name, error in furthest.items())
            found = f"{len(errors)} answers; furthest from fp32 on CPU: {described}"
            yield Row(f"{model_name}, {precision}", not too_far, found)


def _compare_shared_states(device: torch.device) -> Iterator[Row]:
    """Yield for each dtype and width of heads how exact attention to distant states is that rows
    share. Where a kernel refuses it, rows get copies of the states, which takes memory."""
    import torch

    from olmo_sparsity.models.distant_attention import distant_error

    kinds = [(torch.float, 64), *((torch.bfloat16, width) for width in (64, 128, 256))]
    for dtype, width in kinds:
        try:
            error = distant_error(device, dtype, width)
            found = f"attention in two parts is off by {error:.2f} times what rounding allows"
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # of the device, although these are RuntimeErrors, too
        except RuntimeError as refusal:
            error = math.inf
            found = f"rows get copies: {str(refusal)[:120]}"
        # GPUs before Ampere have no such kernel for bf16.
        is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        holds = error <= 1 or (is_old and dtype == torch.bfloat16)
        yield Row(f"distant states are shared, {dtype}, heads of {width}", holds, found)


def answers_of(model_name: str, device: torch.device, precision: str) -> Iterator[Answer]:
    """Yield the numbers of a training step, of distant states, and of each selector. Weights and
    inputs are the same in each call. `precision`: fp32 or bf16."""
    import torch

    model = new_model(model_name)
    tokens_BL = torch.randint(VOCABULARY, (4, NUM_TOKENS))
    positions_BL = torch.arange(NUM_TOKENS).expand(4, NUM_TOKENS) * 3 // 2
    batch = _batch_of(tokens_BL, positions_BL).to(device)
    model.to(device)
    yield from _answers_of_training(model, batch, precision)

    # As `measure` reads a model: all weights in this dtype, and no gradients.
    model.eval().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    model.requires_grad_(False)
    yield from _answers_of_distant_states(model, batch)
    yield from _answers_of_selectors(model, tokens_BL, precision)


def new_model(name: str) -> Any:
    """Return one of `MODELS` with random weights, which are the same in each call."""
    import torch

    from olmo_sparsity.config.model import ModelConfig
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.huggingface.model import HuggingFaceLM

    torch.manual_seed(0)
    if name != "Llama of transformers":
        sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "init_std": 0.1}
        sizes["vocab_size"] = VOCABULARY
        return build_model(ModelConfig(**sizes | MODELS[name], max_sequence_length=128))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    return HuggingFaceLM(LlamaForCausalLM(config))


def _answers_of_training(model: Any, batch: Batch, precision: str) -> Iterator[Answer]:
    """Yield the losses of a batch, with and without masks of documents, and all gradients."""
    import torch

    from olmo_sparsity.training.engines.losses import Losses

    device = batch.tokens_BL.device
    documents_BL = (torch.arange(NUM_TOKENS) // 30).expand(4, NUM_TOKENS)
    masked_batch = replace(batch, documents_BL=documents_BL)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = Losses(model)(batch, batch.tokens_BL.numel())
        loss_masked = Losses(model)(masked_batch, batch.tokens_BL.numel())
    (loss + loss_masked).backward()
    yield Answer("loss", loss.detach().float().cpu().numpy())
    yield Answer("loss with document masks", loss_masked.detach().float().cpu().numpy())
    # Each by itself: in the norm of all, one that lacks a part would be lost.
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            yield Answer(f"gradient of {name}", weight.grad.float().cpu().numpy())


def _answers_of_distant_states(model: Any, batch: Batch) -> Iterator[Answer]:
    """Yield hidden states of a local window after chosen distant tokens, and after all of them with
    some hidden by a bias."""
    import torch

    device = batch.tokens_BL.device
    with torch.no_grad():
        states = model.distant_states(batch.tokens_BL[:1], batch.positions_BL[:1])
        indices_BF = torch.tensor([[3, 40], [7, 79]], device=device)
        local = (batch.tokens_BL[2:, :8], batch.positions_BL[2:, -8:] + 1)
        hidden_BLD = model.hidden(*local, distant=states.choose(indices_BF), num_last=4)
    yield Answer("hidden after distant states", hidden_BLD.float().cpu().numpy())
    with torch.no_grad():
        bias_BF = torch.zeros(2, states.num_tokens, device=device)
        bias_BF[1, 40:] = torch.finfo(torch.float).min
        hidden_BLD = model.hidden(*local, distant=states.expand(2, bias_BF), num_last=4)
    yield Answer("hidden after all distant states", hidden_BLD.float().cpu().numpy())


def _answers_of_selectors(model: Any, tokens_BL: torch.Tensor, precision: str) -> Iterator[Answer]:
    """Yield what each selector ranks by, and in fp32 the losses with what it ranks first."""
    import numpy as np

    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors.influence import SELECTORS
    from olmo_sparsity.text.documents import Document
    from olmo_sparsity.text.windows import Windows

    document = Document(tokens_BL[0, :56].numpy())
    scorer = Scorer(model)
    for name in SELECTORS:
        tables = recover(scorer, document, Windows(32, 8, 8), selectors=name, ks=(1, 4))
        yield Answer(name, tables["influence"].influence.to_numpy())
        if precision == "fp32":  # elsewhere two units that matter alike may change places
            yield Answer(f"{name}, recovery", np.asarray(tables["recovery"].loss_set))


# --- the start of a training with DeepSpeed, stage by stage ---------------------------------------

LIMIT_S_BY_STAGE = {
    "import torch": 60,  # from a cold disk imports take half a minute
    "reach the device": 30,
    "meet": 30,
    "first collective": 30,
    "import deepspeed": 60,
    "build": 60,
    "first step": 150,  # compiling takes a minute
    "second step": 20,
}
"""The limit of each stage, in seconds, in the order of the stages."""


def start_by_stages(variant: str) -> Iterator[Row]:
    """Yield the time of each stage of a training with DeepSpeed until its second step. The stage
    that exceeds its limit prints its stack and ends the process. `variant`: the name of the engine,
    such as `zero2`, or `zero2, compiled`."""
    stages = _Stages(variant)
    yield stages.timed("import torch", lambda: __import__("torch"))
    import torch

    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.training.engines.choose import build_engine
    from olmo_sparsity.training.engines.deepspeed_import import import_deepspeed
    from olmo_sparsity.training.processes.distributed import Processes
    from olmo_sparsity.training.processes.process_group import start_alone

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    config = _config_of_variant(variant, device)
    batch = _random_batch(config, config.training.batch_size)
    engines: list[Engine] = []

    def reduce_a_number() -> None:
        number = torch.ones(1, device=device)
        torch.distributed.all_reduce(number)
        number.item()  # waits for the result

    def build() -> None:
        sections = (config.engine, config.training, config.optimizer)
        engines.append(build_engine(build_model(config.model), *sections, Processes()))

    def take_step() -> None:
        loss = engines[0].step(batch, LEARNING_RATE)[0]
        float(loss)  # waits for the result

    yield stages.timed("reach the device", lambda: torch.ones(1, device=device).item())
    yield stages.timed("meet", start_alone)
    yield stages.timed("first collective", reduce_a_number)
    yield stages.timed("import deepspeed", lambda: import_deepspeed(device))
    yield stages.timed("build", build)
    yield stages.timed("first step", take_step)
    yield stages.timed("second step", take_step)
    engines.clear()  # an engine must not outlive its group
    torch.distributed.destroy_process_group()


class _Stages:
    """Times stages one after the other, and notes which programs each starts, such as a
    compiler."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.programs: list[str] = []
        sys.addaudithook(self._note_program)

    def _note_program(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self.programs.append(Path(str(arguments[0])).name)

    def timed(self, stage: str, action: Callable[[], object]) -> Row:
        """Return the row of a stage, which consists of an action."""
        import faulthandler

        print(f"stage: {stage}", flush=True)  # by which gpu_check.py names one that never ends
        self.programs.clear()
        faulthandler.dump_traceback_later(LIMIT_S_BY_STAGE[stage], exit=True)
        started = time.perf_counter()
        started_cpu = time.process_time()
        action()
        seconds = time.perf_counter() - started
        cpu_seconds = time.process_time() - started_cpu
        faulthandler.cancel_dump_traceback_later()

        programs = ", ".join(self.programs) or "no program"
        found = f"{seconds:.1f} s, {cpu_seconds:.1f} s of CPU; starts {programs}"
        return Row(f"{self.variant}: {stage}", seconds < LIMIT_S_BY_STAGE[stage], found)


def _config_of_variant(variant: str, device: torch.device) -> RunConfig:
    """Return the config of a training with DeepSpeed on a device."""
    from olmo_sparsity.config.run import load_config

    is_compiled = variant.endswith("compiled")
    words = [
        f"--engine.name={variant.partition(',')[0]}",
        f"--training.compile={str(is_compiled).lower()}",
        "--training.precision=fp32",
    ]
    config = load_config(ROOT / "configs/quick.yaml", words)
    config.model.vocab_size = 512
    config.model.embedding_size = 512
    config.training.device = str(device)
    return config


# --- the speed of training ------------------------------------------------------------------------


def measure_training(size: str, folder: Path) -> Iterator[Row]:
    """Yield the speed of steps on random tokens, as configs/c4_SIZE_pose.yaml trains, and of one
    checkpoint. Only the first process of a launch yields a row."""
    from olmo_sparsity.training.processes.process_group import connect

    is_small = size == "small"
    config = _config_of_size(size)
    with connect() as processes:
        # In a function, as the engine must not outlive its group.
        found = _train_and_save(config, processes, folder, is_small=is_small)
        if processes.is_first:
            yield Row(f"speed, {size}, {processes.world_size} process(es)", True, found)


def _config_of_size(size: str) -> RunConfig:
    """Return the config of a training at this size, with the vocabulary that its text would give
    it."""
    from olmo_sparsity.config.run import load_config

    if size == "small":
        config = load_config(ROOT / "configs/quick.yaml")
        config.model.vocab_size = 512
        config.model.embedding_size = 512
        config.training.precision = "fp32"
    else:
        config = load_config(ROOT / f"configs/c4_{size}_pose.yaml")
        config.model.vocab_size = 50280
        config.model.embedding_size = 50304
        config.training.precision = "bf16"
    config.training.micro_batch_size = config.training.micro_batch_size or 4
    return config


def _train_and_save(
    config: RunConfig, processes: Processes, folder: Path, *, is_small: bool
) -> str:
    """Train some steps and save a checkpoint. Return the speed of both, in words."""
    from olmo_sparsity.base.devices import peak_memory_gib
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.training.engines.choose import build_engine
    from olmo_sparsity.training.estimate.compute import flops_per_token, stated_flops_per_second

    sections = (config.engine, config.training, config.optimizer)
    engine = build_engine(build_model(config.model), *sections, processes)
    flops = flops_per_token(engine.model, config.model, config.training.length)
    batch = _random_batch(config, 4 * (config.training.micro_batch_size or 1))
    tokens_per_s = processes.world_size * _tokens_per_s(engine, batch, is_small=is_small)

    share = "peak not known"
    flops_of_device = stated_flops_per_second(engine.device)
    if flops_of_device is not None:
        peak = flops_of_device * processes.world_size
        share = f"{tokens_per_s * flops / peak:.1%} of the stated peak"
    memory = f"{peak_memory_gib(engine.device):.1f} GiB"
    saving = _time_saving(engine, config, processes, folder / "saved")
    return f"{tokens_per_s:,.0f} tokens/s, {share}, {memory}; {saving}"


def _tokens_per_s(engine: Engine, batch: Batch, *, is_small: bool) -> float:
    """Return the speed of training steps of one process, after steps that are not timed."""
    for _ in range(1 if is_small else 3):
        float(engine.step(batch, LEARNING_RATE)[0])
    num_steps = 2 if is_small else 10
    started = time.perf_counter()
    for _ in range(num_steps):
        loss, _ = engine.step(batch, LEARNING_RATE)
    # Reading the loss waits for the GPU, too.
    assert float(loss) < 20, f"a loss of {float(loss)}"
    seconds = time.perf_counter() - started
    return num_steps * batch.tokens_BL.numel() / seconds


def _time_saving(engine: Engine, config: RunConfig, processes: Processes, folder: Path) -> str:
    """Save a checkpoint. Return in words how long it took, and for how long training waits."""
    from olmo_sparsity.models.checkpoint_files import save_weights
    from olmo_sparsity.training.checkpoints.save import CheckpointContent
    from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
    from olmo_sparsity.training.run_folder.trainer_state import TrainerState

    started = time.perf_counter()
    weights = engine.copy_weights()
    write_moments = engine.copy_moments()
    name = f"model-{processes.rank}.safetensors"

    def write_common(folder: Path) -> None:
        """Write nothing: an index of weights would take no time."""

    def write_part(folder: Path) -> list[Path]:
        return [save_weights(weights, folder / name), write_moments(folder / "engine")]

    with CheckpointWriter(folder, config.checkpoint, processes) as writer:
        writer.save(CheckpointContent(TrainerState(1, 1, ""), write_common, write_part))
        seconds_waited = time.perf_counter() - started  # files are written in the background
        writer.wait()
    seconds = time.perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return (
        f"checkpoint of {num_bytes / 2**30:.2f} GiB saved in {seconds:.1f} s, of which training "
        f"stands still for {seconds_waited:.2f} s"
    )


# --- the speed of `measure` -----------------------------------------------------------------------


def measure_distant_tokens(is_small: bool = False) -> Iterator[Row]:
    """Yield the speed of what `measure` spends nearly all of its time on, with a model of the size
    of c4_150m: distant tokens are added one at a time, and ranked by a gradient."""
    import numpy as np

    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.base.devices import choose_device, peak_memory_gib
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.text.documents import Document
    from olmo_sparsity.text.windows import Windows

    if is_small:
        config = load_config(ROOT / "configs/quick.yaml")
        sizes = {"vocab_size": 512, "embedding_size": 512}
        windows = Windows(48, 16, 4)
        num_blocks = 1
    else:
        config = load_config(ROOT / "configs/c4_150m_pose.yaml")
        sizes = {"vocab_size": 50280, "embedding_size": 50304, "max_sequence_length": 2048}
        windows = Windows(1024, 128, 16)
        num_blocks = 8

    device = choose_device("auto")
    model = build_model(replace(config.model, **sizes)).eval().to(device)
    if device.type == "cuda":
        model.bfloat16()
    num_tokens = windows.long + num_blocks * windows.stride
    document = Document(np.random.default_rng(0).integers(0, 512, num_tokens))
    for selector in ("add_one", "gradient"):
        seconds: list[float] = []
        for _ in range(2):  # the first one starts libraries
            scorer = Scorer(model)
            started = time.perf_counter()
            recover(scorer, document, windows, selectors=selector, ks=(1, 4))
            seconds.append(time.perf_counter() - started)
        found = (
            f"{scorer.token_forwards / seconds[-1]:,.0f} token-forwards/s, "
            f"{peak_memory_gib(device):.1f} GiB; {seconds[0]:.1f} s, then {seconds[-1]:.1f} s"
        )
        yield Row(f"speed of measure, {selector}", True, found)


# --- batches of random tokens ---------------------------------------------------------------------


def _random_batch(config: RunConfig, num_rows: int) -> Batch:
    """Return a batch of random tokens with contiguous position IDs."""
    import torch

    shape = (num_rows, config.training.length)
    tokens_BL = torch.randint(config.model.vocab_size, shape)
    return _batch_of(tokens_BL, torch.arange(config.training.length).expand(shape))


def _batch_of(tokens_BL: torch.Tensor, positions_BL: torch.Tensor) -> Batch:
    """Return a batch whose labels are the next tokens; the last label of a row is its first
    token."""
    from olmo_sparsity.data.batches import Batch

    return Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
