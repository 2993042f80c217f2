"""The part of the benchmarks that touches vLLM 0.26.0 and torch."""
