"""The picture of the paper's experiment has a panel for each K_train, of models that learnt."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes

from olmo_sparsity.base.errors import DataError
from study.pages.draw_parity import CUT, draw
from tests.support.parity import KS, TESTED, as_claimed, at_chance, planted


def curves(axes: Axes) -> list[str]:
    """The style of each line, but for that of chance."""
    return [str(line.get_linestyle()) for line in axes.lines[1:]]


def test_each_k_is_a_line_that_is_cut_where_it_was_not_trained() -> None:
    models = planted(as_claimed, at_chance, masters=lambda train_k, seed: seed < 3)
    figure = draw(models, (20, 50))
    assert len(figure.axes) == 2 * len(KS)
    for axes, train_k in zip(figure.axes, (*KS, *KS), strict=True):
        assert curves(axes) == ["-" if k <= train_k else CUT for k in TESTED]
        assert [text.get_text() for text in axes.texts] == ["3 of 5 learnt"]


def test_a_panel_of_models_that_did_not_learn_has_no_line() -> None:
    models = planted(as_claimed, at_chance, masters=lambda train_k, seed: train_k != 12)
    figure = draw(models, (20, 50))
    assert [bool(curves(axes)) for axes in figure.axes[:5]] == [True] * 4 + [False]


def test_a_k_train_without_models_of_a_scheme_is_left_out() -> None:
    models = [
        model
        for model in planted(as_claimed, at_chance)
        if (model.trial.scheme, model.train_k) != ("rope", 10)
    ]
    figure = draw(models, (20, 50))
    assert [axes.get_title() for axes in figure.axes[:4]] == [
        f"K_train = {k}" for k in (4, 6, 8, 12)
    ]


def test_a_picture_without_panels_is_refused() -> None:
    pose = [model for model in planted(as_claimed, at_chance) if model.trial.scheme == "pose"]
    with pytest.raises(DataError, match="make -f study/Makefile parity_table"):
        draw(pose, (20, 50))
