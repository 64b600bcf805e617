"""The edge agent's decisions, free of IO: queueing, connectivity, reporting, rollouts, draining and diagnosis.

Every other room of the agent imports its state machine or its rules from here and performs what they return. Nothing
here awaits, reads a clock or a file, or logs; such code belongs in the room that does the work.
"""
