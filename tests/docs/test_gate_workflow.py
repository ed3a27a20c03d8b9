"""The workflow of docs/sources.md gates a change, and accepts an intended one. The test runs its
steps of shell, and does by itself what GitHub's caches do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs/sources.md").read_text()
(WORKFLOW,) = [
    block
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    if block.startswith("name: sources")
]
STEPS: list[dict[str, Any]] = yaml.safe_load(WORKFLOW)["jobs"]["gate"]["steps"]

GATE = """#!/usr/bin/env bash
# In place of the gate: its result is the prompt, and another prompt than the baseline's fails.
baseline=$(grep -o -- '--baseline [^ ]*' <<< "$*" | cut -d' ' -f2)
mkdir -p results/gate
cp prompt results/gate/prompt
[[ -z $baseline ]] || cmp -s prompt "$baseline/prompt"
"""


@pytest.fixture
def run_workflow(tmp_path: Path) -> Callable[..., bool]:
    """Run the workflow's steps in the shell for this prompt, and return whether all passed."""
    program = tmp_path / "bin" / "olmo-sparsity"
    program.parent.mkdir()
    program.write_text(GATE)
    program.chmod(0o755)

    results = tmp_path / "results"
    cache_of_main = tmp_path / "cache"

    def run(prompt: str, *, is_push: bool, accepts: bool = False) -> bool:
        (tmp_path / "prompt").write_text(prompt)
        shutil.rmtree(results, ignore_errors=True)
        if cache_of_main.exists():
            shutil.copytree(cache_of_main, results / "main")
        is_true = {"push": is_push, "accept-baseline": accepts}
        path = f"{program.parent}:{os.environ['PATH']}"
        for step in STEPS:
            command = step.get("run", "")
            condition = step.get("if", "")
            is_wanted = all(value for name, value in is_true.items() if name in condition)
            if "results/" not in command or not is_wanted:
                continue
            shell = ["bash", "-e", "-c", command]
            ended = subprocess.run(shell, cwd=tmp_path, env={"PATH": path, "ASK": ""}, check=False)
            if ended.returncode:
                return False
        if is_push:
            shutil.copytree(results / "main", cache_of_main, dirs_exist_ok=True)
        return True

    return run


def test_main_stays_red_after_a_change_that_nobody_accepted(
    run_workflow: Callable[..., bool],
) -> None:
    assert run_workflow("one", is_push=True)  # the first run has no baseline
    assert run_workflow("one", is_push=False)
    assert not run_workflow("two", is_push=False)
    assert not run_workflow("two", is_push=True)
    assert not run_workflow("two", is_push=True)


def test_an_accepted_change_becomes_the_baseline(run_workflow: Callable[..., bool]) -> None:
    assert run_workflow("one", is_push=True)
    assert run_workflow("two", is_push=True, accepts=True)
    assert run_workflow("two", is_push=False)
    assert not run_workflow("one", is_push=False)


def test_a_labelled_pull_request_leaves_the_baseline(run_workflow: Callable[..., bool]) -> None:
    assert run_workflow("one", is_push=True)
    assert run_workflow("two", is_push=False, accepts=True)
    assert not run_workflow("two", is_push=True)


def test_the_mark_of_a_label_and_of_a_message_is_that_of_the_text() -> None:
    (condition,) = [step["if"] for step in STEPS if "accept-baseline" in step.get("if", "")]
    assert "github.event.pull_request.labels" in condition
    assert "github.event.head_commit.message, '[accept-baseline]'" in condition
    assert '-m "[accept-baseline]"' in PAGE
