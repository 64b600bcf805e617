"""`tidegate up`: the whole system on one machine, as child processes of one command.

`plan.py` decides what is started, `system.py` and `children.py` run it, and `messages.py` and `screen.py` show it.
Only the command line imports this room. What a process does by itself belongs in that process.
"""
