"""A GPU node as a program: a scripted world behind the same pages and sockets that a real node has.

Invariant: what the node shows is a pure function of the world file and of simulated time, so a run can be
repeated to the byte and every reading can be checked against the truth that the world knows.
"""
