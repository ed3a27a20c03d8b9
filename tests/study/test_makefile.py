"""The commands of study/Makefile parse, and make every stored result."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from study.pages.stored import ROOT, evaluations, measurements, others, task_rows, tasks
from study.rows import one_each
from study.tasks import planted
from study.tasks.experiment import fixed_settings, list_trials, with_defaults
from study.tasks.settings import load_settings
from tests.support.commands import check_command

OF_HISTORY = (
    *("calibration_", "planted_"),  # by `measure --planted`, which is gone
    *(
        "beyond_contextual",
        "ladder_contextual",
    ),  # collected from study/configs/text/experiments/ladder.yaml
    *("mixed_", "prose_mixed_", "reviews_mixed_", "sources_earlier"),  # with settings that are gone
    *("prose_27m_", "gpu_check_h200", "scaling", "theory_bridge"),  # on other machines, or by hand
    *("prose_names_", "prose_wikipedia_names_"),  # a set of targets that is gone
    *("choose_text_", "checkpoint_metrics"),  # by programs that are gone
    *("thirds", "code_first", "code_wikipedia"),  # of mixtures of corpora, which are gone
)
"""Results that were made by commands of the history."""


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
    assert len(commands) > 1000
    for program, *words in commands:
        if program == "olmo-sparsity":
            check_command(words)
        elif program == "python":
            assert words[0] == "-m"
            assert find_spec(words[1]) is not None, words[1]
        else:
            assert program in ("make", "cp", "pip", "chromium", "jupyter")


@pytest.mark.parametrize(("part", "num_experiments"), [("parity_again", 4), ("parity_nearest", 1)])
def test_parts_of_a_change_take_its_values_and_need_its_name(
    part: str, num_experiments: int
) -> None:
    make = ["make", "-n", "-f", "study/Makefile", part]
    named = subprocess.run(
        [*make, "CHANGE=queries chunks"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    experiments = [line for line in named.stdout.splitlines() if "study.tasks" in line]
    assert len(experiments) == num_experiments
    assert "--model.query_scale_length=40" in named.stdout
    unnamed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert f"{part} needs CHANGE" in unnamed.stderr


def named_results() -> set[str]:
    """The stored results that a claim, a number, a table or the figure names."""
    files = ("study/claims.yaml", "docs/numbers.yaml", "study/tables.yaml")
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    bound = [name for line in lines if ": {" not in line for name in one_each(line)]
    words = set(re.findall(r"[\w-]+", "\n".join(lines + bound)))
    return words & {*measurements(), *tasks(), *evaluations(), *others()}


def test_the_report_makes_every_result_that_is_named(commands: list[list[str]]) -> None:
    kept = [
        [word for word in words if word != "--no-rows"][-1]
        for words in commands
        if "study.pages.keep_results" in words
    ]
    made = {name.rpartition("/")[2].removesuffix(".csv").removesuffix(".json") for name in kept}
    if any("study.longer" in words for words in commands):  # stores them itself
        made |= {"longer", "longer_by_k"}
    named = named_results()
    assert len(named) > 250
    assert not {name for name in named - made if not name.startswith(OF_HISTORY)}
    asked = {" ".join(sorted(words)) for words in commands}
    for name, of in tasks().items():
        if name in named:
            assert " ".join(sorted(of["meta"]["command"].split())) in asked, name


GONE = {
    "coupling": {"embed_ids": True, "id_loss_weight": 1.0},
    **{"grow_k_steps": 0, "num_ids": None, "num_letters": 60, "test_task": {}},
}
"""Settings that no longer exist, and what is done now."""


def without_gone(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    kept = {name: of for name, of in settings.items() if name not in GONE or of != GONE[name]}
    return {name: without_gone(of) for name, of in kept.items()}


@pytest.mark.parametrize("name", sorted(named_results() & {*tasks()}))
def test_the_command_of_a_stored_result_still_asks_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The text of planted pieces is not prepared here; settings draw one sample of it.
    text = planted._Text(np.zeros(2048, int), 1024)
    monkeypatch.setattr(planted, "_read_text", lambda *_: text)
    meta = tasks()[name]["meta"]
    python, option, module, config, *overrides = shlex.split(meta["command"])
    settings = load_settings(config, overrides)
    assert (python, option, module) == ("python", "-m", "study.tasks")
    assert fixed_settings(settings) == with_defaults(without_gone(meta["settings"]))
    found = {(row.scheme, row.train_k, row.seed) for row in task_rows(name)}
    assert min(seed for _, _, seed in found) > 0, "settings were chosen on seed 0"
    assert found == {(t.scheme, t.train_k, t.seed) for t in list_trials(settings)}
