"""Generation: what is asked of a generating model, the tokens on their way to the caller, and how an answer ended.

A generation is an inference call like any other (`tidegate/types.py`), whose answer comes in parts: `Call.tokens` is
where they go meanwhile, and the `Reply` at the end has all of them once more, with why the text ended and what it took.
So every layer holds the place of a stream for as long as it lasts, and counts it once. Every process imports
`GenerateRequest`, `TokenSink` and `Usage`; engines implement `GenerativeEngine`. How text becomes tokens and back is
here as well; HTTP and gRPC are `tidegate/openai` and `tidegate/oip`.
"""
