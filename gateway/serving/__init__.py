"""The path of one admitted request: `Dispatcher` describes its work, and `RequestExecution` performs what the request
machine decides, over the targets that exist now. `gateway/app.py` and the layers use `Dispatcher` alone. Decisions
belong to `gateway/core`, connections to `gateway/targets`, and what concerns every call alike to `gateway/layers`.
"""
