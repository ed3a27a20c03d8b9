"""What the pages say is true: numbers are those of stored results, commands and code run."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer

from olmo_sparsity import attribute, estimate_cost, load_model
from olmo_sparsity.base.model_cache import cache_folder
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.transform import load_transform
from olmo_sparsity.models.gguf.smollm2 import FILE
from olmo_sparsity.training.loop import train
from study.benchmarks import engines
from study.benchmarks.questions import read_rows, tables
from study.tasks.settings import load_settings
from tests.support.commands import check_command, experiment_of
from tests.support.explanations import WORDS, make_model, make_tokenizer
from tests.support.fake_server import FakeServer

ROOT = Path(__file__).parents[1]
ALL_RESULTS = pytest.mark.skipif(
    "OLMO_SPARSITY_ALL_RESULTS" not in os.environ, reason="part of `make results-check`"
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def blocks_in(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def outputs_in(page: str) -> list[str]:
    """The block of text that follows each block of Python: what its code prints."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(?:[^`]|`(?!``))*```\s*```text\n(.*?)```", text, flags=re.DOTALL)


def commands_in(page: str) -> list[str]:
    """A line of each command, of a workflow's too; of `sbatch`, the command that the job runs."""
    text = "".join(blocks_in(page, "bash")).replace("\\\n", " ").replace(r"$'\n'", r"'\n'")
    for name, words in re.findall(r'^(\w+)="(.*)"$', text, flags=re.M):
        text = text.replace(f"${name} ", f"{words} ")
    text = re.sub(r"^sbatch .*slurm/(train|measure)\.sbatch", r"olmo-sparsity \1", text, flags=re.M)
    for workflow in blocks_in(page, "yaml"):
        asked = re.findall(r"ASK: (.*)", workflow)
        text += workflow.replace("$ASK", *asked) if asked else ""
    return re.findall(r"^(?:.*run: |.*&& | +)?(olmo-sparsity .*?) *(?: #.*)?$", text, re.M)


# Those of files that a page itself prints are checked with them, in docs/test_own_run.py.
COMMANDS = {
    command
    for page in PAGES
    for command in commands_in(str(page.relative_to(ROOT)))
    if not re.search(r" mine\w*\.yaml", command)
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_parse_and_name_files_that_exist(command: str) -> None:
    check_command(shlex.split(command)[1:])


EXPERIMENTS = [
    *(ROOT / "configs/experiments").iterdir(),
    *(ROOT / "study/configs/experiments").iterdir(),
    *(ROOT / "study/configs/text/experiments").iterdir(),
]


@pytest.mark.parametrize("path", sorted(EXPERIMENTS), ids=str)
def test_experiments_of_the_package_and_of_the_study_can_be_read(path: Path) -> None:
    experiment = experiment_of(str(path.relative_to(ROOT)))
    assert experiment.models
    assert bool(experiment.measurements) == (experiment.file.measure is not None)


@pytest.mark.parametrize("path", sorted((ROOT / "study/configs/text").glob("*.yaml")), ids=str)
def test_configs_of_the_study_name_a_transform_that_accepts_their_options(
    path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    options = config.data.transform_options
    if "planted" in options:  # the tokenizer of the tests has fewer tokens
        options["planted"] |= {"num_tokens": 1, "num_values": 4}
    transform = load_transform(config.data, tokenizer, config.training.shortest_length)
    assert (transform is None) == (config.data.transform is None)


@pytest.mark.parametrize("path", sorted((ROOT / "study/configs/tasks").glob("*.yaml")), ids=str)
def test_task_presets_are_whole(path: Path) -> None:
    load_settings(path, [])


# --- commands that run ----------------------------------------------------------------------------

SMALLER = {
    "measure": {"--long": "all", "--short": "8", "--stride": "16", "--ks": "1,2", "--draws": "1"},
}


def with_options(words: list[str], options: dict[str, str]) -> list[str]:
    """Return the words of a command with values of options, also where it has others."""
    changed = list(words)
    for flag, value in options.items():
        if flag in changed:
            changed[changed.index(flag) + 1] = value
        else:
            changed += [flag, value]
    return changed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with texts, in which a user types."""
    for name in ("docs", "olmo_sparsity", "study", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice([*WORDS, "\n"], 45)) for _ in range(6)]
    notes = [" ".join(rng.choice(WORDS, 20)) for _ in range(2)]
    for name, kept in {"my_texts": texts, "notes": notes}.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(kept):
            (tmp_path / name / f"{number}.txt").write_text(text)
    rows = [{"question": text, "answer": text[:20], "text": text, "body": text} for text in texts]
    pd.DataFrame(rows).to_parquet(tmp_path / "my_texts.parquet")
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reports = [row | {"department": "abc"[place % 3]} for place, row in enumerate(rows)]
    (tmp_path / "reports.jsonl").write_text("\n".join(map(json.dumps, reports)))
    for name in ("article", "question", "answer"):
        (tmp_path / f"{name}.txt").write_text(" ".join(["In 1921", texts[0], "In 1921 it ended."]))
    system = {"role": "system", "content": texts[0]}
    said = {"role": "user", "content": "When?"}, {"role": "assistant", "content": "In 1921."}
    marked = "[1] report.pdf\n{}\n\n[2] faq.md\n{}\n\nQuestion: {}".format(*notes, WORDS[0])
    last_turns = [{"role": "user", "content": marked}, said[-1]]
    (tmp_path / "log.json").write_text(json.dumps([system, *said * 2, *last_turns]))
    own = [dict(zip("ab", pair, strict=True)) for pair in (texts[:2], texts[2:4])]
    asked = [{"sources": two, "question": "w7", "answer": "w1", "expect": "none"} for two in own]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '\nQ: ' if m.role == 'user' else '\nA: ' }}{{ m.content }}"
        "{% endfor %}{{ '\nA: ' if add_generation_prompt else '' }}"
    )
    tokenizer.save_pretrained(tmp_path / "chat_model")
    make_model().save_pretrained(tmp_path / "chat_model")
    code = [block for block in blocks_in("docs/extend.md", "python") if "import torch" not in block]
    (tmp_path / "rules.py").write_text("\n".join(code))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer(make_tokenizer())
    yield made
    made.stop()


@pytest.mark.accept
@pytest.mark.parametrize("page", ["explain", "extend", "measure", "sources"])
def test_commands_of_a_page_run_in_their_order(page: str, folder: Path, server: FakeServer) -> None:
    seeds = [f"study/results/models/prose_seed{seed}" for seed in (1, 2)]
    instead = dict.fromkeys(("MODEL", "smollm2", "LARGE", "runs/a"), seeds[0])
    instead |= dict.fromkeys(("SMALL", "runs/b"), seeds[1])
    instead |= {"http://127.0.0.1:8000": server.url, "Qwen/Qwen3-8B": "chat_model"}
    instead |= {"my_texts/*.parquet": "my_texts.parquet", "docs/examples/notes": "notes"}
    instead |= {"decoys": "my_texts"}
    commands = commands_in(f"docs/{page}.md")
    assert len(commands) > 1
    for command in commands:
        words = [instead.get(word, word) for word in shlex.split(command)[1:]]
        if "--messages" in words:
            words[1] = "chat_model"
        if "--choices" not in words:  # these take the settings of the first measurement
            words = with_options(words, SMALLER.get(words[0], {}))
        elif "--ks" in words:
            words = with_options(words, {"--ks": "1,2"})
        if words[0] == "measure" and not {"--choices", "--targets", "--target-field"} & {*words}:
            words = with_options(words, {"--max-targets": "1"})
            if "--sets" not in words:
                words = with_options(words, {"--min-gap": "0"})
        assert main(words) == 0, command


# --- code -----------------------------------------------------------------------------------------


@pytest.fixture
def run(make_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests of this file: it is found finished by all but the first."""
    made = str(tmp_path_factory.getbasetemp() / "run_of_docs")
    train(make_config(run_folder=made, model__max_sequence_length=1024))
    return made


SHORTER = {
    "Windows(96, 32, 32)": "Windows(24, 8, 8)",
    "Windows(long=96, short=32)": "Windows(24, 8)",
    "128 < len(text.tokens) < 1000": "64 < len(text.tokens) < 200",
    "limit=20": "limit=8",
    "max_targets=4": "max_targets=2, min_gap=0, halves=0",
    '"smollm2"': '"demo"',
    "chat=True": 'answer="Katharina Weiss opened it."',
}


@pytest.mark.parametrize("page", ["explain", "measure", "sources"])
def test_python_of_a_page_runs(page: str, run: str, folder: Path) -> None:
    names: dict[str, Any] = {}
    for code in blocks_in(f"docs/{page}.md", "python"):
        for long, short in (SHORTER | {"runs/figure2_code": run}).items():
            code = code.replace(long, short)
        exec(code, names)
    if page == "measure":
        assert set(names["results"].summary.selector) == {"add_one_screened", "random"}
        assert {"own", "unrelated"} == set(names["tables"]["recovery"].control)
        losses, ranked = names["results"].losses, names["ranked"]
        of_first = losses[losses.document == ranked.index[0]]
        gap = (of_first.loss_short - of_first.loss_long).mean()
        assert ranked["mean"].iloc[0] == pytest.approx(gap) == ranked["mean"].max()
        assert len(ranked) == losses.document.nunique() > 1
        assert ranked.name.notna().all()
    elif page == "sources":
        assert set(names["e"].statements.kind) <= {"one", "either", "both", "none", "undecided"}
    else:
        assert names["e"].checked.draws == 4


def test_the_transform_of_the_page_changes_a_share_of_sequences(
    folder: Path, tokenizer: Tokenizer
) -> None:
    options = {"share": 0.3}
    data = DataConfig(transform="rules.py:reversed_share", transform_options=options)
    transform = load_transform(data, tokenizer, 16)
    assert transform is not None
    tokens = np.arange(16)
    changed = [transform(tokens, [1, 0, number]) for number in range(200)]
    assert 30 < sum(of is not None for of in changed) < 90
    assert all((of.tokens_L == tokens[::-1]).all() for of in changed if of is not None)


@pytest.mark.accept
@pytest.mark.parametrize(
    ("page", "blocks"), [("README.md", None), pytest.param("docs/sources.md", 1, marks=ALL_RESULTS)]
)
def test_the_output_on_a_page_is_what_its_code_prints(
    page: str, blocks: int | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to rounding on other CPUs. `blocks`: so many of its blocks of code and of output."""
    if not (cache_folder() / FILE).is_file() and "OLMO_SPARSITY_ALL_RESULTS" not in os.environ:
        pytest.skip("no SmolLM2 in the cache; load_model('smollm2') downloads it, 93 MB")
    names: dict[str, Any] = {}
    for code in blocks_in(page, "python")[:blocks]:
        exec(code, names)
    printed = capsys.readouterr().out.splitlines()
    numbers = r"-?\d+\.\d+"
    outputs = outputs_in(page)[:blocks]
    assert outputs
    for line in filter(None, "".join(outputs).splitlines()):
        same = next(p for p in printed if re.sub(numbers, "", p) == re.sub(numbers, "", line))
        printed.remove(same)
        shown, found = (np.array(re.findall(numbers, text), float) for text in (line, same))
        np.testing.assert_allclose(found, shown, atol=0.1)


@ALL_RESULTS
def test_the_price_of_the_experiment_on_readme_is_what_its_dry_run_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the text is prepared depends on the clone, so its line is not on the page."""
    monkeypatch.chdir(ROOT)
    command = next(line for line in commands_in("README.md") if "--gpu-hour" in line)
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = next(text for text in blocks_in("README.md", "text") if "c4_1b_pose-last" in text)
    lines = [line for line in shown.splitlines() if line != "…"]
    assert len(lines) > 4
    assert set(lines) <= set(printed)


@ALL_RESULTS
@pytest.mark.parametrize(
    ("num_seeds", "words"),
    [
        (2, "| 2 | {} | {} | {} GB |"),
        (3, "| 3 | {} | {} |"),
    ],
)
def test_the_price_of_seeds_on_readme_is_what_a_dry_run_prints(
    num_seeds: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = ROOT / "configs/experiments/c4_1b.yaml"
    text = experiment.read_text().replace("../c4_1b", f"{ROOT}/configs/c4_1b")
    grid = f"grid: {{seed: {list(range(num_seeds))}}}"
    (tmp_path / "seeds.yaml").write_text(re.sub(r"^# grid: .*", grid, text, flags=re.M))
    monkeypatch.chdir(ROOT)
    flags = ["--dry-run", "--gpus", "8", "--gpu", "h100", "--gpu-hour", "2.5"]
    assert main(["experiment", f"{tmp_path}/seeds.yaml", *flags]) == 0
    *_, disk, total = capsys.readouterr().out.splitlines()
    hours, dollars = re.findall(r": (\d+) GPU-hours .*: (\$\d+) at", total)[0]
    gigabytes = round(float(disk.split()[1].replace(",", "")))
    page = (ROOT / "README.md").read_text()
    assert words.format(hours, dollars, gigabytes) in page
    if num_seeds == 3:
        assert f"| 3 | {hours} | {dollars} | {gigabytes / 1000:.1f} TB |" in page


# --- numbers, in addition to docs/numbers.yaml ----------------------------------------------------


def test_the_results_on_real_questions_are_those_of_the_stored_run() -> None:
    printed = tables(read_rows(ROOT / "study/results/questions.jsonl"))
    of_four = printed.split("at most 4 decoys, 200 questions\n")[1].split("\n\n")[0].splitlines()
    shares = [line.rpartition(": ")[2].replace(", n =", " |") for line in of_four]
    order = [shares[i] for i in (1, 0, 3, 4, 5, 6, 7)]  # as the page has them
    page = (ROOT / "docs/sources.md").read_text()
    assert re.findall(r"\| (\d\.\d\d \[\d\.\d\d, \d\.\d\d\] \| \d+) \|\n", page) == order
    rivals = printed.split("rivals: ")[1].split("\n\n")[0]
    ranked = re.findall(r"^  (?:ours|left out|BM25): .*?; ([\d.]+) .*; (.*)$", rivals, re.M)
    first = re.findall(
        r"first in (\d\.\d\d), hiding.*?in (\d\.\d\d) and BM25 in (\d\.\d\d)", page, re.S
    )
    assert first == [tuple(share for share, _ in ranked)]
    assert f"AUROC of {ranked[0][1]}, BM25 {ranked[2][1]}." in page


def test_the_results_of_engines_are_those_of_the_stored_run() -> None:
    shown = blocks_in("docs/sources.md", "text")
    for name in ("engines", "servers"):
        assert engines.table(read_rows(ROOT / f"study/results/{name}.jsonl")) + "\n" in shown


@pytest.mark.parametrize(("draws", "most"), [(4, (47_000, 45)), (8, (92_000, 89))])
def test_the_price_of_a_question_is_what_is_counted(draws: int, most: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    text = lambda num: " ".join(rng.choice(WORDS, num))  # noqa: E731
    model = load_model("http://nowhere", tokenizer=make_tokenizer(bos=False), only_counts=True)
    asked = {"sources": {name: text(200) for name in "abcde"}, "decoys": [text(400)] * 12}
    cost = estimate_cost(attribute, model, question=text(20), answer=text(20), draws=draws, **asked)
    counted = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", str(cost))]
    assert [round(counted[0], -2), counted[1]] == [9_400, 9]
    assert [round(counted[2], -3), counted[3]] == [*most]
    assert "{:,} ({}) |".format(*most) in (ROOT / "docs/sources.md").read_text()


def test_pypi_has_what_is_pinned() -> None:
    """A local version (`2.13.0+cpu`) would be one that PyPI does not hold."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert not [line for line in pinned if "+" in line and not line.startswith("#")]


NAMED_FILE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|ya?ml|sh|sbatch))(?::\w+)?`")
NAMED_SCRIPT = re.compile(r"[\w/]+\.sbatch\b")
"""A job script is also named without its folder, and within commands."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    """Changes of earlier versions name files of their day."""
    if page.name == "CHANGELOG.md":
        return
    places = (ROOT, ROOT / "olmo_sparsity", ROOT / "olmo_sparsity/analysis", ROOT / "study")
    for name in NAMED_FILE.findall(page.read_text(encoding="utf-8")):
        made_by_the_reader = name.startswith(("your_", "my_", "runs/", "results/", "data/"))
        assert made_by_the_reader or any((place / name).exists() for place in places), name
    for name in NAMED_SCRIPT.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / "slurm" / name.removeprefix("slurm/")).exists(), name
