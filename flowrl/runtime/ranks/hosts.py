"""A model as one rank sees it: its own part of the work, and what the other ranks make.

rollout, update             the site's host does it
logprobs, values, score     each rank of the site its share of rows; everybody who asks has all of them
a rank without the site     waits for the rows, and has them too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.engines.launch.protocol import Site
from flowrl.engines.protocol import (
    Host,
    Parks,
    Sampled,
    SampleRequest,
    SamplingOptions,
    TokenRows,
    UpdateJob,
    UpdateReport,
)
from flowrl.errors import RunError
from flowrl.graph.code import digest
from flowrl.model import Model, Tokenizer
from flowrl.runtime.ranks.desk import Desk
from flowrl.runtime.ranks.shares import cut
from flowrl.schema.ragged import Ragged

Compute = Callable[[Host, TokenRows], Sequence[np.ndarray]]
"""Arrays of some rows, each with one entry for a row or for a response token."""


class SharedHost:
    """See `flowrl.engines.protocol.Host`. Every rank has one for each model, whether it holds the model or not."""

    def __init__(self, name: str, model: Model, desk: Desk, hosts: Mapping[Site, Host], elsewhere: Host | None) -> None:
        """Args:
        hosts: those of the model's sites that this rank is of.
        elsewhere: what stands for the model where it has none.
        """
        self.name = name
        self.spec = model
        self._desk = desk
        self.hosts = dict(hosts)
        main = desk.places.main[name]
        found = self.hosts.get(main) or next(iter(self.hosts.values()), elsewhere)
        if found is None:
            raise RunError(f"model '{name}' was not opened on rank {desk.rank}")
        self._any = found
        self._main = main
        self._sampled: list[str] = []
        """Digests of what this rank has sampled for the node at hand."""
        self._sent: dict[Site, int] = {}
        """Version that each other site was given last; each has the first one by itself."""

    # ------------------------------------------------------------------------------------------------------ what it is

    @property
    def tokenizer(self) -> Tokenizer:
        return self._any.tokenizer  # asked for only then: a rank without the model would load one to know

    @tokenizer.setter
    def tokenizer(self, value: Tokenizer) -> None:
        raise RunError(f"the tokenizer of model '{self.name}' is that of its weights; give fr.Model(..., tokenizer=)")

    @property
    def max_context(self) -> int | None:
        return self._any.max_context

    @property
    def device(self) -> str:
        return self._any.device if self.hosts else ""

    @property
    def version(self) -> int:
        """Of the weights that the node at hand uses."""
        return self._here().version

    @version.setter
    def version(self, value: int) -> None:
        raise RunError(f"the version of model '{self.name}' is that of its weights on each site")

    @property
    def has_main(self) -> bool:
        """Whether this rank holds the model's newest weights, or a part of them."""
        return self._main in self.hosts

    def _site(self) -> Site:
        return self._desk.places.site_of.get(self._desk.path, self._main)

    def _here(self) -> Host:
        return self.hosts.get(self._site(), self._any)

    # ----------------------------------------------------------------------------------------------------- calls of it

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """With the requests of this rank only; `work.rollout` shares prompts out. Ranks that share a copy of the model with this
        one are told them: they `follow`."""
        self._lead((list(requests), options))
        found = self._here().generate(requests, options)
        self._sampled.append(_digest(found))
        return found

    def follow(self) -> None:
        """Make the calls of `generate` that the first rank of this one's copy of the model makes, until it is through.

        Errors: RunError where this rank has sampled other tokens.
        """
        made: list[str] = []
        leader = self._site().team_of(self._desk.rank)[0]
        while True:
            call, digests = self._tell(leader, None)
            if call is None:
                break
            made.append(_digest(self._here().generate(*call)))
        if made != digests:
            raise RunError(
                f"ranks {leader} and {self._desk.rank} share a copy of model '{self.name}' and sampled different tokens in "
                f"'{self._desk.path}': one has other weights, or computes otherwise; use one kind of device, or a layout of dp"
            )

    def dismiss(self) -> None:
        """After the calls of `generate` of a node: whoever follows may go on."""
        self._lead(None)
        self._sampled.clear()

    def _lead(self, call: tuple[list[SampleRequest], SamplingOptions] | None) -> None:
        if len(self._site().team_of(self._desk.rank)) > 1:
            self._tell(self._desk.rank, (call, list(self._sampled)))

    def _tell(self, leader: int, value: Any) -> Any:
        desk = self._desk
        return desk.exchange.tell(desk.key(f"led by {leader}"), leader, value, f"the prompts of '{desk.path}'")

    def logprobs(self, rows: TokenRows) -> Ragged:
        (values,) = self._shared(rows, lambda host, part: [host.logprobs(part).values])
        return Ragged.like(values, rows.response_ids)

    def top_logprobs(self, rows: TokenRows, k: int) -> tuple[Ragged, Ragged]:
        def both(host: Host, part: TokenRows) -> list[np.ndarray]:
            return [one.values for one in host.top_logprobs(part, k)]

        ids, nats = self._shared(rows, both)
        return Ragged.like(ids, rows.response_ids), Ragged.like(nats, rows.response_ids)

    def values(self, rows: TokenRows) -> Ragged:
        (values,) = self._shared(rows, lambda host, part: [host.values(part).values])
        return Ragged.like(values, rows.response_ids)

    def score(self, rows: TokenRows) -> np.ndarray:
        (values,) = self._shared(rows, lambda host, part: [host.score(part)])
        return values

    def _shared(self, rows: TokenRows, compute: Compute) -> list[np.ndarray]:
        """Arrays of all rows, from the parts that the site's ranks compute."""
        desk, site, host, key = self._desk, self._site(), self.hosts.get(self._site()), self._desk.key()
        edge = f"'{desk.path}' of model '{self.name}'"
        mine = None
        if desk.engine.shares_rows(site):
            workers = site.ranks[:1]
            if host is not None:  # all of its ranks have the answer, and the first one tells those that are elsewhere
                found = list(compute(host, rows))
                if desk.rank == workers[0] and len(site.ranks) < desk.exchange.board.world:
                    desk.exchange.share(key, workers, (_named(found), None), edge)
                return found
        else:
            workers = site.data_ranks
            if host is not None and desk.rank in workers:
                first, stop = cut(_tokens(rows), len(workers))[workers.index(desk.rank)]
                mine = (_named(compute(host, part_of(rows, first, stop))), None)
        arrays = desk.exchange.share(key, workers, mine, edge).arrays
        return [arrays[str(index)] for index in range(len(arrays))]

    def update(self, job: UpdateJob) -> UpdateReport:
        """All ranks of the site take it with all rows; others get the report."""
        desk, site, host = self._desk, self._site(), self.hosts.get(self._site())
        report = host.update(job) if host is not None else None
        if len(site.ranks) == desk.exchange.board.world:
            assert report is not None
            return report
        found: UpdateReport = desk.exchange.tell(desk.key(), site.ranks[0], report, f"the report of '{desk.path}'")
        return found

    # -------------------------------------------------------------------------------------------- weights between sites

    def publish(self) -> int:
        """Bring the newest weights to the samplers of this rank's own hosts; bytes copied. See `handover` for other sites."""
        return sum(host.publish() for host in self.hosts.values())

    def handover(self, target: Site) -> int:
        """Bring the newest weights from the main site to another one; bytes that this rank took. Ranks of both call it."""
        desk = self._desk
        main, taker = self.hosts.get(self._main), self.hosts.get(target)
        if main is None and taker is None:
            return 0
        key, first = desk.key(f"to {target.name}"), self._main.ranks[0]
        edge = f"the weights of model '{self.name}' for {target.name}"
        version = desk.exchange.tell(f"{key}/version", first, None if main is None else main.version, edge)
        if version == self._sent.get(target, 0):
            return 0  # an update that took no step
        self._sent[target] = version
        if desk.engine.brings(self._main, target):
            return desk.engine.bring(self._main, main, target, taker, version)
        weights = desk.engine.export(main, keep=desk.rank == first) if main is not None else {}
        mine = (weights, None) if desk.rank == first else None
        if taker is None and mine is None:
            return 0
        whole = desk.exchange.share(key, (first,), mine, edge)
        return 0 if taker is None else desk.engine.load(taker, whole.arrays, version)

    def blend(self, source: Host, decay: float) -> None:
        """weights = decay * weights + (1 - decay) * source's, on each site; ranks of the source's main site give theirs."""
        if not isinstance(source, SharedHost):
            raise RunError(f"model '{self.name}' takes weights from models of this run; found {type(source).__name__}")
        for site in self._desk.places.sites_of(self.name):
            engine = self._desk.engine
            if site.lies_as(source._main) and engine.shares_rows(site) == engine.shares_rows(source._main):
                if site in self.hosts:
                    self.hosts[site].blend(source.hosts[source._main], decay)
            else:
                self._blend_from(source, site, decay)

    def _blend_from(self, source: SharedHost, site: Site, decay: float) -> None:
        desk = self._desk
        giver, taker = source.hosts.get(source._main), self.hosts.get(site)
        if giver is None and taker is None:
            return
        key, first = desk.key(f"into {site.name}"), source._main.ranks[0]
        weights = desk.engine.export(giver, keep=desk.rank == first) if giver is not None else {}
        mine = (weights, None) if desk.rank == first else None
        if taker is None and mine is None:
            return
        edge = f"the weights of model '{source.name}' for model '{self.name}'"
        whole = desk.exchange.share(key, (first,), mine, edge)
        if taker is not None:
            desk.engine.blend(taker, whole.arrays, decay)

    # ------------------------------------------------------------------------------------------------ where it lies

    def offload(self, *, writes: bool = True) -> int:
        """State of all of the model's hosts on this rank to host memory; bytes copied."""
        return sum(host.offload(writes=writes) for host in self.hosts.values() if isinstance(host, Parks))

    def onload(self) -> int:
        """Back to the device; bytes copied."""
        return sum(host.onload() for host in self.hosts.values() if isinstance(host, Parks))

    @property
    def host_bytes(self) -> int:
        """Host memory that its state takes on this rank."""
        return sum(int(getattr(host, "host_bytes", 0)) for host in self.hosts.values())

    # -------------------------------------------------------------------------------------------------- after the steps

    def state(self) -> dict[str, Any]:
        return self._main_host().state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._main_host().restore(state)

    def model(self) -> Model:
        return self._main_host().model()

    def save(self, path: str) -> None:
        """Write the newest weights; every rank calls it, and those that hold them write."""
        host = self.hosts.get(self._main)
        if host is not None and (self._desk.engine.shares_rows(self._main) or self._desk.rank == self._main.ranks[0]):
            host.save(path)

    def write_state(self, path: str, *, is_first: bool = True) -> None:
        """Write the newest state; every rank calls it, and those that hold it write."""
        host = self.hosts.get(self._main)
        if host is not None:
            host.write_state(path, is_first=self._desk.rank == self._main.ranks[0])

    def read_state(self, path: str) -> None:
        """Into the site that has the newest weights; `RankExecutor.resumed` has the others get them from there."""
        host = self.hosts.get(self._main)
        if host is not None:
            host.read_state(path)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self._desk.engine.close()

    def _main_host(self) -> Host:
        if self._main not in self.hosts:
            raise RunError(
                f"rank {self._desk.rank} does not hold model '{self.name}', which is on ranks "
                f"{', '.join(map(str, self._main.ranks))}; ask there, or save the model and open the folder"
            )
        return self.hosts[self._main]


def _digest(responses: Sequence[Sampled]) -> str:
    return digest(repr([one.ids for one in responses]))


def part_of(rows: TokenRows, first: int, stop: int) -> TokenRows:
    """Neighbouring rows, not copied."""
    return TokenRows(
        slice_of(rows.prompt_ids, first, stop), slice_of(rows.response_ids, first, stop), rows.temperature[first:stop]
    )


def slice_of(column: Ragged, first: int, stop: int) -> Ragged:
    low, high = int(column.offsets[first]), int(column.offsets[stop])
    return Ragged(column.values[low:high], column.offsets[first : stop + 1] - low)


def _tokens(rows: TokenRows) -> np.ndarray:
    found: np.ndarray = rows.prompt_ids.lengths + rows.response_ids.lengths
    return found


def _named(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {str(index): np.ascontiguousarray(array) for index, array in enumerate(arrays)}
