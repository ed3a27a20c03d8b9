"""Text as people have it: each form gives the same documents, and every mistake is one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text import tokenized
from olmo_sparsity.text.corpus import CorpusConfig, is_heldout, read_documents
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.training.runs import training_text
from tests.conftest import named
from tests.support.corpora import TEXTS, lines, packed

ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def characters() -> Tokenizer:
    """A token for each character that is in a text of these tests."""
    known = ["?", *map(chr, range(9, 127)), "“", "”"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(known)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture
def model() -> LoadedModel:
    return named("somebody/elses", characters())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(documents: Documents) -> list[str]:
    known = characters()
    return ["".join(known.id_to_token(i) for i in d.tokens.tolist()) for d in documents]


def names(documents: Documents) -> list[str]:
    return [document.name for document in documents]


# --- forms ----------------------------------------------------------------------------------------


FRAME = pd.DataFrame(ROWS)


def test_files_are_documents_of_the_same_numbers_and_names(model: LoadedModel) -> None:
    packed(path := "a.jsonl", lines(ROWS))
    for text in (path, Path(path), str(Path(path).absolute())):
        documents = open_documents(text, model)
        assert read(documents) == TEXTS
        assert names(documents) == [f"{text}:{number}" for number in (1, 2, 3, 4)]
        assert [d.number for d in documents] == [0, 1, 2, 3]
        assert {d.group for d in documents} == {""}
        assert documents.name == str(text)
    renamed = [{"body": row["text"], "text": "no"} for row in ROWS]
    for rows in (pd.DataFrame(renamed), dataset().from_list(renamed), renamed):
        assert read(open_documents(rows, model, field="body")) == TEXTS


def test_a_missing_value_of_pandas_is_no_text_and_no_group(model: Any) -> None:
    nan = float("nan")
    frame = pd.DataFrame({"text": ["w1 w2", nan, "w3 w4"], "by": [nan, "Ada", nan]})
    documents = open_documents(frame, model, group_field="by")
    assert [document.name for document in documents] == ["DataFrame:1", "DataFrame:3"]
    assert [document.group for document in documents] == ["", ""]


@pytest.mark.parametrize("text", [5, {"w1 w2", "w3 w4"}])
def test_text_without_an_order_is_refused(text: Any, model: Any) -> None:
    with pytest.raises(ConfigError, match=r"text=.* must be a path or name"):
        open_documents(text, model)


@cache
def dataset() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "rows",
    [TEXTS, ROWS, tuple(TEXTS), FRAME, dataset, lambda: dataset().to_iterable_dataset()],
)
def test_what_python_holds_are_the_same_documents(rows: Any, model: LoadedModel) -> None:
    rows = rows() if callable(rows) else rows
    documents = open_documents(rows, model)
    assert read(documents) == TEXTS
    assert names(documents)[3] == f"{type(rows).__name__}:4"
    assert read(open_documents((row for row in rows), model)) == TEXTS or rows is FRAME


@pytest.mark.accept
def test_a_folder_named_as_a_corpus_is_read(model: LoadedModel) -> None:
    assert open_documents("python", model, limit=2)[0].group
    for name in ("embedded", "python", "c4"):
        Path(name).mkdir()
        Path(f"{name}/a.txt").write_text("mine")
        assert read(open_documents(name, model)) == ["mine"]
    assert open_documents("builtin:python", model, limit=2)[0].group
    with pytest.raises(ConfigError, match=r"text=builtin:x is not .* builtin:embedded"):
        open_documents("builtin:x", model)


def test_records_of_prompt_and_target_name_two_fields(model: LoadedModel) -> None:
    bad: list[Any] = [{"prompt": "one", "target": ""}, {"prompt": "two", "target": 2}]
    good = [{"prompt": f"{n:05}", "target": "four", "by": "Ada"} for n in range(300)]
    packed("pairs.jsonl", lines(bad + good))
    documents = open_documents("pairs.jsonl", model, prompt_field="prompt")
    assert read(documents) == [f"{n:05}four" for n in range(300)]
    assert {(d.target, d.group) for d in documents} == {(5, "")}
    swapped = {"prompt_field": "target", "target_field": "prompt"}
    assert {d.target for d in open_documents("pairs.jsonl", model, **swapped)} == {4}
    for wrong in ({"prompt_field": "target"}, {"field": "text2", "target_field": "target"}):
        with pytest.raises(ConfigError, match="prompt_field"):
            open_documents("pairs.jsonl", model, **wrong)


def test_standard_input_is_text(model: LoadedModel) -> None:
    kept = os.dup(0)
    Path("in").write_text("one\n\ntwo")
    try:
        for split_at, wanted in (("whole", ["one\n\ntwo"]), ("blank-lines", ["one", "two"])):
            with Path("in").open() as given:
                os.dup2(given.fileno(), 0)
            documents = open_documents("-", model, split_at=split_at)  # type: ignore[arg-type] # a str
            assert read(documents) == wanted
            assert names(documents)[0] == ("-" if split_at == "whole" else "-:1")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


# --- how much is read -----------------------------------------------------------------------------


def counted(rows: list, taken: list) -> Iterator[Any]:
    for row in rows:
        taken.append(row)
        yield row


def test_reading_stops_at_the_limit(model: LoadedModel) -> None:
    taken: list[Any] = []
    assert len(open_documents(counted(["a", "", "b", "c", "d"] * 99, taken), model, limit=3)) == 3
    assert taken == ["a", "", "b", "c"]
    packed("a.jsonl", lines([{"text": text} for text in "abcdef"]) + b"\xff" * 99)
    assert read(open_documents("a.jsonl", model, limit=6)) == list("abcdef")


def test_more_than_can_be_held_is_refused_before_it_is_read(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, data_folder: Path, heldout: TokenShards
) -> None:
    monkeypatch.setattr(tokenized, "BATCH_CHARACTERS", 200)
    monkeypatch.setattr(tokenized, "MAX_TOKENS", 10)
    taken: list[Any] = []
    with pytest.raises(DataError, match=r"more than 10 tokens .*max_documents"):
        open_documents(counted([f"{n:03}" for n in range(1000)], taken), model)
    assert len(taken) == 6  # the batch that is too much, and none after it
    assert len(open_documents([f"{n:03}" for n in range(1000)], model, limit=3)) == 3
    with pytest.raises(DataError, match="more than 10 tokens"):
        open_documents(str(data_folder), named("x", heldout.tokenizer))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a *text*\nof two lines", {}, "text="),
        ("hub:a:b:c:d", {}, "text=hub:a:b:c:d"),
        ("notes.txt", {"field": "body"}, r"notes\.txt"),
        ("text:notes.txt", {"field": "body"}, "field=body"),
        (["a"], {"split_at": "blank-lines"}, "split_at=blank-lines"),
        ("notes.txt", {"split_at": "lines"}, "split_at='lines'"),
        ("notes.txt", {"limit": 1}, "limit=1"),
        ([], {}, "list holds no documents"),
        ([3, 4], {}, "2 x malformed line"),
        (lambda: dataset().train_test_split(0.5), {}, "several splits, train, test"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_read_is_one_line(
    text: Any, options: dict[str, Any], message: str, model: LoadedModel
) -> None:
    Path("notes.txt").write_text("notes")
    with pytest.raises(UserError, match=message) as caught:
        open_documents(text() if callable(text) else text, model, **options)
    assert "\n" not in str(caught.value)


# --- the hub --------------------------------------------------------------------------------------


def test_the_hub_is_asked_for_what_is_named(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((*args, options["split"]))
        return dataset().to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for text, wanted in (
        ("owner/name", ("owner/name", None, "train")),
        ("hub:name", ("name", None, "train")),
        ("hub:owner/name:de:test", ("owner/name", "de", "test")),
        ("hub:owner/name::test", ("owner/name", None, "test")),
        ("c4", ("allenai/c4", "en", "train")),
    ):
        assert read(open_documents(text, model, limit=3)) == TEXTS[:3]
        assert asked.pop() == wanted
    with pytest.raises(DataError, match=r"no body field .*: id, text"):
        open_documents("owner/name", model, field="body")


# --- control tokens -------------------------------------------------------------------------------


SPELLED = "one <|im_end|> two<|im_end|>\n</s>"


CONTROL = "<|im_end|>"


@pytest.fixture
def with_control_token(tokenizer: Tokenizer) -> LoadedModel:
    fast = Tokenizer.from_str(tokenizer.to_str())
    fast.add_special_tokens([AddedToken(CONTROL, lstrip=True, rstrip=True)])
    return named("somebody/elses", fast, 10**6)


def test_a_documents_text_does_not_become_control_tokens(with_control_token: LoadedModel) -> None:
    model = with_control_token
    assert model.tokenizer is not None
    documents = open_documents(["one two", SPELLED], model)
    plain, spelled = [document.tokens.tolist() for document in documents]
    assert model.tokenizer.get_vocab()[CONTROL] not in spelled
    assert model.tokenizer.decode(spelled, skip_special_tokens=False) == SPELLED
    assert [plain] == model.encode(["one two"])


def test_a_documents_text_becomes_control_tokens_if_wanted(
    with_control_token: LoadedModel,
) -> None:
    model = with_control_token
    assert model.tokenizer is not None
    documents = open_documents(["one two", SPELLED], model, control_tokens=True)
    spelled = documents[1].tokens.tolist()
    assert [spelled] == model.encode([SPELLED])
    assert spelled.count(model.tokenizer.get_vocab()[CONTROL]) == SPELLED.count(CONTROL)


def test_a_prompt_and_its_target_do_not_become_control_tokens(
    with_control_token: LoadedModel,
) -> None:
    spelled = open_documents(["one two", SPELLED], with_control_token)[1].tokens.tolist()
    pairs = [{"prompt": SPELLED, "target": SPELLED}] * 2
    (document,) = open_documents(pairs, with_control_token, prompt_field="prompt")
    assert document.tokens.tolist() == spelled * 2
    assert document.target == len(spelled)


# --- what a run has, and what it was trained on ---------------------------------------------------


def as_run(config: RunConfig) -> LoadedModel:
    """A model with the text of a run, as `load_model` gives it."""
    model = named(config.run_folder, open_shards(config.data, "heldout").tokenizer)
    return replace(model, text=training_text(config.data))


def test_a_run_is_measured_on_its_own_held_out_text(
    make_config: Callable[..., RunConfig], heldout: TokenShards
) -> None:
    run = as_run(make_config())
    own = open_documents(None, run)
    assert [document.tokens.tolist() for document in own] == [
        heldout.document(number).tolist() for number in range(len(heldout))
    ]
    assert len(set(names(own))) == len(own)
    assert (own.num_training, own.num_too_short) == (0, 0)
    assert "".join(own[0].texts) == heldout.tokenizer.decode(own[0].tokens.tolist())
    assert len(open_documents(None, run, limit=3)) == 3


def test_held_out_text_has_no_fields(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match="field=body means nothing to held-out documents"):
        open_documents(None, as_run(make_config()), field="body")


@pytest.mark.accept
def test_of_the_whole_corpus_of_a_run_what_it_was_trained_on_is_left_out_and_counted(
    make_config: Callable[..., RunConfig], heldout: TokenShards
) -> None:
    corpus = list(read_documents(CorpusConfig(source="embedded")))
    held_out = [record for record in corpus if is_heldout(record, 0.2)]
    whole = open_documents("embedded", as_run(make_config()))
    assert whole.num_training == len(corpus) - len(held_out)
    assert [document.number for document in whole] == list(range(len(held_out)))
    assert [document.group for document in whole] == [record.group for record in held_out]
    for document, record in zip(whole, held_out[:50], strict=False):
        assert "".join(document.texts) == record.text


@pytest.mark.accept
def test_what_is_left_out_is_counted_as_far_as_is_read(
    make_config: Callable[..., RunConfig], heldout: TokenShards
) -> None:
    run = as_run(make_config())
    corpus = list(read_documents(CorpusConfig(source="embedded")))
    held_out = [record for record in corpus if is_heldout(record, 0.2)]
    few = open_documents("embedded", run, limit=4)
    place_of_last = next(i for i, record in enumerate(corpus) if record is held_out[3])
    assert few.num_training == place_of_last - 3
    whole = open_documents("embedded", run)
    first = [document.tokens.tolist() for document in whole[:4]]
    assert [document.tokens.tolist() for document in few] == first


def test_of_another_text_nothing_is_left_out(
    make_config: Callable[..., RunConfig], heldout: TokenShards
) -> None:
    record = next(iter(read_documents(CorpusConfig(source="embedded"))))
    for name in ("one", "two"):
        Path(f"{name}.txt").write_text(f"{name} and {record.text}")
    other = open_documents("*.txt", as_run(make_config()))
    assert (len(other), other.num_training, other[0].group) == (2, 0, "")


def test_a_file_that_was_trained_on_is_known_in_every_form(
    make_config: Callable[..., RunConfig],
) -> None:
    texts = [f"Text {n}: " + " ".join(f"word{n * i % 97}" for i in range(40)) for n in range(60)]
    packed("a.jsonl", lines([{"body": text} for text in texts]))
    corpus = {"source": "files", "path": "*.jsonl", "field": "body"}
    config = make_config(data__folder="data", data__corpus=corpus)
    prepare(config.data)
    run = as_run(config)
    own = open_documents(None, run)
    assert 0 < len(own) < 60
    for form in ("a.jsonl", "c4_files:a.jsonl"):
        documents = open_documents(form, run, field="body")
        assert [d.tokens.tolist() for d in documents] == [d.tokens.tolist() for d in own]
        assert documents.num_training == 60 - len(own)
    packed("a.jsonl", lines([{"body": text, "text": text[9:]} for text in texts]))
    with pytest.raises(ConfigError, match=r"trained on this text with field=body.*pass the same"):
        open_documents("a.jsonl", run)


def test_a_model_of_others_has_no_held_out_text(heldout: TokenShards) -> None:
    with pytest.raises(ConfigError, match=r"text=None: .* was not trained here"):
        open_documents(None, named("somebody/elses", heldout.tokenizer))


def test_a_model_of_others_reads_all_documents_of_a_corpus(heldout: TokenShards) -> None:
    documents = open_documents("embedded", named("somebody/elses", heldout.tokenizer), limit=10)
    assert (len(documents), documents.num_training) == (10, 0)


def test_documents_of_a_prepared_folder_are_spread_over_it(
    heldout: TokenShards, data_folder: Path
) -> None:
    model = named("somebody/elses", heldout.tokenizer)
    prepared = open_documents(str(data_folder), model, limit=10)
    spread = [number * len(heldout) // 10 for number in range(10)]
    assert len(heldout) > 20, "else the first ten are as spread as any"
    assert [d.tokens.tolist() for d in prepared] == [heldout.document(n).tolist() for n in spread]


def test_prepared_passages_of_one_article_are_one_group(
    heldout: TokenShards, data_folder: Path
) -> None:
    documents = open_documents(str(data_folder), named("somebody/elses", heldout.tokenizer))
    groups = [document.group for document in documents]
    assert 1 < len(set(groups)) < len(groups)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(DataError, match="has no tokenizer"):
        open_documents("embedded", named("x", None))


def test_a_token_outside_the_models_vocabulary_is_an_error(
    heldout: TokenShards, data_folder: Path
) -> None:
    model = named("x", heldout.tokenizer, 9)
    with pytest.raises(DataError, match="is not in its 9 embeddings"):
        open_documents("embedded", model, limit=2)
    with pytest.raises(DataError, match="the model's vocabulary has 9"):
        open_documents(str(data_folder), model, limit=2)


def test_documents_are_chosen_by_their_length_from_as_many_as_it_takes(
    model: LoadedModel,
    heldout: TokenShards,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenized, "BATCH_CHARACTERS", 100)
    taken: list[str] = []
    every = ["x" * length for length in (3, 9, 5, 12, 8, 10, 30, 2, *[4] * 99)]
    documents = open_documents(counted(every, taken), model, limit=3, min_tokens=9)
    assert [len(d.tokens) for d in documents] == [9, 12, 10]
    assert [d.number for d in documents] == [0, 1, 2]
    assert len(taken) < 12
    assert len(open_documents(every, model, min_tokens=9)) == 4
    with pytest.raises(DataError, match="no documents of 31 tokens or more"):
        open_documents(every, model, min_tokens=31)
    lengths = [len(heldout.document(number)) for number in range(len(heldout))]
    least = sorted(lengths)[-20]
    long = [number for number, length in enumerate(lengths) if length >= least]
    reader = named("somebody/elses", heldout.tokenizer)
    found = open_documents(str(data_folder), reader, limit=3, min_tokens=least)
    spread = [long[number * len(long) // 3] for number in range(3)]
    assert [d.tokens.tolist() for d in found] == [heldout.document(n).tolist() for n in spread]


def test_documents_of_few_groups_are_listed_by_group(model: LoadedModel) -> None:
    rows = [{"text": f"{number}", "site": "abc"[number % 3]} for number in range(7)]
    documents = open_documents(rows, model, group_field="site")
    assert documents.groups == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}
    assert open_documents(rows, model).groups == {}
    assert open_documents(rows, model, group_field="text").groups == {}
    every = [{"text": f"{number}", "site": f"site {number}"} for number in range(21)]
    assert len(open_documents(every[:20], model, group_field="site").groups) == 20
    assert open_documents(every, model, group_field="site").groups == {}


def test_equal_documents_are_read_once_and_counted(
    model: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies are not independent: with them an interval would be too short."""
    texts_with_copies = [*TEXTS, *TEXTS, TEXTS[0]]
    documents = open_documents(texts_with_copies, model)
    assert read(documents) == TEXTS
    assert [document.number for document in documents] == list(range(len(TEXTS)))
    expected = "list: 5 documents equal an earlier one but for white space; each is read once"
    assert expected in capsys.readouterr().err


def test_copies_that_differ_in_white_space_are_read_once(model: LoadedModel) -> None:
    """A last line break, or line ends of another system, makes no independent document; and one
    would be the unrelated text of the other."""
    copies = ["one two", "one two\n", "one\r\ntwo", "one two three"]
    assert read(open_documents(copies, model)) == ["one two", "one two three"]
    rows = [{"q": "one", "a": "two"}, {"q": "one ", "a": "two"}, {"q": "on", "a": "etwo"}]
    documents = open_documents(rows, model, prompt_field="q", target_field="a")
    assert len(documents) == 2


def test_a_list_of_paths_is_no_list_of_texts(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"list:1: '.*a.txt' is a path, and each item is the text"
    ):
        open_documents([tmp_path / "a.txt"], model)


def test_a_long_path_that_does_not_exist_is_shown_whole_and_a_text_is_cut(
    model: LoadedModel,
) -> None:
    path = f"/{'folder/' * 12}nowhere"
    with pytest.raises(ConfigError, match=f"text={path} is not"):
        open_documents(path, model)
    with pytest.raises(ConfigError, match=r"text=word word .*… is not"):
        open_documents("word " * 100, model)


@pytest.mark.parametrize("text", ["texts/mistyped", "other/file.txt"])
def test_a_mistyped_path_is_not_looked_up_on_the_hub(model: LoadedModel, text: str) -> None:
    Path("texts").mkdir()
    with pytest.raises(ConfigError, match=rf"text={text} does not exist.* pass hub:{text} for"):
        open_documents(text, model)


def test_a_group_field_that_is_empty_in_all_documents_is_said(
    model: Any, capfd: pytest.CaptureFixture
) -> None:
    rows = [{"text": f"ab cd {number}", "by": by} for number, by in enumerate([None, "", " "])]
    open_documents(rows, model, group_field="by")
    assert "list: by is empty in all documents" in capfd.readouterr().err
    open_documents([*rows, {"text": "ef", "by": "Ada"}], model, group_field="by")
    assert "is empty" not in capfd.readouterr().err


def test_one_number_written_in_two_ways_makes_no_two_groups(model: Any) -> None:
    rows = [{"text": f"ab cd {number}", "by": by} for number, by in enumerate([1, 2, 1.0])]
    with pytest.raises(DataError, match=r"by is 1 in some documents and 1\.0 in others"):
        open_documents(rows, model, group_field="by")
