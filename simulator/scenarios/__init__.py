"""Scenarios: what a YAML file says of a fleet, how it is read and checked, and the files that come with Tidegate.

Others import the data classes from `scenario.py`, `load` and `LoadedScenario` from `scenario_file.py`, and the changes
of `tidegate simulate`'s options from `what_if.py`. Building a fleet from a scenario belongs in `simulator/world`.
"""
