"""The files of an adapter directory: finding them safely, and their digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lorahost.adapters.tensors import Bits, Dtype, SafetensorsFile, TensorInfo
from lorahost.errors import AdapterRejectedError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files that make up an adapter; everything else in its directory is ignored."""

    config: Path
    weights: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(p.stat().st_size for p in (self.config, *self.weights))


def find_files(source: Path) -> AdapterFiles:
    """Finds adapter_config.json and adapter_model*.safetensors in `source` or in one directory below it.

    Raises:
        AdapterRejectedError: something is missing, ambiguous, a pickle, or a link that leaves `source`.
    """
    if not source.is_dir():
        raise AdapterRejectedError(f"{source} is not a directory", code="source_not_found")
    root = source.resolve()
    directory = _adapter_directory(source)
    weights = sorted(directory.glob("adapter_model*.safetensors"))
    if not weights:
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise AdapterRejectedError(
                f"the adapter's weights are in {', '.join(pickles[:3])}, a pickle, which may run code when read; "
                f"only {WEIGHTS} is accepted",
                code="pickle_weights",
            )
        raise AdapterRejectedError(f"no {WEIGHTS} beside {CONFIG}", code="weights_missing")
    files = AdapterFiles(directory / CONFIG, tuple(weights))
    for path in (files.config, *files.weights):
        real = path.resolve()
        if not real.is_relative_to(root):
            raise AdapterRejectedError(
                f"{path.name} is a link to {real}, outside the adapter's directory", code="link_outside_source"
            )
        if not real.is_file():
            raise AdapterRejectedError(f"{path.name} is not a regular file", code="not_a_file")
    return files


def _adapter_directory(source: Path) -> Path:
    if _present(source / CONFIG):
        return source
    nested = sorted(d for d in source.iterdir() if d.is_dir() and _present(d / CONFIG))
    if not nested:
        raise AdapterRejectedError(
            f"no {CONFIG} in the adapter's directory, nor in a directory right below it",
            code="config_missing",
        )
    if len(nested) > 1:
        raise AdapterRejectedError(
            f"{CONFIG} is in {len(nested)} directories ({', '.join(d.name for d in nested[:5])}); "
            "expected exactly one adapter",
            code="config_ambiguous",
        )
    return nested[0]


def _present(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def digest_of(source: Path) -> str:
    """Hex sha256 over name, size and content of adapter_config.json and the safetensors file(s).

    Raises:
        AdapterRejectedError: as `find_files`.
    """
    files = find_files(source)
    digest = hashlib.sha256()
    for path in (files.config, *files.weights):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class AdapterTensors:
    """All tensors of an adapter, from one or several files.

    Raises:
        AdapterRejectedError: a corrupt file, or a name in two files.
    """

    def __init__(self, files: AdapterFiles) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._files: dict[str, SafetensorsFile] = {}
        for path in files.weights:
            file = SafetensorsFile(path)
            for name, info in file.infos.items():
                if name in self.infos:
                    raise AdapterRejectedError(
                        f"{name} is in {self._files[name].path.name} and in {path.name}",
                        code="duplicate_tensor",
                    )
                self.infos[name] = info
                self._files[name] = file

    def bits(self, name: str) -> tuple[Bits, Dtype]:
        """The tensor's bits and format; see `SafetensorsFile.bits`."""
        return self._files[name].bits(self.infos[name])
