"""One base model and dozens of LoRA adapters on one accelerator, behind SageMaker's container contract."""

__version__ = "0.1.0"
__all__ = ["__version__"]
