"""The model repository extension of the protocol: loading and unloading the models of a running process.

What stands behind it is each process's own: targets start and end workers, a gateway changes what it takes.
"""
