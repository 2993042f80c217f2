"""Everything in the kernels package that touches vLLM 0.26.0; moving to another version is a change in here."""
