"""Each node chooses the interface by which it reaches the others."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from olmo_sparsity.base.launch import Launch
from olmo_sparsity.training.processes import network_interface
from olmo_sparsity.training.processes.network_interface import (
    VARIABLE,
    choose_interface,
    interface_of,
)
from olmo_sparsity.training.processes.process_group import connect
from tests.support import children


def test_an_address_belongs_to_the_interface_that_has_it() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") is None, "an address of documentation"


def test_a_host_without_a_way_to_it_has_no_address() -> None:
    assert network_interface.address_towards("127.0.0.1") == "127.0.0.1"
    assert network_interface.address_towards("no.such.host.invalid") is None


def chosen_by(
    rank: int, hosts: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Return what a process chooses, where the second node is at 10.0.0.2 and reached by ib0."""
    store = dist.HashStore()
    for other, host in enumerate(hosts):
        address = {"first": "127.0.0.1", "second": "10.0.0.2"}[host]
        store.set(f"node {other}", json.dumps([host, address]))
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[rank])
    ways = {"first": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
    if hosts[rank] == "second":
        ways = {"first": "10.0.0.2"}
    monkeypatch.setattr(network_interface, "address_towards", ways.get)
    names = {"127.0.0.1": "lo", "10.0.0.1": "ib0", "10.0.0.2": "ibp12s0"}
    monkeypatch.setattr(network_interface, "interface_of", names.get)
    monkeypatch.setattr(os, "environ", variables)
    choose_interface(store, Launch(rank, len(hosts)), "first")
    return variables.get(VARIABLE)


@pytest.mark.parametrize(("rank", "expected"), [(0, "ib0"), (1, "ib0"), (2, "ibp12s0")])
def test_nodes_whose_interfaces_have_other_names_choose_their_own(
    rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_by(rank, ["first", "first", "second"], {}, monkeypatch) == expected


def test_processes_of_one_node_choose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_by(1, ["first", "first"], {}, monkeypatch) is None


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {VARIABLE: "eth7"}
    assert chosen_by(2, ["first", "first", "second"], variables, monkeypatch) == "eth7"


def sum_as_another_node(out: Path) -> int:
    """In each process."""
    name = f"node{os.environ['RANK']}"
    socket.gethostname = lambda: name
    with connect() as processes:
        numbers = torch.ones(3)
        dist.all_reduce(numbers)
        (out / f"{processes.rank}.txt").write_text(f"{os.environ[VARIABLE]} {int(numbers[0])}")
    return 0


def test_processes_of_two_nodes_sum_over_the_interfaces_that_they_chose(tmp_path: Path) -> None:
    job = children.start_each(
        {"run_folder": str(tmp_path / "run")}, sum_as_another_node, [tmp_path] * 2
    )
    assert job.wait() == [0, 0], "\n".join(job.texts())
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["lo 2", "lo 2"]
