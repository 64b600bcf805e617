"""Simulated workers: edges around the real edge queue, pools around the real batcher, and how fast each really is.

The queues, their predictions and refusals are the very objects that serve (`EdgeQueue`, `Batcher`, `ServiceTime`);
these files do for them what `edge_agent/serving/scheduler.py` and `cloud_pool/scheduling/scheduler.py` do with asyncio:
they take jobs in, start what they release, wake at the instants they name and send each answer or refusal back on the
stream it came from.

    job        one request as it stands before a worker, and the caller that its answer goes to
    slowness   how much slower a device is at an instant than it measured
    worker     what edges and pools have in common
    edge       one computation at a time           pool    one batch at a time
"""
