"""Claim: the first quarter of an hour on a GPU says where the time of training and analysis goes.

    python benchmarks/gpu_speed.py --out results/gpu_speed [--seconds 560] [--only step,larger]
    python benchmarks/gpu_speed.py --out results/gpu_speed --small      # on a CPU: does it run?

One row of JSON a line in rows.jsonl, the most valuable first. A part that fails is a row, and the
others go on. A change is compared with what it replaced, which is put over today's code, in one
process. Kernels of a step are listed in kernels_*.csv.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from olmo_sparsity.analysis.inputs.vocabulary import IGNORED
from olmo_sparsity.analysis.kernels import losses
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.positions import draw_positions
from olmo_sparsity.model import rope
from olmo_sparsity.model.build import build_model
from olmo_sparsity.runtime import peak_memory_gib
from olmo_sparsity.training import engine as engines
from olmo_sparsity.training.engine import Engine, measure_matmul_peak
from olmo_sparsity.training.estimate import flops_per_token, stated_flops

CONFIGS = Path(__file__).parents[1] / "configs"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")


@dataclass
class Bench:
    out: Path
    small: bool

    def row(self, part: str, **found: object) -> None:
        line = json.dumps({"part": part, **found})
        print(line, flush=True)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(line + "\n")


def sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def median_s(run: Callable[[], Any], repeats: int = 10) -> float:
    taken = []
    for _ in range(3 + repeats):
        sync()
        began = time.perf_counter()
        run()
        sync()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[3:])


# --- what was before ------------------------------------------------------------------------------


def with_log_softmax(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_C: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    is_used_C1 = (labels_C != IGNORED)[:, None]
    labels_C1 = labels_C.clamp(min=0)[:, None]
    log_p_CV = (F.linear(hidden_CD, weight_VD, bias_V).float() * scale).log_softmax(-1)
    is_label_CV = torch.arange(log_p_CV.shape[1], device=labels_C.device) == labels_C1
    grad_CV = (log_p_CV.exp() - is_label_CV.float()) * is_used_C1
    nll_C1 = -log_p_CV.gather(1, labels_C1)
    return (nll_C1 * is_used_C1)[:, 0], grad_CV.to(hidden_CD.dtype)


BEFORE: dict[str, Callable[[], Any]] = {
    "tables in each kernel": lambda: mock.patch.object(
        rope, "_cos_and_sin", lambda angles: (angles.cos(), angles.sin())
    ),
    "log_softmax": lambda: mock.patch.object(losses, "_losses_of_chunk", with_log_softmax),
    "1,334 rows": lambda: mock.patch.object(losses, "rows_per_chunk", return_value=1334),
    "whole graph": lambda: mock.patch.object(engines, "COMPILED_BY_BLOCK", 1000),
}


@contextmanager
def before(*names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(BEFORE[name]())
        yield


# --- training -------------------------------------------------------------------------------------


def make(bench: Bench, size: str, micro: int | None = None) -> tuple[Engine, RunConfig, Batch]:
    """Two micro-batches of random tokens a step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = load_config(CONFIGS / f"c4_{size}_pose.yaml")
    model, training = config.model, config.training
    model.vocab_size, model.embedding_size = (500, 512) if bench.small else (50280, 50304)
    if bench.small:
        model.d_model, model.n_heads, model.n_layers, training.length = 32, 2, 1, 64
        training.compile = False  # takes half a minute
    training.device, training.precision = str(DEVICE), "fp32" if bench.small else "bf16"
    training.micro_batch_size = 2 if bench.small else micro or training.micro_batch_size
    training.batch_size = 2 * (training.micro_batch_size or 1)
    engine = Engine(build_model(model), config.training, config.optimizer)
    tokens_BL = torch.randint(model.vocab_size, (training.batch_size, training.length))
    positions_BL = (3 * torch.arange(training.length)).expand_as(tokens_BL).contiguous()
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))
    return engine, config, batch.pinned() if ON_GPU else batch


def rate(bench: Bench, made: tuple[Engine, RunConfig, Batch], steps: int = 10) -> dict[str, Any]:
    engine, config, batch = made
    steps = 2 if bench.small else steps
    began = time.perf_counter()
    for _ in range(3):
        loss, norm = engine.step(batch, 1e-4)
    third = [float(loss), float(norm)]
    compiling_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(steps):
        loss, _ = engine.step(batch, 1e-4)
    host_s = time.perf_counter() - began  # until the last launch
    float(loss)
    step_s = (time.perf_counter() - began) / steps
    tokens_per_s = batch.tokens_BL.numel() / step_s
    stated = stated_flops(torch.cuda.get_device_name() if ON_GPU else "cpu")
    mfu = {
        name: tokens_per_s
        * flops_per_token(engine.model, config.model, config.training.length, whole)
        / stated
        if stated
        else 0
        for name, whole in (("mfu", False), ("mfu_whole_attention", True))
    }
    return mfu | {
        "tokens_per_s": round(tokens_per_s),
        "ms_a_step": 1e3 * step_s,
        "host_ms_a_step": 1e3 * host_s / steps,
        "compiling_s": compiling_s,
        "third_loss_and_norm": third,
        "gib": peak_memory_gib(DEVICE),
    }


def list_kernels(bench: Bench, made: tuple[Engine, RunConfig, Batch], name: str) -> None:
    with torch.profiler.profile() as seen:
        made[0].step(made[2], 1e-4)
        sync()
    times = [
        (e.self_device_time_total if ON_GPU else e.self_cpu_time_total, e.count, e.key)
        for e in seen.key_averages()
    ]
    lines = [f"{us:.0f},{count},{key[:160]!r}\n" for us, count, key in sorted(times, reverse=True)]
    (bench.out / f"kernels_{name}.csv").write_text("us,count,kernel\n" + "".join(lines[:150]))


def step(bench: Bench) -> None:
    """60M: now, with each of the earlier ways, and with all of them."""
    every = ("tables in each kernel", "log_softmax", "1,334 rows")
    for names in ((), *((name,) for name in every), every):
        with before(*names):
            made = make(bench, "60m")
            bench.row("step 60m", before=names, **rate(bench, made))
            if names in ((), every):
                list_kernels(bench, made, "60m_before" if names else "60m")
        del made


def larger(bench: Bench) -> None:
    for size, micro in (("1b", None), ("1b", 4), ("300m", None), ("150m", None)):
        bench.row(f"step {size}", micro=micro, **rate(bench, make(bench, size, micro), 4))
        if bench.small:
            return
    with before("whole graph"):
        bench.row("step 300m", before="whole graph", **rate(bench, make(bench, "300m"), 4))


class Drawn(Dataset[Batch]):
    """As much work of Python as 64 sequences are."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __getitem__(self, step: int) -> Batch:
        pose = PositionsConfig(scheme="pose", target_length=1024)
        for row in range(64):
            draw_positions(pose, 256, seed=1, epoch=0, index=64 * step + row)
        return self.batch


def host(bench: Bench) -> None:
    """Small steps alone, and with batches made by a thread or a process: is the host the limit?"""
    engine, _, batch = made = make(bench, "60m", micro=2)
    bench.row("host", batches="made before", **rate(bench, made, 40))
    num_steps = 4 if bench.small else 60
    plain = Batch(*(t.clone() for t in (batch.tokens_BL, batch.positions_BL, batch.labels_BL)))
    for kind, workers in (("thread", 0), ("process", 1)):
        loader = DataLoader(
            Drawn(plain), batch_size=None, sampler=range(num_steps + 5), num_workers=workers
        )

        def pinned(loader: DataLoader = loader) -> Iterator[Batch]:
            for made in loader:
                yield made.pinned() if ON_GPU else made

        with closing(in_background(pinned(), depth=1)) as batches:
            next(batches)
            began = time.perf_counter()
            for _ in range(num_steps):
                loss, _ = engine.step(next(batches), 1e-4)
            float(loss)
            step_s = (time.perf_counter() - began) / num_steps
        bench.row("host", batches=kind, ms_a_step=1e3 * step_s)


# --- the GPU itself -------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    precision = "fp32" if bench.small else "bf16"
    bench.row("ceiling", matmul_tflops=measure_matmul_peak(DEVICE, precision) / 1e12)
    source = torch.empty(2**20 if bench.small else 2**32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    bench.row("ceiling", copy_tb_per_s=2 * len(source) / copy_s / 1e12)
    name = torch.cuda.get_device_name() if ON_GPU else "cpu"
    cudnn = torch.backends.cudnn.version()
    bench.row("machine", gpu=name, torch=torch.__version__, cores=os.cpu_count(), cudnn=cudnn)


def kernels(bench: Bench) -> None:
    """Attention, and matrix products of the shapes of layers and logits."""
    chosen = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if ON_GPU else ()
    for heads, width, rows in ((8, 64, 32), (16, 128, 4)):
        shape = (2 if bench.small else rows, heads, 64 if bench.small else 1024, width)
        q, k, v = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        for kernel in (None, *chosen):

            def both(kernel: SDPBackend | None = kernel, qkv: Any = (q, k, v)) -> None:
                with sdpa_kernel(kernel) if kernel is not None else ExitStack():
                    F.scaled_dot_product_attention(*qkv, is_causal=True).sum().backward()

            bench.row("attention", width=width, kernel=str(kernel), ms=1e3 * median_s(both))
    for width, rows in ((512, 32768), (768, 32768), (1024, 32768), (2048, 16384)):
        for what, (m, inner, n) in {
            "qkv": (rows, width, 3 * width),
            "up": (rows, width, 8 * width),
            "down": (rows, 4 * width, width),
            "weight gradient of up": (8 * width, rows, width),
            "logits": (8192, width, 50304),
            "weight gradient of logits": (50304, 8192, width),
        }.items():
            m, inner, n = (min(x, 64) if bench.small else x for x in (m, inner, n))
            a = torch.randn(m, inner, device=DEVICE, dtype=torch.bfloat16)
            b = torch.randn(inner, n, device=DEVICE, dtype=torch.bfloat16)
            taken = median_s(lambda a=a, b=b: a @ b)
            bench.row("product", width=width, what=what, tflops=2 * m * inner * n / taken / 1e12)


# --- analysis -------------------------------------------------------------------------------------


def measuring(bench: Bench) -> None:
    """Token-forwards a second by batch size: our 150M, and a Llama of SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from olmo_sparsity.analysis.inputs.documents import Document
    from olmo_sparsity.analysis.inputs.windows import Windows
    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
    from olmo_sparsity.analysis.scoring.scorer import Scorer

    config = load_config(CONFIGS / "c4_150m_pose.yaml").model
    config.vocab_size, config.embedding_size = (512, 512) if bench.small else (50280, 50304)
    if bench.small:
        config.d_model, config.n_heads, config.n_layers = 32, 2, 2
    sizes = (32, 64, 2, 2, 1, 512) if bench.small else (576, 1536, 30, 9, 3, 49152)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "vocab_size")  # fmt: skip
    llama = LlamaConfig(**dict(zip(names, sizes, strict=True)), max_position_embeddings=2048)
    windows = Windows(48, 16, 4) if bench.small else Windows(512, 128, 16)
    num_targets = 4 if bench.small else 64
    document = Document(np.random.default_rng(0).integers(3, 500, windows.long + num_targets))
    models: dict[str, Callable[[], Any]] = {
        "olmo 150m": lambda: build_model(config),
        "llama 135m": lambda: HuggingFaceLM(LlamaForCausalLM(llama)),
    }
    for name, build in models.items():
        model = build().eval().to(DEVICE)
        model = model if bench.small else model.bfloat16()
        for selector in ("add_one", "add_one_screened", "gradient"):
            for batch_tokens in (None, 16384):
                for _ in range(1 if bench.small else 2):
                    scorer, began = Scorer(model, batch_tokens=batch_tokens), time.perf_counter()
                    recover(scorer, document, windows, selectors=selector, ks=(1, 4))
                    taken = time.perf_counter() - began
                rate = round(scorer.token_forwards / taken)
                bench.row("measure", model=name, selector=selector,
                          batch_tokens=scorer.batch_tokens, token_forwards_per_s=rate)  # fmt: skip


PARTS = (ceilings, step, larger, measuring, host, kernels)


def main(words: list[str] | None = None) -> int:
    """Return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--small", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--only", help="parts, separated by commas")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    bench, started, failed = Bench(options.out, options.small), time.monotonic(), False
    for part in PARTS:
        name, left = part.__name__, options.seconds - (time.monotonic() - started)
        if options.only and name not in options.only.split(","):
            continue
        if left < 20:
            bench.row(name, skipped=f"{left:.0f} s left")
            continue
        began = time.monotonic()
        try:
            part(bench)
        except Exception as error:
            failed = True
            bench.row(name, failed=repr(error)[:300], where=traceback.format_exc()[-600:])
        bench.row(name, took_s=round(time.monotonic() - began, 1))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
