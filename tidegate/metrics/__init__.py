"""Metrics that all processes share: histograms, Prometheus families, the merging of several processes, and scraping.

Processes import the counters and make families of them with `families.py`. Metrics of a single process are defined in
that process, from these parts.
"""
