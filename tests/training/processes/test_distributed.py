"""Where processes meet, and one mistake gives one message."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError, DataError, ReportedElsewhere, UserError
from olmo_sparsity.base.launch import EXIT_UNREACHED
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.processes.distributed import ErrorReport, LostProcess, Processes
from olmo_sparsity.training.processes.meeting import read_meeting_point
from olmo_sparsity.training.processes.process_group import connect
from tests.support.children import free_port


@pytest.mark.usefixtures("no_launcher")
def test_a_launch_without_a_meeting_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        read_meeting_point()


def agreeing(rank: int, texts: list[str | None]) -> Processes:
    class Scripted(Processes):
        def gather(self, value: Any) -> list[Any]:
            reports = [text and ErrorReport(text, None, 2) for text in texts]
            assert value == reports[rank]
            return reports

        def sum_integers(self, number: int) -> int:
            assert number == (texts[self.rank] is not None)
            return len(texts) - texts.count(None)

    return Scripted(rank=rank, world_size=len(texts))


@pytest.mark.parametrize(
    ("texts", "speaker"), [(["bad", "bad"], 0), (["bad", None], 0), ([None, "bad"], 1)]
)
def test_one_process_speaks_for_all(texts: list[str | None], speaker: int) -> None:
    def attempted(rank: int) -> None:
        with agreeing(rank, texts).raising_together():
            if texts[rank] is not None:
                raise DataError(texts[rank])

    for rank in range(2):
        with pytest.raises(UserError) as caught:
            attempted(rank)
        if rank == speaker:
            assert str(caught.value).endswith("bad")
            assert isinstance(caught.value, DataError)
            alone = texts.count("bad") == 1
            assert str(caught.value).startswith(f"process {rank} of 2" if alone else "bad")
        else:
            assert isinstance(caught.value, ReportedElsewhere)


@pytest.mark.usefixtures("no_launcher")
def test_who_does_not_come_to_the_meeting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "3")  # and put back as it was
    named = r"process 1, process 2 of 3 did not come .*meeting_timeout_s=1"
    with pytest.raises(LostProcess, match=named), connect(EngineConfig(meeting_timeout_s=1)):
        pass


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(("rank", "port_is_taken"), [("1", False), ("0", True)])
def test_a_process_that_reaches_nobody_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, rank: str, port_is_taken: bool
) -> None:
    """As where the first process is late or dead, or another job on its node has the port."""
    with socket.socket() as other_job:
        port = free_port()
        if port_is_taken:
            other_job.bind(("", port))
            other_job.listen()
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(UserError, match=f"MASTER_PORT={port}") as caught,
            connect(EngineConfig(meeting_timeout_s=1)),
        ):
            pass
    assert caught.value.exit_code == EXIT_UNREACHED
