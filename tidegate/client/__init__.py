"""The Python client of a gateway (or of an edge or pool): `from tidegate import Tidegate, AsyncTidegate`.

    with Tidegate("http://127.0.0.1:8000", budget_s=0.5) as client:
        answer = client.embed("minilm", "Time and tide wait for no one.")
        answer.vectors, answer.served.by, answer.served.budget_left_s

Any client of the Open Inference Protocol or of OpenAI's works with a gateway as well. This one adds what those hide:
budgets, pins and demanded variants as typed options, what happened as an object, errors as the classes of
`tidegate/outcome.py`, and retries that wait as long as the refusal says and never beyond the budget.

What a request and its answer are on the wire is pure (`exchange.py`, `answers.py`, `refusals.py`, `event_stream.py`),
and so is when to try again (`retry_policy.py`); the two clients only send. No process that serves imports this room.
"""
