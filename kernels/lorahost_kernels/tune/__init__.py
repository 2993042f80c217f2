"""The tuner: searches tiles for a model's LoRA operations on this GPU and writes a tuned configuration file."""
