"""`tidegate up`: the whole system on one machine, as child processes of one command."""
