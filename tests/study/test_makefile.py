"""The commands of study/Makefile parse, and make every stored result."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.util import find_spec

import pytest

from study.pages.stored import ROOT, evaluations, measurements, others, tasks
from tests.support.commands import check_command


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


def test_the_report_makes_every_stored_result(commands: list[list[str]]) -> None:
    kept = [
        [word for word in words if word != "--no-rows"][-1]
        for words in commands
        if "study.pages.keep_results" in words
    ]
    made = {name.rpartition("/")[2].removesuffix(".csv").removesuffix(".json") for name in kept}
    by_hand = {"gpu_check_h200", "scaling"}  # scripts/gpu_check.sh, fake tensors
    by_hand |= {"pose_pays", "source_rivals", "theory_bridge"}  # by scripts that are in the history
    names = {*measurements(), *tasks(), *evaluations(), *others()}  # again: on another machine
    other = ("_again", "prose_names", "wikipedia_names")  # on another machine; sets that are gone
    assert not {n for n in names - by_hand - made if not any(word in n for word in other)}
    asked = {" ".join(sorted(words)) for words in commands}
    for name, of in tasks().items():
        words = [w for w in of["meta"]["command"].split() if not w.startswith("--num_workers")]
        assert " ".join(sorted(words)) in asked, name
