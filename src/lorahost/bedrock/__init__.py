"""Bedrock's runtime API in terms of OpenAI calls: pure functions, without HTTP and without an engine."""
