"""Distant text replaced by unrelated text: losses and units against plain transformers."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from olmo_sparsity import estimate_cost, explain, load_model, measure
from olmo_sparsity.analysis.explain.unrelated import unrelated_documents
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.selectors.influence import Question, halving
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.command.cli import main
from olmo_sparsity.models.load import wrap_model
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Documents
from tests.support.explanations import SHORT, TEXT, UNRELATED, asked, make_model, make_tokenizer
from tests.support.fake_server import FakeServer
from tests.support.families import REFUSED, build

VOCAB = 45
OF_WINDOWS: dict[str, Any] = {"long": "all", "short": 6, "stride": 4}
GIVEN: dict[str, Any] = {"ks": (1, 4), "min_gap": 0.0, "share": 0.3, "max_targets": 2}


def mamba() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(**shape, bos_token_id=1, eos_token_id=2)
    ).eval()


MODELS = {
    "llama": make_model,
    "mamba": mamba,
    "alibi": lambda: build(next(f for f in REFUSED if f.name == "BLOOM"), vocab_size=VOCAB),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    torch.manual_seed(1)
    return wrap_model(MODELS[request.param](), whole_prompts=True)


@pytest.fixture(scope="module")
def documents() -> Documents:
    rng = np.random.default_rng(0)
    return Documents.of([rng.integers(3, VOCAB, 44) for _ in range(8)])


@pytest.fixture(scope="module")
def measured(model: LoadedModel, documents: Documents) -> Results:
    return measure(
        model, documents, **OF_WINDOWS, **GIVEN, distant_states="replaced", replacements=3
    )


@torch.no_grad()
def plain(model: LoadedModel, tokens: np.ndarray) -> float:
    """The loss of the last token, by transformers alone."""
    inner = getattr(model.model, "model", model.model)
    logits = inner(input_ids=torch.tensor(tokens[None, :-1])).logits[0, -1]
    return -float(logits.log_softmax(-1)[tokens[-1]])


@pytest.mark.parametrize("chosen_by", ["itself", "another"])
def test_losses_are_those_of_the_texts_put_together_by_hand(
    chosen_by: str, model: LoadedModel, documents: Documents, measured: Results
) -> None:
    if chosen_by == "another":  # transfer: its units and targets, among the same unrelated texts
        torch.manual_seed(2)
        model = wrap_model(make_model(), whole_prompts=True)
        first = measured.influence.query("rank == 1 and distant_part == 'document'").distant_first
        measured = measure(model, documents, choices=measured)
        same = measured.influence.query("rank == 1 and distant_part == 'document'").distant_first
        assert first.tolist() == same.tolist()
    settings = Settings(**OF_WINDOWS, distant_states="replaced", replacements=3)
    windows = settings.windows
    controls = Controls(documents, windows, num_draws=settings.draws)
    losses = measured.losses.set_index(["document", "target"])
    ranked = measured.influence.query("distant_part == 'document' and control == 'own'")
    rows = measured.recovery.query("distant_part == 'document' and control == 'own'")
    assert len(rows) >= 8
    for row in rows.itertuples():
        tokens, start = documents[row.document].tokens, int(windows.start_of(row.target))
        block = windows.block(tokens, start, min(start + 4, len(tokens)))
        texts = [controls.replacement(documents[row.document], block, r).tokens_F for r in range(3)]
        distant = ranked.query(f"document == {row.document} and target == {row.target}")
        kept = distant.distant_first[: row.k].to_numpy()
        behind = tokens[block.num_distant : row.target + 1]

        def loss(kept: np.ndarray) -> float:
            changed = [np.concatenate([one, behind]) for one in texts]  # noqa: B023 (used at once)
            for one in changed:
                one[kept] = tokens[kept]  # noqa: B023
            return float(np.mean([plain(model, one) for one in changed]))

        every = np.arange(block.num_distant)
        found = losses.loc[row.document, row.target]
        assert found.loss_short == pytest.approx(loss(kept[:0]), abs=2e-5)
        assert found.loss_long == pytest.approx(plain(model, tokens[: row.target + 1]), abs=2e-5)
        assert row.loss_set == pytest.approx(loss(kept), abs=2e-5)
        assert row.loss_without == pytest.approx(loss(np.setdiff1d(every, kept)), abs=2e-5)
        if (
            row.k == 1 and chosen_by == "itself"
        ):  # of so few units the best groups hold the best one, mostly
            alone = [loss(every[j : j + 1]) for j in every]
            best = distant.influence.iloc[0]
            assert best == pytest.approx(found.loss_short - alone[kept[0]], abs=2e-5)
            assert np.sort(alone)[len(alone) // 4] >= alone[kept[0]]


@pytest.mark.accept
def test_every_unit_by_brute_force_is_what_add_one_finds(
    model: LoadedModel, documents: Documents
) -> None:
    given = OF_WINDOWS | GIVEN | {"distant_states": "replaced", "selectors": "add_one", "ks": (1,)}
    every = measure(model, documents, **given)
    few = measure(model, documents, **given | {"selectors": "halving"})
    both = every.recovery.merge(
        few.recovery, on=["document", "target", "distant_part", "control", "draw", "k"]
    )
    assert len(both) == len(few.recovery)
    assert (both.loss_set_x <= both.loss_set_y + 1e-5).all()


@pytest.mark.accept
def test_reliability_is_the_agreement_of_two_halves(
    model: LoadedModel, documents: Documents, measured: Results
) -> None:
    """Of the groups that all are evaluated: five or more by halving all distant tokens."""
    settings = Settings(**OF_WINDOWS, distant_states="replaced", replacements=3)
    windows, controls = settings.windows, Controls(documents, settings.windows, num_draws=1)
    for row in measured.lds.itertuples():
        tokens, start = documents[row.document].tokens, int(windows.start_of(row.target))
        block = windows.block(tokens, start, min(start + 4, len(tokens)))
        groups = [(0, block.num_distant)]
        while len(groups) < 5:
            groups = [(c, d) for a, b in groups for c, d in ((a, (a + b) // 2), ((a + b) // 2, b))]
        falls = np.zeros((3, len(groups)))
        for draw, fall in enumerate(falls):
            distant = controls.replacement(documents[row.document], block, draw).tokens_F
            text = np.concatenate([distant, tokens[len(distant) : row.target + 1]])
            for number, (first, end) in enumerate(groups):
                changed = text.copy()
                changed[first:end] = tokens[first:end]
                fall[number] = plain(model, text) - plain(model, changed)
        r = np.corrcoef(pd.DataFrame([falls[[0, 2]].mean(0), falls[1]]).rank(axis=1))[0, 1]
        assert row.lds == pytest.approx(max(-1, 2 * r / (1 + max(r, -0.9))), abs=1e-5)
    (found,) = measured.meta.reliability
    assert (found["units"], found["target_set"]) == ("tokens", "gap")
    alone = measure(
        model, documents, **OF_WINDOWS, **GIVEN, distant_states="replaced", replacements=1
    )
    assert alone.meta.reliability == []


class Copies:
    """A model that predicts what followed the same token before, as the last time but one."""

    token_forwards = 0
    device = "cpu"

    shares = False

    def score(self, prompts: list[Prompt]) -> list[np.ndarray]:
        found = []
        for prompt in prompts:
            tokens = [*prompt.prefix.tolist(), *prompt.continuation.tolist()]
            self.token_forwards += len(tokens) - 1
            log_p = []
            for place in range(len(prompt.prefix), len(tokens)):
                pairs = {*pairwise(tokens[:place])}
                log_p.append(-0.1 if (tokens[place - 1], tokens[place]) in pairs else -8.0)
            found.append(np.array(log_p))
        return found


def test_planted_copies_are_found_with_few_prompts() -> None:
    """A pair that recurs once, anywhere in 900 tokens: its unit first, with at most 150 prompts of
    both texts, in at least nine of ten."""
    rng, right = np.random.default_rng(0), 0
    windows = Settings(long=1024, short=128, stride=1, distant_states="replaced").windows
    for trial in range(20):
        texts = [rng.integers(10, 50_000, 1100) for _ in range(6)]
        place = int(rng.integers(0, 895))
        texts[0][place : place + 2] = texts[0][1023:1025] = (3, 4)
        documents = Documents.of(texts)
        copies = Copies()
        scorer = ReplacingScorer(copies, copies, 1)
        scorer.of_document(documents[0], Controls(documents, windows, num_draws=1, seed=trial))
        context = scorer.context(windows.block(documents[0].tokens, 1024, 1025))
        units = documents[0].units("span:2", 0, 896)
        asked = Question(context, units, [(0, 1)], 4, rng)
        right += int(halving(scorer, asked).unit_TK[0, 0]) == place
        assert copies.token_forwards <= 150 / 2 * 1024
    assert right >= 18


@pytest.mark.parametrize("long", [256, 1024, 4096])
def test_a_target_takes_as_many_whole_prompts_as_the_page_says(long: int) -> None:
    """Its losses, units, recovery and control, with one unrelated text."""
    rng, prompts = np.random.default_rng(0), list[Prompt]()

    class Counts(Copies):
        def score(self, given: list[Prompt]) -> list[np.ndarray]:
            prompts.extend(given)
            return [-rng.random(len(prompt.continuation)) for prompt in given]

    documents = Documents.of([rng.integers(0, 5000, long + 6) for _ in range(6)])
    windows = Settings(long=long, distant_states="replaced").windows
    controls, document = Controls(documents, windows, num_draws=1), documents[1]
    scorer = ReplacingScorer(Counts(), Copies(), 1).of_document(document, controls)
    block = windows.block(document.tokens, long, long + 1)
    context_losses(scorer, document, windows, controls, [block])
    recover(scorer, document, windows, [long], selectors="halving", controls=controls)
    assert {len(prompt.inputs) for prompt in prompts} == {long}
    page = (Path(__file__).parents[3] / "docs/measure.md").read_text(encoding="utf-8")
    stated = re.search(rf"(\d+) (whole prompts )?at {long:,}\b", page)
    assert stated is not None
    assert len(prompts) == pytest.approx(int(stated[1]), abs=3)


@pytest.mark.accept
def test_the_cost_is_counted_before(model: LoadedModel, documents: Documents) -> None:
    given = OF_WINDOWS | GIVEN | {"distant_states": "replaced", "at": [30, 36], "replacements": 1}
    # Settings by which targets are chosen cannot be combined with names of targets.
    choosing = {"share", "max_targets", "min_gap"}
    given = {name: value for name, value in given.items() if name not in choosing}
    cost = estimate_cost(measure, model, documents, **given)
    spent = measure(model, documents, **given).meta.token_forwards_of_last_start
    assert cost.token_forwards == pytest.approx(spent, rel=0.1)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_one_text_is_explained(kind: str) -> None:
    model = MODELS[kind]()
    given = {"text": TEXT, "at": "w7 w8", "short": SHORT, "k": 2, "unrelated": UNRELATED}
    given |= {"distant_states": "replaced", "replacements": 2}
    found = explain(model, make_tokenizer(), **given)
    cost = estimate_cost(explain, model, make_tokenizer(), **given)
    shared = 0.25 if kind == "llama" else 0.1  # how much of so short prompts depends on the units
    assert cost.token_forwards == pytest.approx(found.token_forwards, rel=shared)
    document, windows = found.document, found.windows
    others = unrelated_documents(found.model, UNRELATED, document)
    controls = Controls(others, windows, num_draws=1)
    row = found.targets.iloc[-1]
    block = windows.block(document.tokens, row.target, row.target + 1)
    loaded = wrap_model(model, make_tokenizer(), whole_prompts=True)
    losses = []
    for draw in range(2):
        tokens = block.with_distant(controls.replacement(document, block, draw).tokens_F).tokens
        both = np.append(tokens, document.tokens[row.target + 1])
        losses.append(plain(loaded, tokens) + plain(loaded, both))
    assert row.loss_short == pytest.approx(np.mean(losses), abs=2e-5)
    assert found.check(draws=2).table.unrelated.notna().all()
    assert found.settings.selector == "halving"


def test_what_reads_states_is_refused(documents: Documents) -> None:
    model = make_model()
    for selector in ("gradient", "attention", "pairs", "add_one_screened", "add_one_nested"):
        with pytest.raises(ConfigError, match="distant_states=replaced"):
            asked(model, distant_states="replaced", selector=selector)
    with pytest.raises(ConfigError, match="replacements"):
        asked(model, replacements=2)
    with pytest.raises(ConfigError):
        measure(wrap_model(mamba(), whole_prompts=True), documents, **OF_WINDOWS)
    assert replace(Settings(), distant_states="replaced").distant_states == "replaced"


def test_the_command_measures_a_recurrent_model(tmp_path: Path, capsys: Any) -> None:
    mamba().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(UNRELATED * 2):
        (tmp_path / f"texts/{number}.txt").write_text(f"w{number} {text[number:400]}")
    model = f"measure {tmp_path}/model --text {tmp_path}/texts --out {tmp_path}/"
    how = f"{model}out --distant-states replaced --short 8 --blocks 1 --max-targets 1"
    how += " --min-gap 0 --ks 1"
    assert main(how.split()) == 0
    assert "distant units among unrelated text" in capsys.readouterr().out
    assert main([*how.split(), "--selectors", "gradient"]) == 2
    assert main(f"{model}judged --choices {tmp_path}/out".split()) == 0
    out, judged = (read_results(tmp_path / name).recovery for name in ("out", "judged"))
    both = judged.merge(out[out.selector == "halving"], on=["document", "target", "control"])
    assert len(both) == len(judged) > 0
    np.testing.assert_allclose(both.loss_set_x, both.loss_set_y, atol=1e-5)


@pytest.mark.accept
def test_a_measurement_behind_a_server_is_resumed_to_that_in_process(
    documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's model depends on two tokens, of which one is distant, and a little on all."""
    server = FakeServer(make_tokenizer())
    given: dict[str, Any] = {"long": 16, "short": 1, "stride": 1, "distant_states": "replaced"}
    given |= {"share": 0.3, "min_gap": 0.1, "max_targets": 2, "ks": 1}
    really, written = Parts.add, list[str]()

    def add(self: Parts, phase: str, *others: Any) -> None:
        if written.count("recovery") == 1 and phase == "recovery":
            raise KeyboardInterrupt
        really(self, phase, *others)
        written.append(phase)

    try:
        model = load_model(server.url, tokenizer=make_tokenizer())
        monkeypatch.setattr(Parts, "add", add)
        with pytest.raises(KeyboardInterrupt):
            measure(model, documents, **given, out=tmp_path)
        monkeypatch.setattr(Parts, "add", really)
        resumed = measure(model, documents, **given, out=tmp_path)
    finally:
        server.stop()
    losses = resumed.losses.set_index(["document", "target"])
    for row in resumed.recovery.query(
        "distant_part == 'document' and control == 'own'"
    ).itertuples():
        tokens, found = documents[row.document].tokens, losses.loc[row.document, row.target]
        window = [*resumed.meta.windows["prefix"], *tokens[row.target - 16 : row.target].tolist()]
        truth = server.model.truth(window, [int(tokens[row.target])])
        assert found.loss_long == pytest.approx(-float(truth[0]), abs=1e-4)
        assert abs(row.loss_set - found.loss_long) < 0.5 * abs(found.loss_short - found.loss_long)
    best = resumed.influence.query("control == 'own' and distant_part == 'document' and rank == 1")
    assert ((best.target - best.distant_first) == 2).mean() > 0.5
    assert resumed.summary.recovery.iloc[0] == pytest.approx(1, abs=0.3)
