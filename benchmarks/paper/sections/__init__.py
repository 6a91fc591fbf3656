"""The sections of `python -m benchmarks.paper`: a claim or a few of the paper each, measured by `run`."""
