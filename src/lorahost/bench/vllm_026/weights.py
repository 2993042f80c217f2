"""vLLM plugin for `load_format="dummy"`: random weights whose routing spreads over the experts.

vLLM's own dummy weights leave packed MXFP4 tensors zero and give every layer the same values near zero, router bias
included, so that all tokens take the same experts. Here every parameter has its own seed and the scale of a freshly
initialised model: the residual stream stays each token's own, all values are finite, and expert weights are all read.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import zlib
from typing import Any

GAIN = 0.5  # of a linear layer, so that 24 or more of them don't drown the embedding
ROUTER_GAIN = 2.0  # logits with a spread of 2: top-k weights as uneven as a trained router's
COLLAPSED_GAIN = 1e-5  # leaves the residual stream as small as vLLM's dummy embeddings
FP4_RMS = 2.93  # of random E2M1 codes
E8M0_BIAS = 127


def register() -> None:
    """Replaces the dummy loader's weights in this process; calling it again changes nothing.

    From then on SIGUSR1 makes the process print what each of its threads is doing.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    stock = DummyModelLoader.load_weights
    if getattr(stock, "_lorahost_bench", False):
        return

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        stock(self, model, model_config)
        fill(model, spread=os.environ.get("BENCH_WEIGHTS", "spread") == "spread")

    faulthandler.register(signal.SIGUSR1)
    load_weights._lorahost_bench = True  # type: ignore[attr-defined]
    DummyModelLoader.load_weights = load_weights


def fill(model: Any, spread: bool = True) -> None:
    """Gives every 16 or 32 bit float and packed MXFP4 parameter its random values, in place.

    Args:
        model: A module as vLLM builds it, before its weights are repacked for a backend.
        spread: False leaves the floats at vLLM's dummy values, with MXFP4 weights as small: every token then takes
            the same experts.

    Raises:
        TypeError: a packed parameter that is neither MXFP4 weights nor their scales.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
            if parameter.dtype == torch.uint8:
                _fill_mxfp4(name, parameter, generator, GAIN if spread else COLLAPSED_GAIN)
            elif spread and parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
                _fill_float(name, parameter, generator)


def _fill_float(name: str, parameter: Any, generator: Any) -> None:
    if parameter.dim() == 1 and "norm" in name:
        parameter.fill_(1.0)
    elif name.endswith(("bias", "sinks")):
        parameter.zero_()
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        gain = ROUTER_GAIN if name.endswith(("router.weight", ".gate.weight")) else GAIN
        parameter.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)


def _fill_mxfp4(name: str, parameter: Any, generator: Any, gain: float) -> None:
    if name.endswith("weight_scale"):
        fan_in = parameter.shape[-1] * 32
        exponent = E8M0_BIAS + round(math.log2(gain / math.sqrt(fan_in) / FP4_RMS))
        parameter.random_(exponent - 1, exponent + 2, generator=generator)
    elif name.endswith("weight"):
        parameter.random_(0, 256, generator=generator)
    else:
        raise TypeError(f"{name}: no random values are known for packed bytes of this name")
