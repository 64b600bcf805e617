"""This room decides how healthy a target is: breakers over its calls, and named degradations with their evidence.

The fleet view owns one set for each target, and attempts record into it. What follows from a bad state, such as an
ejection or a higher price, is decided in `gateway/core/fleet`.
"""
