"""Choose the network interface by which a node reaches the other nodes of a run.

    node1 (eth0 10.0.0.1) and node2 (ib0 10.0.0.2) meet at node1
    on node1    GLOO_SOCKET_IFNAME=eth0    its interface towards node2
    on node2    GLOO_SOCKET_IFNAME=ib0     its interface towards node1

    with one process each, the store then holds
    node 0      ["node1", "127.0.0.1"]     node1 reaches itself by its loopback, which is of no use
    node 1      ["node2", "10.0.0.2"]

gloo otherwise takes the address of the node's own name, which may be one of loopback. Interfaces
may be named differently on each node, so that no node can choose for another one. meeting.py calls
`choose_interface` when all processes have come.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from typing import NamedTuple

import torch.distributed as dist

from olmo_sparsity.base.launch import Launch

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The variable in which gloo looks for the name of the interface."""


def choose_interface(store: dist.Store, launch: Launch, meeting_address: str) -> None:
    """Set gloo's variable for this process, unless the user has set it, or all processes run on one
    node. Every process must call it."""
    own_node = _Node(socket.gethostname(), address_towards(meeting_address))
    own_node.write(store, launch.rank)
    # Ranks fill one node after the other, so the nodes of the first and of the last process tell
    # whether there are several. `read` waits until that process has written.
    first_node = _Node.read(store, 0)
    last_node = _Node.read(store, launch.world_size - 1)
    if VARIABLE in os.environ or first_node.name == last_node.name:
        return

    address = _address_to_announce(own_node, first_node, last_node)
    interface = None if address is None else interface_of(address)
    # Otherwise gloo chooses by itself, which works on most clusters.
    if interface is not None:
        os.environ[VARIABLE] = interface


def _address_to_announce(own_node: _Node, first_node: _Node, last_node: _Node) -> str | None:
    """Return the address of this node at which the others can reach it; None if none is known."""
    if own_node.name != first_node.name:
        return own_node.address
    # Processes meet at the first node. Towards itself it would find its loopback.
    return None if last_node.address is None else address_towards(last_node.address)


class _Node(NamedTuple):
    """The node of a process, as it is written into the store that all processes share."""

    name: str
    address: str | None
    """The IPv4 address of its interface towards the meeting point; None if there is no route."""

    def write(self, store: dist.Store, rank: int) -> None:
        """Write the node of the process with this rank."""
        store.set(f"node {rank}", json.dumps(self))

    @staticmethod
    def read(store: dist.Store, rank: int) -> _Node:
        """Read the node of the process with this rank. Wait until it is written."""
        return _Node(*json.loads(store.get(f"node {rank}")))


def address_towards(host: str) -> str | None:
    """Return the IPv4 address of this node's interface towards a host; None if there is no
    route."""
    any_port = 9  # of the service "discard"
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((host, any_port))  # with datagrams this chooses a route, and sends nothing
        return probe.getsockname()[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the name of this node's interface that has an IPv4 address."""
    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                # `struct ifreq` of netdevice(7): 16 bytes of the name, then a socket address, whose
                # IPv4 address follows after 2 bytes of the family and 2 of the port.
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe, get_address, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
