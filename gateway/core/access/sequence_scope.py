"""The sequence scope gives each tenant's sequences names at targets that no other tenant can produce.

A target keeps a sequence's state under the id that its caller chose, and callers choose 1, 2, 3. It cannot tell tenants
apart, since everything comes to it from the gateway; so a tenant that says another's number would step its memory, read
what comes of it, and end it. Hence the gateway passes no caller's id on:

    7 of acme       "acme/7"            a number
    "a" of acme     "acme/'a"           a text; what is too long is "acme/~" and its digest
    7 of nobody     7                   no tenant: a foreign server may want its numbers as numbers
    "a" of nobody   "/'a"

A tenant's name has no `/`, so two tenants' names for anything differ, and so do a number and a text; nobody's are the
only numbers and the only texts that begin with `/`. Names depend on nothing but the two, so that another gateway says
the same one. A credential with limits of its own is its tenant's all the same ("acme#key:3f9a" pays for "acme").

What belongs to no sequence stays as it is. Where the model remembers, ids that are none were refused before
(`tidegate/oip/sequence.py`); elsewhere ids are renamed all the same, since a foreign server may have a memory of which
our manifest says nothing. How many sequences there are is bounded for all tenants together (`max_sequences` of the
manifest): one can still use them up.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from msgspec.structs import replace

from tidegate.caller import tenant_of
from tidegate.oip.sequence import ID_KEY, MAX_ID_CHARACTERS
from tidegate.types import Call

MOST_CHARACTERS: Final = MAX_ID_CHARACTERS


def scope_sequence(call: Call) -> Call:
    """The call as targets may see it: a step of its own tenant's sequence."""
    parameters = call.request.parameters
    id = parameters.get(ID_KEY)
    if not id or isinstance(id, bool) or not isinstance(id, int | str):
        return call
    name = scoped_sequence_id(call.tenant, id)
    return call if name == id else replace(call, request=replace(call.request, parameters={**parameters, ID_KEY: name}))


def scoped_sequence_id(tenant: str, id: int | str) -> int | str:
    """What a sequence of this tenant is called at targets. `id` is neither 0 nor empty."""
    owner = tenant_of(tenant)
    if isinstance(id, int):
        return f"{owner}/{id}" if owner else id
    name = f"{owner}/'{id}"
    if len(name) <= MOST_CHARACTERS:
        return name
    return f"{owner}/~{blake2b(id.encode(errors='surrogatepass'), digest_size=24).hexdigest()}"
