"""What crosses MQTT: topics, messages, and the rules by which they merge in any order."""
