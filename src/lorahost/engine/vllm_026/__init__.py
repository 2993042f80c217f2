"""vLLM 0.26.0 behind the `EngineHost` interface. Everything in the server that imports vLLM lives here."""

VLLM_VERSION = "0.26.0"
