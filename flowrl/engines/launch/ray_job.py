"""Starts the ranks of a job on a Ray cluster, and ends them together. As `spawn.run_job`, on whichever nodes have room.

driver (here)       a placement group with a bundle for the ranks of each host; passes on what ranks print; tells who is gone
  host              one on each node: see `ray_actors`
  rank 0 .. n-1     the rank function, with RANK, WORLD_SIZE, FLOWRL_JOB, ... as of any launcher

[Note: Who sees what] Ranks see each other's failures in the job's folder, or by its hub, as without Ray. A process that is
killed is seen there too, and by Ray, which tells the driver in milliseconds. A node that is lost is seen by Ray's health checks,
or by its silence. When the driver ends, however, Ray ends the actors; the folder is then removed by the next job or table on that
node. Of a cluster that a killed driver had started for itself, two of Ray's agents end a minute or two later.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from flowrl.engines.launch.across import LOOPBACK, Across
from flowrl.engines.launch.board import POLL_S, Failure
from flowrl.engines.launch.place import Place, module_paths
from flowrl.engines.launch.ray_actors import VISIBLE, HostActor, RankActor, Said, Where
from flowrl.engines.launch.ray_cluster import Held, bundle_of, connected, nodes, placed, ray, refuse_too_large
from flowrl.engines.launch.ray_options import RayOptions
from flowrl.engines.launch.spawn import GRACE_S
from flowrl.errors import ConfigError, FlowError, RunError, WaitTimeout

_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\. |\.?$)", re.MULTILINE)


def run_job(
    entry: str,
    argument: Any,
    nproc: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
    options: RayOptions | None = None,
    hosts: Sequence[int] | None = None,
) -> None:
    """Call the function `entry` with `argument` in `nproc` actors, each a rank of one job, and wait for them.

    Args:
        entry: `module:function` or `FILE.py:function`, importable on the nodes.
        argument: of JSON's types.
        environment: added to that of a node.
        grace_s: from the first failure to the end of ranks that do not end by themselves.
        options: what each rank asks of the cluster, which cluster, and how long is waited.
        hosts: how many ranks are on each node, of neighbouring ranks; None: all are on one.

    Errors: RunError with the first error of any rank, its rank and node; ConfigError for what the cluster cannot hold, before
    anything is placed; WaitTimeout. No actor, placement group or shared memory of the job is left.
    """
    if nproc < 1:
        raise ConfigError(f"a job has at least 1 process; found {nproc}")
    options, hosts = options or RayOptions(), tuple(hosts or (nproc,))
    if sum(hosts) != nproc or min(hosts) < 1:
        raise ConfigError(
            f"{nproc} ranks are on hosts with {', '.join(map(str, hosts))} ranks; give as many as there are"
        )
    with connected(options, nproc):
        refuse_too_large(nodes(), hosts, options)
        with placed(hosts, options) as held, _started(held, hosts, options, grace_s) as job:
            job.begin(environment or {})
            failure = job.wait(entry, argument)
    if failure is not None:
        raise RunError(failure.told(f" [on node {held.names[job.host_of[failure.rank]]}]"))


@contextmanager
def _started(held: Held, hosts: Sequence[int], options: RayOptions, grace_s: float) -> Iterator[_Job]:
    host_of = tuple(host for host, count in enumerate(hosts) for _ in range(count))
    addresses = held.addresses if len(hosts) > 1 else (LOOPBACK,)
    beside = []
    for host, address in enumerate(addresses):
        mine = [rank for rank, on in enumerate(host_of) if on == host]
        hub_of = len(host_of) if len(hosts) > 1 and host == 0 else 0
        beside.append(_actor(HostActor, held.group, host, 0.0, 0.0).remote(mine, address, hub_of))
    ranks = [
        _actor(RankActor, held.group, host, options.cpus, options.gpus).remote(rank)
        for rank, host in enumerate(host_of)
    ]
    job = _Job(beside, ranks, host_of, held.names, addresses, options, grace_s)
    is_well = False
    try:
        yield job
        is_well = not job.is_ended_early
    finally:
        job.end(is_well=is_well)


def _actor(kind: type[Any], group: Any, bundle: int, cpus: float, gpus: float) -> Any:
    return ray.remote(kind).options(
        num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0,
        scheduling_strategy=bundle_of(group, bundle),
    )  # fmt: skip


@dataclass
class _Job:
    """Actors of a job, as the driver sees them."""

    hosts: list[Any]
    """The process beside the ranks of each node."""
    ranks: list[Any]
    host_of: tuple[int, ...]
    names: tuple[str, ...]
    """Of the node of each host."""
    addresses: tuple[str, ...]
    options: RayOptions
    grace_s: float
    is_ended_early: bool = False
    """A rank failed, so that others may still be at work."""
    lost: set[int] = field(default_factory=set)
    """Hosts that are gone."""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Wait for all processes, and make ranks of them. Errors: WaitTimeout that names those that did not come."""
        beside = [
            f"the process beside the ranks{f' of host {host}' if host else ''}" for host in range(len(self.hosts))
        ]
        found: list[Where] = self._all([one.where.remote() for one in self.hosts], beside, list(range(len(self.hosts))))
        names = [f"rank {rank}" for rank in range(len(self.ranks))]
        seen = self._devices(names) if self.options.gpus else {}
        paths = module_paths()
        begun = []
        for number, (rank, host) in enumerate(zip(self.ranks, self.host_of, strict=True)):
            across = None
            if len(self.hosts) > 1:
                across = Across(found[0].hub, found[0].token, self.addresses[host], self.host_of)
            place = Place(number, len(self.ranks), found[host].folder, across).environment()
            meet = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": str(found[0].port)}
            added = {**environment, **seen.get(host, {}), **place, **meet}
            begun.append(rank.begin.remote(added, paths, os.getcwd(), found[host].logs))
        pids = self._all(begun, names, self.host_of)
        for host in range(len(self.hosts)):
            mine = {rank: pid for rank, pid in enumerate(pids) if self.host_of[rank] == host}
            self._ask("watch", mine, host=host)

    def _devices(self, names: Sequence[str]) -> dict[int, dict[str, str]]:
        """What ranks of each host see: the GPUs of all of them, rank r its own as the r-th there, as on a host without Ray."""
        given = self._all([rank.devices.remote() for rank in self.ranks], names, self.host_of)
        seen: dict[int, list[str]] = {}
        for host, ids in zip(self.host_of, given, strict=True):
            seen.setdefault(host, []).extend(filter(None, [ids]))
        return {host: {VISIBLE: ",".join(ids)} for host, ids in seen.items()}

    def wait(self, entry: str, argument: Any) -> Failure | None:
        """Until all have ended, or some time after the first that failed."""
        running = {rank.run.remote(entry, argument): number for number, rank in enumerate(self.ranks)}
        until: float | None = None
        while running and (until is None or time.monotonic() < until):
            ended, _ = ray.wait(list(running), timeout=POLL_S)
            for host in range(len(self.hosts)):
                self._pass_on(self._said(host))
            if self.lost and until is None:
                until = time.monotonic() + self.grace_s
            for one in ended:
                if not self._ended_well(one, running.pop(one)) and until is None:
                    until = time.monotonic() + self.grace_s
        self.is_ended_early = until is not None
        failure: Failure | None = self._ask("failure")
        return failure

    def _said(self, host: int) -> list[Said]:
        """What ranks of a host have printed; the job is told of a host that is gone, if it is not the first."""
        if host in self.lost:
            return []
        try:
            found: list[Said] = self._ask("said", host=host)
            return found
        except RunError as error:
            if not host:
                raise  # it holds all that is known
            self.lost.add(host)
            self._ask("fail", self.host_of.index(host), str(error).partition("\n")[0], str(error))
            return []

    def end(self, *, is_well: bool) -> None:
        """End all that still run, and what they had. Never raises for what is gone already."""
        for rank in self.ranks:
            if is_well:
                rank.__ray_terminate__.remote()  # in the order of Python: what is to be done at exit is done
            else:
                ray.kill(rank)
        for host in reversed(range(len(self.hosts))):  # the first has the hub
            if host in self.lost:
                continue
            with suppress(ray.exceptions.RayError, RunError):
                self._ask("ended", self.grace_s, wait_s=2 * self.grace_s, host=host)
                while said := self._ask("said", is_all=True, host=host):
                    self._pass_on(said)
                self._ask("close", host=host)
        for actor in (*self.ranks, *self.hosts):
            ray.kill(actor)

    # --------------------------------------------------------------------------------------------------------- inside

    def _ended_well(self, call: Any, rank: int) -> bool:
        try:
            code = ray.get(call, timeout=self.options.silent_s)
            how, text = f"its function ended with code {code}", ""
        except ray.exceptions.RayError as error:
            code, how, text = 1, f"its process is gone: {_why(error)}", str(error)
        if code:
            self._ask("fail", rank, how, text)  # unless it is known why
        return not code

    def _ask(self, method: str, *arguments: Any, wait_s: float = 0.0, host: int = 0, **named: Any) -> Any:
        """What the process beside the ranks of a host answers. Errors: RunError when its node is lost or silent."""
        silent_s, node = self.options.silent_s, self.names[host]
        try:
            return ray.get(getattr(self.hosts[host], method).remote(*arguments, **named), timeout=silent_s + wait_s)
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"node {node} of the ranks has said nothing for {silent_s:g} s: it is lost, or hangs"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RunError(f"the process beside the ranks on node {node} is gone: {_why(error)}\n{error}") from error

    def _all(self, calls: Sequence[Any], names: Sequence[str], hosts: Sequence[int]) -> list[Any]:
        """What processes answer first. Errors: WaitTimeout, RunError, and what they raise."""
        start_s = self.options.start_s
        _, missing = ray.wait(list(calls), num_returns=len(calls), timeout=start_s)
        if missing:
            late = {
                name: self.names[host] for call, name, host in zip(calls, names, hosts, strict=True) if call in missing
            }
            raise WaitTimeout(
                f"waited {start_s:g} s for {', '.join(late)} to start on node {', '.join(dict.fromkeys(late.values()))}; Ray's "
                "logs there say more (/tmp/ray/session_latest/logs)"
            )
        found = []
        for call, name, host in zip(calls, names, hosts, strict=True):
            node = self.names[host]
            try:
                found.append(ray.get(call, timeout=self.options.silent_s))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, FlowError):
                    raise error.cause from error
                raise RunError(f"{name} did not start on node {node}: {error.cause!r}\n{error}") from error
            except ray.exceptions.RayError as error:
                raise RunError(f"{name} did not start on node {node}: {_why(error)}\n{error}") from error
        return found

    def _pass_on(self, said: Sequence[Said]) -> None:
        """Print what ranks have printed: rank 0 speaks for all, the others say who they are."""
        for one in said:
            text = one.text
            if one.rank and len(self.ranks) > 1:
                text = "".join(f"rank {one.rank}: {line}" for line in text.splitlines(keepends=True))
            stream = sys.stderr if one.is_error else sys.stdout
            stream.write(text)
            stream.flush()


def _why(error: Exception) -> str:
    """The one sentence of Ray's that says how a process ended."""
    found = _DETAIL.search(str(error))
    return found.group(1) if found else str(error).strip().partition("\n")[0]
