"""A crowd of devices that speak MQTT as real agents do: what a broker and a gateway make of many."""
