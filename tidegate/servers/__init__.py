"""Doors: the ports on which a process answers, opened and closed the same way everywhere."""
