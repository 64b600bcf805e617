"""The reader of scenarios: a YAML file with the files that it names becomes a `Scenario` whose parts fit each other.

Whatever is wrong is an error that names the file, the key and what would be right.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import yaml

from simulator.scenarios.scenario import Scenario, target_names
from tidegate.netsim.file_errors import explained
from tidegate.netsim.links.profile import CapacityRecording, with_files
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.runtime.suggestion import did_you_mean

SCENARIOS = Path(__file__).parent


class ScenarioError(Exception):
    """A scenario cannot be used; the message names the file and the key."""


class LoadedScenario:
    """A scenario with the files that it names. `traces` has the recordings of each link that has them."""

    def __init__(self, scenario: Scenario, folder: Path, source: str) -> None:
        self.scenario = scenario
        self.source = source
        self._folder = folder

    @cached_property
    def traces(self) -> dict[str, tuple[CapacityTrace, CapacityTrace]]:
        return {
            name: (self._trace(name, "to_target", link.recording), self._trace(name, "from_target", link.recording))
            for name, link in self.scenario.links.items()
            if link.recording is not None
        }

    def replaced(self, scenario: Scenario) -> LoadedScenario:
        return LoadedScenario(scenario, self._folder, self.source)

    def _trace(self, link: str, key: str, recording: CapacityRecording) -> CapacityTrace:
        path = self._folder / str(getattr(recording, key))
        try:
            return recording.parse(path.name, path.read_text())
        except (OSError, ValueError) as error:
            raise ScenarioError(f"{self.source}: key 'links.{link}.recording.{key}': {path}: {error}") from error

    def __repr__(self) -> str:
        return f"<LoadedScenario {self.source}: {self.scenario.summary}>"


def names() -> tuple[str, ...]:
    """Of the scenarios that come with the package."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.yaml")))


def load(name: str) -> LoadedScenario:
    """The scenario of this name, or in this file.

    Raises:
        ScenarioError: it does not exist, or is not one.
    """
    path = SCENARIOS / f"{name}.yaml" if name in names() else Path(name)
    try:
        text = path.read_text()
    except OSError as error:
        known = f"by name: {', '.join(names())}.{did_you_mean(name, names())}"
        raise ScenarioError(f"there is no scenario {name!r}: {error}; {known}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"{path}: is no text, and so no scenario; traffic of `tidegate record` goes with --replay {path}"
        ) from error
    return LoadedScenario(_with_files(parse(text, str(path)), path), path.parent, str(path))


def _with_files(scenario: Scenario, path: Path) -> Scenario:
    """The same with every link's measured jitter read."""
    links = {}
    for name, link in scenario.links.items():
        try:
            links[name] = with_files(link, lambda file: (path.parent / file).read_text())
        except (OSError, ValueError) as error:
            raise ScenarioError(f"{path}: key 'links.{name}.jitter.file': {error}") from error
    return msgspec.structs.replace(scenario, links=links)


def parse(text: str, source: str) -> Scenario:
    """Read and check a scenario. Raises ScenarioError."""
    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ScenarioError(f"{source}: a scenario is a mapping of keys, this is {type(raw).__name__}")
    try:
        scenario = msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {explained(str(error))}") from error
    for key, why in _misfits(scenario):
        raise ScenarioError(f"{source}: key {key!r}: {why}")
    return scenario


def _misfits(scenario: Scenario) -> list[tuple[str, str]]:
    """Keys whose values do not fit to each other, and why."""
    found: list[tuple[str, str]] = []

    def must_name(key: str, name: str, known: dict[str, Any]) -> None:
        if name not in known:
            found.append((key, f"there is no {name!r} (there are: {', '.join(known) or 'none'})"))

    for place, edge in enumerate(scenario.edges):
        must_name(f"edges[{place}].link", edge.link, scenario.links)
        for model in edge.models or ():
            must_name(f"edges[{place}].models", model, scenario.models)
        for model in edge.edge_ms:
            must_name(f"edges[{place}].edge_ms", model, scenario.models)
        for model in edge.takes_ms:
            must_name(f"edges[{place}].takes_ms", model, scenario.models)
        if edge.background is not None:
            classes = {one.name: one for one in scenario.classes}
            must_name(f"edges[{place}].background.class", edge.background.class_, classes)
    for place, pool in enumerate(scenario.pools):
        must_name(f"pools[{place}].link", pool.link, scenario.links)
    for place, kind in enumerate(scenario.classes):
        must_name(f"classes[{place}].model", kind.model, scenario.models)
        model_spec = scenario.models.get(kind.model)
        if model_spec is not None and kind.rows > model_spec.max_batch:
            found.append((f"classes[{place}].rows", f"{kind.rows} are more than the model's max_batch"))
        if model_spec is not None and (model_spec.generation is None) != (kind.output is None):
            found.append((f"classes[{place}].output", "it goes with a model that has generation, and with no other"))
    if len({one.generation is None for one in scenario.models.values()}) > 1:
        found.append(("models", "models with generation and models without are not simulated together"))
    for place, step in enumerate(scenario.arrivals.steps):
        for name in step.shares:
            must_name(f"arrivals.steps[{place}].shares", name, {one.name: one for one in scenario.classes})
    targets = {*target_names(scenario), "mqtt"}
    for place, fault in enumerate(scenario.faults):
        if fault.target not in targets:
            found.append((f"faults[{place}].target", f"there is no {fault.target!r}"))
        if (fault.kind == "broker") != (fault.target == "mqtt"):
            found.append((f"faults[{place}].target", "a fault of the broker has the target 'mqtt', and no other has"))
    if not scenario.edges and not scenario.pools:
        found.append(("edges", "a fleet needs an edge or a pool"))
    if not scenario.classes or sum(one.share for one in scenario.classes) <= 0.0:
        found.append(("classes", "at least one class with a share above 0 is needed"))
    if not 0.0 <= scenario.warmup_s < scenario.duration_s:
        found.append(("warmup_s", f"must be from 0 up to below duration_s ({scenario.duration_s})"))
    if scenario.max_in_flight < 1:
        found.append(("max_in_flight", f"must be at least 1, not {scenario.max_in_flight}"))
    if scenario.cloud_budget is not None and not scenario.cloud_budget > 0.0:
        found.append(("cloud_budget", f"must be above 0, not {scenario.cloud_budget:g}; leave it out for no limit"))
    names_of_groups = [edge.name for edge in scenario.edges]
    if len(set(names_of_groups)) < len(names_of_groups):
        found.append(("edges", "two groups have one name"))
    return found
