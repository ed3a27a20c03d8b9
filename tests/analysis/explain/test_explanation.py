"""One call: its numbers against plain transformers, what it names, how it is asked from a shell."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity import estimate_cost, explain
from olmo_sparsity.analysis.explain import answer, target_choice
from olmo_sparsity.analysis.explain.answer import count_evaluation
from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.explain.stored_form import to_json
from olmo_sparsity.analysis.explain.unrelated import unrelated_documents
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command.cli import main
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.windows import Windows
from tests.support.brute import Brute
from tests.support.explanations import SHORT, TEXT, UNRELATED, asked, make_model, make_tokenizer
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


def test_a_training_loop_around_it_draws_the_same_random_numbers(model: Any, folder: str) -> None:
    before = torch.get_rng_state()
    asked(model).check(draws=2)
    estimate_cost(explain, model, make_tokenizer(), text=TEXT, at="w7 w8", short=SHORT)
    explain(folder, text=TEXT, at="w7 w8", short=SHORT, k=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prefix", ["auto", "none", "w1 w2"])
@pytest.mark.parametrize("distant_states", ["contextual", "isolated"])
def test_numbers_are_those_of_plain_transformers(
    model: Any, prefix: str, distant_states: Any
) -> None:
    found = asked(model, prefix=prefix, distant_states=distant_states)
    start: dict[str, tuple[int, ...]] = {"auto": (1,), "none": (), "w1 w2": (4, 5)}
    row = found.targets.iloc[-1]
    assert row.text.strip() == "w7 w8"

    def plain(tokens: torch.Tensor, positions: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        (mask,) = bias or [causal_bias(tokens.shape[1], torch.device("cpu"))]
        return model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits

    ids = np.array(make_tokenizer(bos=False)(TEXT).input_ids)
    windows = Windows("all", SHORT, prefix=start[prefix])
    brutes = [
        Brute(plain, ids, windows, place, distant_states, start=row.target)
        for place in (row.target, row.target + 1)
    ]

    def loss(distant: list[int]) -> float:
        return sum(brute.loss(distant) for brute in brutes)

    every = list(range(row.target - SHORT))
    assert row.loss_long == pytest.approx(loss(every), abs=1e-5)
    assert row.loss_short == pytest.approx(loss([]), abs=1e-5)
    falls = np.array([loss([]) - loss([place]) for place in every])
    units = found.distant[found.distant.target == row.target]
    np.testing.assert_allclose(units.nats, np.sort(falls)[::-1][:3], atol=2e-5)
    np.testing.assert_allclose(falls[units["first"]], units.nats, atol=2e-5)
    for k, unit in enumerate(units.itertuples(), 1):
        chosen = units["first"].tolist()[:k]
        assert unit.loss_set == pytest.approx(loss(chosen), abs=2e-5)
        without = loss([place for place in every if place not in chosen])
        assert unit.loss_without == pytest.approx(without, abs=2e-5)


def test_without_names_a_target_with_two_distant_units_is_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_one_gap(*arguments: Any, **options: Any) -> pd.DataFrame:
        """The only gap is that of the first target, which has one distant token."""
        losses = context_losses(*arguments, **options)
        gap = 1.0 * (losses.target == losses.target.min())
        return losses.assign(loss_short=losses.loss_long + gap)

    monkeypatch.setattr(target_choice, "context_losses", with_one_gap)
    found = asked(model, at=None)
    assert found.targets.target.min() > SHORT + 1


@pytest.mark.parametrize("long", ["all", 30])
def test_without_names_the_largest_gaps_are_looked_at(model: Any, long: Any) -> None:
    found = asked(model, at=None, long=long, selector="nearest")
    assert found.chosen_by_gap
    # Those of the placebo are chosen with the text that is then asked about.
    recovery = found.check(draws=2).tables["recovery"]
    placebo = recovery[(recovery.distant_part == "placebo") & (recovery.control == "own")]
    controls = Controls(
        unrelated_documents(found.model, UNRELATED, found.document), found.windows, num_draws=2
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


def test_a_check_with_fewer_distant_units_than_k_compares_all_of_them(model: Any) -> None:
    few_distant = asked(model, at=slice(SHORT + 3, SHORT + 4), k=50)
    check = few_distant.check(draws=2)
    assert check.k == len(few_distant.distant) == 3
    all_distant = few_distant.targets.gap
    assert check.table.own[0] == pytest.approx(all_distant[0], abs=1e-5)


@pytest.mark.parametrize("distant_states", ["contextual", "isolated"])
def test_a_number_of_tokens_is_at_most_so_many(model: Any, distant_states: str) -> None:
    """As if the text began there; a target before it sees all."""
    found = asked(model, at=[slice(20, 21), slice(50, 52)], long=30, distant_states=distant_states)
    assert found.targets.target.tolist() == [20, 50]
    for row, first in zip(found.targets.itertuples(), (0, 20), strict=True):
        text = "".join(found.document.texts[first:]).strip()
        span = slice(row.target - first, row.end - first)
        alone = asked(model, text=text, at=span, distant_states=distant_states)
        assert row.loss_long == pytest.approx(alone.targets.loss_long[0], abs=1e-5)
        distant = found.distant[found.distant.target == row.target]
        assert (distant["first"] - first).tolist() == alone.distant["first"].tolist()
        np.testing.assert_allclose(distant.nats, alone.distant.nats, atol=1e-5)
    assert found.check(draws=2).table.unrelated.notna().all()


@pytest.mark.parametrize(("units", "width"), [("tokens", 1), ("span:3", 3)])
def test_the_top_units_are_named_by_their_tokens_and_how_far_back_they_are(
    model: Any, units: str, width: int
) -> None:
    rows = asked(model, units=units).top()
    assert (rows.target == 60).all()
    assert (rows.back == 60 - rows.place).all()
    lasts = rows.place + width - 1
    names = [
        f"{place}" if width == 1 else f"{place}–{last}"
        for place, last in zip(rows.place, lasts, strict=True)
    ]
    assert rows.unit.tolist() == names
    words = TEXT.split()
    for row in rows.itertuples():
        assert row.text.split() == words[row.place : row.place + width]


def test_a_selector_that_takes_long_says_how_many_tokens_it_evaluates(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is at place 60, so all but the last 8 of 60 tokens are distant."""
    for many, is_said in ((51, True), (52, False)):
        monkeypatch.setattr(answer, "MANY_DISTANT", many)
        asked(model, selector="add_one")
        said = "selector=add_one evaluates 52 distant tokens"
        assert (said in capsys.readouterr().err) == is_said


def test_a_text_longer_than_the_model_is_cut_off(capsys: Any) -> None:
    family = SUPPORTED[find("Llama 1, 2, 3")]
    limited = build(family, vocab_size=45, max_position_embeddings=42)
    found = asked(limited, at=[slice(30, 31), slice(60, 61)])
    assert "long windows of 41 tokens" in capsys.readouterr().err
    assert found.targets.target.tolist() == [30, 60]
    assert found.distant[found.distant.target == 60]["first"].min() >= 60 - 41
    for given in ({}, {"long": 1000}, {"long": 20}):  # a number is at most so many, too
        asked(limited, at=slice(30, 31), **given)
        assert "longer" not in capsys.readouterr().err
    capped = asked(limited, at=[slice(30, 31), slice(60, 61)], long=1000)
    assert "long windows of 41 tokens" in capsys.readouterr().err
    assert capped.targets.equals(found.targets)


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
    for name, one in (("e.html", found), ("kept.html", kept)):
        one.to_html(tmp_path / name)
    assert (tmp_path / "kept.html").read_text() == (tmp_path / "e.html").read_text()
    with pytest.raises(ConfigError, match="path"):
        kept.to_html(tmp_path / "kept.pdf")
    with pytest.raises(ConfigError, match="model"):
        kept.check()


def test_a_table_that_cannot_be_written_whole_leaves_the_earlier_file(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.parquet"
    found = asked(model, at="w8")
    found.save(path)
    earlier = path.read_bytes()

    def write_a_part(_: pd.DataFrame, path: Path) -> None:
        Path(path).write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", write_a_part)
    with pytest.raises(KeyboardInterrupt):
        found.save(path)
    assert path.read_bytes() == earlier
    assert [file.name for file in tmp_path.iterdir()] == ["e.parquet"]


@pytest.mark.parametrize("at", ["w7 w8", None])
def test_a_weight_that_is_no_number_is_not_explained_away(at: str | None) -> None:
    model = make_model()
    with torch.no_grad():  # of a word that stands among the distant ones
        model.model.embed_tokens.weight[make_tokenizer().convert_tokens_to_ids("w5")] = torch.nan
    text = "w5 " + " ".join(f"w{i}" for i in range(6, 24)) + " w7 w8 w9"
    with pytest.raises(DataError, match="losses of targets are not finite"):
        asked(model, text=text, at=at)


def shell(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["explain", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def words(folder: str, tmp_path: Path) -> list[str]:
    """A command line, without the folder of the model: see `shell`."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return [folder, "--text", str(path), "--at", "w7 w8", "--short", "8", "-k", "2"]


def test_the_command_prints_the_explanation_and_its_check_as_json(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unrelated.txt").write_text("\n\n".join(UNRELATED))
    checked = f"--json --check --unrelated {tmp_path}/unrelated.txt".split()
    code, out, err = shell(capsys, *words, *checked)
    assert code == 0, err
    explained = json.loads(out)
    assert explained["targets"][-1]["text"].strip() == "w7 w8"
    assert explained["check"]["draws"] == 8


def test_a_check_that_fails_ends_the_command_after_the_explanation(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = f"--html {tmp_path}/page.html --check --unrelated {tmp_path}/nowhere".split()
    code, out, err = shell(capsys, *words, *failing)
    assert code == 2
    assert "nowhere" in err
    assert "gap" in out
    assert not (tmp_path / "page.html").exists(), "a page would lack its check"


def test_the_command_reads_the_text_from_a_pipe(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, from_file, _ = shell(capsys, *words, "--json")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, piped, err = shell(capsys, words[0], "--text", "-", *words[3:], "--json")
    assert code == 0, err
    assert json.loads(piped)["targets"] == json.loads(from_file)["targets"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--text TEXT --at zebra", "zebra"),
        ("--text TEXT --at 40", "40:41"),
        ("--text TEXT --at 0:2", "no target has distant tokens"),
        ("--text TEXT --at 0:1", "name later targets, or pass a longer text"),
        ("--text TEXT --at 20:21 --short 20", "of 63; lower short=20"),
        ("--text TEXT --at 20:21 --short 19", "is one token, so there is nothing to rank; lower"),
        ("--text TEXT --units span:70", "or pass a longer text, or smaller units"),
        ("--text TEXT --units span", "none of tokens"),
        ("--text TEXT --unrelated embedded", "--unrelated has no effect here; add --check"),
        ("--text TEXT --seed 1", "--seed has no effect here, as nothing is drawn; add --check"),
        ("--text TEXT --dry-run --json", "--json: cannot be combined with --dry-run"),
        ("--text TEXT --dry-run --html a.html", "--html: cannot be combined with --dry-run"),
        ("--text TEXT:1", "TEXT is one text, not a file of records; pass --text=TEXT"),
        ("--prompt w1 --target @nowhere", "--target: nowhere cannot be read"),
        ("--text BINARY", "BINARY is not text in UTF-8 from byte 1 on"),
        ("--prompt w1\udcff", "prompt: '\\udcff', its character 3, is half of a surrogate pair"),
    ],
)
def test_mistakes_are_one_line(
    folder: str, tmp_path: Path, capsys: Any, monkeypatch: Any, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text(TEXT)
    Path("BINARY").write_bytes(b"\xff\xfe\x00\x01" * 9)
    code, out, err = shell(capsys, folder, *words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert len([line for line in err.splitlines() if line.strip()]) == 1


def test_a_target_may_be_read_from_a_file(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("target").write_text("w3 w4")
    words = ["--prompt", "w1 w2 w3 w4 w5 w6", "-k", "1", "--json", "--target"]
    found = []
    for target in ("w3 w4", "@target"):
        code, out, err = shell(capsys, folder, *words, target)
        assert code == 0, err
        found.append(json.loads(out)["targets"])
    assert found[0] == found[1]
    _, _, err = shell(capsys, folder, *words, "target")
    assert "--target: the words 'target' themselves; --target @target reads the file" in err


@pytest.mark.parametrize("units", ["tokens", "span:4"])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
@pytest.mark.parametrize("distant_states", ["contextual", "isolated"])
def test_the_count_is_what_is_spent(
    model: Any, distant_states: str, selector: str, units: str
) -> None:
    given = {
        "at": ["w7 w8"],
        "selector": selector,
        "units": units,
        "distant_states": distant_states,
    }
    cost = estimate_cost(explain, model, make_tokenizer(), text=TEXT, short=SHORT, k=3, **given)
    # Which rows these rules evaluate depends on losses.
    off = {"pairs": 0.2, "add_one_screened": 0.02, "halving": 0.05}.get(selector, 0)
    assert cost.token_forwards == pytest.approx(asked(model, **given).token_forwards, rel=off)
    assert cost.flops == 2 * cost.num_parameters * cost.token_forwards
    if selector == "add_one":
        found = asked(model, **given)
        counted = count_evaluation(
            found.prepared, [(t.target, t.end) for t in found.targets.itertuples()], UNRELATED
        )
        found.check(unrelated=UNRELATED)
        spent = found.prepared.scorer.token_forwards
        assert counted.token_forwards == pytest.approx(spent, rel=0.02)


def test_the_check_says_what_its_texts_are_worth(model: Any) -> None:
    """And keeps those that it is given."""
    e, other = asked(model), asked(model, unrelated=UNRELATED[:1])
    assert str(e.check(draws=2, unrelated=UNRELATED[:1])) == str(other.check(draws=2))
    given = {"at": "w8", "selector": "nearest"}
    found = asked(model, **given)
    ids = np.array(make_tokenizer(bos=False)(TEXT).input_ids)
    (others,) = unrelated_documents(found.model, [TEXT, *UNRELATED], found.document).items
    runs = {tuple(run) for run in np.lib.stride_tricks.sliding_window_view(others.tokens, 32)}
    assert tuple(ids[:32]) not in runs, "the text itself stands in for an unrelated one"
    with pytest.raises(DataError, match="share no passage"):
        asked(model, **given, unrelated=[TEXT, TEXT]).check()
    assert "overlap" not in str(found.check(draws=8))
    few = asked(model, **given, unrelated=[text[:900] for text in UNRELATED[:2]]).check(draws=8)
    assert f"overlap: there is text for {few.apart}" in str(few)
    # A target whose own units raise the loss depends on nothing.
    assert replace(few, table=few.table.assign(own=-1.0, better=0)).num_beyond == 0
    # Nor does one whose loss all distant tokens together raise.
    beyond = replace(few, table=few.table.assign(own=1.0, gap=1.0, better=0))
    assert beyond.num_beyond == len(few.table)
    assert replace(beyond, table=beyond.table.assign(gap=-2.63)).num_beyond == 0


@pytest.mark.parametrize(("at", "selector"), [("w7 w8", "add_one"), (None, "nearest")])
def test_the_check_asks_the_same_of_unrelated_texts(model: Any, at: Any, selector: str) -> None:
    found = asked(model, at=at, selector=selector, k=2)
    checked = found.check(draws=4)
    assert (checked.placebo is None) == (at is not None)
    assert checked.draws == 4
    by_target = found.distant.groupby("target").loss_set.last()
    for row in checked.table.itertuples():
        own = found.targets.set_index("target").loss_short[row.target] - by_target[row.target]
        assert row.own == pytest.approx(own, abs=1e-5)
        assert row.unrelated <= row.unrelated_most
    value, low, high = checked.excess
    assert low <= value <= high
    assert value == pytest.approx((checked.table.own - checked.table.unrelated).mean(), abs=1e-5)
    assert not checked.induction["has_induction"]  # random weights
    assert "copies little" in str(checked)


def test_of_targets_that_begin_alike_the_longest_is_asked_about(model: Any) -> None:
    found = asked(model, at=["w7", "w7 w8"], selector="random", k=2)
    assert found.targets.target.is_unique
    assert found.targets.iloc[-1].end == found.targets.iloc[-1].target + 2
    checked = found.check(draws=2)  # of the random rule, three draws are averaged
    assert len(checked.table) == len(found.targets)


def answered(model: Any, prompt: str, **changed: Any) -> Explanation:
    return asked(model, text=None, at=None, prompt=prompt, **changed)


def test_a_prompt_and_its_answer(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Given, or what transformers writes."""
    prompt = " ".join(TEXT.split()[:30])
    given = answered(model, prompt, target="w3 w4", units="words")
    assert given.targets.text.str.strip().tolist() == ["w3 w4"]
    assert given.targets.target.tolist() == [30]
    written = answered(model, prompt, max_new_tokens=5)
    ids = torch.tensor([make_tokenizer()(prompt).input_ids])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=2)[0, 31:]
    expected = [int(i) for i in expected if i != 2]
    assert written.document.tokens[30:].tolist() == expected
    assert ("max_new_tokens" in capsys.readouterr().err) == (len(expected) == 5)


def test_an_answer_ends_where_the_generation_config_ends_it() -> None:
    model, prompt = make_model(), " ".join(TEXT.split()[:30])
    first = answered(model, prompt, max_new_tokens=1).document.tokens[-1]
    model.generation_config.eos_token_id = [2, int(first)]
    with pytest.raises(DataError, match="the model generated nothing"):
        answered(model, prompt, max_new_tokens=1)
    for wrong in ({"a": 1}, "</s>", [2, 1.5]):
        model.generation_config.eos_token_id = wrong
        with pytest.raises(ConfigError, match="not a token ID"):
            answered(model, prompt, max_new_tokens=1)


def test_a_chat_template_is_prefix_and_end(model: Any) -> None:
    prompt = " ".join(TEXT.split()[:30])
    found = answered(model, prompt, target="w3", chat=True)
    assert found.windows.prefix == (1, 43)  # <s> Q:
    assert found.document.tokens[29:].tolist()[1:] == [44, 6]  # A: w3
    assert found.targets.target.tolist() == [31]
    # What the template puts behind the prompt is no candidate, unless that is asked for.
    prompt = " ".join(TEXT.split()[:3])
    given = {"target": "w3", "chat": True}
    assert answered(model, prompt, **given, short=None).windows.short == 1
    with pytest.raises(ConfigError, match="prefix"):
        answered(model, prompt, **given, prefix="none")


def test_a_prompt_is_found_where_the_template_puts_it(model: Any) -> None:
    tokenizer = make_tokenizer()
    prompt = "w3 w5 w3"
    given = {"prompt": prompt, "target": "w3", "chat": True, "k": 1}
    # The template says the words of the prompt before it.
    tokenizer.chat_template = "{{ bos_token }} w3 w5 w3 Q: {{ messages[0]['content'] }} A:"
    found = explain(model, tokenizer, **given)
    assert found.windows.prefix == (1, 6, 8, 6, 43), "what the template sets is no candidate"
    assert found.document.tokens.tolist() == [6, 8, 6, 44, 6]
    tokenizer.chat_template = "{{ bos_token }} {{ messages[0]['content'].replace('w3', 'w4') }}"
    with pytest.raises(DataError, match="the chat template"):
        explain(model, tokenizer, **given)
    for broken in ("{{ raise_exception('roles must alternate') }}", "{% if %}", "{{ 1 / 0 }}"):
        tokenizer.chat_template = broken
        with pytest.raises(DataError, match=r"template of .* does not take a prompt"):
            explain(model, tokenizer, **given)


def test_more_units_than_there_are_cost_no_more_and_are_marked(model: Any) -> None:
    found = asked(model, k=10**9, selector="nearest")
    target = found.targets.target.max()
    assert found.distant["rank"].max() == target - SHORT
    assert "warning: at " in found.describe()
    assert "the units are all distant tokens" in found.describe()
    last = found.distant[found.distant.target == target].iloc[-1]
    assert last.loss_set == pytest.approx(found.targets.loss_long.iloc[-1], abs=1e-4)
    all_but_one = asked(
        model, k=target - SHORT - 1, selector="nearest", at=slice(target, target + 1)
    )
    assert "warning" not in all_but_one.describe()


def test_an_empty_text_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="text is empty"):
        explain(model, text="")


def test_an_empty_prompt_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        explain(model, prompt="", target=" w1")


def test_an_empty_target_is_named(model: Any) -> None:
    with pytest.raises(DataError, match="the target is empty"):
        explain(model, make_tokenizer(), prompt="w1 w2", target="")


def test_a_text_of_one_unit_has_nothing_to_rank(model: Any) -> None:
    with pytest.raises(DataError, match=r"units=paragraphs: .* is one of them, .* a blank line"):
        asked(model, units="paragraphs", text=TEXT.replace(" w3 ", "\nw3 "))


def test_the_warning_of_a_missing_prefix_is_shown_and_kept(model: Any, tmp_path: Path) -> None:
    found = asked(model)
    assert found.sink == {}, "this tokenizer has a prefix of its own"
    sink = {"harm": 0.31, "harm_with_prefix": -0.03, "needs_prefix": True}
    warned = replace(found, sink=sink)
    assert "raises this model's loss by 0.31 nats" in warned.describe()
    assert json.loads(to_json(warned))["sink"] == sink
    warned.to_html(tmp_path / "page.html")
    assert "by 0.31 nats" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_count_says_how_long_it_takes_here(model: Any) -> None:
    given: dict[str, Any] = {"text": TEXT, "at": "w7 w8", "short": SHORT, "k": 3}
    cost = estimate_cost(explain, model, make_tokenizer(), **given)
    assert cost.seconds is not None
    assert cost.seconds > 0
    assert "time            about " in str(cost)
    assert "to shrink" in str(replace(cost, seconds=121.0))
    assert "to shrink" not in str(replace(cost, seconds=119.0))


@pytest.mark.parametrize("draws", ["4", 4.0, True, 1])
def test_a_check_needs_a_whole_number_of_draws(model: Any, draws: Any) -> None:
    problem = f"draws={draws!r} must be a whole number of at least 2"
    with pytest.raises(ConfigError, match=problem):
        asked(model).check(draws=draws)


def test_top_needs_a_whole_number(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"top\('2'\): n must be a whole number"):
        asked(model).top("2")  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1.0, 2.0], [1, 2]])
def test_token_ids_in_place_of_a_text_are_refused_with_advice(model: Any, ids: Any) -> None:
    with pytest.raises(ConfigError) as error:
        asked(model, text=ids)
    accepted = f"text={ids} must be a string, or a Path to a file; decode token IDs first"
    assert accepted in str(error.value)


def test_a_prefix_longer_than_the_model_takes_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"prefix \(300 tokens\).* more than the 256 positions"):
        asked(model, prefix="w1 " * 300)


def test_a_target_longer_than_the_model_takes_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"target \(291\) need more than the 256 positions"):
        asked(model, text=" ".join([TEXT] * 5), at=slice(9, 300))
