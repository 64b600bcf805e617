"""How an edge answers: the models that it runs, the worker of each, the queue before the workers, and their metrics.

`app.py`, `offline` and `delivery` import the host (`host.EdgeHost`), the runners (`runner.Runner`,
`runner_set.RunnerSet`) and the catalogue. Which generation a device runs is decided in `delivery`, the order of the
queue in `core`, and the pipeline that an edge shares with a pool is `tidegate/serving`.
"""
