"""The gateway's side of MQTT: devices' messages are folded into `FleetRegister`, which grades how far each is believed.
Others import `FleetSync`, which carries the messages, and `DeviceView`, what is known of one device. The formats of the
messages are in `tidegate/fleet`; connections to devices are in `gateway/targets`.
"""
