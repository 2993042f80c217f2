"""Confirms one point in a second process that hangs, until something ends this one: python FILE PID_FILE."""

import signal
import sys
from pathlib import Path

from tests.kernels.tuned_second import Second, found

from lorahost_kernels.tune.confirm import confirm
from lorahost_kernels.tune.plan import Place

if __name__ == "__main__":
    # what runs in a shell's background is started with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = Place("moe", 16)
    tuned, _ = found({place: (30.0, 29.0, 27.0)}, [])
    opener = Second({}, ends={place: "hang"}, pid_file=Path(sys.argv[1]))
    confirm(tuned, [place], opener, 100.0, print)
