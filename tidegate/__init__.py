"""Tidegate: one inference endpoint in front of your devices and your GPU pool.

This package is what the processes share; it imports none of them.
"""

__version__ = "0.1.0"
