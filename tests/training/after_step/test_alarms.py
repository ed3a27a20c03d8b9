"""Alarms: a loss that rises, a slow process."""

from __future__ import annotations

from olmo_sparsity.config.sections import RunConfig, StageConfig
from olmo_sparsity.training.after_step.alarms import LossAlarm, StragglerAlarm


def config_of(warmup_steps: int = 20) -> RunConfig:
    config = RunConfig()
    config.optimizer.warmup_steps = warmup_steps
    return config


def lines_of(alarm: LossAlarm, losses: list[float], first_interval: int = 1) -> list[int]:
    """Give the alarm the means of intervals of 10 steps. Return the steps at which it says so."""
    steps = range(10 * first_interval, 10 * (first_interval + len(losses)), 10)
    return [
        step for step, loss in zip(steps, losses, strict=True) if alarm.describe_rise(step, loss)
    ]


def test_a_loss_that_rises_is_reported_once_until_it_has_fallen_again() -> None:
    alarm = LossAlarm(config_of(), [])
    losses = [9, 8, 4, 3.9, 4.3, 4.5, 6, 7, 3.8, 4.2, 4.4]
    assert lines_of(alarm, losses) == [60, 110]


def test_a_rise_names_both_losses() -> None:
    alarm = LossAlarm(config_of(), [])
    assert lines_of(alarm, [9, 8, 4]) == []
    line = alarm.describe_rise(40, 4.6)
    assert "step 40: LOSS HAS RISEN to 4.60, from 4.00 at step 30" in line
    assert "branch_from" in line


def test_the_loss_of_the_warm_up_is_no_measure() -> None:
    alarm = LossAlarm(config_of(warmup_steps=15), [])
    assert lines_of(alarm, [2, 1, 5, 5.4, 5.6]) == [50]


def test_a_resumed_run_compares_with_the_losses_before() -> None:
    earlier = [(step, 3.0 if step <= 40 else 5.0) for step in range(1, 61)]
    resumed = LossAlarm(config_of(), earlier)
    assert lines_of(resumed, [5, 3.2, 4], first_interval=7) == [90]


def test_a_stage_with_other_text_begins_anew() -> None:
    config = config_of()
    config.training.lengths = [StageConfig(until=50), StageConfig()]
    assert lines_of(LossAlarm(config, []), [9, 8, 2, 2, 2, 4, 4, 4.6]) == [80]


def test_a_process_that_is_slowest_three_times_in_a_row_is_named_once() -> None:
    alarm = StragglerAlarm(["n1", "n1", "n2", "n2"])
    rows = [(2, 1.3), (2, 1.3), (2, 1.5), (2, 1.5), (2, 1.5), (2, 1.1), (2, 1.3), (2, 1.3), (2, 2)]
    lines = [alarm.describe_slow(rank, ratio) for rank, ratio in rows]
    assert [bool(line) for line in lines] == [False, False, True] + 6 * [False]
    assert "2 on n2 takes 1.5 times as long" in lines[2]


def test_processes_that_take_turns_are_not_slow() -> None:
    alarm = StragglerAlarm(["n1", "n2"])
    assert not any(alarm.describe_slow(rank, 1.3) for rank in (0, 0, 1, 1, 0, 0, 1))
