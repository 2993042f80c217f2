"""`python -m lorahost_kernels.tune`."""

import sys

from lorahost_kernels.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
