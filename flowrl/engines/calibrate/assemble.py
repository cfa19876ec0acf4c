"""From measured numbers to a cluster. No torch here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from flowrl.engines.calibrate.fit import Sample, fit
from flowrl.engines.calibrate.processes import Results
from flowrl.errors import ConfigError, FlowError
from flowrl.mesh import Cluster, Device, Host, Measured
from flowrl.mesh.detect import of_cpu, of_gpus

UNKNOWN_LINK_BYTES_S = 1e10
"""Between devices, and between nodes, of which nothing is known. Assumed."""
MADE_UP = "cpu"
"""The named device whose figures are nobody's: all that is measured replaces them."""
ROOM = 1.25
"""Peaks of a device without published figures are this many times the best that was measured: a part of a peak is at most 1, and
what a run measures later may be faster than what was measured here. Assumed."""
MOST_PASSES, MOST_LOGIT_BYTES, MOST_SHARD_BYTES, MOST_LAYER_S = 100.0, 1000.0, 1000.0, 0.03
"""What a layer can move of what it keeps, a loss for a logit, sharding for a parameter, and how long the start of a layer can
take. Figures above come from a machine that did something else meanwhile. On quiet GPUs they are near 7, 30, 40 and 0.004."""
DIGITS = 4
"""That a file has of what was measured: no more of them come back when it is measured again."""


def assemble(results: Results, *, host_bytes: int, calibrated_at: str) -> Cluster:
    """A cluster of one node with what was measured; the slowest process counts, as the others wait for it in every step.

    What was not measured keeps the figures of `Cluster.detect`, with a note. A device without published figures gets those that
    were measured as its peaks.
    """
    maker = _Maker(results)
    cluster = maker.start(host_bytes)
    for step in (maker.peak, maker.memory, maker.attention, maker.layers, maker.sharded, maker.starts, maker.decode, maker.host,
                 maker.links):  # fmt: skip
        cluster = step(cluster)
    notes = [f"{name}: {text}" for name, text in results.errors.items()]
    if results.ended:
        notes.append(f"ended early: {results.ended}")
    return replace(cluster, notes=(*maker.notes, *notes), calibrated_at=calibrated_at)


class _Maker:
    """Steps that each replace some figures of a cluster, or leave a note."""

    def __init__(self, results: Results) -> None:
        self.values = results.values
        self.notes: list[str] = []

    def missing(self, name: str, instead: str) -> bool:
        """Whether no process measured it; then a note says what stands in its place."""
        if self.values.get(name):
            return False
        self.notes.append(f"{name} was not measured; {instead}")
        return True

    def refused(self, name: str, found: float, most: float) -> bool:
        """Whether a figure makes no sense; then a note says so, and what to do."""
        if found <= most:
            return False
        self.notes.append(
            f"{name} came out as {found:.3g}, and more than {most:.3g} makes no sense: the machine did something else meanwhile. "
            "It is not counted; measure again while nothing else runs"
        )
        return True

    def start(self, host_bytes: int) -> Cluster:
        devices = [(str(one["name"]), int(one["memory_bytes"])) for one in self.values["device"]]
        names = sorted({name for name, _ in devices})
        if names == ["cpu"]:
            cluster = of_cpu(host_bytes)
            return replace(cluster, devices_per_node=len(devices)).with_memory(
                device_bytes=max(1, cluster.device.memory_bytes // len(devices))
            )
        try:
            return of_gpus(devices, host_bytes)
        except ConfigError as error:
            if len(names) > 1:
                raise
            unknown = error
        if not self.values.get("products") or not self.values.get("copy"):
            raise FlowError(f"{unknown}. Its products or copies could not be measured either: {self.notes}")
        self.notes.append(
            f"no published figures for {names[0]!r}; its peaks are {ROOM} times the best that was measured, and links between "
            "nodes are assumed: give the vendor's figures in the file"
        )
        peak, bandwidth = ROOM * self.best_flops(), ROOM * self.best_bytes_s()
        device = Device(names[0], min(memory for _, memory in devices), peak, bandwidth)
        return Cluster(
            1, len(devices), device, UNKNOWN_LINK_BYTES_S, UNKNOWN_LINK_BYTES_S, Host(host_bytes, UNKNOWN_LINK_BYTES_S)
        )

    def best_flops(self) -> float:
        """FLOP/s of the fastest of all products, layers and attention."""
        rates = [flops / took for flops, took in self.slowest("products")]
        for one in self.values.get("layers", []):
            rates += [(row[0] + row[1]) / row[-1] for kind in ("train", "forward") for row in one[kind]]
        for one in self.values.get("attention", []):
            rates += [one[kind][0] / one[kind][1] for kind in ("train", "forward")]
        return max(rates)

    def best_bytes_s(self) -> float:
        """Of the fastest of all that reads and writes memory."""
        decoded = [read / took for _, read, took in self.slowest("decode")] if self.values.get("decode") else []
        return max([min(self.values["copy"]), *self.values.get("adam", []), *decoded])

    def slowest(self, name: str) -> list[list[float]]:
        """Rows of a measurement, each with the longest time of any process; the time is a row's last number."""
        return _slowest_rows(self.values[name])

    def peak(self, cluster: Cluster) -> Cluster:
        if self.missing("products", "efficiency of products is assumed"):
            return cluster
        best = self.best_flops()
        peak = ROOM * best if cluster.device.name == MADE_UP else max(best, cluster.device.peak_flops)
        device = replace(cluster.device, peak_flops=peak)
        flops, took = self.slowest("products")[-1]
        efficiency = replace(cluster.efficiency, decode_flops=min(1.0, flops / took / device.peak_flops))
        return replace(cluster, device=device, efficiency=efficiency)

    def memory(self, cluster: Cluster) -> Cluster:
        if self.missing("copy", "efficiency of memory is assumed"):
            return cluster
        found = min(self.values["copy"])
        known = cluster.device.hbm_bytes_s
        peak = ROOM * self.best_bytes_s() if cluster.device.name == MADE_UP else max(found, known)
        efficiency = replace(cluster.efficiency, hbm=min(1.0, found / peak))
        if not self.missing("adam", "the optimizer's step on the device is assumed"):
            efficiency = replace(efficiency, adam=min(1.0, min(self.values["adam"]) / peak))
        return replace(cluster, device=replace(cluster.device, hbm_bytes_s=peak), efficiency=efficiency)

    def attention(self, cluster: Cluster) -> Cluster:
        if self.missing("attention", "it is taken to be as fast as other products"):
            return cluster
        parts = {}
        for kind in ("train", "forward"):
            flops, took = _slowest_rows([[one[kind]] for one in self.values["attention"]])[0]
            parts[f"{kind}_attention"] = min(1.0, flops / took / cluster.device.peak_flops)
        return replace(cluster, efficiency=replace(cluster.efficiency, **parts))

    def layers(self, cluster: Cluster) -> Cluster:
        """Efficiency of products inside layers, passes over memory, bytes per logit."""
        if self.missing("layers", "efficiency of training and of forward passes is assumed"):
            return cluster
        peak, bandwidth = cluster.device.peak_flops, cluster.device.hbm_bytes_s * cluster.efficiency.hbm
        for kind in ("train", "forward"):
            attention = getattr(cluster.efficiency, f"{kind}_attention")
            samples = []
            for products, attending, kept, took in _slowest_rows([one[kind] for one in self.values["layers"]]):
                if attention:
                    samples.append(Sample(products, kept, max(took - attending / (peak * attention), took / 10)))
                else:
                    samples.append(Sample(products + attending, kept, took))
            # no product is faster than the peak, where that is known, else than the fastest that was measured
            least = 1 / peak if cluster.is_published else ROOM / peak
            per_flop, per_byte = fit(samples, least_per_flop=least)
            if self.refused(f"{kind}_passes", per_byte * bandwidth, MOST_PASSES):
                per_flop, per_byte = fit([replace(one, moved=0.0) for one in samples], least_per_flop=least)
            eta = min(1.0, 1 / (per_flop * peak))
            overheads = replace(cluster.overheads, **{f"{kind}_passes": per_byte * bandwidth})
            if self.values.get("loss"):
                rows = _slowest_rows([one[kind] for one in self.values["loss"]])
                _, per_logit = fit([Sample(*row) for row in rows], least_per_flop=least)
                if not self.refused(f"{kind}_logit_bytes", per_logit * bandwidth, MOST_LOGIT_BYTES):
                    overheads = replace(overheads, **{f"{kind}_logit_bytes": per_logit * bandwidth})
            cluster = replace(cluster, efficiency=replace(cluster.efficiency, **{kind: eta}), overheads=overheads)
        self.missing("loss", "what a loss moves is not counted")
        return cluster

    def sharded(self, cluster: Cluster) -> Cluster:
        if self.missing("sharded", "what sharded weights move is not counted"):
            return cluster
        bandwidth = cluster.device.hbm_bytes_s * cluster.efficiency.hbm
        train, forward = (max(one[kind] for one in self.values["sharded"]) * bandwidth for kind in ("train", "forward"))
        if self.refused("train_shard_bytes", max(train, forward), MOST_SHARD_BYTES):
            return cluster
        overheads = replace(cluster.overheads, train_shard_bytes=train, forward_shard_bytes=forward)
        return replace(cluster, overheads=overheads)

    def starts(self, cluster: Cluster) -> Cluster:
        if self.missing("starts", "the start of kernels is not counted"):
            return cluster
        train, forward = (max(one[kind] for one in self.values["starts"]) for kind in ("train", "forward"))
        if self.refused("train_layer_s", max(train, forward), MOST_LAYER_S):
            return cluster
        if not (train and forward):
            self.notes.append(
                "more layers took no longer than few ones: the machine did something else meanwhile. The start of kernels is not "
                "counted; measure again while nothing else runs"
            )
            return cluster
        return replace(cluster, overheads=replace(cluster.overheads, train_layer_s=train, forward_layer_s=forward))

    def decode(self, cluster: Cluster) -> Cluster:
        if self.missing("decode", "its efficiency is assumed"):
            return cluster
        rates = sorted(read / took for _, read, took in self.slowest("decode"))
        part = min(1.0, rates[len(rates) // 2] / cluster.device.hbm_bytes_s)
        return replace(cluster, efficiency=replace(cluster.efficiency, decode_hbm=part))

    def host(self, cluster: Cluster) -> Cluster:
        host = cluster.host
        if not self.missing("host_adam", "the rate of Adam on the CPU is assumed"):
            host = replace(host, cpu_adam_params_s=min(self.values["host_adam"]) * len(self.values["host_adam"]))
        tables: list[Measured] = []
        if not self.missing("host_copies", "copies to and from the host have published rates"):
            for name in ("to_device", "to_host"):
                rows = _slowest_rows([one[name] for one in self.values["host_copies"]])
                tables.append(_table(name, cluster.devices_per_node, rows))
            slower = min(one.sizes_bytes[-1] / one.times_s[-1] for one in tables)
            host = replace(host, pcie_bytes_s=slower, pcie_shared_by=1)
            cluster = replace(cluster, efficiency=replace(cluster.efficiency, pcie=1.0))
        return replace(cluster, host=host, measured=(*cluster.measured, *tables))

    def links(self, cluster: Cluster) -> Cluster:
        if cluster.num_devices == 1:
            return cluster
        tables = []
        for name in self.values:
            operation, _, ranks = name.partition("/")
            if ranks:
                tables.append(_table(operation, int(ranks), self.slowest(name)))
        most = cluster.devices_per_node
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
            self.missing(f"{operation}/{most}", "its time is computed")
        cluster = replace(cluster, measured=(*cluster.measured, *tables))
        whole = next((one for one in tables if (one.operation, one.ranks) == ("all_gather", most)), None)
        if whole is None:
            return cluster
        part = (most - 1) / most
        reached = part * whole.sizes_bytes[-1] / whole.times_s[-1]
        published = reached if cluster.device.name == MADE_UP else max(reached, cluster.nvlink_bytes_s)
        return replace(
            cluster,
            alpha_s=whole.times_s[0] / (1 + (most - 1) / 4),
            nvlink_bytes_s=published,
            efficiency=replace(cluster.efficiency, nvlink=min(1.0, reached / published)),
        )


def rounded(cluster: Cluster, digits: int = DIGITS) -> Cluster:
    """The cluster with so many significant digits of everything that is measured. Counts and bytes of memory stay."""
    return cast(Cluster, _rounded(cluster, digits))


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, tuple):
        return tuple(_rounded(one, digits) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _rounded(getattr(value, one.name), digits) for one in fields(value)})
    return value


def _slowest_rows(of_processes: list[list[list[float]]]) -> list[list[float]]:
    rows = zip(*of_processes, strict=True)
    return [[*same[0][:-1], max(row[-1] for row in same)] for same in rows]


def _table(operation: str, ranks: int, rows: list[list[float]]) -> Measured:
    return Measured(operation, ranks, 1, tuple(float(row[0]) for row in rows), tuple(row[-1] for row in rows))
