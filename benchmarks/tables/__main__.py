"""`python -m benchmarks.tables`, which is `python -m benchmarks tables`."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["tables", *sys.argv[1:]]))
