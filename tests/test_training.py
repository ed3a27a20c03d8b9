"""Training: one step, the schedule, the log, evaluation, starting from weights."""

from __future__ import annotations

import json
import math
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from analysis.measurement import measure
from analysis.plan import Plan
from analysis.probe import SparsityProbe, probe_documents, probe_settings
from olmo_sparsity.config import IGNORED, OptimizerConfig, RunConfig
from olmo_sparsity.data.batches import Batch, heldout_batches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.model.load import build_model, load_model
from olmo_sparsity.model.losses import token_losses
from olmo_sparsity.training import loop
from olmo_sparsity.training.checkpoint import TrainerState
from olmo_sparsity.training.engine import Engine, choose_device, choose_precision
from olmo_sparsity.training.estimate import (
    count_parameters,
    estimate,
    flops_per_token,
    stated_flops,
)
from olmo_sparsity.training.evaluate import evaluate, induction_drop
from olmo_sparsity.training.loop import Outcome, resolve, train
from olmo_sparsity.training.optim import build_optimizer, learning_rate
from olmo_sparsity.training.run_folder import Metrics, draw_losses, loss_table, read_metrics

MakeConfig = Callable[..., RunConfig]
GPT_NEOX = {
    **{"architecture": "gpt_neox", "d_model": 32, "n_heads": 2, "n_layers": 2},
    **{"max_sequence_length": 64, "activation_type": "gelu", "include_bias": True},
}


def rows(config: RunConfig) -> list[dict]:
    return list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))


def losses(config: RunConfig) -> list[float]:
    return [row["loss"] for row in rows(config) if "loss" in row]


def final_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_model(config.run_folder, device="cpu").model.state_dict()


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_a_whole_folder(make_config: MakeConfig) -> None:
    config = make_config(training__num_steps=40, training__batch_size=16)
    assert train(config) is Outcome.FINISHED
    folder = Path(config.run_folder)
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
    }
    curve = losses(config)
    assert len(curve) == 40
    assert sum(curve[-5:]) / 5 < curve[0] - 0.5
    (start,) = json.loads((folder / "environment.json").read_text())
    assert start["engine"]["class"] == "Engine"
    assert start["versions"]["torch"] == torch.__version__
    kept = list_checkpoints(folder)
    assert [path.name for path in kept] == ["step000040", "step000038"]
    assert "held-out loss by position" in loss_table(folder)


def test_a_finished_run_is_left_alone(
    make_config: MakeConfig, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    metrics = trained / "metrics.jsonl"
    before = metrics.read_bytes()
    assert train(make_config()) is Outcome.FINISHED
    assert metrics.read_bytes() == before
    metrics.unlink()
    assert train(make_config()) is Outcome.FINISHED
    assert "held-out loss by position: lost" in capsys.readouterr().err


def test_runs_repeat_and_seeds_differ(make_config: MakeConfig, tmp_path: Path) -> None:
    curves = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = make_config(run_folder=str(tmp_path / name), seed=seed)
        train(config)
        curves.append(losses(config))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"training__activation_checkpointing": True},
        {"training__precision": "bf16"},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_every_variant_trains(make_config: MakeConfig, changes: dict) -> None:
    config = make_config(**changes, training__num_steps=12)
    train(config)
    assert losses(config)[-1] < losses(config)[0]


# --- one step -------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(0, 300, (6, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(tokens, -1, 1)
    labels[:, -1] = IGNORED
    labels[0, 3:9] = IGNORED  # micro-batches hold unequal numbers of labels
    return Batch(tokens, torch.arange(16).expand(6, 16), labels)


def engine_for(config: RunConfig) -> Engine:
    config.model.vocab_size = 300
    torch.manual_seed(0)
    return Engine(build_model(config.model), config)


def test_gradient_accumulation_equals_one_batch(make_config: MakeConfig, batch: Batch) -> None:
    engines = [
        engine_for(make_config(training__batch_size=6, training__micro_batch_size=micro))
        for micro in (6, 3, 1)
    ]
    found = [engine.step(batch, 1e-3) for engine in engines]
    for engine, (loss, norm) in zip(engines, found, strict=True):
        torch.testing.assert_close(loss, found[0][0])
        torch.testing.assert_close(norm, found[0][1])
        for ours, first in zip(
            engine.model.parameters(), engines[0].model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, first, rtol=1e-4, atol=1e-5)


def test_the_step_is_that_of_plain_pytorch(make_config: MakeConfig, batch: Batch) -> None:
    """Against a bare loop: cross-entropy over all labels, clip, AdamW."""
    config = make_config(training__max_grad_norm=0.1, training__batch_size=6)
    engine = engine_for(config)
    torch.manual_seed(0)
    bare = build_model(config.model)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        loss, _ = engine.step(batch, 3e-3)
        logits = bare(batch.tokens_BL, batch.positions_BL)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BL.flatten())
        optimizer.zero_grad()
        expected.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for ours, theirs in zip(engine.model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_compiled_equals_eager(make_config: MakeConfig, batch: Batch) -> None:
    changes = {"training__batch_size": 6, "model__n_layers": 1}
    eager = engine_for(make_config(**changes))
    compiled = engine_for(make_config(**changes, training__compile=True))
    for _ in range(2):
        torch.testing.assert_close(compiled.step(batch, 1e-3)[0], eager.step(batch, 1e-3)[0])
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()


def test_decay_groups(make_config: MakeConfig) -> None:
    model = build_model(engine_for(make_config(model__weight_tying=False)).config.model)

    def decayed(**settings: bool) -> int:
        groups = build_optimizer(model, OptimizerConfig(**settings)).param_groups
        return sum(p.numel() for g in groups if g["weight_decay"] for p in g["params"])

    everything = count_parameters(model)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    embedding = model.transformer.wte.weight.numel()
    assert decayed() == everything
    assert decayed(decay_norm_and_bias=False) == everything - norms
    assert decayed(decay_embeddings=False) == everything - embedding


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training__length": 64}, "matmul"),
        ({"training__length": 256}, "flash_attention"),
        ({"training__length": 64, "model__n_kv_heads": 1}, "flash_attention"),
        ({"training__length": 256, "model__rope": False, "model__alibi": True}, "flash_attention"),
    ],
)
def test_the_attention_kernel_that_is_named_is_the_one_that_runs(
    make_config: MakeConfig, changes: dict, expected: str
) -> None:
    length = changes["training__length"]
    changes |= {"positions__target_length": length, "model__max_sequence_length": length}
    engine = engine_for(make_config(**changes, training__batch_size=2))
    tokens_BL = torch.randint(0, 300, (2, length))
    with torch.profiler.profile() as profiled:
        engine.step(Batch(tokens_BL, torch.arange(length).expand(2, length), tokens_BL), 1e-3)
    ran = {event.key for event in profiled.key_averages()}
    assert engine.describe()["attention"] == expected
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == (expected != "matmul")


# --- attention within documents -------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [{}, {"rope": False, "alibi": True}, {"rope": False}, {"n_kv_heads": 1}, GPT_NEOX],
    ids=["rope", "alibi", "nope", "grouped", "gpt_neox"],
)  # fmt: skip
def test_the_loss_of_a_masked_document_is_its_loss_alone(
    make_config: MakeConfig, run_dict: dict, model: dict, precision: str
) -> None:
    """In training and held out; its position IDs may even begin anew, since only their differences
    count."""
    run_dict["model"] = model if model == GPT_NEOX else run_dict["model"] | model
    engine = engine_for(make_config(training__batch_size=2, training__precision=precision))
    lengths, generator = (5, 1, 18), torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(1, 300, (2, sum(lengths)), generator=generator)
    labels_BL = tokens_BL.roll(-1, 1)
    numbers_L = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions_BL = torch.arange(24).expand(2, 24)
    packed = Batch(tokens_BL, positions_BL, labels_BL, numbers_L.expand(2, 24))
    places = [slice(0, 5), slice(5, 6), slice(6, 24)]
    apart = [
        Batch(tokens_BL[:, some], positions_BL[:, : some.stop - some.start], labels_BL[:, some])
        for some in places
    ]
    near = {"rtol": 2e-2, "atol": 2e-2} if precision == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
    nll_BL = engine.token_losses(packed)
    torch.testing.assert_close(
        nll_BL, torch.cat([engine.token_losses(b) for b in apart], 1), **near
    )
    unmasked = engine.token_losses(Batch(tokens_BL, positions_BL, labels_BL))
    assert (nll_BL[:, 6:] - unmasked[:, 6:]).abs().max() > 0.05, "the mask hides something"

    def gradients(batches: list[Batch]) -> torch.Tensor:
        engine.model.zero_grad()
        for batch in batches:
            with engine.autocast():
                engine.losses(batch, 48).backward()
        return torch.cat([p.grad.flatten() for p in engine.model.parameters()])

    one, other = gradients([packed]), gradients(apart)
    assert (one - other).norm() < near["rtol"] * other.norm()


def test_a_run_within_documents_is_another_one(make_config: MakeConfig, tmp_path: Path) -> None:
    curves = []
    for mask in (True, False):
        config = make_config(
            run_folder=str(tmp_path / str(mask)), data__mask_documents=mask, training__length=32
        )
        train(config)
        curves.append(losses(config))
    assert curves[0] != curves[1]


# --- schedule -------------------------------------------------------------------------------------


def test_the_linear_schedule_is_that_of_transformers() -> None:
    from transformers import get_linear_schedule_with_warmup

    config = OptimizerConfig()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    theirs = get_linear_schedule_with_warmup(optimizer, 300, 1000)
    for step in range(1, 1001):
        optimizer.step()
        theirs.step()
        assert learning_rate(config, step, 1000) == pytest.approx(theirs.get_last_lr()[0])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_warm_up_and_end_where_they_should(schedule: str) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=10, final_lr_share=0.1)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(5e-6)
    assert max(rates) == rates[9] == 5e-5
    assert rates[-1] == pytest.approx(5e-5 if schedule == "constant" else 5e-6)
    assert learning_rate(OptimizerConfig(warmup_steps=0), 1, 1) == 0.0


# --- evaluation -----------------------------------------------------------------------------------


def test_losses_by_position_are_means_over_those_positions(make_config: MakeConfig) -> None:
    config = make_config(evaluation__length=50, evaluation__batch_size=3)
    heldout = open_shards(config.data, "heldout")
    resolve(config, heldout, torch.device("cpu"))
    engine = Engine(build_model(config.model), config)
    found = evaluate(engine, heldout, config)
    assert [(row["from"], row["to"]) for row in found] == [(0, 16), (16, 32), (32, 50)]
    (whole,) = heldout_batches(heldout, length=50, num_sequences=4, batch_size=4)
    nll_BL = token_losses(engine.model, whole.tokens_BL, whole.positions_BL, whole.labels_BL)
    for row, columns in zip(found, (slice(0, 15), slice(15, 31), slice(31, 49)), strict=True):
        assert row["loss"] == pytest.approx(float(nll_BL[:, columns].mean()), rel=1e-5)
        assert row["num_tokens"] == nll_BL[:, columns].numel()
        # The same with the bytes counted document by document.
        texts = [
            heldout.tokenizer.decode(heldout.document(i).tolist()) for i in range(len(heldout))
        ]
        num_bytes = sum(len(text.encode()) for text in texts)
        bits = row["loss"] / math.log(2) * heldout.num_tokens / num_bytes
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


def test_induction_is_the_fall_in_loss_on_a_second_reading(make_config: MakeConfig) -> None:
    """Of a parrot, which knows what followed a token the last time, and of a fresh model."""
    config = make_config(training__length=20, evaluation__batch_size=1)
    heldout = open_shards(config.data, "heldout")
    resolve(config, heldout, torch.device("cpu"))
    engine = Engine(build_model(config.model), config)
    assert abs(induction_drop(engine, heldout, config)) < 0.1

    def parrot(batch: Batch) -> torch.Tensor:
        nll_BL = torch.zeros(batch.labels_BL.shape)
        for row, labels in enumerate(batch.labels_BL.tolist()):
            for place, label in enumerate(labels):
                nll_BL[row, place] = 3.0 * (label != IGNORED and place < 10)
        return nll_BL

    engine.token_losses = parrot
    assert induction_drop(engine, heldout, config) == pytest.approx(3.0)
    shares = []
    for rank in range(30):  # more processes than the last batch has passages
        engine.processes = SimpleNamespace(
            rank=rank, world_size=30, add_up=lambda sums: shares.append(sums) or torch.ones(3)
        )
        induction_drop(engine, heldout, config)
    assert sum(shares).tolist() == [3 * 64, 0, 64]


# --- starting from weights ------------------------------------------------------------------------


def test_init_from_starts_with_those_weights(
    make_config: MakeConfig, trained: Path, tmp_path: Path
) -> None:
    first = make_config()
    second = make_config(
        run_folder=str(tmp_path / "second"),
        init_from=str(trained),
        positions__target_length=48,
        optimizer__learning_rate=1e-30,
        optimizer__weight_decay=0.0,
        training__num_steps=1,
    )
    train(second)
    weights = final_weights(second)
    for name, tensor in final_weights(first).items():
        assert torch.equal(tensor, weights[name]), name


# --- what the user is told ------------------------------------------------------------------------


def test_estimates_count_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512, model__weight_tying=False)
    model = build_model(config.model)
    assert estimate(config)["parameters"] == f"{count_parameters(model):,}"
    weights = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    weights += sum(p.numel() for n, p in model.named_parameters() if "out" in n)
    assert flops_per_token(model, config) == 6 * weights + 6 * 2 * 16 * 32


@pytest.mark.usefixtures("trained")
def test_another_config_in_the_same_folder_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate=0\.01 \(now 0\.5\)"):
        train(make_config(optimizer__learning_rate=0.5))
    train(make_config(optimizer__learning_rate=0.01, logging__interval_steps=1))


def test_other_data_under_the_same_run_is_refused(
    make_config: MakeConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainerState.read(list_checkpoints(trained)[0])
    state.data_fingerprint = "another"
    monkeypatch.setattr(TrainerState, "read", staticmethod(lambda folder: state))
    with pytest.raises(DataError, match="other tokens"):
        train(make_config())


def test_a_model_too_small_for_its_tokenizer_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100 is smaller than the tokenizer's"):
        train(make_config(model__vocab_size=100))


def test_a_loss_that_is_not_a_number_stops_the_run(make_config: MakeConfig) -> None:
    config = make_config(optimizer__learning_rate=1e30, training__num_steps=30)
    with pytest.raises(UserError, match=r"step \d+: loss .*Lower optimizer\.learning_rate"):
        train(config)
    for folder in list_checkpoints(config.run_folder):
        for tensor in load_model(str(folder), device="cpu").model.state_dict().values():
            assert torch.isfinite(tensor).all()


def test_a_last_step_that_diverges_is_no_finished_run(make_config: MakeConfig) -> None:
    """Its own loss was still that of the weights before."""
    config = make_config(
        model__layer_norm_type="default",
        optimizer__learning_rate=1e30,
        optimizer__schedule="constant",
        optimizer__warmup_steps=0,
        training__num_steps=1,
    )
    with pytest.raises(UserError, match=r"step 1: held-out loss nan.*Lower optimizer"):
        train(config)
    assert list_checkpoints(config.run_folder) == []


def test_weights_that_are_no_numbers_are_not_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def spoil(self: Engine, *given: object) -> object:
        found = step(self, *given)
        next(self.model.parameters()).data[0] = torch.nan
        return found

    monkeypatch.setattr(Engine, "step", spoil)
    with pytest.raises(UserError, match=r"step 1: sum of the weights nan"):
        train(make_config(checkpoint__interval_steps=1))


def test_devices_and_precisions_are_chosen_or_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match=r"training\.device=warp"):
        choose_device("warp")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"training\.device=cuda"):
            choose_device("cuda")
    assert choose_precision("fp32", torch.device("cpu")) == "fp32"
    assert choose_precision("auto", torch.device("cpu")) in ("fp32", "bf16")


@pytest.mark.parametrize(
    "damage",
    [
        b"\xf6\x00", b"5", b'{"step": 2, "lo', b'{"step": "2"}', b'{"step": 2, "loss": null}',
        b"[" * 10**5, b'{"step": 2, "loss": 1.5, "line": 2, "crc32": "00000000"}',
        b'{"step": 2, "heldout": [{}]}',
    ],
)  # fmt: skip
def test_a_damaged_line_of_the_metrics_is_named_and_left(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage)
    assert list(read_metrics(path)) == [{"step": 1}], "the last one, cut short by a kill"
    content = b'{"step": 1}\n' + damage + b'\n{"step": 3}\n'
    path.write_bytes(content)
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 3}]
    Metrics(tmp_path, 3, [])
    assert path.read_bytes() == content
    assert "1 damaged lines are passed over: 2" in capsys.readouterr().err


def test_a_line_of_the_metrics_that_is_lost_or_there_twice_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path, 0, [])
    for step in range(1, 5):
        metrics.write({"step": step, "loss": 1.0})
    whole = path.read_bytes().splitlines(keepends=True)
    for lines, steps, said in (
        (whole[:1] + whole[2:], [1, 3, 4], "1 lines are lost"),
        (whole[:2] + whole[1:], [1, 2, 3, 4], "1 damaged lines are passed over: 3"),
    ):
        path.write_bytes(b"".join(lines))
        assert [row["step"] for row in read_metrics(path)] == steps
        Metrics(tmp_path, 4, [])
        assert said in capsys.readouterr().err


def test_metrics_past_the_checkpoint_are_written_anew(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "lo')
    metrics = Metrics(tmp_path, 5, [])
    metrics.add(6, loss=torch.tensor(2.0), gradient_norm=1.0)
    metrics.flush(tokens_per_s=3.0)
    found = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1] == {"step": 6, "loss": 2.0, "gradient_norm": 1.0, "tokens_per_s": 3.0}


def test_too_little_heldout_text_ends_a_run_before_its_first_step(make_config: MakeConfig) -> None:
    training = {"training__length": 10**6, "positions": {}, "model__max_sequence_length": 10**6}
    for changes in ({"evaluation__length": 10**6}, training | {"evaluation__length": 4}):
        config = make_config(**changes)
        with pytest.raises(DataError, match="no file of the held-out text holds one"):
            train(config)
        assert not Path(config.run_folder).exists()


def test_sinks_are_asked_for_and_receive_every_row(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[dict, int]] = []
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(id="a1", log=lambda row, step: received.append((row, step)))
    opened: list[dict] = []
    fake.init = lambda **settings: opened.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(config := make_config(logging__wandb_project="test"))
    assert [step for _, step in received] == [1, 2, 3, 4, 5, 6, 6]
    assert {"train/tokens_per_s", "train/peak_memory_gib"} <= received[-2][0].keys()
    places = ("0-16", "16-32", "32-64")
    assert set(received[-1][0]) == {
        *(f"{name}/{place}" for name in ("heldout", "heldout_bits_per_byte") for place in places),
        "heldout/induction_drop",
    }
    shutil.rmtree(list_checkpoints(config.run_folder)[0])
    train(config)
    assert [settings["id"] for settings in opened] == [None, "a1"]


def test_the_share_of_the_stated_peak_is_logged_where_it_is_known(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(training__num_steps=1, training__batch_size=4, training__length=16)
    train(config)
    assert not [row for row in rows(config) if "mfu" in row]
    monkeypatch.setattr(loop, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    config = make_config(run_folder=config.run_folder + "-a100")
    train(config)
    (row,) = [row for row in rows(config) if "mfu" in row]
    model = load_model(config.run_folder, device="cpu").model
    expected = row["tokens_per_s"] * flops_per_token(model, config) / 312e12
    assert row["mfu"] == pytest.approx(expected)
    assert 0.1 < row["peak_memory_gib"] < 100


def test_stated_peaks_go_by_the_device_name() -> None:
    for name, tflops in {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
    }.items():
        assert stated_flops(name) == tflops * 1e12
    for name in ("cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert stated_flops(name) is None


# --- the curves of a run --------------------------------------------------------------------------


def test_the_curves_are_printed_and_drawn_for_every_evaluation(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(evaluation__interval_steps=2)
    train(config)
    table = loss_table(config.run_folder).splitlines()
    evaluations = [row for row in rows(config) if "heldout" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    for row, line in zip(evaluations, table[-3:], strict=True):
        losses_and_drop = [*(part["loss"] for part in row["heldout"]), row["induction_drop"]]
        assert line.split() == [str(row["step"]), *(f"{value:.4f}" for value in losses_and_drop)]
    draw_losses(config.run_folder, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert "held out, 16 … 31" in drawn
    metrics = Path(config.run_folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in lines:
        row.pop("crc32")  # as an older version wrote them
        row.pop("induction_drop", None)
        for part in row.get("heldout", []):
            part.pop("bits_per_byte")
    metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert "nan" in loss_table(config.run_folder), "a run of before has neither"
    draw_losses(config.run_folder, tmp_path / "curves.svg")


def test_sparsity_is_probed_at_every_evaluation(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of a run's metrics are those that `measure` finds of its checkpoint."""
    targets = Plan.targets
    changes = {
        "training__length": 64, "positions__target_length": 64, "training__num_steps": 2,
        "evaluation__interval_steps": 1,
    }  # fmt: skip
    plain = make_config(**changes)
    train(plain)
    config = make_config(evaluation__sparsity_targets=4, run_folder=str(tmp_path / "probed"))
    with pytest.raises(ConfigError, match="needs the command"):
        train(config)
    train(config, probe=SparsityProbe)
    for name, weight in final_weights(plain).items():
        torch.testing.assert_close(final_weights(config)[name], weight, rtol=0, atol=0)
    found = [row["sparsity"] for row in rows(config) if "heldout" in row]
    assert len(found) == 2
    heldout = open_shards(config.data, "heldout")
    settings = probe_settings(config)
    documents = probe_documents(config, heldout, settings.windows)
    measured = measure(
        load_model(config.run_folder, device="cpu"), documents, settings.windows,
        units=settings.units, selectors=settings.selectors, ks=settings.ks, sets=settings.sets,
        max_targets=settings.max_targets, num_foreign=settings.num_foreign,
    )  # fmt: skip
    assert measured is not None
    summary = measured.summary.set_index(["target_set", "units"])
    for units in settings.units:
        for name, value in found[-1][units].items():
            assert value == pytest.approx(summary.loc["gap", units][name], abs=1e-6)
    monkeypatch.setattr(
        Plan, "targets", lambda plan, losses: targets(plan, losses).query("far_part == 'placebo'")
    )
    assert SparsityProbe(config, heldout, torch.device("cpu"))(final_weights(config)) == {}
    assert "net span:4" in loss_table(config.run_folder)
    draw_losses(config.run_folder, tmp_path / "curves.svg")
    assert "best of span:4" in (tmp_path / "curves.svg").read_text()
    with pytest.raises(ConfigError, match="must be at least 32"):
        make_config(training__length=16)
    with pytest.raises(DataError, match="needs four"):
        train(make_config(training__length=4096, positions__target_length=4096,
                          model__max_sequence_length=4096, run_folder=str(tmp_path / "long")),
              probe=SparsityProbe)  # fmt: skip


@pytest.mark.parametrize("key", ["tensorboard", "wandb_project"])
def test_a_missing_sink_package_is_named(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'olmo-sparsity\["):
        train(make_config(**{f"logging__{key}": True if key == "tensorboard" else "x"}))
