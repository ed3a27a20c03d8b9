"""One call: its numbers against plain transformers, what it names, how it is asked from a shell."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from analysis import explain
from analysis.check import _unrelated
from analysis.documents import Controls, Document
from analysis.explanation import Explanation
from analysis.scoring import context_losses
from analysis.targets import find_spans, parse_at
from analysis.windows import Windows
from olmo_sparsity.cli import main
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.layers import causal_bias
from tests.test_families import SUPPORTED, build, find
from tests.test_influence import Brute

WORDS = [f"w{i}" for i in range(40)]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 60).tolist()) + " w7 w8 w9"
FOREIGN = [" ".join(np.random.default_rng(i).choice(WORDS, 700).tolist()) for i in range(1, 4)]
SHORT = 8


def make_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *WORDS, "Q:", "A:"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{{ bos_token }} Q: {{ messages[0]['content'] }} A:"
    return made


def make_model() -> Any:
    return build(
        SUPPORTED[find("Llama 1, 2, 3")], vocab_size=45, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def asked(model: Any, **changed: Any) -> Explanation:
    given = {"text": TEXT, "at": "w7 w8", "short": SHORT, "k": 3, "foreign": FOREIGN} | changed
    return explain(model, make_tokenizer(), **given)


def answered(model: Any, prompt: str, **changed: Any) -> Explanation:
    return asked(model, text=None, at=None, prompt=prompt, **changed)


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


def test_top_is_a_table(model: Any) -> None:
    found = asked(model, units="span:3")
    table = found.top(2)
    columns = "target rank unit text place back nats loss_set loss_without"
    assert list(table) == columns.split()
    assert len(table) == 2 * len(found.targets)
    words = TEXT.split()
    for row in table.itertuples():
        assert row.text.split() == words[row.place : row.place + 3]
        assert row.unit == f"{row.place}–{row.place + 2}"
        assert row.back == row.target - row.place


@pytest.mark.parametrize("long", ["all", 30])
def test_without_names_the_largest_gaps_are_looked_at(model: Any, long: Any) -> None:
    found = asked(model, at=None, long=long, selector="nearest")
    assert found.settings.chosen_by_gap
    # Those of the placebo are chosen with the text that is then asked about.
    recovery = found.check(draws=2).tables["recovery"]
    placebo = recovery[(recovery.far_part == "placebo") & (recovery.control == "own")]
    controls = Controls(
        _unrelated(found.model, FOREIGN, found.document), found.windows, num_draws=2
    )
    losses = context_losses(found.scorer, found.document, found.windows, controls)
    losses = losses.set_index("target").loc[SHORT + 1 if long == "all" else long :]

    def largest(loss_long: pd.Series) -> pd.Series:
        gaps = (losses.loss_short - loss_long).nlargest(8)
        return gaps[gaps >= 0.1].sort_index()

    own = largest(losses.loss_long)
    assert found.targets.target.tolist() == own.index.tolist()
    np.testing.assert_allclose(found.targets.gap, own, atol=1e-5)
    chosen = sorted(placebo.target.unique().tolist())
    assert chosen == largest(losses.placebo_loss_long).index.tolist() != []


@pytest.mark.parametrize("selector", ["attention", "nearest", "random", "drop_one", "greedy"])
def test_nats_are_falls_whatever_a_selector_goes_by(model: Any, selector: str) -> None:
    found = asked(model, selector=selector, at="w8")
    exact = asked(model, at="w8", k=50).far.set_index(["target", "first"]).nats
    for row in found.far.itertuples():
        if (row.target, row.first) in exact.index:
            assert row.nats == pytest.approx(exact[row.target, row.first], abs=1e-5)
    assert len(found.far)
    first = found.far[found.far["rank"] == 1].set_index("target")
    alone = found.targets.set_index("target").loss_short - first.nats
    np.testing.assert_allclose(first.loss_set, alone, atol=1e-5)


def test_the_check_says_what_its_texts_are_worth(model: Any) -> None:
    given = {"at": "w8", "selector": "nearest"}
    found = asked(model, **given)
    ids = np.array(make_tokenizer(bos=False)(TEXT).input_ids)
    (others,) = _unrelated(found.model, [TEXT, *FOREIGN], found.document).items
    runs = {tuple(run) for run in np.lib.stride_tricks.sliding_window_view(others.tokens, 32)}
    assert tuple(ids[:32]) not in runs, "the text itself stands in for an unrelated one"
    with pytest.raises(DataError, match="share no passage"):
        asked(model, **given, foreign=[TEXT, TEXT]).check()
    assert "overlap" not in str(found.check(draws=8))
    few = asked(model, **given, foreign=[text[:900] for text in FOREIGN[:2]]).check(draws=8)
    assert f"overlap: there is text for {few.apart}" in str(few)
    # A target whose own units raise the loss depends on nothing.
    none = replace(few, table=few.table.assign(own=-1.0, better=0))
    assert none.num_beyond == 0


def test_where_a_rule_asks_very_often_a_cheaper_one_is_named(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(model)
    assert "add_one_nested" not in capsys.readouterr().err
    monkeypatch.setattr("analysis.explanation.MANY_UNITS", 40)
    asked(model)
    assert "each of up to 52 far tokens; add_one_nested" in capsys.readouterr().err
    asked(model, selector="add_one_nested")
    asked(model, long=48)  # 40 far tokens
    assert "each of up to" not in capsys.readouterr().err


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
    said = "the answer ends at 5 tokens (max_new_tokens), unfinished"
    assert (said in capsys.readouterr().err) == (len(expected) == 5)


def test_an_answer_ends_where_the_generation_config_ends_it() -> None:
    model, prompt = make_model(), " ".join(TEXT.split()[:30])
    first = answered(model, prompt, max_new_tokens=1).document.tokens[-1]
    model.generation_config.eos_token_id = [2, int(first)]
    with pytest.raises(DataError, match="ends the text at once"):
        answered(model, prompt, max_new_tokens=1)


def test_all_tokens_of_a_target_need_a_position() -> None:
    limited = build(SUPPORTED[find("Llama 1, 2, 3")], vocab_size=45, max_position_embeddings=42)
    target = slice(45, 48)  # with a beginning of text, its inputs end at position ID 42
    with pytest.raises(ConfigError, match="43 positions are more than"):
        asked(limited, long=40, at=target)
    assert len(asked(limited, long=39, at=target).targets) == 1


def test_targets_without_a_far_part_are_named(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(model, at=[slice(2, 3), slice(40, 41)])
    assert found.targets.target.tolist() == [40]
    assert "1 of 2 targets stand before token" in capsys.readouterr().err


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
    with pytest.raises(ConfigError, match="the template sets"):
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
    with pytest.raises(DataError, match="changes the prompt"):
        explain(model, tokenizer, **given)


def test_what_would_be_ignored_is_refused(model: Any, folder: str) -> None:
    with pytest.raises(ConfigError, match="brings its own tokenizer"):
        explain(folder, make_tokenizer(), text=TEXT)
    with pytest.raises(ConfigError, match="of a model in memory"):
        asked(model, dtype="bf16")
    with pytest.raises(ConfigError, match="for an answer that is generated"):
        asked(model, max_new_tokens=5)
    with pytest.raises(ConfigError, match="for an answer that is generated"):
        answered(model, TEXT, target="w3", max_new_tokens=5)


def test_a_text_is_given_or_read_from_its_path_and_a_name_alone_is_refused(
    model: Any, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    found = explain(model, make_tokenizer(), text=path, at="w7", short=SHORT, k=1)
    pd.testing.assert_frame_equal(found.far, asked(model, at="w7", k=1).far)
    with pytest.raises(ConfigError, match=r"is the name of a file; give Path\("):
        explain(model, make_tokenizer(), text=str(path))


def test_spans_that_do_not_fit_before_a_target_are_not_asked_about(model: Any) -> None:
    """Neither of named targets, nor of those of the placebo."""
    found = asked(model, at=[slice(SHORT + 1, SHORT + 2), slice(40, 41)], units="span:20")
    assert found.targets.target.tolist() == [40]
    found = asked(model, at=None, units="span:20", selector="nearest")
    assert found.targets.target.min() >= SHORT + 20
    assert found.check(draws=2).placebo is not None


def test_names_of_targets() -> None:
    tokenizer = make_tokenizer()._tokenizer
    ids = tokenizer.encode("w1 w2 w11 w1 w2", add_special_tokens=False).ids
    document = Document(np.array(ids), tokenizer=tokenizer)
    assert "".join(document.texts) == "w1 w2 w11 w1 w2"
    assert find_spans(document, "w1 w2") == [(0, 2), (3, 5)]
    assert find_spans(document, re.compile(r"\bw1\b")) == [(0, 1), (3, 4)]
    assert find_spans(document, "w1") == [(0, 1), (2, 3), (3, 4)]
    assert find_spans(document, 2) == find_spans(document, np.int64(2)) == [(2, 3)]
    for strange in (5.0, [None], [1.5]):
        with pytest.raises(ConfigError, match="is neither words"):
            find_spans(document, strange)  # type: ignore[arg-type] # wrong on purpose
    assert find_spans(document, -1) == [(4, 5)]
    assert find_spans(document, slice(1, 3)) == [(1, 3)]
    assert find_spans(document, ["w11", slice(-2, None)]) == [(2, 3), (3, 5)]
    for wrong in ("w3", re.compile("z*"), 7, slice(4, 2), slice(0, 4, 2)):
        with pytest.raises((ConfigError, DataError)):
            find_spans(document, wrong)
    assert parse_at("3:5") == slice(3, 5)
    assert parse_at("/a+/").pattern == "a+"  # type: ignore[union-attr] # a pattern here
    assert parse_at("a/b") == "a/b"


@pytest.mark.parametrize(("at", "selector"), [("w7 w8", "add_one"), (None, "nearest")])
def test_the_check_asks_the_same_of_unrelated_texts(model: Any, at: Any, selector: str) -> None:
    found = asked(model, at=at, selector=selector, k=2)
    checked = found.check(draws=4)
    assert str(checked).count("\n") >= len(found.targets) + 1
    assert (checked.placebo is None) == (at is not None)
    assert checked.draws == 4
    by_target = found.far.groupby("target").loss_set.last()
    for row in checked.table.itertuples():
        own = found.targets.set_index("target").loss_short[row.target] - by_target[row.target]
        assert row.own == pytest.approx(own, abs=1e-5)
        assert row.foreign <= row.foreign_most
    value, low, high = checked.excess
    assert low <= value <= high
    assert value == pytest.approx((checked.table.own - checked.table.foreign).mean(), abs=1e-5)
    assert not checked.induction["has_induction"]  # random weights
    assert "does not copy" in str(checked)


def test_of_targets_that_begin_alike_the_longest_is_asked_about(model: Any) -> None:
    found = asked(model, at=["w7", "w7 w8"], selector="random", k=2)
    assert found.targets.target.is_unique
    assert found.targets.iloc[-1].end == found.targets.iloc[-1].target + 2
    checked = found.check(draws=2)  # of the random rule, three draws are averaged
    assert len(checked.table) == len(found.targets)


def test_what_is_shown_and_saved(model: Any, tmp_path: Path) -> None:
    found = asked(model, at="w8")
    page = found._repr_html_()
    assert page.count("<mark") >= 1
    assert "<u>" in page
    assert repr(found).splitlines()[0].startswith("w8 (token ")
    found.save(tmp_path / "e.parquet")
    rows = pd.read_parquet(tmp_path / "e.parquet")
    assert len(rows) == len(found.far)
    assert {"target_text", "gap", "nats", "text"} <= set(rows)


# --- from a shell ---------------------------------------------------------------------------------


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
    code, out, err = shell(capsys, *given, "--json", "--check", "--foreign",
                           str(tmp_path / "foreign.txt"))  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    assert [target["text"].strip() for target in told["targets"]][-1] == "w7 w8"
    assert told["check"]["draws"] == 8
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, piped, err = shell(capsys, folder, "--text", "-", *given[3:], "--json")
    assert code == 0, err
    assert json.loads(piped)["targets"] == told["targets"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "TEXT", "--at", "zebra"], "does not stand in the text"),
        (["--text", "TEXT", "--at", "/(/"], "regular expression"),
        (["--text", "TEXT", "--at", "0:2"], "no target has far tokens"),
        (["--text", "TEXT", "--short", "400"], "no target has far tokens"),
        (["--text", "TEXT", "--selector", "addone"], "choose from"),
        (["--text", "TEXT", "--units", "span"], "none of tokens"),
        (["--text", "TEXT", "--target", "w3"], "belong to a prompt"),
        (["--text", "TEXT", "--foreign", "embedded"], "is text for --check"),
        (["--text", "TEXT", "--html", "page.txt"], "must end in .html"),
        (["--text", "LONG"], "positions are more than"),
        (["--text", "BINARY"], "not text in UTF-8"),
        (["--prompt", "w1 w2", "--target", ""], "the target is empty"),
        (["--prompt", "w1", "--target", "w2"], "no target has far tokens"),
    ],
)
def test_mistakes_are_one_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    files = {"TEXT": TEXT.encode(), "LONG": (TEXT * 8).encode(), "BINARY": b"\xff\xfe\x00\x01" * 9}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / word) if word in files else word for word in words]
    code, out, err = shell(capsys, folder, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert len([line for line in err.splitlines() if line.strip()]) == 1
