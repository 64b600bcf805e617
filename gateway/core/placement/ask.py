"""An ask holds what placement needs to know of one request: model, work, deadline and the caller's demands."""

from __future__ import annotations

from collections.abc import Set
from typing import Final, NamedTuple

from gateway.core.placement.generation_time import GenerationAsk
from tidegate.placement_pin import Pin

NOTHING: Final[Set[str]] = frozenset()


class Ask(NamedTuple):
    """What placement needs to know of a request."""

    model: str
    version: str
    units: float
    rows: int
    longest_row: int
    deadline: float
    variant: str = ""  # demanded, by name or precision; "" takes any
    priority: int = 0  # OIP's: 1 is highest, 0 means the default
    body_bytes: int = 0
    answer_bytes: int = 0  # expected; known only where an answer's bytes have a price
    min_quality: float = 0.0  # a variant of lower or unmeasured quality is not eligible
    pin: Pin = "any"  # targets outside of it are never candidates
    weight: float = 1.0  # of its tenant times its model's: how much more its answer is worth than others
    tenant: str = ""  # the tenant that pays; "" is the anonymous one
    escalates: bool = False  # an unsure answer of a lesser variant is sent on to a better one
    attested: bool = False  # targets without evidence that is good until the deadline are no candidates
    schema: bool = False  # a generation that has to follow a JSON schema
    generation: GenerationAsk | None = None  # of a generating model, whose `units` are those expected
    ids: bool = False  # a generation that only a target of token ids can answer: there are no words for it
    begun: bool = False  # a generation whose beginning another target has written, given to this one in words
    home: str = ""  # the only target that will do: it remembers the sequence of which this is a step
    also_pays: str = ""  # the quota of a credential with limits that acts for the tenant
    again: bool = False  # a connection ended under an attempt before this one, which took some of its time
    left_out: Set[str] = NOTHING  # targets that are no candidates, though none of them was tried
