"""Tokens in time, beside other people's rules: who keeps the budgets of most answers over the very same engines.

Real processes: four edges of mixed speed and a pool, whose engines are paced (they take a model's time and compute
nothing), a simulated link in front of each, and callers in an open loop. Every rule meets the same requests, and the
same weather at the same instants; rules take turns within each link and load.

    tidegate        as it is, with its defaults
    edge-only       the edge with the least of its slots taken
    pool-only       the pool
    least-loaded    of all targets the one with the least of its slots taken
    p90             the rule of llm-d's latency predictor: of the targets whose 90th percentiles of first token and of
                    each next one keep the budgets the one with the least room left, else the one that misses least
    litellm         LiteLLM's Router, in front of the edges' own OpenAI ports and of one in front of the pool; its
                    default strategy, with the targets' slots as weights (`make peers`)

All but the last stand inside of a gateway in the place of Tidegate's own placement (`rules.py`). That is the kinder
way for them: they get the link stream, queues by deadline and Tidegate's own estimates, which are more than their
authors have, and their answers go on elsewhere when a target is lost. What differs is the decision, and that only
Tidegate hedges and sheds. LiteLLM runs as its users run it, in the callers' process, so no proxy of it is measured.

The links: `quiet`; `jitter` (20 ms of lognormal jitter to the pool, and stretches of 2 s with 16 times the delay; the
edges' WiFi jitters at other instants); `cellular`, where the way to the pool has the capacity of a recorded drive
(TIDEGATE_TRACES or ../shared/traces; skipped without).

    goodput          answers a second that were whole, kept the budget of the first token and, on average, of each next
    smooth goodput   tokens a second that came by their own instants, which delaying some to help others cannot raise

`bound` is a linear program that knows every arrival, length and cost beforehand (`bound.py`): no rule can beat it.
Loads are fractions of the knee, at which least-request keeps nine answers in ten in simulation on a quiet link.

    python -m tests.bench.generate_routing [--quick] [--seconds 30] [--links quiet,jitter] [--rules tidegate,p90]
"""
