"""This room holds the gateway's estimators: of links, service costs, waits, chances, shadow prices and statistics.

Fleet, placement and request read them; an estimator imports none of these and knows no target. Estimators that agents
and pools need too are in `tidegate/estimate`.
"""
