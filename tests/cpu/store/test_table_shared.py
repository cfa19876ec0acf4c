"""The same model as in tests/null, with two attachments to one table, compressed and in files, and a thread that moves rows."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import settings

from tests.null.store.test_table_model import TableMachine


class SharedMachine(TableMachine):
    options: ClassVar[dict[str, Any]] = {"compression": "lz4", "hot_bytes": 0}
    shared = True


class FilesMachine(TableMachine):
    options: ClassVar[dict[str, Any]] = {"compression": "auto", "hot_bytes": 2000, "memory_bytes": 6000}
    shared = True
    has_path = True


for machine in (SharedMachine, FilesMachine):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=14, deadline=None)
TestShared, TestFiles = SharedMachine.TestCase, FilesMachine.TestCase
