"""`olmo-sparsity attribute` for one answer: its sources from files, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olmo_sparsity.command.cli import main
from tests.support.sources import (
    GIVEN,
    SOURCES,
    saved,
)


@pytest.fixture(scope="module")
def shell_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shell")
    model, decoys = saved(folder)
    words = [model]
    for name, text in SOURCES.items():
        (folder / f"{name}.txt").write_text(text)
        words += ["--source", f"{name}={folder / name}.txt"]
    return [*words, "--question", GIVEN["question"], "--decoys", decoys]


def shell(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return main(["attribute", *words]), *capsys.readouterr()


def test_a_folder_names_its_sources_and_refuses_what_is_not_text(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    (folder / ".DS_Store").write_bytes(b"\0\1")
    words = [shell_words[0], "--source", str(folder), *shell_words[7:], "--answer", "w1"]
    code, _, err = shell(capsys, *words, "--dry-run")
    assert code == 0, err
    assert "3 files are sources: a, b, c" in err
    (folder / "d.pdf").write_bytes(b"%PDF-1.7\n\0\xff")
    code, _, err = shell(capsys, *words, "--dry-run")
    assert code == 2
    assert "d.pdf is not text in UTF-8 from byte 11 on; convert it to text" in err


def test_the_command_prints_verdicts_and_writes_a_page(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shell_words, "--answer", "w1 w2 w3", "--candidates", "a,c", "--draws", "5"]
    code, out, err = shell(capsys, *words, "--html", str(tmp_path / "page.html"))
    assert code == 0, err
    assert "w1 w2 w3\n  rests on " in out
    assert "statements: 1, sources: 2, decoys of each: 5 at most" in out
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_the_command_prints_json_of_an_answer_and_its_reasoning(
    shell_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shell_words, "--answer", "w1 w2 w3", "--candidates", "a,c", "--draws", "5"]
    code, out, err = shell(capsys, *words, "--json", "--reasoning", "w5 w6 w7 w8 w9")
    assert code == 0, err
    told = json.loads(out)
    assert [cell["source"] for cell in told["matrix"]] == ["a", "c", "reasoning 1"]
    assert told["reasoning"][0]["text"] == "w5 w6 w7 w8"  # the last token stays in view


def test_a_dry_run_prints_the_cost(
    shell_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shell(capsys, *shell_words, "--answer", "w1 w2 w3", "--dry-run")
    assert code == 0, err
    assert out.startswith("token-forwards  ")


@pytest.mark.parametrize("option", ["--question", "--answer", "--reasoning"])
def test_an_empty_file_is_named_with_its_option(
    option: str, shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    empty = f"@{tmp_path}/empty.txt"
    words = [*shell_words, option, empty]
    if option in shell_words:
        words = [*shell_words]
        words[shell_words.index(option) + 1] = empty
    code, _, err = shell(capsys, *words, "--dry-run")
    assert code == 2
    assert f"{option}: {tmp_path}/empty.txt is empty; write the text into it" in err


def test_a_source_that_is_missing_is_not_to_be_converted(
    shell_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [shell_words[0], "--source", "nowhere.txt", *shell_words[7:], "--answer", "w1"]
    code, _, err = shell(capsys, *words)
    assert code == 2
    assert err.endswith("--source: nowhere.txt cannot be read: No such file or directory\n")


def test_an_error_of_the_environment_is_not_one_of_the_decoys(
    shell_words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = shell(capsys, *shell_words, "--answer", "w1")
    assert code == 2
    assert "olmo-sparsity: the environment sets WORLD_SIZE, but not RANK" in err


@pytest.mark.parametrize("pattern", ["", "*"])
def test_each_file_of_a_folder_is_a_source(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    words = [shell_words[0], "--source", str(tmp_path / pattern), *shell_words[7:]]
    code, out, err = shell(capsys, *words, "--answer", "w1", "--units", "words")
    assert code == 0, err
    assert "sources: 12, decoys" in out


def test_a_file_with_an_equals_sign_or_an_umlaut_in_its_name_is_a_source(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("a=b.txt", "half \udcc3\udcbc.txt")  # the second as the locale C has an umlaut
    texts = list(SOURCES.values())
    for name, text in zip(names, texts, strict=False):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in names]
    words = [shell_words[0], "--source", *files, *shell_words[7:], "--answer", "w1", "--json"]
    code, out, err = shell(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["sources"] == ["a=b.txt", "half ü.txt"]


def test_a_named_file_may_have_the_letters_of_a_glob(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes[1].txt").write_text(next(iter(SOURCES.values())))
    named = f"notes={tmp_path / 'notes[1].txt'}"
    words = [shell_words[0], "--source", named, *shell_words[7:], "--answer", "w1", "--json"]
    code, out, err = shell(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["sources"] == ["notes"]


@pytest.mark.parametrize("words", [["--message", "0"], ["--passages", "document"]])
def test_an_option_of_0_that_has_no_effect_is_refused(
    words: list[str], shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "questions.jsonl").write_text("{}")
    of_file = ["--questions", str(tmp_path / "questions.jsonl"), "--out", str(tmp_path / "out")]
    code, _, err = shell(capsys, shell_words[0], *of_file, *words)
    assert code == 2
    assert words[0] in err


LOG = [
    {"role": "user", "content": "[1] w1 w2 w3\nw4 w5\n\n[2] w6\nw7 w8\n\nw20 w21?"},
    {"role": "assistant", "content": "w1 w2"},
]


@pytest.fixture
def log_words(shell_words: list[str], tmp_path: Path) -> list[str]:
    """The command about a log, with a dry run, up to the value of `--passages`."""
    (tmp_path / "log.json").write_text(json.dumps(LOG))
    model, decoys = shell_words[0], shell_words[-1]
    words = [model, "--messages", str(tmp_path / "log.json"), "--decoys", decoys]
    return [*words, "--dry-run", "--passages"]


def test_the_sources_of_a_log_are_listed_before_anything_is_computed(
    log_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shell(capsys, *log_words, r"\[\d+\] (?P<name>.+)\n(.+)")
    assert code == 0, err
    assert "2 sources\n  w1 w2 w3: 'w4 w5'\n  w6: 'w7 w8'\n" in err
    assert "passages=" not in err


def test_a_passage_that_holds_the_question_is_a_warning(
    log_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shell(capsys, *log_words, r"(?s)\[\d+\].+")
    assert code == 0, err
    assert "1 source\n  passage 1: '[1] w1" in err
    assert err.count("'passage 1' holds the last line of the user's message, 'w20 w21?'") == 1


def test_a_dry_run_lists_the_sources_of_each_line_with_messages(
    log_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "q.jsonl"
    record = {"messages": LOG, "passages": r"\[\d+\] .+\n.+", "expect": "passage 1"}
    questions.write_text(json.dumps(record))
    model, _, _, *decoys, dry_run, _ = log_words
    code, _, err = shell(capsys, model, "--questions", str(questions), *decoys, dry_run, "--gate")
    assert code == 0, err
    assert "q.jsonl:1: 2 sources\n  passage 1: '[1] w1 w2 w3 w4 w5'\n" in err
