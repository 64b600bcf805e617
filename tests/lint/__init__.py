"""The rules of this code base that no linter knows: `make lint` runs `python -m tests.lint`.

One rule a file, each a function from the sources to its violations; `test_rules.py` plants a violation of each.
CONTRIBUTING.md says what the rules are for. A rule with exceptions lists them beside itself, each with its reason.
"""
