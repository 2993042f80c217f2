"""Benchmarks: load over HTTP, steps of one engine start each, and what is made of their rows.

`engine_point` and what it imports need vLLM and the standard library only, so that they run on a bare GPU host.
"""
