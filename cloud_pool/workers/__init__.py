"""The pool's workers: which models they load, where they run, how they are kept alive, watched and recycled.

`app.py` imports the catalogue, the supervisor and the health controller; `serving` imports what is loadable. Worker
processes and the restarts that they share with an edge's are `tidegate/workers`; which work a worker gets is decided in
`scheduling`.
"""
