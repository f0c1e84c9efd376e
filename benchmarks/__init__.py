"""Benchmarks of dgmoe_ops: `python3 -m benchmarks.bench --help` from the root of the repository."""
