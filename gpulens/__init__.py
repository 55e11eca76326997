"""gpulens: who holds each GPU, and is it really working?"""

__version__ = "0.1.0"
