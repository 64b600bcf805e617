"""The copies that are spelled out for speed keep every field, also those that are added later."""

from __future__ import annotations

from msgspec.structs import fields, replace

from tidegate.caller import Grant, Identity
from tidegate.generate.token_stream import TokenStream
from tidegate.text_prompt import TextPrompt
from tidegate.trace_context import Trace
from tidegate.types import Call, Datatype, InferRequest, RequestedOutput, SplitNote, Tensor

REQUEST = InferRequest(
    "minilm",
    (Tensor("x", Datatype.INT8, (1,), b"a"),),
    "",
    "7",
    (RequestedOutput("y"),),
    {"priority": 1},
    TextPrompt({}),
)

SOMEBODY = Identity("key:1", Grant("acme"))


def test_a_pinned_request_differs_in_its_version_only() -> None:
    assert REQUEST.pinned("3") == replace(REQUEST, model_version="3")
    defaults = InferRequest("", ())
    changed = [one.name for one in fields(REQUEST) if getattr(REQUEST, one.name) == getattr(defaults, one.name)]
    assert changed == ["model_version"], "give every new field a value above, so that its copy is tested"


def test_a_call_that_is_due_differs_in_its_deadline_only() -> None:
    words = {"a": "b"}
    trace = Trace(1, 2, sampled=True)
    who = ("edge", 0.9, "acme", SOMEBODY)
    sink = TokenStream()
    calls = [lambda accepted: None, *who, True, True, trace, sink, lambda route: None, 0.5, 0.05, False, ("north",)]
    calls.append(SplitNote("encoder", "head", "/body/Relu_3", "in time"))
    call = Call(REQUEST, "oip-grpc", 5.0, None, 2, "fp32", words, *calls)  # type: ignore[arg-type]
    assert call.due(9.0) == replace(call, deadline=9.0)
    defaults = Call(InferRequest("", ()), "", 0.0)
    changed = [one.name for one in fields(call) if getattr(call, one.name) == getattr(defaults, one.name)]
    assert changed == ["deadline"], "give every new field a value above, so that its copy is tested"
