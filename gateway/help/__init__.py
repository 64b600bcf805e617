"""This room is where devices get help: requests of a device's local callers that the device cannot answer well.

`help_service.py` takes the streams that devices open for it, on the port that they dial (`link_port`), and
`asker_host.py` is what each of them may use. Which of its requests a device sends is decided there
(`edge_agent/core/help/help_choice.py`), and what it may have in `gateway/core/access/asker.py`.
"""
