"""OpenAI's HTTP interface over any `ModelHost`: embeddings, the list of models, and tokenizers.

The gateway and the edge agent mount the same routes. Whatever is common to all protocols (checks, budgets, status
codes) is in `tidegate/oip`.
"""
