"""`python -m flowrl.cli` is the command `flowrl`."""

import sys

from flowrl.cli import main

sys.exit(main())
