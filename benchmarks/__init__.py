"""Measurements of FlowRL against other ways to do the same. `python -m benchmarks` lists them."""
