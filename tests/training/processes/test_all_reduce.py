"""The speed of a cluster's links, and the least that they should have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from olmo_sparsity.training.processes import all_reduce
from olmo_sparsity.training.processes.all_reduce import find_link, main
from olmo_sparsity.training.processes.distributed import Processes
from tests.support import children


@pytest.mark.parametrize(("least", "exit_codes"), [("0.0001", [0, 0]), ("10000", [1, 0])])
def test_a_link_below_its_least_speed_fails(
    tmp_path: Path, least: str, exit_codes: list[int]
) -> None:
    job = children.start_each({"run_folder": str(tmp_path / "run")}, main, [["--least", least]] * 2)
    assert job.wait() == exit_codes, "\n".join(job.texts())
    first, second = job.texts()
    assert "2 processes" in first
    assert f"(gloo; at least {float(least):g})" in first
    assert not second


@pytest.mark.parametrize(
    ("device", "num_nodes", "has_card", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 1, True, ("NVLink", 150)),
        ("NVIDIA A100-SXM4-40GB", 1, True, ("NVLink", 100)),
        ("NVIDIA L40S", 1, True, ("PCIe", 10)),
        ("a GPU of tomorrow", 1, True, ("PCIe", 10)),
        ("NVIDIA H100 80GB HBM3", 2, True, ("InfiniBand or RoCE", 12.5)),
        ("NVIDIA H100 80GB HBM3", 2, False, ("TCP", 0.5)),
    ],
)
def test_the_least_speed_goes_by_the_kind_of_link(
    device: str,
    num_nodes: int,
    has_card: bool,
    expected: tuple[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(all_reduce, "device_name", lambda _: device)
    monkeypatch.setattr(all_reduce, "has_infiniband", lambda: has_card)
    processes = Processes(0, 8, 0, 8 // num_nodes)
    assert find_link(torch.device("cuda"), processes) == expected
    assert find_link(torch.device("cpu"), processes)[0] == "gloo"
