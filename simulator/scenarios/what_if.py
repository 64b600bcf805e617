"""Changes to one thing of a scenario: more devices, or another link. The rest stays, chance included.

The devices and requests that were there before meet the same weather, heat and luck as without the change, so what
differs is the change's own doing.

A link is exchanged for one that comes with Tidegate or is in a file (`tidegate/netsim/links/profiles/`), or gets
its capacity from two recordings; its delay and jitter then stay what they were, since a recording has capacity only.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from simulator.scenarios.scenario import Scenario
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError
from tidegate.netsim.links.profile import CapacityRecording, LinkProfile
from tidegate.netsim.proxy import scenario as link_scenarios
from tidegate.netsim.proxy.link import LinkError
from tidegate.runtime.suggestion import did_you_mean


def with_more_devices(scenario: Scenario, words: str) -> Scenario:
    """With "GROUP=COUNT" more devices, or "COUNT" in the first group. Raises ScenarioError."""
    name, _, count = words.rpartition("=")
    groups = [group.name for group in scenario.edges]
    name = name or (groups[0] if groups else "")
    if name not in groups:
        known = f"(there are: {', '.join(groups)}).{did_you_mean(name, groups)}"
        raise ScenarioError(f"more devices {words!r}: there is no group {name!r} {known}")
    if not count.isdecimal():
        raise ScenarioError(f"more devices {words!r}: {count!r} is not a whole number of 0 or more")
    edges = [
        msgspec.structs.replace(group, count=group.count + int(count)) if group.name == name else group
        for group in scenario.edges
    ]
    return msgspec.structs.replace(scenario, edges=tuple(edges))


def with_link(loaded: LoadedScenario, words: str) -> LoadedScenario:
    """With "KIND=LINK", where LINK is a link's name or file, or "TO_TARGET,FROM_TARGET" recordings.

    Raises:
        ScenarioError: there is no such kind, or no such link.
    """
    kind, _, link = words.partition("=")
    links = loaded.scenario.links
    if kind not in links or not link:
        raise ScenarioError(
            f"link {words!r}: KIND=LINK is wanted, with a KIND of: {', '.join(links)}.{did_you_mean(kind, links)}"
        )
    there, comma, back = link.partition(",")
    profile = _recorded(links[kind], there, back) if comma else _named(link)
    changed = loaded.replaced(msgspec.structs.replace(loaded.scenario, links={**links, kind: profile}))
    _ = changed.traces  # a recording that cannot be read is reported now
    return changed


def _recorded(profile: LinkProfile, there: str, back: str) -> LinkProfile:
    recording = CapacityRecording(to_target=str(Path(there).absolute()), from_target=str(Path(back).absolute()))
    return msgspec.structs.replace(profile, recording=recording, to_mbit=None, from_mbit=None)


def _named(name: str) -> LinkProfile:
    try:
        found = link_scenarios.load(name)
        link, _ = found.ready(found.scenario.link)
    except LinkError as error:
        raise ScenarioError(str(error)) from error
    beyond = [
        word
        for word, there in (
            ("timeline", found.scenario.timeline),
            ("toxics", found.scenario.toxics),
            ("nat_idle_s", link.nat_idle_s),
            ("limit", link.limit),
        )
        if there
    ]
    if beyond:
        raise ScenarioError(
            f"link {name!r} has {' and '.join(beyond)}, which a fleet's links do not have: write it as `faults`, "
            "or choose another one"
        )
    profile = LinkProfile(**{field: getattr(link, field) for field in LinkProfile.__struct_fields__})
    if profile.recording is None:
        return profile
    recording = msgspec.structs.replace(
        profile.recording,
        to_target=str((found.folder / profile.recording.to_target).absolute()),
        from_target=str((found.folder / profile.recording.from_target).absolute()),
    )
    return msgspec.structs.replace(profile, recording=recording)
