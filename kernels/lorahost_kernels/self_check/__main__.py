"""`python -m lorahost_kernels.self_check`: the self-check without an engine; prints JSON, exit code 1 on a fallback."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from lorahost_kernels.self_check.paths import run

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m lorahost_kernels.self_check")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the LoRA weights")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA device")
        torch.cuda.set_device(device)
    paths = run(device, DTYPES[args.dtype])
    found = {"device": str(device), "dtype": args.dtype, "moe": paths.moe, "dense": paths.dense}
    print(json.dumps(found | {"operations": paths.facts()}, indent=2))
    return 0 if (paths.moe, paths.dense) == ("triton", "triton") else 1


if __name__ == "__main__":
    sys.exit(main())
