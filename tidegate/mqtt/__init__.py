"""One lasting MQTT connection over asyncio: session, redial, inbox and the task that reads it.

The edge agent and the gateway import `MqttLoop` and the link below it; the demo broker's address is parsed here, too.
What the messages mean does not belong here: topics and schemas are in `tidegate/fleet`, and the reactions are in the
processes.
"""
