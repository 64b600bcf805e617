"""The operators' commands: broker files, model building, rollouts, certificates, configuration and `tidegate up`.

The command line (`tidegate/cli.py`) finds the commands as entry points. No process imports this room; what a running
gateway, edge or pool needs belongs in the other rooms of `tidegate`.
"""
