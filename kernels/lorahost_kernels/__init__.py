"""vLLM plugin of lorahost: MoE LoRA on the CPU, fused MoE-LoRA kernels on the GPU."""

__version__ = "0.1.0"
__all__ = ["__version__"]
