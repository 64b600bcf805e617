"""Generations as every protocol in front of a `ModelHost` serves them: one under way, its text, and its limits.

The protocols themselves are elsewhere: Triton's in `tidegate/oip/http` and `tidegate/oip/grpc`, OpenAI's in
`tidegate/openai`.
"""
