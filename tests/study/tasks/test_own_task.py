"""The examples of study/tasks.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from study.tasks.__main__ import main
from study.tasks.experiment import run_settings
from study.tasks.schemes import SCHEMES
from study.tasks.settings import build_task, load_settings
from tests.conftest import small_task
from tests.study.tasks.support import write

ROOT = Path(__file__).parents[3]
OWN_TASK = re.findall(r"```python\n(.*?)```", (ROOT / "study/tasks.md").read_text(), re.DOTALL)


def test_the_example_of_an_own_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = OWN_TASK
    for long, short in (("= 3000, 160", "= 40, 40"), ("(20, 40, 60, 100)", "(3, 30)")):
        assert long in code
        code = code.replace(long, short)
    names: dict[str, Any] = {}
    exec(code, names)
    assert float(names["loss"].detach()) < 4.5  # far below the ln 9 + ln 40 of guessing
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


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("response_ids_BR=ids_Bn[:, ::-1]", "response_ids_BR=ids_Bn[:, 1:]", "_BR has shape"),
        ("@dataclass(frozen=True)", "", "nor a dataclass your_file.py:Task"),
        ("num_letters)), ", "num_letters - 1)), ", "the vocabulary has 8 words"),
        ("return length + 1", "return length", "but the first is 1"),
        ("[:, -2::-1]", "[:, :-1]", "solve() does not give"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture, right: str, wrong: str, expected: str
) -> None:
    _, code = OWN_TASK
    assert code.count(right) == 1
    (tmp_path / "own.py").write_text(code.replace(right, wrong))
    task = {"task": {"name": f"{tmp_path}/own.py:Backwards"}}
    assert main([str(write(small_task(tmp_path / "run") | task, tmp_path))]) == 2
    assert expected in capsys.readouterr().err
