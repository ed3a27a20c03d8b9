"""Choose the network interface by which a node reaches the other nodes of a run.

gloo otherwise takes the address of the node's own name, which may be one of loopback. Interfaces
may be named differently on each node, so that no node can choose for another one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

import torch.distributed as dist

from olmo_sparsity.base.launch import Launch

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(store: dist.Store, launch: Launch, meeting_address: str) -> None:
    """Set gloo's variable for this process, unless the user has set it, or all processes run on one
    node. Every process must call it."""
    own_name = socket.gethostname()
    own_address = address_towards(meeting_address)
    store.set(f"host {launch.rank}", f"{own_name} {own_address or ''}")
    first_name, _ = _host_of(store, 0)
    last_name, last_address = _host_of(store, launch.world_size - 1)
    if VARIABLE in os.environ or first_name == last_name:
        return
    if own_name == first_name:
        # Towards itself, the node that the processes meet at would find its loopback.
        own_address = address_towards(last_address) if last_address else None
    interface = interface_of(own_address) if own_address else None
    if interface is not None:
        os.environ[VARIABLE] = interface


def _host_of(store: dist.Store, rank: int) -> tuple[str, str]:
    """Return the name and the address of a process's node; the address may be empty."""
    name, _, address = store.get(f"host {rank}").decode().partition(" ")
    return name, address


def address_towards(host: str) -> str | None:
    """Return the IPv4 address of this node's interface towards a host; None if there is no
    route."""
    any_port = 9
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
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe, get_address, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
