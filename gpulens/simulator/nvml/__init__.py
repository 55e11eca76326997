"""A fake of NVIDIA's management library, for tests and for simulated nodes.

Invariant: what loads it is the unmodified Python binding; the fake tells what its state file says and nothing else.
"""
