"""The demo models, each built on this machine: MiniLM, a digit classifier, and paced models that only wait.

`tidegate model build` and `tidegate model paced` import the builders. Nothing here runs while a model is served.
"""
