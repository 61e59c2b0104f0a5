"""Tests against a real vLLM, in an environment of its own: `make vllm`."""
