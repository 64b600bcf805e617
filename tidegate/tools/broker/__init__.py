"""The MQTT broker of a fleet: Mosquitto's files (`tidegate broker config`) and the embedded broker of `tidegate up`.

Others import the plan of Mosquitto's files and the functions that write them. MQTT clients live in `tidegate/mqtt`.
"""
