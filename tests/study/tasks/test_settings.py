"""What is refused before anything is trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from study.tasks.__main__ import main
from study.tasks.settings import load_settings
from tests.conftest import small_task
from tests.study.tasks.support import write

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/tasks").glob("*_paper.yaml")), ids=str)
def test_presets_of_the_paper_draw_its_chunks(path: Path) -> None:
    positions = load_settings(path, []).positions
    assert (positions.num_chunks, positions.published) == (2, True)


K = {
    "task": {"name": "sparse_parity"},
    "schemes": ["rope"],
    "train_lengths": [20, 20],
    "test_lengths": [20],
    "train_ks": [4],
    "test_ks": [4],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schemes": ["ppc"], "positions": {"num_ids": 8}},
            "test_lengths: length 8 has position IDs up to 9 under ppc, beyond the largest ID of",
        ),
        ({**K, "test_ks": [11]}, "test_ks: k=11 must lie between 1 and 10, the places of"),
        ({**K, "train_ks": [11]}, "train_ks: k=11 must lie between 1 and 10, the places of"),
        ({**K, "schemes": ["ppc"]}, "scheme ppc: this task has no coupled IDs"),
        ({**K, "test_lengths": [21]}, "21 is not a length of this task; use multiples of 2"),
        ({**K, "train_lengths": [21, 21]}, "holds no multiple of 2"),
        ({"schemes": ["spiral"]}, "scheme spiral is not known; choose among rope"),
        ({"schemes": []}, "schemes is empty"),
        ({"schemes": "rope"}, r"schemes must be a list: schemes=\[rope\]"),
        ({**K, "task": {"name": "sparse_parity", "max_k": 3}}, "task: unknown key 'max_k'$"),
        ({"seeds": [1, 1]}, "holds one value twice"),
        ({"task": "addition"}, "task=addition must be a section"),
        ({"task": None}, "task is missing"),
        ({"task": {"name": "subtraction"}}, "task.name=subtraction is not known"),
        ({"task": {"name": ["addition"]}}, "is not known"),
        ({"task": {"name": "addition", "base": 8}}, "base"),
        ({"task": {"name": "nowhere.py:Task"}}, "'nowhere.py' does not exist"),
        ({"train_lengths": [5, 3]}, r"train_lengths=\[5, 3\] must be \[shortest, longest\]"),
        ({"train_ks": [2], "test_ks": [2]}, "this task has no k; remove it"),
        ({"schemes": ["rope"], "positions": {"num_chunks": 3}}, "positions.num_chunks=3 is set"),
        (
            {"schemes": ["rope"], "positions": {"aligned_cuts": True}},
            "positions.aligned_cuts=True is set",
        ),
        ({"schemes": ["rope"], "coupling": {"embed_ids": False}}, "coupling.embed_ids=False is"),
        ({"schemes": ["auxiliary"], "coupling": {"embed_ids": False}}, "cannot predict IDs"),
        ({**K, "schemes": ["pointers"]}, "scheme pointers: this task has no coupled IDs"),
        ({"schemes": ["auxiliary"], "task": {"name": "addition"}}, "coupled with no prompt token"),
        ({"schemes": ["rope"], "positions": {"published": True}}, "positions.published=True is"),
        (
            {"schemes": ["pose"], "positions": {"published": True, "aligned_cuts": True}},
            "it means several chunks, cut anywhere",
        ),
        ({"model": {"alibi": True}}, "model.alibi=True is set, but the scheme decides it"),
        ({"model": {"vocab_size": 9}}, "model.vocab_size=9 is set, but the task"),
        ({"model": {"d_model": 32, "n_heads": 2, "mlp_hidden_size": 3}}, "model.mlp_hidden_size=3"),
        ({"schemes": ["ppc"], "positions": {"aligned_cuts": True}}, "units are single tokens"),
        ({"model": {"embedding_size": 9}}, "model.embedding_size=9 is set, but the task"),
        ({"model": {"max_sequence_length": 9}}, "model.max_sequence_length=9 is set, but the task"),
        (
            {"task": {"name": "variable_assignment"}, "train_ks": [2], "test_ks": [2]},
            "takes one k for all samples; leave train_ks empty",
        ),
        ({"training": {"num_steps": 0}}, "training.num_steps=0 must be at least 1"),
        ({"training": {"max_grad_norm": -1}}, "training.max_grad_norm=-1.0 must be at least"),
        ({**K, "training": {"grow_k_steps": -1}}, "training.grow_k_steps=-1 must be at least 0"),
        ({"speed": 3}, "speed"),
    ],
)
def test_bad_input_ends_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(small_task(tmp_path / "run") | changes, tmp_path)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
