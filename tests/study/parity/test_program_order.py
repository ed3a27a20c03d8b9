"""The verdicts on variable assignment in program order, on planted accuracies."""

from __future__ import annotations

import pytest

from study.parity.models import Model
from study.parity.program_order import judge
from tests.support.parity import planted_model

LENGTHS = (5, 10, 25, 50)


def three(scheme: str, at_50: tuple[float, float, float], at_5: float = 1.0) -> list[Model]:
    models = []
    for seed, longest in zip((451, 452, 453), at_50, strict=True):
        accuracy = {5: at_5, 10: at_5, 25: longest, 50: longest}
        models.append(
            planted_model(
                scheme,
                5,
                seed,
                lambda k, length, accuracy=accuracy: accuracy[length],
                tested=(2, 5, 10),
                lengths=LENGTHS,
            )
        )
    return models


@pytest.mark.parametrize(
    ("ppc", "pose", "expected"),
    [
        ((1.0, 1.0, 0.99), (0.2, 0.3, 0.4), ("yes", "yes")),
        ((1.0, 1.0, 0.5), (0.2, 0.3, 0.6), ("open", "open")),
        ((0.2, 0.3, 0.4), (0.8, 0.9, 0.8), ("no", "no")),
    ],
)
def test_each_seed_decides(
    ppc: tuple[float, float, float],
    pose: tuple[float, float, float],
    expected: tuple[str, str],
) -> None:
    findings = judge([*three("ppc", ppc), *three("pose", pose)])
    assert (findings["U22"].verdict, findings["U23"].verdict) == expected


def test_pose_that_did_not_learn_voids_the_comparison() -> None:
    models = [*three("ppc", (1, 1, 1)), *three("pose", (0.1, 0.1, 0.1), at_5=0.5)]
    assert judge(models)["U23"].verdict == "void"


def test_two_seeds_are_unfinished() -> None:
    models = [*three("ppc", (1, 1, 1))[:2], *three("pose", (0.1, 0.1, 0.1))]
    findings = judge(models)
    assert findings["U22"].verdict == "unfinished"
    assert findings["U23"].verdict == "unfinished"
