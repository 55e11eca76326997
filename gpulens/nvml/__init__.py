"""NVML behind one typed gateway, and the child process that owns it.

Nothing here imports another part of gpulens: the child must start fast and stay small.
"""
