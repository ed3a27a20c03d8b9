"""README's first figure shows the stored measurements, and its caption says what they show."""

from __future__ import annotations

import pandas as pd
import pytest

from study.pages.draw_readme import (
    POSE,
    ROPE,
    SCHEMES,
    SELECTOR,
    TRAINED_LENGTH,
    WINDOWS,
    Scheme,
    draw,
    name_of,
    read_gaps,
    read_placebo_recovery,
)
from study.pages.stored import ROOT, measurements, read_summary

README = (ROOT / "README.md").read_text(encoding="utf-8")


def recovery_of(scheme: Scheme, window: int) -> pd.Series:
    return read_summary(name_of(scheme, window)).loc[SELECTOR].recovery


def test_each_panel_draws_the_stored_numbers() -> None:
    gaps, inside, beyond = draw().axes
    drawn = [list(line.get_ydata()) for line in gaps.lines]
    for scheme in SCHEMES:
        assert list(read_gaps(scheme)) in drawn
    for axes, schemes, window in ((inside, SCHEMES, TRAINED_LENGTH), (beyond, [POSE], WINDOWS[-1])):
        drawn = [list(line.get_ydata()) for line in axes.lines]
        assert len(drawn) == 1 + 2 * len(schemes)  # the whole gap; each scheme and its placebo
        for scheme in schemes:
            assert list(recovery_of(scheme, window)) in drawn
            assert list(read_placebo_recovery(scheme, window)) in drawn


def test_the_caption_says_how_the_gap_goes_on_beyond_the_trained_length() -> None:
    pose = read_gaps(POSE)
    rope = read_gaps(ROPE)
    inside = f"by {pose[256]:.2f} and {rope[256]:.2f} nats"
    assert f"Up to 256 tokens distant text helps both models, {inside}" in README
    assert f"no longer grows ({pose[480]:.2f} at 480 tokens, {pose[960]:.2f} at 960)" in README
    assert pose[960] < pose[480] < pose[256]
    assert f"raises the loss, by {-rope[480]:.2f} and {-rope[960]:.2f}" in README


def test_the_caption_says_where_the_placebo_of_rope_is_the_higher_line() -> None:
    own = recovery_of(ROPE, TRAINED_LENGTH)
    placebo = read_placebo_recovery(ROPE, TRAINED_LENGTH)
    higher = [k for k in placebo.index if placebo[k] > own[k]]
    assert higher == [8, 16]
    assert "with RoPE alone it is negative from eight tokens on" in README


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.key)
def test_the_caption_has_the_numbers_of_tokens_targets_and_documents(scheme: Scheme) -> None:
    for window in WINDOWS:
        name = name_of(scheme, window)
        row = read_summary(name).loc[SELECTOR].iloc[0]
        assert (row.num_targets, row.num_documents) == (120, 60)
        assert 76_000 < measurements()[name]["mean_losses"]["loss_short"]["count"] < 77_000
    assert "120 tokens in 60 documents" in README
    assert "Means of more than 76,000 tokens" in README
