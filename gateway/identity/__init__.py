"""Who callers are: each kind of credential turned into one `Identity`, and the guard that asks for it."""
