"""`python -m gpulens`: the command line."""

import sys

from gpulens.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
