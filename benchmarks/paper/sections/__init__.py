"""The sections of `python -m benchmarks.paper`. Each measures one or a few claims of the paper in `run`."""
