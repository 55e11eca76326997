"""`python -m gpulens.nvml`: the child process that owns NVML; started by the `nvml` receiver, of no use by hand.

Invariant: the process ends when its input does, even with threads that hang in the driver.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from gpulens.nvml.agent import serve
from gpulens.nvml.protocol import ProtocolError


def main() -> None:
    """Serves on standard input and output and leaves without waiting for anybody."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to us too; the receiver tells us by our input
    signal.signal(signal.SIGTERM, _leave)
    sink = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not get between the frames
    code = 0
    try:
        serve(0, sink)
    except ProtocolError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        code = 2
    except _Leave:
        pass
    os._exit(code)


class _Leave(BaseException):
    """The process was asked to end."""


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise _Leave


if __name__ == "__main__":
    main()
