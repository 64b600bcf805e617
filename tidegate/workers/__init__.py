"""Worker processes: a child that loads engines and computes, and the parent's end of it.

Edges and pools import the process (`process.WorkerProcess`), what keeps it alive (`supervised.SupervisedWorker`), the
warm-up, and what is known of a worker's memory and time. Queues, batches and what a worker serves belong to the
processes.
"""
