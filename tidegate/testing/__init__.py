"""Simulated links in anybody's tests: what the pytest plugin's fixtures are made of.

    links    a link as an object that any thread may use, synchronous tests and asynchronous ones (`links.py`)
    netsim   links on a timeline: at 5 s partition, at 9 s heal (`netsim.py`)
    stack    a whole gateway, pool, edges and broker as processes, with links between them (`stack.py`)
    traces   recordings of real links, where the machine has them (`traces.py`)

The links run on an event loop in a thread of their own: a test that blocks, or whose own loop is busy, does not bend
the network. `pytest_plugin.py` imports none of this until a test asks for a fixture.
"""
