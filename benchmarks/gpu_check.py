"""Claim: on the GPUs of this machine the numbers agree with the CPU's, every engine trains the same
curve, and a killed run goes on along it; how fast training is, the table says.

Each check is a process of its own with a time limit: one that fails, hangs or crashes is a row, and
the others go on. Ends with code 0 if all hold, else 1. Run it by scripts/gpu_check.sh; `--small`
runs the same on CPU, where it says nothing of speed.

    python benchmarks/gpu_check.py [--small] [--only numbers,compile] [--minutes 10] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL = [
    *("--model.d_model=32", "--model.n_heads=2", "--model.n_layers=2", "--training.length=32"),
    *("--training.batch_size=8", "--positions.target_length=64", "--evaluation.num_sequences=4"),
    *("--data.tokenizer.train_vocab=512", "--data.corpus.max_documents=300"),
]

ALLOWED = {"fp32": 1e-3, "bf16": 0.05}
"""Of ‖found − expected‖ / ‖expected‖; five times that for what selectors rank by, differences of
losses that are nearly equal."""

LIMIT_S = 150
"""For one command. Compiling the largest model takes the longest."""

KEPT_S = 15
"""Of the time there is, for each check that follows: the last ones are run, too."""


class Failed(Exception):
    """What a check found wrong, in one line, and all that its command printed."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


@dataclass
class Row:
    check: str
    holds: bool
    found: str
    seconds: float = 0.0


@dataclass
class Machine:
    """Runs commands of the project, within the time there is."""

    folder: Path
    small: bool
    deadline: float
    num_following: int = 0
    """Checks after the one that runs."""

    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_processes(self) -> int:
        """All GPUs; on CPU two processes."""
        return 2 if self.small else len(self.facts["gpus"])

    def start(self, *words: object, processes: int | str | None = None) -> subprocess.Popen[str]:
        """`processes`: their number, started by torchrun, or `srun`, for one on each GPU."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes else []), *map(str, words)]
        if processes == "srun":
            step = ["--overlap", "--nodes=1", f"--ntasks={self.num_processes}"]
            command = ["srun", *step, sys.executable, *map(str, words)]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.small else {}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | hidden
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *words: object, processes: int | str | None = None) -> str:
        """What the command prints; Failed with the end of it where it fails or takes too long."""
        left_s = self.deadline - time.monotonic()
        limit_s = min(LIMIT_S, max(left_s - KEPT_S * self.num_following, min(left_s, KEPT_S)))
        if limit_s <= 0:
            raise Failed("not run: no time was left")
        child = self.start(*words, processes=processes)
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # torchrun ends its processes, which are no longer ours to reach
            output = ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = child.communicate(timeout=40)
            raise Failed(f"took longer than {limit_s:.0f} s", output) from None
        finally:
            end(child)
        if child.returncode != 0:
            raise Failed(f"exit code {child.returncode}: {last_words(output)}", output)
        return output

    def train(self, name: str, *overrides: str, processes: int | str | None = None) -> list[float]:
        """The losses of a run of configs/quick.yaml. Where one hangs, its stacks say in what."""
        limits = ("--engine.work_timeout_s=100", "--engine.step_timeout_s=60")
        try:
            self.run(*self.training(name, *limits, *overrides), processes=processes)
        except Failed as error:
            stacks = sorted((self.folder / name / "stacks").rglob("process*.txt"))
            where = frames_in(stacks[0].read_text()) if stacks else ""
            raise Failed(f"{error}{where}", error.output) from None
        return self.logged(name)

    def logged(self, name: str, what: str = "loss") -> list[float]:
        path, found = self.folder / name / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError, KeyError):  # a line half written, an evaluation
                found.append(json.loads(line)[what])
        return found

    def training(self, name: str, *overrides: str) -> list[object]:
        batch_size = -(-32 // self.num_processes) * self.num_processes
        size = SMALL if self.small else [f"--training.batch_size={batch_size}"]
        return [
            *(ROOT / "scripts/train.py", ROOT / "configs/quick.yaml", *size),
            f"--data.folder={self.folder / 'data'}",
            f"--run_folder={self.folder / name}",
            *("--training.num_steps=20", "--training.precision=fp32"),
            *("--logging.interval_steps=1", "--checkpoint.interval_steps=10", *overrides),
        ]

    @cached_property
    def reference(self) -> list[float]:
        """One process, not compiled."""
        return self.train("reference")


def end(child: subprocess.Popen[str]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("olmo-sparsity:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


# --- the checks -----------------------------------------------------------------------------------

Check = Callable[[Machine], Iterator[Row] | str]


def inside(what: str, processes: int | None = None) -> Check:
    """A check that a child of this file makes: it prints rows. Those before a crash stay."""

    def check(machine: Machine) -> Iterator[Row]:
        try:
            words = (__file__, "--child", what, "--out", machine.folder)
            yield from rows_in(machine.run(*words, processes=processes))
        except Failed as error:
            yield from rows_in(error.output)
            begun = re.findall(r"^stage: (.*)$", error.output, re.M)
            where = f"in stage '{begun[-1]}'{frames_in(error.output)}: " if begun else ""
            raise Failed(f"{where}{error}", error.output) from None

    return check


def frames_in(output: str) -> str:
    """Where the main thread is, by a stack that faulthandler wrote: its comes last."""
    stack = output.rpartition("(most recent call first)")[2]
    frames = re.findall(r'File "(\S+)", line \d+ in (\S+)', stack)
    where = " < ".join(f"{Path(file).stem}.{called}" for file, called in frames[:6])
    return where and f", in {where}"


def rows_in(output: str) -> Iterator[Row]:
    lines = (line for line in output.splitlines() if line.startswith('{"check"'))
    return (Row(**json.loads(line)) for line in lines)


def prepare(machine: Machine) -> str:
    words = [word for word in machine.training("run") if str(word).startswith("--data.")]
    output = machine.run("-m", "olmo_sparsity", "prepare", "configs/quick.yaml", *words)
    return next(line for line in output.splitlines() if "heldout" in line).partition(": ")[2]


def same_curve(name: str, processes: int | str | None, *overrides: str) -> Check:
    allowed = ALLOWED["bf16" if "--training.precision=bf16" in overrides else "fp32"]

    def check(machine: Machine) -> str:
        expected = machine.reference
        found = machine.train(name, *overrides, processes=processes)
        differences = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
        # A gradient that lacks a part changes losses late and by little.
        norm, wanted = (machine.logged(run, "gradient_norm")[0] for run in (name, "reference"))
        of_norm = abs(norm - wanted) / wanted
        text = (
            f"{len(found)} losses within {max(differences):.1e} of one process, the first "
            f"gradient's norm within {of_norm:.1e}, relative"
        )
        if not all(difference <= allowed for difference in (*differences, of_norm)):
            raise Failed(f"{text}; {allowed} is allowed")
        return text

    return check


def resume(machine: Machine) -> str:
    settings = ("--training.num_steps=100", "--training.deterministic=true")
    expected = machine.train("undisturbed", *settings)
    child = machine.start(*machine.training("killed", *settings))
    try:
        while child.poll() is None and len(machine.logged("killed")) < 25:
            if time.monotonic() > machine.deadline:
                raise Failed("not run: no time was left")
            time.sleep(0.005)
    finally:
        end(child)
    reached = len(machine.logged("killed"))
    if child.returncode != -signal.SIGKILL:
        raise Failed(f"the run ended before it could be killed: exit code {child.returncode}")
    found = machine.train("killed", *settings)
    steps = enumerate(zip(found, expected, strict=True), start=1)
    other = [step for step, (again, before) in steps if again != before]
    if other:
        raise Failed(f"killed after step {reached}, the loss of step {other[0]} is another")
    return f"killed after step {reached}, all {len(found)} losses are the same to the bit"


def pipeline(machine: Machine) -> str:
    """Train in the hardware's own precision, measure, draw."""
    steps = 20 if machine.small else 200
    losses = machine.train("pipeline", f"--training.num_steps={steps}", "--training.precision=auto")
    results, figure = machine.folder / "results", machine.folder / "figure2.png"
    windows = ["--long=48", "--short=16"] if machine.small else ["--long=128", "--short=32"]
    machine.run(
        *("-m", "olmo_sparsity", "measure", machine.folder / "pipeline", "--quick"),
        *("--out", results, *windows, "--stride=16", "--max-documents=16", "--min-gap=0"),
        *("--ks=1,4", "--share=top5%"),
    )
    machine.run("-m", "olmo_sparsity", "figure", results, "--out", figure)
    text = f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps"
    if not losses[-1] < losses[0]:
        raise Failed(text)
    return f"{text}; the figure has {figure.stat().st_size:,} bytes"


def checks(machine: Machine) -> Iterator[tuple[str, str, Check]]:
    """(group, its name in the table, the check), in order of what breaks first."""
    num, bf16 = machine.num_processes, "--training.precision=bf16"
    yield "", "prepare", prepare
    yield "pipeline", "train, measure, figure", pipeline
    yield "numbers", "numbers", inside("numbers")
    if num > 1 and not machine.small and "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        yield "engines", "srun, ddp", same_curve("srun", "srun", "--engine.name=ddp")
    for words in ("zero1", "zero2", "zero2, compiled", "zero3"):
        yield "stages", f"stages of {words}", inside(f"stages of {words}", 1)
    for name in ("ddp", "fsdp", "zero2", "zero3", "zero1"):
        for count in sorted({num} if machine.small else {1, num}, reverse=True):
            engine, processes = f"--engine.name={name}", f"{count} process{'es' * (count > 1)}"
            check = same_curve(f"{name}-{count}", count, engine)
            yield "engines", f"{name}, {processes}", check
            if name.startswith(("fsdp", "zero")) and count == num and not machine.small:
                check = same_curve(f"{name}-{count}-bf16", count, engine, bf16)
                yield "engines", f"{name}, bf16, {processes}", check
    yield "compile", "compiled", same_curve("compiled", None, "--training.compile=true")
    yield "resume", "kill -9 and resume", resume
    for size in ["small"] if machine.small else ["60m", "150m", "300m", "1b"]:
        yield "speed", f"speed, {size}", inside(size)
    yield "speed", "speed of measure", inside("small_measure" if machine.small else "measure")
    if num > 1 and not machine.small:
        yield "speed", f"speed, 1b, {num} processes", inside("1b", num)


GROUPS = ("pipeline", "numbers", "stages", "engines", "compile", "resume", "speed")


def perform(name: str, check: Check, machine: Machine) -> list[Row]:
    started, rows = time.monotonic(), []
    try:
        found = check(machine)
        if isinstance(found, str):
            rows.append(Row(name, True, found))
        else:
            rows.extend(found)
    except Exception as error:  # a defect of a check is a row, too
        text = str(error) if isinstance(error, Failed) else repr(error)
        rows.append(Row(name, False, text))
    for row in rows:
        row.seconds = round((time.monotonic() - started) / len(rows), 1)
        print(f"{'holds ' if row.holds else 'FAILED'} {row.check}: {row.found}", flush=True)
    return rows


def report(rows: list[Row], machine: Machine, out: Path) -> None:
    """Written after each check, so that what is known stays."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine.facts, "rows": [asdict(row) for row in rows]}
    (out / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["| check | holds | found | seconds |", "| --- | --- | --- | ---: |"]
    for row in rows:
        cells = [row.check, "yes" if row.holds else "**no**", row.found, f"{row.seconds:.0f}"]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    facts = ", ".join(f"{name} {value}" for name, value in machine.facts.items())
    (out / "gpu_check.md").write_text("\n".join([facts, "", *lines]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="on CPU, with a tiny model")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu_check")
    parser.add_argument("--only", default=",".join(GROUPS), help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (%(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        children: dict[str, Callable[[], Iterator[Row]]] = {
            "numbers": compare_numbers,
            "measure": measure_distant_tokens,
            "small_measure": partial(measure_distant_tokens, small=True),
        }
        stages = partial(start_by_stages, options.child.removeprefix("stages of "))
        speed = partial(measure_speed, options.child, options.out)
        is_stages = options.child.startswith("stages of ")
        child = stages if is_stages else children.get(options.child, speed)
        for row in child():
            print(json.dumps(asdict(row)), flush=True)
        return 0
    wanted = set(options.only.split(","))
    if not wanted <= set(GROUPS):
        parser.error(f"--only: choose from {', '.join(GROUPS)}")
    folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    machine = Machine(folder, options.small, time.monotonic() + 60 * options.minutes)
    rows: list[Row] = []
    try:
        machine.facts = json.loads(machine.run("-c", FACTS).splitlines()[-1])
        if not machine.facts["gpus"] and not options.small:
            parser.error("PyTorch sees no GPU here; --small runs the same checks on CPU")
        chosen = [
            (name, check)
            for group, name, check in checks(machine)
            if group in wanted or (not group and wanted - {"numbers", "stages", "speed"})
        ]
        for index, (name, check) in enumerate(chosen, start=1):
            machine.num_following = len(chosen) - index
            rows += perform(name, check, machine)
            report(rows, machine, options.out)
    except Failed as error:
        parser.error(f"PyTorch does not start: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = sum(not row.holds for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} hold; {options.out / 'gpu_check.md'}")
    return int(failed > 0)


# --- inside a child -------------------------------------------------------------------------------

FACTS = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""

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


def new_model(name: str) -> Any:
    import torch

    from olmo_sparsity.config.model import ModelConfig
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.huggingface.model import HuggingFaceLM

    torch.manual_seed(0)
    if name != "Llama of transformers":
        sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "init_std": 0.1}
        return build_model(ModelConfig(**sizes | MODELS[name], max_sequence_length=128))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    return HuggingFaceLM(LlamaForCausalLM(config))


def compare_numbers() -> Iterator[Row]:
    import numpy as np
    import torch

    from olmo_sparsity.analysis.selectors.influence import SELECTORS
    from olmo_sparsity.models.distant_attention import distant_error

    torch.set_num_threads(1)  # for models this small more of them take longer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [(torch.float, 64), *((torch.bfloat16, width) for width in (64, 128, 256))]
    for dtype, width in kinds:
        try:
            error = distant_error(device, dtype, width)
            found = f"attention in two parts is off by {error:.2f} times what rounding allows"
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as refused:
            error, found = math.inf, f"rows get copies: {str(refused)[:120]}"
        is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        holds = error <= 1 or (is_old and dtype == torch.bfloat16)  # which has no kernel there
        yield Row(f"distant states are shared, {dtype}, heads of {width}", holds, found)
    for model in MODELS:
        expected = dict(asked_of(model, torch.device("cpu"), "fp32"))
        for dtype, allowed in ALLOWED.items():
            if (device.type, dtype) == ("cpu", "fp32"):
                continue  # that is what the others are compared with
            errors = {
                what: float(np.linalg.norm(found - expected[what]) / np.linalg.norm(expected[what]))
                for what, found in asked_of(model, device, dtype)
            }
            wrong = {
                what: error
                for what, error in errors.items()
                if not error <= allowed * (5 if what in SELECTORS else 1)
            }
            furthest = wrong or {max(errors, key=errors.__getitem__): max(errors.values())}
            named = ", ".join(f"{what} by {error:.1e}" for what, error in furthest.items())
            text = f"{len(errors)} answers; furthest from fp32 on CPU: {named}"
            yield Row(f"{model}, {dtype}", not wrong, text)


def asked_of(name_of_model: str, device: Any, dtype: str) -> Iterator[tuple[str, Any]]:
    """Name and numbers: of a training step, of distant states, and what each selector ranks
    first."""
    import numpy as np
    import torch

    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors.influence import SELECTORS
    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.text.documents import Document
    from olmo_sparsity.text.windows import Windows
    from olmo_sparsity.training.losses import Losses

    model = new_model(name_of_model)
    tokens_BL = torch.randint(256, (4, 80))
    positions_BL = torch.arange(80).expand(4, 80) * 3 // 2
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1)).to(device)
    documents_BL = (torch.arange(80) // 30).expand(4, 80)
    model.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
        loss = Losses(model)(batch, batch.tokens_BL.numel())
        masked = replace(batch, documents_BL=documents_BL)
        loss_masked = Losses(model)(masked, batch.tokens_BL.numel())
    (loss + loss_masked).backward()
    yield "loss", loss.detach().float().cpu().numpy()
    yield "loss with document masks", loss_masked.detach().float().cpu().numpy()
    for name, weight in model.named_parameters():  # one that lacks a part is lost in their sum
        if weight.grad is not None:
            yield f"gradient of {name}", weight.grad.float().cpu().numpy()
    model.eval().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.requires_grad_(False)
    with torch.no_grad():
        states = model.distant_states(batch.tokens_BL[:1], batch.positions_BL[:1])
        indices_BF = torch.tensor([[3, 40], [7, 79]], device=device)
        near = (batch.tokens_BL[2:, :8], batch.positions_BL[2:, -8:] + 1)
        hidden_BLD = model.hidden(*near, distant=states.choose(indices_BF), num_last=4)
    yield "hidden after distant states", hidden_BLD.float().cpu().numpy()
    with torch.no_grad():
        bias_BF = torch.zeros(2, states.num_tokens, device=device)
        bias_BF[1, 40:] = torch.finfo(torch.float).min
        hidden_BLD = model.hidden(*near, distant=states.expand(2, bias_BF), num_last=4)
    yield "hidden after all distant states", hidden_BLD.float().cpu().numpy()
    document, scorer = Document(tokens_BL[0, :56].numpy()), Scorer(model)
    for name in SELECTORS:
        tables = recover(scorer, document, Windows(32, 8, 8), selectors=name, ks=(1, 4))
        yield name, tables["influence"].influence.to_numpy()
        if dtype == "fp32":  # elsewhere two units that matter alike may change places
            yield f"{name}, recovery", np.asarray(tables["recovery"].loss_set)


STAGES_S = {
    **{"import torch": 60, "reach the device": 30, "meet": 30, "first collective": 30},
    **{"import deepspeed": 60, "build": 60, "first step": 150, "second step": 20},
}
"""The limit of each stage. Imports from a cold disk take half a minute, compiling a minute."""


def start_by_stages(engine: str) -> Iterator[Row]:
    """What a training with DeepSpeed does until its second step. The stage that exceeds its limit
    prints its stack and ends the check. `starts`: programs, such as a compiler."""
    import faulthandler

    name, is_compiled = engine.partition(",")[0], engine.endswith("compiled")
    programs, made = list[str](), dict[str, Any]()

    def noting(event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            programs.append(Path(str(given[0])).name)

    def timed(stage: str, do: Callable[[], Any]) -> Row:
        print(f"stage: {stage}", flush=True)
        programs.clear()
        faulthandler.dump_traceback_later(STAGES_S[stage], exit=True)
        began, cpu = time.perf_counter(), time.process_time()
        do()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        faulthandler.cancel_dump_traceback_later()
        text = f"{seconds:.1f} s, {cpu:.1f} s of CPU; starts {', '.join(programs) or 'no program'}"
        return Row(f"{engine}: {stage}", seconds < STAGES_S[stage], text)

    sys.addaudithook(noting)
    yield timed("import torch", lambda: __import__("torch"))
    import torch

    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.training.choose_engine import build_engine
    from olmo_sparsity.training.deepspeed_engine import import_deepspeed
    from olmo_sparsity.training.distributed import Processes, start_alone

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    words = [f"--engine.name={name}", f"--training.compile={is_compiled}".lower()]
    config = load_config(ROOT / "configs/quick.yaml", [*words, "--training.precision=fp32"])
    config.model.vocab_size = config.model.embedding_size = 512
    config.training.device = str(device)
    tokens_BL = torch.randint(512, (config.training.batch_size, config.training.length))
    positions_BL = torch.arange(config.training.length).expand_as(tokens_BL)
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))

    def collect() -> None:
        torch.distributed.all_reduce(number := torch.ones(1, device=device))
        number.item()

    def build() -> None:
        sections = (config.engine, config.training, config.optimizer)
        made["engine"] = build_engine(build_model(config.model), *sections, Processes())

    def step() -> None:
        float(made["engine"].step(batch, 1e-4)[0])

    yield timed("reach the device", lambda: torch.ones(1, device=device).item())
    yield timed("meet", start_alone)
    yield timed("first collective", collect)
    yield timed("import deepspeed", lambda: import_deepspeed(device))
    yield timed("build", build)
    yield timed("first step", step)
    yield timed("second step", step)
    made.clear()
    torch.distributed.destroy_process_group()


def measure_speed(size: str, out: Path) -> Iterator[Row]:
    """Steps on random tokens, as configs/c4_SIZE_pose.yaml trains, then one checkpoint."""
    import torch

    from olmo_sparsity.base.devices import peak_memory_gib
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.checkpoint_files import save_weights
    from olmo_sparsity.training.checkpoint import CheckpointWriter
    from olmo_sparsity.training.choose_engine import build_engine
    from olmo_sparsity.training.distributed import Processes, connect
    from olmo_sparsity.training.estimate.compute import flops_per_token, stated_flops
    from olmo_sparsity.training.trainer_state import TrainerState

    small = size == "small"
    config = load_config(ROOT / f"configs/{'quick' if small else f'c4_{size}_pose'}.yaml")
    config.model.vocab_size, config.model.embedding_size = (512, 512) if small else (50280, 50304)
    config.training.precision = "fp32" if small else "bf16"
    config.training.micro_batch_size = micro = config.training.micro_batch_size or 4

    def measured(processes: Processes) -> str:  # the engine must not outlive its group
        engine = build_engine(
            build_model(config.model),
            config.engine,
            config.training,
            config.optimizer,
            processes,
        )
        flops = flops_per_token(engine.model, config.model, config.training.length)
        tokens_BL = torch.randint(config.model.vocab_size, (4 * micro, config.training.length))
        positions_BL = torch.arange(config.training.length).expand_as(tokens_BL)
        batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))
        num_steps = 2 if small else 10
        for _ in range(1 if small else 3):
            float(engine.step(batch, 1e-4)[0])
        started = time.perf_counter()
        for _ in range(num_steps):
            loss, _ = engine.step(batch, 1e-4)
        assert float(loss) < 20, f"a loss of {float(loss)}"  # waits for the GPU, too
        seconds = time.perf_counter() - started
        rate = num_steps * tokens_BL.numel() * processes.world_size / seconds
        share = "peak not known"
        flops_of_device = stated_flops(engine.device)
        if flops_of_device is not None:
            peak = flops_of_device * processes.world_size
            share = f"{rate * flops / peak:.1%} of the stated peak"
        text = f"{rate:,.0f} tokens/s, {share}, {peak_memory_gib(engine.device):.1f} GiB; "
        started = time.perf_counter()
        weights, write_moments = engine.copy_weights(), engine.copy_moments()
        path = f"model-{processes.rank}.safetensors"
        with CheckpointWriter(out / "saved", config.checkpoint, processes) as writer:
            writer.save(
                TrainerState(1, 1, ""),
                lambda folder: None,
                lambda folder: [
                    save_weights(weights, folder / path),
                    write_moments(folder / "engine"),
                ],
            )
            stood_still = time.perf_counter() - started
            writer.wait()
        seconds = time.perf_counter() - started
        size_B = sum(path.stat().st_size for path in (out / "saved").rglob("*.safetensors"))
        return (
            f"{text}checkpoint of {size_B / 2**30:.2f} GiB saved in {seconds:.1f} s, of which "
            f"training stands still for {stood_still:.2f} s"
        )

    with connect() as processes:
        found = measured(processes)
        if processes.is_first:
            yield Row(f"speed, {size}, {processes.world_size} process(es)", True, found)


def measure_distant_tokens(small: bool = False) -> Iterator[Row]:
    """What `measure` spends nearly all of its time on, in the weights' size of c4_150m: one distant
    token added at a time, and one at a time left out."""
    import numpy as np

    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.base.devices import choose_device, peak_memory_gib
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.text.documents import Document
    from olmo_sparsity.text.windows import Windows

    config = load_config(ROOT / f"configs/{'quick' if small else 'c4_150m_pose'}.yaml")
    sizes = {"vocab_size": 512, "embedding_size": 512}
    if not small:
        sizes = {"vocab_size": 50280, "embedding_size": 50304, "max_sequence_length": 2048}
    device = choose_device("auto")
    model = build_model(replace(config.model, **sizes)).eval().to(device)
    if device.type == "cuda":
        model.bfloat16()
    windows = Windows(48, 16, 4) if small else Windows(1024, 128, 16)
    num_blocks = 1 if small else 8
    tokens = np.random.default_rng(0).integers(0, 512, windows.long + num_blocks * windows.stride)
    for selector in ("add_one", "gradient"):
        taken: list[float] = []
        for _ in range(2):  # the first one starts libraries
            scorer, started = Scorer(model), time.perf_counter()
            recover(scorer, Document(tokens), windows, selectors=selector, ks=(1, 4))
            taken.append(time.perf_counter() - started)
        text = (
            f"{scorer.token_forwards / taken[-1]:,.0f} token-forwards/s, "
            f"{peak_memory_gib(device):.1f} GiB; {taken[0]:.1f} s, then {taken[-1]:.1f} s"
        )
        yield Row(f"speed of measure, {selector}", True, text)


if __name__ == "__main__":
    sys.exit(main())
