"""safetensors reading and writing against the safetensors library and torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lorahost.adapters.tensors import (
    Dtype,
    SafetensorsFile,
    SafetensorsWriter,
    all_finite,
    any_nonzero,
    bits_dtype,
    convert,
    from_float32,
    to_float32,
)
from lorahost.errors import AdapterRejectedError

TORCH: dict[Dtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EDGES = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, 1e-40, -1e-45, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8]


def torch_bits(values: torch.Tensor) -> np.ndarray:
    kind = torch.uint32 if values.dtype == torch.float32 else torch.uint16
    return values.view(kind).numpy()


@pytest.mark.parametrize("dtype", list(TORCH))
@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_rounding_is_torch_s(dtype: Dtype, values: list[float]) -> None:
    floats = np.array(EDGES + values, np.float32)
    expected = torch.from_numpy(floats).to(TORCH[dtype])
    bits = from_float32(floats, dtype)
    np.testing.assert_array_equal(bits, torch_bits(expected))
    np.testing.assert_array_equal(to_float32(bits, dtype), expected.float().numpy())


def test_every_16_bit_value_survives() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("bfloat16", "float16"):
        finite = bits[[all_finite(bits[i : i + 1], dtype) for i in range(1 << 16)]]
        expected = torch.from_numpy(finite.view(np.int16)).view(TORCH[dtype])
        assert bool(torch.isfinite(expected).all())
        assert len(finite) == (1 << 16) - 2 * (1 << (7 if dtype == "bfloat16" else 10))
        np.testing.assert_array_equal(from_float32(to_float32(finite, dtype), dtype), finite)


@pytest.mark.parametrize("source", list(TORCH))
@pytest.mark.parametrize("target", list(TORCH))
def test_convert_scales_in_float32_and_rounds_once(source: Dtype, target: Dtype) -> None:
    # More than one chunk.
    values = torch.randn(700, 1001, generator=torch.Generator().manual_seed(0)).to(TORCH[source])
    got = convert(torch_bits(values), source, target, 1.7)
    expected = (values.float() * torch.tensor(1.7, dtype=torch.float32)).to(TORCH[target])
    np.testing.assert_array_equal(got, torch_bits(expected))


def test_unchanged_bits_are_not_copied() -> None:
    bits = np.ones((3, 4), np.uint16)
    assert convert(bits, "bfloat16", "bfloat16") is bits


def test_minus_zero_is_zero() -> None:
    bits = from_float32(np.array([[0.0, -0.0], [0.0, 1e-40]], np.float32), "float32")
    assert any_nonzero(bits, axis=1).tolist() == [False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", list(TORCH))
def test_not_finite(bad: float, dtype: Dtype) -> None:
    values = torch.zeros(1_000_001, dtype=TORCH[dtype])
    assert all_finite(torch_bits(values), dtype)
    values[-1] = bad
    assert not all_finite(torch_bits(values), dtype)


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"t.{d}": torch.randn(5, 7).to(t) for d, t in TORCH.items()} | {"empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "é"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.infos) == set(tensors)
    for name, tensor in tensors.items():
        bits, dtype = file.bits(file.infos[name])
        assert TORCH[dtype] == tensor.dtype
        np.testing.assert_array_equal(bits, torch_bits(tensor))


@pytest.mark.parametrize("dtype", list(TORCH))
def test_safetensors_reads_what_we_write(dtype: Dtype, tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 5).to(TORCH[dtype])
    one = torch.randn(1, 6).to(TORCH[dtype])
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, dtype, ["a", "b", 'c"é', "one", "never"]) as writer:
        writer.write_each(["a", "b", 'c"é'], torch_bits(stack))
        writer.write_each(["one"], torch_bits(one)[None])
        size = writer.bytes_written
    loaded = load_file(path)
    assert {k: tuple(v.shape) for k, v in loaded.items()} == {"a": (4, 5), "b": (4, 5), 'c"é': (4, 5), "one": (1, 6)}
    assert all(torch.equal(loaded[n], stack[i]) for i, n in enumerate(["a", "b", 'c"é']))
    assert torch.equal(loaded["one"], one)
    assert size == sum(t.nbytes for t in loaded.values())
    assert set(SafetensorsFile(path).infos) == set(loaded)


def test_writer_refuses_bits_of_another_width(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "x", "float32", ["a"]) as writer, pytest.raises(TypeError):
        writer.write("a", np.zeros(3, bits_dtype("bfloat16")))


def raw_file(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a":1,"a":2}', b"", "twice"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "b starts at byte .* overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, bytes(10), "leaves a gap"),
        ({"a": entry(0, 4)}, bytes(3), "tensors end at byte"),
        ({"a": entry(0, 4)}, bytes(9), "tensors end at byte"),
        ({"a": entry(0, 8)}, bytes(8), "needs 4 bytes, the header gives it 8"),
        ({"a": entry(4, 0)}, bytes(4), "needs 4 bytes"),
        ({"a": entry(0, 4, shape=[-1, -1])}, bytes(4), "malformed"),
        ({"a": entry(0, 4, shape=[True])}, bytes(4), "malformed"),
        ({"a": entry(0, 4, shape="1")}, bytes(4), "malformed"),
        ({"a": entry(0, 4, dtype="F99")}, bytes(4), "unknown dtype 'F99'"),
        ({"a": entry(0, 1 << 70, shape=[1 << 68])}, bytes(4), "tensors end at byte"),
        ({"a": {"dtype": "F32"}}, b"", "malformed"),
        ({"a": None}, b"", "malformed"),
    ],
)
def test_lying_headers(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match=message) as e:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data))
    assert e.value.code == "corrupt_safetensors"


def test_any_truncation_is_seen(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 3), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    for size in range(len(content)):
        (tmp_path / "y.safetensors").write_bytes(content[:size])
        with pytest.raises(AdapterRejectedError) as e:
            SafetensorsFile(tmp_path / "y.safetensors")
        assert e.value.code == "corrupt_safetensors"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_or_within_the_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        path.write_bytes(data)
        with contextlib.suppress(AdapterRejectedError):
            assert all(info.end <= len(data) for info in SafetensorsFile(path).infos.values())


def test_no_torch_in_the_importer() -> None:
    code = (
        "import sys, lorahost.adapters.import_process as p; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
