"""One module per model runtime behind the small interface `Engine`; `load_engine` chooses by the manifest.

Worker processes import `load_engine`. Only this room and `tidegate/tools/build` import a model runtime. Engines take
and return arrays: requests, queues and batches do not belong here.
"""
