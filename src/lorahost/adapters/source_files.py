"""Which files of an adapter matter, how many bytes they may have, and where its configuration lies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from lorahost.errors import AdapterRejectedError

CONFIG = "adapter_config.json"
WANTED = (
    CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "README*",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DEPTH = 2


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """What a source may hold.

    Attributes:
        max_bytes: Of all its files, unpacked.
        max_files: Number of files and directories.
    """

    max_bytes: int = 16 * 1024**3
    max_files: int = 2000


class Budget:
    """Counts files and bytes of one source against its limits."""

    def __init__(self, limits: SourceLimits, source: str) -> None:
        self._limits = limits
        self._source = source
        self.files = 0
        self.bytes = 0

    def add(self, size: int) -> None:
        """One more file of `size` bytes; raises AdapterRejectedError (`artifact_too_large`)."""
        self.files += 1
        self.bytes += size
        if self.bytes > self._limits.max_bytes:
            raise too_large(self._source, f"at least {self.bytes} bytes", f"{self._limits.max_bytes} bytes")
        if self.files > self._limits.max_files:
            raise too_large(self._source, f"at least {self.files} files", f"{self._limits.max_files} files")


def too_large(source: str, found: str, limit: str) -> AdapterRejectedError:
    """The answer to a source beyond its limits."""
    return AdapterRejectedError(
        f"src {source!r} holds {found}; the limit is {limit}", code="artifact_too_large", param="src"
    )


def is_wanted(path: PurePosixPath) -> bool:
    """Whether the importer may need the file at `path` (relative to the source): at the root or one below."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return not hidden and len(path.parts) <= DEPTH and _matches(path.name, WANTED)


def is_pickle(name: str) -> bool:
    """Whether a file of this name may run code when it is loaded."""
    return _matches(name, PICKLES)


def find_root(directory: Path, source: str, skipped: Iterable[str] = ()) -> Path:
    """The directory that holds `adapter_config.json`: `directory` or exactly one below it.

    Args:
        directory: A local directory.
        source: What the caller asked for, for messages.
        skipped: Names of files in the source that were left out of `directory`.

    Raises:
        AdapterRejectedError: `config_missing`, `config_ambiguous`, `pickle_weights`, `weights_missing`.
    """
    root = _config_root(directory, source)
    names = sorted(os.listdir(root))
    if not any(name.endswith(".safetensors") for name in names):
        pickles = [name for name in [*names, *skipped] if is_pickle(name)]
        if pickles:
            raise AdapterRejectedError(
                f"src {source!r} has its weights as pickle ({', '.join(pickles[:3])}), which can run code; "
                "save them as adapter_model.safetensors",
                code="pickle_weights",
                param="src",
            )
        raise AdapterRejectedError(
            f"src {source!r} has no *.safetensors next to {CONFIG}, only {names[:10]}",
            code="weights_missing",
            param="src",
        )
    return root


def _config_root(directory: Path, source: str) -> Path:
    if (directory / CONFIG).is_file():
        return directory
    below = sorted(
        child
        for child in directory.iterdir()
        if child.is_dir() and not child.name.startswith((".", "__MACOSX")) and (child / CONFIG).is_file()
    )
    if len(below) == 1:
        return below[0]
    if below:
        raise AdapterRejectedError(
            f"src {source!r} has {len(below)} adapters: {CONFIG} in {[child.name for child in below[:10]]}",
            code="config_ambiguous",
            param="src",
        )
    raise AdapterRejectedError(
        f"src {source!r} has no {CONFIG}, neither at its root nor in a directory of the root",
        code="config_missing",
        param="src",
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
