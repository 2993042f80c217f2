"""Bedrock can't run containers: an adapter is merged into its base model, and the result is imported."""
