"""The signatures of artefacts, read from the files: one module for each format, and the form that they share.

`tidegate model add` imports the readers and compares the signatures (`agree.py`). Nothing here runs a model.
"""
