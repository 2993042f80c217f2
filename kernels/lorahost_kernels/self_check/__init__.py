"""Each operation against its float64 reference on the device that will serve; what fails is left to vLLM's own."""

from lorahost_kernels.self_check.paths import Outcome, Paths, UnusableDeviceError, paths_for, run

__all__ = ["Outcome", "Paths", "UnusableDeviceError", "paths_for", "run"]
