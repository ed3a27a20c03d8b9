"""The command line: every mistake a user can make ends in one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from olmo_sparsity.base.manifest import write_manifest
from olmo_sparsity.command.cli import EXIT_BAD_INPUT, main


@pytest.fixture
def config_path(run_dict: dict, tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_dict))
    return str(path)


def complaint(capsys: pytest.CaptureFixture, *words: str) -> str:
    """Runs the command, which must fail politely; returns its one line."""
    capsys.readouterr()
    assert main(list(words)) == EXIT_BAD_INPUT
    lines = [line for line in capsys.readouterr().err.splitlines() if "olmo-sparsity:" in line]
    assert len(lines) == 1
    return lines[0]


def test_prepare_train_losses_export_in_order(
    config_path: str, run_dict: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = run_dict["run_folder"]
    assert main(["prepare", config_path]) == 0
    capsys.readouterr()
    assert main(["train", config_path, "--dry-run"]) == 0
    assert "learning_rate: 0.01" in capsys.readouterr().out
    assert not Path(run).exists()
    words = ["--model.layer_norm_with_affine=true", "--evaluation.interval_steps=3"]
    assert main(["train", config_path, *words]) == 0
    assert re.search(r"step 3: held-out loss .*; induction drop -?\d", capsys.readouterr().err)
    assert main(["losses", run]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["figure", run, run, "--labels", "a,b", "--out", str(tmp_path / "a.svg")]) == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert all(words in drawn for words in ("training loss", ">b, 16 … 31<", "tokens/s"))
    assert main(["export", run, str(tmp_path / "exported")]) == 0
    assert json.loads((tmp_path / "exported/config.json").read_text())["architectures"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optimizer.lr=1"], "choose from optimizer.name"),
        (["--dryrun"], "'--dryrun' is neither an option"),
        (["--dry-run", "--gpu", "a100"], "--gpu describes the GPUs of a dry run"),
        (["--gpus", "8"], "use --dry-run --gpus N"),
        (["--data.folder=/nowhere/at/all"], "/nowhere/at/all is not prepared; run `olmo-sparsity"),
        (["--run_folder=/proc/nowhere"], "run_folder=/proc/nowhere cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_in_a_run(
    config_path: str, capsys: pytest.CaptureFixture, words: list[str], expected: str
) -> None:
    assert expected in complaint(capsys, "train", config_path, *words)


def test_a_current_folder_that_is_gone_is_named(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries say then that a file of theirs is missing, such as libtorch_cpu.so."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert "the current folder was deleted; `cd` to another one" in complaint(capsys, "configs")


NOTE = ("--source", "README.md", "--question", "q", "--answer", "a")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "configs/experiments/quick.yaml"], "belongs to `olmo-sparsity experiment`"),
        (["train", "nowhere.yaml"], "does not exist"),
        (["report", "x", "--out", "r.html", "--max-documents", "0"], "must be at least 1"),
        (["report", "x", "--out", "r.pdf"], "must end in .html"),
        (["measure", "x", "--out", "README.md"], "README.md is a file"),
        (["figure", "study/results", "--out", "x.png"], "holds no measurement"),
        (["figure", "x", "y", "--labels", "a,a", "--out", "x.png"], "--labels=a,a must name each"),
        (["figure", "x", "y", "--labels", ",", "--out", "x.png"], "--labels=, must name each"),
        (
            ["explain", "demo", "--text", "x.jsonl", "--field", "a"],
            "--text=x.jsonl: --field requires FILE:N",
        ),
        (["explain", "demo", "--prompt", "x", "--field", "a"], "--field=a is of --text FILE:N"),
        (["measure", "demo", "--out", "y", "--speed", "h100"], "--speed=h100 is of --dry-run"),
        (
            ["attribute", "demo", *NOTE, "--dry-run", "--html", "x.html"],
            "--html: cannot be combined with --dry-run, which has no results",
        ),
        (
            ["attribute", "demo", *NOTE, "--dry-run", "--json"],
            "--json: cannot be combined with --dry-run, which has no results",
        ),
        (
            ["attribute", "demo", *NOTE, "--max-new-tokens", "5"],
            "max_new_tokens=5: it limits an answer that the model writes, and the answer is given",
        ),
        (["measure", "demo", "--out=~/y"], "--out=~/y: ~ is not replaced here"),
        (["explain", "demo", "--text", "README.md", "--html=~/y.html"], "--html=~/y.html: ~ is"),
    ],
)
def test_mistakes_in_other_commands(
    words: list[str], expected: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert expected in complaint(capsys, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "demo", "--text", "note.html"],
        ["explain", "demo", "--prompt", "@note.html"],
        ["attribute", "demo", "--source", "a=note.html", "--question", "q", "--answer", "a"],
    ],
)
def test_a_page_does_not_replace_the_text_that_it_explains(
    words: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.html").write_text("The bridge opened in 1921.")
    said = complaint(capsys, *words, "--html", "note.html")
    assert "--html=note.html would replace note.html, which is read" in said
    assert Path("note.html").read_text() == "The bridge opened in 1921."


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["losses", "x", "--seed=3"],
        ["train", "a", "b"],
        ["attribute", "demo", "--questions", "q.jsonl", "--out", "y", "--html="],
    ],
)
def test_usage_errors_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=f"^{EXIT_BAD_INPUT}$"):
        main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ks", "1", "--ks", "2"], "--ks is given 2 times; give it once"),
        (["--ks=1", "--seed=3", "--ks", "2"], "--ks is given 2 times; give it once"),
        (["-k", "1", "-k", "2"], "-k is given 2 times"),
        (["--ks", "1,,2"], "--ks has a comma with nothing before or after it; delete it"),
        (["--selectors", "random,"], "--selectors has a comma with nothing"),
    ],
)
def test_no_value_of_an_option_is_ignored(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    command = ["explain"] if "-k" in words else ["measure", "--out", "x"]
    with pytest.raises(SystemExit, match=f"^{EXIT_BAD_INPUT}$"):
        main([*command, "demo", "--text", "README.md", *words])
    assert message in capsys.readouterr().err


def test_options_that_add_up_and_flags_may_be_given_twice() -> None:
    words = ["explain", "demo", "--text", "README.md", "--at", "the", "--at", "model"]
    assert main([*words, "--dry-run", "--dry-run"]) == 0


@pytest.mark.parametrize("blank", ["", " ", "\t"])
@pytest.mark.parametrize(
    "words",
    [
        ["measure", "demo", "--text", "builtin:embedded", "--out"],
        ["measure", "demo", "--out", "x", "--text"],
        ["measure", "demo", "--out", "x", "--targets"],
        ["attribute", "demo", "--source", "README.md"],
        ["report", "--out", "r.html"],
        ["figure", "--out", "r.png", "x"],
        ["compare", "x"],
    ],
)
def test_a_blank_name_of_a_file_or_folder_is_named(
    words: list[str], blank: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match=f"^{EXIT_BAD_INPUT}$"):
        main([*words, blank])
    shown = words[-1] if words[-1].startswith("--") else "(SOURCE|RESULTS|SECOND|--source)"
    assert re.search(f"{shown} is blank", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["measure", "demo", "--out", "a" * 256],
        ["report", "--out", f"{'a' * 256}.html", "x"],
        ["figure", "--out", f"{'a' * 256}.png", "x"],
        ["compare", "x", "--out", f"{'a' * 256}.csv"],
        ["explain", "demo", "--text", "x", "--html", f"{'a' * 256}.html"],
    ],
)
def test_a_name_that_no_disk_stores_is_named_with_its_limit(
    words: list[str], capsys: pytest.CaptureFixture
) -> None:
    wanted = r"--(out|html)=a{60}… has a name of 2\d\d bytes, and disks store 255 at most; pass a "
    assert re.search(wanted, complaint(capsys, *words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["attribute", "demo", "--questions", "-", "--dry-run"], "--questions=- is read several"),
        (["attribute", "demo", "--questions", "pipe", "--dry-run"], "--questions=pipe is read sev"),
        (["measure", "demo", "--text", "pipe", "--out", "x"], "pipe is a pipe or a device"),
        (["export", "folder", "x"], "'folder' is not a model folder; pass a run"),
        (["measure", "demo", "--text", "texts", "--out", "link"], "out=link is a link to nowhere"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_no_plain_file_or_folder_is_named(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # opening it would wait for ever
    Path("folder").mkdir()
    write_manifest(Path("folder"))
    Path("link").symlink_to("nowhere")
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(f"{number} Ada opened the bridge. " * 60)
    assert expected in complaint(capsys, *words)


def test_a_line_break_is_a_prefix_not_a_blank_option(capsys: pytest.CaptureFixture) -> None:
    words = ["--prompt", "It was Ada", "--target", " Ada", "--short", "1", "-k1", "--dry-run"]
    assert main(["explain", "demo", *words, "--prefix", "\n"]) == 0


def test_a_word_of_thousands_of_letters_does_not_fill_the_screen(
    capsys: pytest.CaptureFixture,
) -> None:
    number = "9" * 5000
    for words in ([f"--seed={number}"], ["--training.length=1", f"--run_folder={number}"]):
        shown = complaint(capsys, "train", "quick.yaml", "--dry-run", *words)
        assert "99999" in shown
        assert len(shown) < 400
    with pytest.raises(SystemExit):
        main(["attribute", "demo", "--messages", "x", "--message", f"{number}x"])
    assert len(capsys.readouterr().err) < 400


def test_a_record_of_a_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        {"body": "no", "text": "no"},
        {"body": "The bridge was opened by Ada. It was Ada", "text": "this is one of the two"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["explain", "demo", "--field", "body", "--at", "Ada", "--short", "2", "-k1", "--json"]
    assert main([*words, "--text", f"{tmp_path}/a.jsonl:2"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"]
    assert "a.jsonl has no record 3" in complaint(capsys, *words, "--text", f"{tmp_path}/a.jsonl:3")
    words = ["explain", "demo", "--at", "two", "--short", "1", "-k1", "--json"]  # the field `text`
    whole_file = complaint(capsys, *words, "--text", f"{tmp_path}/a.jsonl")
    assert "a.jsonl holds records; pass one of them" in whole_file
    assert main([*words, "--text", f"{tmp_path}/a.jsonl:2"]) == 0
    assert "Ada" not in capsys.readouterr().out
