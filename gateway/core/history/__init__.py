"""This room holds what is remembered of finished requests: records, packed decisions, waterfalls, counterfactuals.

Request execution writes to the `FlightRecorder`; explanations, metrics and recordings read from it. It decides nothing
about live requests.
"""
