"""Pure estimators that several processes share: the cost table, its online correction, and trends.

Edge and pool measure and publish with them, the gateway predicts with them. Estimators that only placement uses are in
`gateway/core/estimate`.
"""
