"""Tracked checkpoints: numbers of naive forwards, paired differences, a null, runs and trainers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from olmo_sparsity import track
from olmo_sparsity.analysis.options import TrackSettings
from olmo_sparsity.analysis.results.statistics import resample_weights
from olmo_sparsity.analysis.results.tracked import Tracked
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.tracking import track as module
from olmo_sparsity.analysis.tracking.fixed_text import FixedText
from olmo_sparsity.analysis.tracking.track import TrackRequest, count_track
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.run_folder import read_metrics
from tests.support.explanations import WORDS, make_model, make_tokenizer

LONG, LOCAL = 40, 6
ROOT = Path(__file__).parents[3]


def make_texts(num: int = 12) -> list[str]:
    """Each repeats its own phrases."""
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(num):
        phrases = [" ".join(generator.choice(WORDS, 4).tolist()) for _ in range(5)]
        texts.append(" ".join(generator.choice(phrases, 30).tolist()))
    return texts


@pytest.fixture(scope="module")
def model() -> Any:
    return wrap_model(make_model(), make_tokenizer())


@pytest.fixture(scope="module")
def tracked(model: Any) -> Tracked:
    return track(model, text=make_texts(), long=LONG, local=LOCAL)


@torch.no_grad()
def naive(model: Any, ids: list[int]) -> np.ndarray:
    """The loss of each token, behind the beginning-of-text token."""
    tokens = torch.tensor([[1, *ids]])
    logits = model.model(tokens, torch.arange(len(ids) + 1)[None])[0].float()
    return -logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_numbers_are_those_of_naive_forwards(model: Any, tracked: Tracked) -> None:
    texts = [model.encode([text])[0][:LONG] for text in make_texts()]
    contexts, start = [6, 12, 24, LONG - LOCAL], LONG - LOCAL
    request = TrackRequest.of(models=(model,), text=make_texts(), long=LONG, local=LOCAL)
    text = module._Tracking(request).text
    sums: dict[str, list[tuple[float, float]]] = {}
    num_copies = 0
    for number, ids in enumerate(texts):
        of: dict[str, tuple[float, float]] = {}
        whole, block = naive(model, ids), ids[start:]
        for first, end in pairwise([0, 6, 12, 24, LONG]):
            of[f"loss_{first}_{end}"] = whole[first:end].sum(), end - first
        own = {c: naive(model, ids[start - c :])[-LOCAL:] for c in contexts}
        document = text.documents[number]
        far = text.controls.unrelated(document, text.block(document), 0)
        assert far.document.number != number
        unrelated = {LOCAL: own[LOCAL]}
        for context in contexts[1:]:
            before = far.tokens_F.tolist()[-(context - LOCAL) :]
            mixed = naive(model, [*before, *ids[start - LOCAL : start], *block])
            unrelated[context] = mixed[-LOCAL:]
        for before, context in pairwise(contexts):
            gain = own[before].sum() - own[context].sum()
            of[f"gain_{context}"] = gain, LOCAL
            net = gain - (unrelated[before].sum() - unrelated[context].sum())
            of[f"net_gain_{context}"] = net, LOCAL
        of["net_gain"] = (unrelated[start] - own[start]).sum(), LOCAL
        near = [*pairwise(ids[start - LOCAL :])]
        of |= {
            f"{a}_{b}": (0, LOCAL) for a in ("net_gain", "gaining") for b in ("copies", "others")
        }
        for sign, text_F, gain_T in (
            (1, ids[: start - LOCAL], own[LOCAL] - own[start]),
            (-1, far.tokens_F.tolist(), own[LOCAL] - unrelated[start]),
        ):
            for i, gain in enumerate(gain_T):
                pair = near[LOCAL - 1 + i]
                is_copy = pair in pairwise(text_F) and pair not in near[: LOCAL - 1 + i]
                name = "copies" if is_copy else "others"
                num_copies += is_copy
                for kind, value in (("net_gain", gain), ("gaining", gain > 0.1)):
                    of[f"{kind}_{name}"] = of[f"{kind}_{name}"][0] + sign * value, LOCAL
        twice = torch.tensor([ids[: LONG // 2] * 2])
        with torch.no_grad():
            log_p = model.model(twice, torch.arange(LONG)[None])[0].log_softmax(-1)
        loss_T = -log_p[:-1].gather(1, twice[0, 1:, None])[:, 0].numpy()
        parts = loss_T[: LONG // 2 - 1], loss_T[LONG // 2 :]
        of["induction_drop"] = parts[0].mean() - parts[1].mean(), 1
        for name, pair in of.items():
            sums.setdefault(name, []).append(pair)
    values = tracked.numbers.set_index("number").value
    for name, pairs in sums.items():
        total, count = np.sum(pairs, axis=0)
        assert values[name] == pytest.approx(total / count, abs=1e-4), name
    assert set(values.index) - sums.keys() == {"one_unit", "recovery"}
    assert 20 < num_copies < 12 * LOCAL
    assert tracked.rows[tracked.rows.number == "one_unit"].document.tolist() == [0, 8]


def test_processes_share_the_documents_and_rows_do_not_depend_on_it(
    model: Any, tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TrackRequest.of(models=(model,), text=make_texts(), long=LONG, local=LOCAL)
    text, scorer = module._Tracking(request).text, Scorer(model.model)
    parts, gathered = [text.measure(scorer, text.numbers[rank::3]) for rank in range(3)], []

    def gather(into: list[Any], own: pd.DataFrame) -> None:
        gathered.append(own)
        into[:] = parts

    monkeypatch.setattr(module, "_processes", lambda: (1, 3))
    monkeypatch.setattr(module.dist, "all_gather_object", gather)
    joined = module.measure_together(text, scorer)
    assert set(gathered[0].document) == {1, 4, 7, 10}
    both = [f.set_index(["document", "number"]).total for f in (joined, tracked.rows)]
    pd.testing.assert_series_equal(*both, atol=1e-4)
    monkeypatch.undo()
    counted = count_track(request)
    before = scorer.token_forwards
    text.measure(scorer, text.numbers)
    assert counted.token_forwards == pytest.approx(scorer.token_forwards - before, rel=0.02)
    assert 8 <= len(text.within(counted.token_forwards * 0.9, scorer).documents) < 12
    with pytest.raises(DataError, match="budget="):
        text.within(counted.token_forwards * 0.3, scorer)
    with pytest.raises(DataError, match="7 of 7"):
        track(model, text=make_texts(7), long=LONG, local=LOCAL)
    with pytest.raises(DataError, match="long=500"):
        track(model, text=make_texts(), long=500, local=8)
    with pytest.raises(ConfigError, match="local="):
        track(model, text=make_texts(), long=8, local=3)


def test_differences_are_paired() -> None:
    generator = np.random.default_rng(0)
    level, rows = generator.normal(3, 1, 40), []
    for run, shift in (("a", 0.0), ("b", 0.1)):
        for name in ("net_gain", "loss_0_8"):
            values = level + shift + generator.normal(0, 0.05, 40)
            rows += [(run, 5, d, name, 2 * v, 2.0) for d, v in enumerate(values)]
    found = Tracked(
        pd.DataFrame(rows, columns=["run", "step", "document", "number", "total", "count"])
    )
    compared = found.compare(("a", 5), ("b", 5)).set_index("number")
    by_run = {run: [r[4] / 2 for r in rows if r[0] == run][:40] for run in "ab"}
    apart_R = resample_weights(40) / 40 @ (np.array(by_run["a"]) - np.array(by_run["b"]))
    ends = np.percentile(apart_R, [2.5, 97.5])
    assert compared.loc["net_gain", ["low", "high"]].tolist() == pytest.approx(ends)
    assert compared.ahead.tolist() == ["b", "a"]  # more gain, but a lower loss
    verdict = found.verdict("a", "b")
    assert (verdict["ahead"], verdict["step"], verdict["number"]) == ("a", 5, "loss_0_8")
    numbers = found.numbers
    assert (numbers.high - numbers.low).min() > 5 * (ends[1] - ends[0])
    one = numbers.iloc[0]
    expected = (np.std(by_run["a"]) / (0.1 * one.value)) ** 2
    assert one.documents == pytest.approx(expected, rel=0.1)
    with pytest.raises(ConfigError, match="same step"):
        Tracked(found.rows.replace({"step": {5: 6}}).pipe(
            lambda other: pd.concat([found.rows[found.rows.run == "a"], other[other.run == "b"]])
        )).verdict("a", "b")  # fmt: skip


def test_distant_text_of_others_gives_nothing_and_its_own_does() -> None:
    """A model that copies, on documents whose distant tokens are drawn as the controls are: no
    number of long contexts is further from zero than its interval is wide."""
    model, settings = load_model("demo"), TrackSettings(long=160, local=32, documents=96)
    own = FixedText.of(module.open_documents("embedded", model, 800), settings)
    mixed = []
    for document in own.documents:
        far = own.controls.unrelated(document, own.block(document), 1).tokens_F
        tokens = np.concatenate([far, document.tokens[len(far) :]])
        mixed.append(replace(document, tokens=tokens))
    null = FixedText(Documents("mixed", mixed), settings)
    vars(null)["controls"] = own.controls
    for text, gains in ((own, True), (null, False)):
        rows = text.measure(Scorer(model.model), text.numbers).assign(run="", step=0)
        found = Tracked(rows).numbers.set_index("number")
        for name in found.index[found.index.str.contains("net_gain|gaining|one_unit")]:
            value, low, high = found.loc[name, ["value", "low", "high"]]
            assert low > 0 if gains else abs(value) < high - low, name
    assert found.low["induction_drop"] > 0  # it could use them


def test_all_checkpoints_of_two_runs(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(trained, other)
    words = ["track", str(trained), str(other), "--out", str(out), "--long=30", "--local=6"]
    words += ["--documents=10"]
    assert main([*words, "--dry-run"]) == 0
    assert not out.exists()
    assert main([*words, "--shard=1/2"]) == 0
    assert not (out / "track.parquet").exists()
    calls = []
    really = module._Tracking.measure
    monkeypatch.setattr(
        module._Tracking, "measure", lambda *given: calls.append(given) or really(*given)
    )
    assert main([*words, "--shard=0/2"]) == 0
    steps = [int(path.name[4:]) for path in (trained / "checkpoints").iterdir()]
    assert len(calls) == len(steps)  # half of both runs
    assert {*pd.read_parquet(out / "track.parquet").step} == {*steps}
    assert main(words) == 0
    assert len(calls) == len(steps)
    verdict = json.loads((out / "verdict.json").read_text())
    assert (verdict["difference"], verdict["ahead"], verdict["step"]) == (0, None, max(steps))
    assert "<script" not in (out / "track.html").read_text()
    (next(iter((out / "checkpoints").iterdir()))).write_text("{}")
    assert main(words) == 0
    assert len(calls) == len(steps) + 1
    with pytest.raises(ConfigError, match=r"local=6 \(now 5"):
        module.track_checkpoints(
            TrackRequest.of(models=(str(trained),), out=out, long=30, local=5, documents=10)
        )


def test_our_trainer_tracks_each_evaluation(run_dict: dict) -> None:
    run_dict["evaluation"] |= {"interval_steps": 3, "track": 9}
    train(config_from_dict(run_dict))
    metrics = read_metrics(Path(run_dict["run_folder"]) / "metrics.jsonl")
    rows = [row for row in metrics if "track" in row]
    assert [row["step"] for row in rows] == [3, 6]
    value, low, high = rows[1]["track"]["net_gain"]
    assert low <= value <= high
    assert rows[0]["track"]["loss_16_32"][0] > rows[1]["track"]["loss_16_32"][0]
    model = load_model(run_dict["run_folder"])
    texts = [d for d in module.open_documents(None, model) if len(d.tokens) >= 32][:9]
    items = [Document(d.tokens, n) for n, d in enumerate(texts)]
    text = FixedText.of(Documents("d", items), TrackSettings(long=32, local=4, documents=9))
    again = Tracked(text.measure(Scorer(model.model), text.numbers).assign(run="", step=0)).numbers
    expected = again.dropna(subset=["value"]).set_index("number").value
    assert {name: of[0] for name, of in rows[1]["track"].items()} == pytest.approx(
        expected.to_dict(), abs=1e-4
    )
    with pytest.raises(ConfigError, match="track"):
        config_from_dict(run_dict | {"evaluation": {"track": 7}})


def test_the_callback_of_the_page_logs_numbers(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/track.md").read_text(), re.DOTALL)
    blocks = [block for block in blocks if "olmo_core" not in block]  # tests/wheel has that one
    texts = [text * 3 for text in make_texts()]
    tokenizer, inner = make_tokenizer(), make_model()
    rows = [
        {"input_ids": ids, "labels": ids} for ids in tokenizer([t[:80] for t in texts]).input_ids
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, report_to=[], use_cpu=True,
        per_device_train_batch_size=1, per_device_eval_batch_size=1, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(inner, arguments, train_dataset=rows, eval_dataset=rows[:2])
    names: dict[str, Any] = {"trainer": trainer, "tokenizer": tokenizer, "texts": texts}
    names |= {"model": inner, "track": track}
    for code in blocks:
        exec(code, names)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "track/net_gain" in row]
    assert [row["step"] for row in logged] == [1, 2]
    assert logged[0]["track/net_gain"] != logged[1]["track/net_gain"]
