"""Entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

vLLM skips a plugin that fails to import without stopping, so this module imports neither torch nor vLLM: whatever
can go wrong goes wrong inside `register`, whose exceptions do stop the process.
"""

from __future__ import annotations


def register() -> None:
    """Checks that this is the vLLM we know and applies our patches; calling it again changes nothing.

    Raises:
        PluginError: another version of vLLM, or a vLLM name that we use has changed.
    """
    from lorahost_kernels.vllm_026.install import install

    install()
