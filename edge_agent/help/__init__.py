"""This room has gateways answer what the device's local callers ask and the device cannot answer well.

`helping_host.py` stands around the device's own models: it asks the decision (`edge_agent/core/help/help_choice.py`)
and performs it. `help_lines.py` knows the gateways that can be asked, each over a `help_line.py`: one stream that this
device dials. `callers_host.py` notes which credential a caller showed, so that the gateway can honour it.

Local callers come in by `edge_agent/offline/local_host.py`, which also says what becomes of what no gateway answered.
Calls of gateways never come through here.
"""
