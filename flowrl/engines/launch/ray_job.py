"""Starts the ranks of a job on a Ray cluster, and ends them together. As `spawn.run_job`, on whichever node has room.

driver (here)       a placement group of one bundle for each rank on one node; passes on what ranks print; tells who is gone
  host              see `ray_actors`
  rank 0 .. n-1     the rank function, with RANK, WORLD_SIZE, FLOWRL_JOB, ... as of any launcher

[Note: Who sees what] Ranks see each other's failures in the job's folder, as without Ray. A process that is killed is seen there
too, and by Ray, which tells the driver in milliseconds. A node that is lost is seen by Ray's health checks, or by its silence.
When the driver ends, however, Ray ends the actors; the folder is then removed by the next job or table on that node. Of a
cluster that a killed driver had started for itself, two of Ray's agents end a minute or two later.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flowrl.engines.launch.board import POLL_S, Failure
from flowrl.engines.launch.place import Place, module_paths
from flowrl.engines.launch.ray_actors import VISIBLE, HostActor, RankActor, Said, Where
from flowrl.engines.launch.ray_cluster import bundle_of, connected, nodes, placed, ray, refuse_too_large
from flowrl.engines.launch.ray_options import LOOPBACK, RayOptions
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
) -> None:
    """Call the function `entry` with `argument` in `nproc` actors of one node, each a rank of one job, and wait for them.

    Args:
        entry: `module:function` or `FILE.py:function`, importable on the node.
        argument: of JSON's types.
        environment: added to that of the node.
        grace_s: from the first failure to the end of ranks that do not end by themselves.
        options: what each rank asks of the cluster, which cluster, and how long is waited.

    Errors: RunError with the first error of any rank, its rank and node; ConfigError for what the cluster cannot hold, before
    anything is placed; WaitTimeout. No actor, placement group or shared memory of the job is left.
    """
    if nproc < 1:
        raise ConfigError(f"a job has at least 1 process; found {nproc}")
    options = options or RayOptions()
    with connected(options, nproc):
        refuse_too_large(nodes(), nproc, options)
        with placed(nproc, options) as (group, node), _started(group, nproc, node, options, grace_s) as job:
            job.begin(environment or {})
            failure = job.wait(entry, argument)
    if failure is not None:
        raise RunError(failure.told(f" [on node {node}]"))


@contextmanager
def _started(group: Any, nproc: int, node: str, options: RayOptions, grace_s: float) -> Iterator[_Job]:
    host = _actor(HostActor, group, 0, 0.0, 0.0).remote(nproc)
    ranks = [_actor(RankActor, group, rank, options.cpus, options.gpus).remote(rank) for rank in range(nproc)]
    job = _Job(host, ranks, node, options, grace_s)
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

    host: Any
    ranks: list[Any]
    node: str
    options: RayOptions
    grace_s: float
    is_ended_early: bool = False
    """A rank failed, so that others may still be at work."""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Wait for all processes, and make ranks of them. Errors: WaitTimeout that names those that did not come."""
        where: Where = self._all([self.host.where.remote()], ["the process beside the ranks"])[0]
        names = [f"rank {rank}" for rank in range(len(self.ranks))]
        if self.options.gpus:  # each sees those of all, rank r its own as the r-th: as on a host without Ray
            given = self._all([rank.devices.remote() for rank in self.ranks], names)
            environment = {**environment, VISIBLE: ",".join(filter(None, given))}
        paths = module_paths()
        begun = []
        for number, rank in enumerate(self.ranks):
            place = Place(number, len(self.ranks), where.folder).environment()
            added = {**environment, **place, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(where.port)}
            begun.append(rank.begin.remote(added, paths, os.getcwd(), where.logs))
        pids = self._all(begun, names)
        self._ask("watch", pids)

    def wait(self, entry: str, argument: Any) -> Failure | None:
        """Until all have ended, or some time after the first that failed."""
        running = {rank.run.remote(entry, argument): number for number, rank in enumerate(self.ranks)}
        until: float | None = None
        while running and (until is None or time.monotonic() < until):
            ended, _ = ray.wait(list(running), timeout=POLL_S)
            self._pass_on(self._ask("said"))
            for one in ended:
                if not self._ended_well(one, running.pop(one)) and until is None:
                    until = time.monotonic() + self.grace_s
        self.is_ended_early = until is not None
        failure: Failure | None = self._ask("failure")
        return failure

    def end(self, *, is_well: bool) -> None:
        """End all that still run, and what they had. Never raises for what is gone already."""
        for rank in self.ranks:
            if is_well:
                rank.__ray_terminate__.remote()  # in the order of Python: what is to be done at exit is done
            else:
                ray.kill(rank)
        with suppress(ray.exceptions.RayError, RunError):
            self._ask("ended", self.grace_s, wait_s=2 * self.grace_s)
            while said := self._ask("said", is_all=True):
                self._pass_on(said)
            self._ask("close")
        for actor in (*self.ranks, self.host):
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

    def _ask(self, method: str, *arguments: Any, wait_s: float = 0.0, **named: Any) -> Any:
        """What the process beside the ranks answers. Errors: RunError when its node is lost or silent."""
        silent_s = self.options.silent_s
        try:
            return ray.get(getattr(self.host, method).remote(*arguments, **named), timeout=silent_s + wait_s)
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"node {self.node} of the ranks has said nothing for {silent_s:g} s: it is lost, or hangs"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RunError(
                f"the process beside the ranks on node {self.node} is gone: {_why(error)}\n{error}"
            ) from error

    def _all(self, calls: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """What processes answer first. Errors: WaitTimeout, RunError, and what they raise."""
        start_s = self.options.start_s
        _, missing = ray.wait(list(calls), num_returns=len(calls), timeout=start_s)
        if missing:
            late = ", ".join(name for call, name in zip(calls, names, strict=True) if call in missing)
            raise WaitTimeout(
                f"waited {start_s:g} s for {late} to start on node {self.node}; its Ray logs say more "
                "(/tmp/ray/session_latest/logs)"
            )
        found = []
        for call, name in zip(calls, names, strict=True):
            try:
                found.append(ray.get(call, timeout=self.options.silent_s))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, FlowError):
                    raise error.cause from error
                raise RunError(f"{name} did not start on node {self.node}: {error.cause!r}\n{error}") from error
            except ray.exceptions.RayError as error:
                raise RunError(f"{name} did not start on node {self.node}: {_why(error)}\n{error}") from error
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
