"""Tuned configurations: tiles that were measured on this GPU for this model, in front of the defaults.

`tuned.start.start(config, slots=...)` finds and activates them; see docs/tuning.md. Nothing is imported here: kernels
alone run without pydantic, which reading files needs.
"""
