"""A job on several hosts: which rank is on which, where this one can be reached, and where messages pass.

A host here is what shares memory. Two containers of one machine are two hosts, unless they share `/dev/shm`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flowrl.errors import ConfigError

HOST, ADDRESS = "FLOWRL_HOST", "FLOWRL_ADDRESS"
"""Set by hand where what is found out is wrong: a name of this host, its address for the other ones."""
LOOPBACK = "127.0.0.1"
_BOOT, _NETWORK, _MEMORY = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net"), Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Across:
    """What a rank of a job on several hosts knows of it.

    Example:
        Across(hub="10.0.0.1:4711", token="...", address="10.0.0.2", host_of=(0, 0, 1, 1))
    """

    hub: str
    """`ADDRESS:PORT` of what passes messages on; see `flowrl.engines.launch.hub`."""
    token: str = field(repr=False)
    """Whoever has it takes part."""
    address: str
    """Of this host, for the others."""
    host_of: tuple[int, ...]
    """Number of the host that each rank is on."""
    keeper: int | None = None
    """Rank whose process holds the hub; None: none of them."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Across:
        found = json.loads(text)
        return cls(**{**found, "host_of": tuple(found["host_of"])})


def host_id(environment: Mapping[str, str] = os.environ) -> str:
    """The same in two processes exactly when both see the same shared memory and network, as the same user."""
    if environment.get(HOST):
        return environment[HOST]
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    parts = [boot, str(os.getuid())]
    parts += [f"{found.st_dev}-{found.st_ino}" for path in (_MEMORY, _NETWORK) if (found := _stat(path)) is not None]
    return "/".join(parts)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def address_towards(other: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address of this host that is used on the way to another one; nothing is sent. Errors: ConfigError."""
    if environment.get(ADDRESS):
        return environment[ADDRESS]
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.connect(where)
            return str(one.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no way from {socket.gethostname()} to {other}: {error}; {ADDRESS}=... names the address under which other hosts "
            "reach this one"
        ) from error


def interface_of(address: str) -> str | None:
    """The network interface that has an address (IPv4); None where that is not known."""
    import fcntl
    import struct

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(one.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return "lo" if address.startswith("127.") else None
