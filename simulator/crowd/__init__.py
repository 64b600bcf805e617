"""Many simulated devices that speak MQTT as real agents do, to load a broker and a gateway: `tidegate fleet simulate`.

Others import `Crowd` from `crowd.py`. The devices answer no requests; fleets that do are simulated on virtual time by
`simulator/simulation.py`.
"""
