"""What the pages say is true: numbers are those of stored results, commands and code run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity import explain
from olmo_sparsity.analysis.models.gguf import cache_folder
from olmo_sparsity.analysis.models.smollm2 import FILE
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.command.cli import build_parser, main
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.sweep import Run, expand
from olmo_sparsity.training.loop import train
from study.benchmarks import engines
from study.benchmarks.questions import read_rows
from study.pages.stored import evaluations, measurements, other_table, others, tasks
from study.tasks.experiment import run_settings
from study.tasks.schemes import SCHEMES
from study.tasks.settings import build_task, load_settings

ROOT = Path(__file__).parents[1]
ALL_RESULTS = pytest.mark.skipif(
    "OLMO_SPARSITY_ALL_RESULTS" not in os.environ, reason="part of `make results-check`"
)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/tasks").glob("*.yaml")), ids=str)
def test_task_presets_are_whole(path: Path) -> None:
    load_settings(path, [])


def commands_in(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    whole = [block.replace("\\\n", " ") for block in blocks]
    lines = [line.split(" #")[0].strip() for block in whole for line in block.splitlines()]
    return [line for line in lines if line.startswith("olmo-sparsity ")]


GUIDES = ["README.md", "slurm/README.md"] + [
    f"docs/{name}.md"
    for name in (
        "explain",
        "sources",
        "measure",
        "long_documents",
        "results",
        "../study/tables/commands",
        "tasks",
        "train",
        "tutorial",
    )
]
COMMANDS = [command for name in GUIDES for command in commands_in((ROOT / name).read_text())]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_parse_and_name_files_that_exist(command: str) -> None:
    check_command(shlex.split(command)[1:])


@cache
def runs_of(config: str, *overrides: str) -> list[Run]:
    return expand(os.path.relpath(ROOT / config), list(overrides))


parser = cache(build_parser)


def check_command(words: list[str]) -> None:
    options, rest = parser().parse_known_args(words)
    assert all(word.startswith("--") and "=" in word for word in rest)
    if options.command == "sweep":
        assert runs_of(options.config, *rest)
    elif hasattr(options, "config"):
        load_config(ROOT / options.config, rest)
    elif options.command == "measure":
        shipped = {name for name in getattr(options, "selectors", ()) if ".py:" not in name}
        assert shipped <= set(SELECTORS)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/sweeps").iterdir()), ids=str)
def test_the_grids_that_are_shipped(path: Path) -> None:
    assert runs_of(f"configs/sweeps/{path.name}")


# --- the report -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """The words of each command of study/Makefile."""
    parts = re.findall(r"^PARTS := (.*)", (ROOT / "study/Makefile").read_text(), re.MULTILINE)
    make = ["make", "-n", "-f", "study/Makefile", *parts[0].split()]
    # Not as a part of `make test`, which would print the folder, too.
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    printed = subprocess.run(
        make, cwd=ROOT, env=outside, check=True, capture_output=True, text=True
    )
    assert not printed.stderr
    lines = printed.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("mkdir -p runs/evidence")]


def test_the_report_is_made_by_commands_that_parse(commands: list[list[str]]) -> None:
    assert len(commands) > 1400
    for program, *words in commands:
        if program == "olmo-sparsity":
            check_command(words)
        elif program == "python":
            assert words[0] == "-m"
            assert find_spec(words[1]) is not None, words[1]
            if words[1] == "study.planting":
                check_command(["measure", *words[2:]])
        else:
            assert program in ("make", "cp", "pip", "chromium", "jupyter")


ARTICLE = (
    "Katharina Weiss was a German botanist who studied the mosses of the Black Forest. In 1902 she "
    "published a catalogue of four hundred species, most of them drawn by her own hand. After the "
    "war her collection was bought by the museum of natural history in Berlin. The species Hypnum "
    "weissiae is named after Katharina Weiss."
)


@pytest.mark.parametrize("name", ["prose_seed1", "prose_seed2"])
def test_the_stored_models_copy_names(name: str) -> None:
    folder = ROOT / "study/results/models" / name
    found = explain(str(folder), text=ARTICLE, at=slice(-4, None), units="words", k=1, device="cpu")
    assert found.targets.gap[0] > 1
    assert "Weiss" in found.far.text[0]


def test_the_report_makes_every_stored_result(commands: list[list[str]]) -> None:
    kept = [
        [word for word in words if word != "--no-rows"][-1]
        for words in commands
        if "study.pages.keep_results" in words
    ]
    made = {name.rpartition("/")[2].removesuffix(".csv").removesuffix(".json") for name in kept}
    by_hand = {"gpu_check_h200", "scaling"}  # scripts/gpu_check.sh, fake tensors
    by_hand |= {"pose_pays", "source_rivals"}  # by scripts that are in the history
    names = {*measurements(), *tasks(), *evaluations(), *others()}  # again: on another machine
    other = ("_again", "prose_names", "wikipedia_names")  # on another machine; sets that are gone
    assert not {n for n in names - by_hand - made if not any(word in n for word in other)}
    asked = {" ".join(sorted(words)) for words in commands}
    for name, of in tasks().items():
        words = [w for w in of["meta"]["command"].split() if not w.startswith("--num_workers")]
        assert " ".join(sorted(words)) in asked, name


# --- code -----------------------------------------------------------------------------------------


@pytest.fixture
def run(make_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests of this file: it is found finished by all but the first."""
    folder = str(tmp_path_factory.getbasetemp() / "run_of_docs")
    train(make_config(run_folder=folder, model__max_sequence_length=1024))
    return folder


def cells_of_notebook() -> list[dict[str, Any]]:
    cells = json.loads((ROOT / "docs/explain.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def python_in(name: str) -> list[str]:
    if name.endswith(".ipynb"):
        return [cell["source"] for cell in cells_of_notebook()]
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


SMALLER = {
    "Windows(long=96, short=32)": "Windows(24, 8)",
    "Windows(96, 32, 32)": "Windows(24, 8, 8)",
    "limit=20": "limit=8",
    '"smollm2"': '"demo"',
    "chat=True": 'answer="Katharina Weiss opened it."',
    "128 < len(text.tokens) < 1000": "64 < len(text.tokens) < 200",
}


@pytest.mark.parametrize(
    "name",
    [
        "docs/explain.md",
        "docs/explain.ipynb",
        "docs/measure.md",
        "docs/sources.md",
        "docs/tutorial.md",
    ],
)
def test_python_of_a_page_runs(
    name: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("docs", "README.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    if name == "docs/tutorial.md":
        smaller = "--long=24 --short=8 --stride=8 --ks=1,2 --max-documents=8 --min-gap=0 "
        smaller += "--max-targets=2 --sets=gap --halves=0"
        assert main(["measure", run, "--quick", "--out", "results/tutorial", *smaller.split()]) == 0
    names: dict[str, Any] = {}
    for code in python_in(name):
        for long, short in (SMALLER | {"runs/figure2_code": run, "my_model": run}).items():
            code = code.replace(long, short)
        exec(code, names)
    if name == "docs/tutorial.md":
        assert {"target", "far_part", "loss_set"} <= set(names["table"].columns)
        assert len(names["foreign"]) == len(names["helped"])
        assert set(names["summary"].selector) == {"add_one_screened", "random"}
        assert set(names["spans"].summary.units) == {"span:4"}
    elif name == "docs/measure.md":
        assert names["influence_FW"].shape == (32, 8)
        assert {"recovery", "influence", "lds", "costs"} == set(names["answers"])
        assert len(names["losses"]) == len(names["document"].tokens) - 48
    elif name != "docs/explain.ipynb":
        assert len(list(tmp_path.glob("*.html"))) == 1
    if "explain" in name:
        assert names["e"].checked.draws in (4, 8)
    elif name == "docs/sources.md":
        assert set(names["e"].statements.kind) <= {"one", "either", "both", "none"}


@pytest.mark.parametrize(
    ("page", "blocks", "written"),
    [
        ("README.md", None, set()),
        pytest.param("docs/sources.md", 1, set(), marks=ALL_RESULTS),
    ],
)
def test_the_output_on_a_page_is_what_its_code_prints(
    page: str, blocks: int | None, written: set[str], capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Up to rounding on other CPUs. `blocks`: so many of its blocks of code and of output."""
    if not (cache_folder() / FILE).is_file() and "OLMO_SPARSITY_ALL_RESULTS" not in os.environ:
        pytest.skip("no SmolLM2 in the cache; load_model('smollm2') downloads it, 93 MB")
    for folder in ("docs", "olmo_sparsity"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in python_in(page)[:blocks]:
        exec(code, names)
    printed = capsys.readouterr().out.splitlines()
    numbers = r"-?\d+\.\d+"
    texts = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    for line in filter(None, "".join(texts[:blocks]).splitlines()):
        same = next(p for p in printed if re.sub(numbers, "", p) == re.sub(numbers, "", line))
        printed.remove(same)
        shown, found = (np.array(re.findall(numbers, text), float) for text in (line, same))
        np.testing.assert_allclose(found, shown, atol=0.1)
    assert {path.name for path in tmp_path.glob("*.html")} == written


def test_the_notebook_is_stored_with_its_outputs() -> None:
    assert all(cell["outputs"] for cell in cells_of_notebook())


def test_the_tables_of_sources_are_those_of_the_stored_runs() -> None:
    kinds = ["right_source", "told_either", "told_both", "told_none", "false_rests_on"]
    swapped = ["wrong_of_named", "swapped_rests_on", "swapped_exercises"]
    now, earlier = others()["sources"], others()["sources_earlier"]
    first = {name: run for name, run in earlier.items() if "_seed" in name}  # of all statements
    later = {name: run for name, run in earlier.items() if name not in first}
    for runs, digits, shares, page in [
        (later, 3, ["counted", *kinds, *swapped], "study/records/log.md"),
        (first, 2, ["whole", "counted", *kinds], "study/records/log.md"),
    ]:
        text = (ROOT / page).read_text()
        for share in shares:
            cells = (f"{run[share]:.{digits}f}" if share in run else "–" for run in runs.values())
            assert f" | {' | '.join(cells)} |\n" in text, share
    for run in now.values():  # S27 to S31 of study/claims.yaml
        assert run["right_source"] >= 0.98
        assert min(run[f"told_{kind}"] for kind in ("either", "both", "none")) >= 0.9
        assert max(run[share] for share in ("false_rests_on", *swapped[::2])) <= 0.05


def test_the_results_of_engines_are_those_of_the_stored_run() -> None:
    for name in ("engines", "servers"):
        printed = engines.table(read_rows(ROOT / f"study/results/{name}.jsonl"))
        assert f"```text\n{printed}\n```" in (ROOT / "docs/engines.md").read_text()


def test_the_rivals_on_sources_are_those_of_the_stored_run() -> None:
    rows = other_table("source_rivals").set_index("rival")
    text = (ROOT / "study/records/benchmarks.md").read_text()
    assert len(rows) > 8
    for name, row in rows.iterrows():
        numbers = [*(f"{number:.2f}" for number in row[:-1]), f"{row.iloc[-1]:,.0f}"]
        assert f"| {name} | {' | '.join(numbers)} |\n" in text


def test_pypi_has_what_is_pinned() -> None:
    """A local version (`2.13.0+cpu`) would be one that PyPI does not hold."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert not [line for line in pinned if "+" in line and not line.startswith("#")]


OWN_TASK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)


def test_the_example_of_an_own_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = OWN_TASK
    assert len(code.splitlines()) < 60
    for long, short in (("= 3000, 160", "= 40, 40"), ("(20, 40, 60, 100)", "(3, 30)")):
        assert long in code
        code = code.replace(long, short)
    names: dict[str, Any] = {}
    exec(code, names)
    assert float(names["loss"].id.detach()) < 2.5  # far below the ln 40 of guessing
    assert re.findall(r"^(\d+): exact [01]\.\d\d", capsys.readouterr().out, re.M) == ["3", "30"]
    assert names["found"].tokens_BR.shape == (50, 30)


def test_the_same_task_runs_under_every_scheme(tmp_path: Path) -> None:
    _, code = OWN_TASK
    (tmp_path / "backwards_task.py").write_text(code)
    settings = load_settings(
        ROOT / "study/configs/tasks/scratchpad_parity_quick.yaml",
        [
            f"--task.name={tmp_path}/backwards_task.py:Backwards",
            f"--output={tmp_path}/out",
            "--seeds=[1]",
            f"--schemes=[{','.join(SCHEMES)}]",
            "--num_workers=1",
            "--test_lengths=[6]",
            "--num_test_samples=20",
            "--training.num_steps=2",
        ],
    )
    task = build_task(settings)
    samples = task.sample(np.random.default_rng(0), 20, 6)
    np.testing.assert_array_equal(task.solve(samples), samples.response_BR)
    rows = run_settings(settings)
    assert {row.scheme for row in rows} == set(SCHEMES)
    assert all(0 <= row.token_accuracy <= 1 for row in rows)
