"""Pipelines run a model's steps where the model runs: tokens and pixels before it, pooling and labels after it.

A worker process imports this room; what a step may be is declared in `tidegate/models/steps.py`.
"""
