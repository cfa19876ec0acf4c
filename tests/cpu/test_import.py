"""What `import flowrl` brings with it."""

from __future__ import annotations

import subprocess
import sys


def test_import_brings_no_heavy_library():
    heavy = ("torch", "transformers", "vllm", "ray", "networkx", "pyarrow", "rich")
    code = f"import sys, flowrl; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
