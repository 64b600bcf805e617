"""Figures and plots of finished runs.

Others import `PolicyFigures`, `figures` and `rows` from `figures.py` and the drawing functions from `plot.py`. Nothing
here runs a simulation, and only drawing needs matplotlib.
"""
