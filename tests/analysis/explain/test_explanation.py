"""One call: its numbers against plain transformers, what it names, how it is asked from a shell."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity.analysis.explain.check import _unrelated
from olmo_sparsity.analysis.explain.explanation import to_json
from olmo_sparsity.analysis.inputs.documents import Controls
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.scoring.scorer import context_losses
from olmo_sparsity.command.cli import main
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.layers import causal_bias
from tests.support.brute import Brute
from tests.support.explanations import FOREIGN, SHORT, TEXT, asked, make_model, make_tokenizer
from tests.support.families import SUPPORTED, build, find


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("prefix", ["auto", "none", "w1 w2"])
@pytest.mark.parametrize("far_states", ["contextual", "isolated"])
def test_numbers_are_those_of_plain_transformers(model: Any, prefix: str, far_states: Any) -> None:
    found = asked(model, prefix=prefix, far_states=far_states)
    start: dict[str, tuple[int, ...]] = {"auto": (1,), "none": (), "w1 w2": (4, 5)}
    row = found.targets.iloc[-1]
    assert row.text.strip() == "w7 w8"

    def plain(tokens: torch.Tensor, positions: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        (mask,) = bias or [causal_bias(tokens.shape[1], torch.device("cpu"))]
        return model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits

    ids = np.array(make_tokenizer(bos=False)(TEXT).input_ids)
    windows = Windows("all", SHORT, prefix=start[prefix])
    brutes = [
        Brute(plain, ids, windows, place, far_states, start=row.target)
        for place in (row.target, row.target + 1)
    ]

    def loss(far: list[int]) -> float:
        return sum(brute.loss(far) for brute in brutes)

    every = list(range(row.target - SHORT))
    assert row.loss_long == pytest.approx(loss(every), abs=1e-5)
    assert row.loss_short == pytest.approx(loss([]), abs=1e-5)
    falls = np.array([loss([]) - loss([place]) for place in every])
    units = found.far[found.far.target == row.target]
    np.testing.assert_allclose(units.nats, np.sort(falls)[::-1][:3], atol=2e-5)
    np.testing.assert_allclose(falls[units["first"]], units.nats, atol=2e-5)
    for k, unit in enumerate(units.itertuples(), 1):
        chosen = units["first"].tolist()[:k]
        assert unit.loss_set == pytest.approx(loss(chosen), abs=2e-5)
        without = loss([place for place in every if place not in chosen])
        assert unit.loss_without == pytest.approx(without, abs=2e-5)


@pytest.mark.parametrize("selector", ["add_one", "gradient", "attention"])
def test_a_model_in_memory_comes_back_as_it_was(selector: str) -> None:
    model = make_model()
    model.train()
    model.lm_head.eval()
    model.lm_head.weight.requires_grad_(False)

    def state() -> list[Any]:
        modules = [module.training for module in model.modules()]
        weights = [(w.requires_grad, w.grad, w.device, w.dtype) for w in model.parameters()]
        return [modules, weights, model.config.to_dict(), model.config._attn_implementation]

    before, numbers = state(), [weight.clone() for weight in model.parameters()]
    assert len(set(before[0])) == 2
    e = asked(model, selector=selector)
    assert state() == before
    e.check(draws=2)
    assert state() == before
    assert all(map(torch.equal, model.parameters(), numbers))


@pytest.mark.parametrize("long", ["all", 30])
def test_without_names_the_largest_gaps_are_looked_at(model: Any, long: Any) -> None:
    found = asked(model, at=None, long=long, selector="nearest")
    assert found.chosen_by_gap
    # Those of the placebo are chosen with the text that is then asked about.
    recovery = found.check(draws=2).tables["recovery"]
    placebo = recovery[(recovery.far_part == "placebo") & (recovery.control == "own")]
    controls = Controls(
        _unrelated(found.model, FOREIGN, found.document), found.windows, num_draws=2
    )
    losses = context_losses(found.prepared.scorer, found.document, found.windows, controls)
    losses = losses.set_index("target").loc[SHORT + 1 :]

    def largest(loss_long: pd.Series) -> pd.Series:
        gaps = (losses.loss_short - loss_long).nlargest(8)
        return gaps[gaps >= 0.1].sort_index()

    own = largest(losses.loss_long)
    assert found.targets.target.tolist() == own.index.tolist()
    np.testing.assert_allclose(found.targets.gap, own, atol=1e-5)
    chosen = sorted(placebo.target.unique().tolist())
    assert chosen == largest(losses.placebo_loss_long).index.tolist() != []


@pytest.mark.parametrize("long", ["all", 30])
def test_a_long_text_has_at_most_so_many_windows(
    model: Any, long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then targets of the largest gaps are those of shared windows; their numbers stay exact."""
    exact = asked(model, at=None, long=long, selector="nearest")
    monkeypatch.setattr("olmo_sparsity.analysis.explain.prompt.MOST_WINDOWS", 8)
    found = asked(model, at=None, long=long, selector="nearest")
    blocks, document = found.prepared.blocks_to_select(), found.document
    assert len(blocks) <= 8 < len(document.tokens) // 2
    assert sum(block.num_targets for block in blocks) > 8
    losses = context_losses(found.prepared.scorer, document, found.windows, blocks=blocks)
    losses = losses.set_index("target")
    gaps = (losses.loss_short - losses.loss_long).loc[SHORT + 1 :].nlargest(8)
    assert set(found.targets.target) == set(gaps[gaps >= 0.1].index) != set()
    assert found.token_forwards < exact.token_forwards
    both = exact.targets.merge(found.targets, on="target", suffixes=("", "_shared"))
    np.testing.assert_allclose(both.gap, both.gap_shared, atol=1e-5)


@pytest.mark.parametrize("far_states", ["contextual", "isolated"])
def test_a_number_of_tokens_is_at_most_so_many(model: Any, far_states: str) -> None:
    """As if the text began there; a target before it sees all."""
    found = asked(model, at=[slice(20, 21), slice(50, 52)], long=30, far_states=far_states)
    assert found.targets.target.tolist() == [20, 50]
    for row, first in zip(found.targets.itertuples(), (0, 20), strict=True):
        text = "".join(found.document.texts[first:]).strip()
        span = slice(row.target - first, row.end - first)
        alone = asked(model, text=text, at=span, far_states=far_states)
        assert row.loss_long == pytest.approx(alone.targets.loss_long[0], abs=1e-5)
        far = found.far[found.far.target == row.target]
        assert (far["first"] - first).tolist() == alone.far["first"].tolist()
        np.testing.assert_allclose(far.nats, alone.far.nats, atol=1e-5)
    assert found.check(draws=2).table.foreign.notna().all()


@pytest.fixture(scope="module")
def limited() -> Any:
    return build(SUPPORTED[find("Llama 1, 2, 3")], vocab_size=45, max_position_embeddings=42)


def test_a_text_longer_than_the_model_is_cut_off(limited: Any, capsys: Any) -> None:
    found = asked(limited, at=[slice(30, 31), slice(60, 61)])
    assert "longer than the model takes: long windows of 41 tokens" in capsys.readouterr().err
    assert found.targets.target.tolist() == [30, 60]
    assert found.far[found.far.target == 60]["first"].min() >= 60 - 41
    for given in ({}, {"long": 1000}, {"long": 20}):  # a number is at most so many, too
        asked(limited, at=slice(30, 31), **given)
        assert "longer" not in capsys.readouterr().err
    capped = asked(limited, at=[slice(30, 31), slice(60, 61)], long=1000)
    assert "long windows of 41 tokens" in capsys.readouterr().err
    assert capped.targets.equals(found.targets)


def test_spans_that_do_not_fit_before_a_target_are_not_asked_about(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of named targets, nor of those of the placebo."""
    found = asked(model, at=[slice(SHORT + 1, SHORT + 2), slice(40, 41)], units="span:20")
    assert found.targets.target.tolist() == [40]
    assert "1 of 2 targets precede token" in capsys.readouterr().err
    found = asked(model, at=None, units="span:20", selector="nearest")
    assert found.targets.target.min() >= SHORT + 20
    assert found.check(draws=2).placebo is not None


def test_an_explanation_is_sent_to_another_process_without_its_model(
    model: Any, tmp_path: Path
) -> None:
    found = asked(model, at="w8")
    found.check(draws=2)
    found.save(tmp_path / "e.json")
    pickled = pickle.dumps(found)
    assert len(pickled) < 100_000
    kept = pickle.loads(pickled)
    assert repr(kept) == repr(found)
    assert to_json(kept) == to_json(found) == (tmp_path / "e.json").read_text()
    pd.testing.assert_frame_equal(kept.top(2), found.top(2))
    for name, one in (("e.html", found), ("kept.html", kept)):
        one.to_html(tmp_path / name)
    assert (tmp_path / "kept.html").read_text() == (tmp_path / "e.html").read_text()
    with pytest.raises(ConfigError, match="path"):
        kept.to_html(tmp_path / "kept.pdf")
    with pytest.raises(ConfigError, match="model"):
        kept.check()


@pytest.mark.parametrize("at", ["w7 w8", None])
def test_a_weight_that_is_no_number_is_not_explained_away(at: str | None) -> None:
    model = make_model()
    with torch.no_grad():  # of a word that stands among the far ones
        model.model.embed_tokens.weight[make_tokenizer().convert_tokens_to_ids("w5")] = torch.nan
    text = "w5 " + " ".join(f"w{i}" for i in range(6, 24)) + " w7 w8 w9"
    with pytest.raises(DataError, match="losses of targets are not finite"):
        asked(model, text=text, at=at)


def shell(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["explain", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    (tmp_path / "foreign.txt").write_text("\n\n".join(FOREIGN))
    given = [folder, "--text", str(path), "--at", "w7 w8", "--short", "8", "-k", "2"]
    code, out, err = shell(capsys, *given)
    assert code == 0, err
    assert "gap" in out
    assert "\x1b" not in out  # no terminal
    checked = f"--json --check --foreign {tmp_path}/foreign.txt".split()
    code, out, err = shell(capsys, *given, *checked)
    assert code == 0, err
    told = json.loads(out)
    assert [target["text"].strip() for target in told["targets"]][-1] == "w7 w8"
    assert told["check"]["draws"] == 8
    # A check that fails loses nothing of what is found.
    failing = f"--json --html {tmp_path}/page.html --check --foreign {tmp_path}/nowhere".split()
    code, out, err = shell(capsys, *given, *failing)
    assert code == 2
    assert "nowhere" in err
    assert json.loads(out) == told | {"check": None, "tables": json.loads(out)["tables"]}
    assert (tmp_path / "page.html").is_file()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, piped, err = shell(capsys, folder, "--text", "-", *given[3:], "--json")
    assert code == 0, err
    assert json.loads(piped)["targets"] == told["targets"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "TEXT", "--at", "zebra"], "does not occur in the text"),
        (["--text", "TEXT", "--at", "40"], "40:41"),
        (["--text", "TEXT", "--at", "/(/"], "regular expression"),
        (["--text", "TEXT", "--at", "0:2"], "no target has distant tokens"),
        (["--text", "TEXT", "--short", "400"], "no target has distant tokens"),
        (["--text", "TEXT", "--selector", "addone"], "is not a selector; pass one of"),
        (["--text", "TEXT", "--units", "span"], "none of tokens"),
        (["--text", "TEXT", "--target", "w3"], "belong to a prompt"),
        (["--text", "TEXT", "--foreign", "embedded"], "--foreign requires --check"),
        (["--text", "TEXT", "--html", "page.txt"], "must end in .html"),
        (["--text", "TEXT", "--at", "9000:9001"], "at=9000:9001 does not occur"),
        (["--text", "BINARY"], "not text in UTF-8"),
        (["--prompt", "w1 w2", "--target", ""], "the target is empty"),
        (["--prompt", "w1", "--target", "w2"], "no target has distant tokens"),
    ],
)
def test_mistakes_are_one_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    files = {"TEXT": TEXT.encode(), "BINARY": b"\xff\xfe\x00\x01" * 9}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / word) if word in files else word for word in words]
    code, out, err = shell(capsys, folder, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert len([line for line in err.splitlines() if line.strip()]) == 1
