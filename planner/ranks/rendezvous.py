"""How ranks find one another: under torchrun, or in the process group of a server."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...offload.errors import InputError, RankError
from .agreement import Agreement, Solo
from .pulse import Pulse
from .ranks import Line, LineError, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import Store

RENDEZVOUS_S = 300.0
DEADLINE_S = 120.0
SILENCE_S = 20.0
"""Longer than anything keeps Python's global lock: as long as that is held, no thread beats."""

_LOOPBACK = "127.0.0.1"

_MISSING = re.compile(r"keys: \S*/(\d+)$")
"""How gloo tells the rank that it waited for in vain while a group was made."""

_meetings = count()
_kept: list[TCPStore] = []
"""Stores on MASTER_PORT stay for as long as the process lives: a rank that is ahead may be in the
server's `init_process_group` already, and have connected to this one."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the store is. `server` is set on the rank that holds it."""

    rank: int
    world_size: int
    host: str
    address: str
    port: int
    prefix: str = ""
    server: TCPStore | None = None

    def connect(self, timeout_s: float) -> Store:
        store = _store(self.address, self.port, timeout_s)
        return dist.distributed_c10d.PrefixStore(self.prefix, store)


def meet(
    group: ProcessGroup | None = None,
    *,
    rendezvous_s: float = RENDEZVOUS_S,
    deadline_s: float = DEADLINE_S,
    silence_s: float = SILENCE_S,
) -> Agreement:
    """The agreement of the ranks in `group`, or of all; Solo where there is but one.

    Every rank has to call it, as often as the others. Where torch.distributed is initialised, a
    gloo group of its own tells the ranks where rank 0's store is, and is destroyed again; ranks are
    numbered as in `group`. Otherwise the store is that of `env://`, at MASTER_ADDR and MASTER_PORT,
    and torch.distributed isn't initialised.

    `rendezvous_s` is how long all may take to come, `deadline_s` how long a step waits where
    nothing else is said. A rank without a sign of life for `silence_s` is taken for dead.
    Raises RankError where a rank doesn't come, InputError for an environment that can't be.
    """
    if dist.is_available() and dist.is_initialized():
        place = _in_group(group, rendezvous_s)
    else:
        place = _in_environment(rendezvous_s)
    if place is None:
        return Solo()
    line = Line(lambda: place.connect(rendezvous_s), silence_s)
    try:
        line.call(lambda store: store.check([""]), patience_s=rendezvous_s)
    except LineError as fault:
        raise RankError(
            f"rank {place.rank} didn't reach {place.host} at {place.address}:{place.port} within "
            f"{rendezvous_s:g} s: {fault}",
            hint="the log of that rank says why",
            ranks=(0,),
        ) from fault
    pulse = Pulse(lambda: place.connect(rendezvous_s), place.rank, place.world_size)
    ranks = Ranks(
        place.rank,
        place.world_size,
        line,
        pulse,
        host=place.host,
        server=place.server,
        deadline_s=deadline_s,
        silence_s=silence_s,
    )
    try:
        ranks.nodes = ranks.exchange("meeting", socket.gethostname(), deadline_s=rendezvous_s)
    except BaseException:
        ranks.close()
        raise
    return ranks


def _in_environment(timeout_s: float) -> _Place | None:
    world_size = _number("WORLD_SIZE", least=1, default=1)
    if world_size == 1:
        return None
    if not dist.is_available():
        raise InputError(
            f"WORLD_SIZE is {world_size}, and this PyTorch is built without torch.distributed",
            hint="install one that has it, or start one process",
        )
    rank, port = _number("RANK"), _number("MASTER_PORT", least=1)
    address = os.environ.get("MASTER_ADDR")
    if rank >= world_size or not address:
        raise InputError(
            f"RANK is {rank}, WORLD_SIZE {world_size} and MASTER_ADDR {address!r}",
            hint="start the ranks with torchrun, or set what it sets",
        )
    is_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = None
    if rank == 0 and not is_launcher:
        try:
            server = _store(address, port, timeout_s, is_master=True, multi_tenant=True)
        except RuntimeError as error:
            raise InputError(
                f"rank 0 can't listen at {address}:{port}: {str(error).partition(chr(10))[0]}",
                hint="set MASTER_PORT to a free port",
            ) from error
        _kept.append(server)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"residency/{restart}/{next(_meetings)}"
    host = "the launcher" if is_launcher else "rank 0"
    return _Place(rank, world_size, host, address, port, prefix, server)


def _in_group(group: ProcessGroup | None, timeout_s: float) -> _Place | None:
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(members) == 1:
        return None
    rank = dist.get_rank(group)
    try:
        control = dist.new_group(
            members,
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
        machines = [""] * len(members)
        dist.all_gather_object(machines, socket.gethostname(), group=control)
        server, told = None, [("", 0)]
        if rank == 0:
            server, told = _opened(timeout_s, one_machine=len(set(machines)) == 1)
        dist.broadcast_object_list(told, src=members[0], group=control)
        dist.destroy_process_group(control)
    except RuntimeError as error:
        raise _unmet(error, len(members), timeout_s) from error
    address, port = told[0]
    return _Place(rank, len(members), "rank 0", address, port, "residency", server)


def _unmet(error: RuntimeError, ranks: int, timeout_s: float) -> RankError:
    told = str(error).partition("\n")[0]
    missing = _MISSING.search(told)
    who = f"the {ranks} ranks of the process group" if missing is None else f"rank {missing[1]}"
    return RankError(
        f"{who} didn't come within {timeout_s:g} s: {told}",
        hint="every rank of the group has to take part; the logs say which didn't, and why",
        ranks=() if missing is None else (int(missing[1]),),
    )


def _opened(timeout_s: float, *, one_machine: bool) -> tuple[TCPStore, list[tuple[str, int]]]:
    """A store on a free port and where it is. Nothing outside the machine reaches it unless it has
    to."""
    if not one_machine:
        address = socket.getfqdn()
        server = _store(address, 0, timeout_s, is_master=True)
        return server, [(address, server.port)]
    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    server = _store(_LOOPBACK, port, timeout_s, is_master=True, master_listen_fd=listening.detach())
    return server, [(_LOOPBACK, port)]


def _store(
    address: str,
    port: int,
    timeout_s: float,
    *,
    is_master: bool = False,
    multi_tenant: bool = False,
    master_listen_fd: int | None = None,
) -> TCPStore:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=master_listen_fd,
    )


def _number(name: str, *, least: int = 0, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < least:
        raise InputError(
            f"the environment variable {name} is {text!r}, and has to be a number from {least} on",
            hint="start the ranks with torchrun, or set what it sets",
        )
    return int(text)
