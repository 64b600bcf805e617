"""The same model without a server: what one core can do at most, and what simple rules make of it.

Everything happens in one thread of one process, pinned to the core that is measured: there is nothing to be handed
over, so this is what servers are held against. Groups are found by code of its own, from a table of costs by padded
tokens that is made once, so that a reference does not wait for what is under test.

    limit     all rows sorted by length and cut into the groups that cost least, by this core's own measured costs
    fifo1     one row a call, as they come
    bare      the same, each call timed: what a caller of a server with nobody else there would wait at least
    sjf       open loop: of those who wait, cost-optimal groups of at most 8; the cheapest first, but any whose oldest
              has waited 40 ms before those, the oldest first

Speaks the harness's JSON lines; `{"op": "limit" | "fifo1" | "bare" | "open" | "answers", ...}`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.bench.batching.texts import LONG, Due, Row, read_rows, schedule
from tidegate.engines.engine import Engine, load_engine

OUTPUT: Final = "sentence_embedding"
AGED_S: Final = 0.040
SJF_ROWS: Final = 8
_LIMIT_ROWS: Final = 32
_SIZES: Final = ((1, 4), (1, 16), (1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (32, 64))
_WINDOW: Final = 64
_LONG_LATE_S: Final = 1.0  # once everybody waits for so long the run is lost and may end


class Alone:
    """One engine in this very thread."""

    def __init__(self, engine: Engine, rows: dict[str, list[Row]]) -> None:
        self._engine = engine
        self._rows = rows
        self._cost_s = self._costs()

    def run(self, rows: Sequence[Row]) -> NDArray[Any]:
        """The embeddings of rows that are padded to the longest."""
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        return self._engine.infer({"input_ids": ids, "attention_mask": mask})[OUTPUT]

    def limit(self, rows: Sequence[Row]) -> float:
        """Rows a second in the cheapest groups. Groups are found before the time is taken."""
        ordered = sorted(rows, key=len)
        groups = [[ordered[index] for index in group] for group in self._groups(ordered, _LIMIT_ROWS)]
        began = time.perf_counter()
        for group in groups:
            self.run(group)
        return len(rows) / (time.perf_counter() - began)

    def bare(self, rows: Sequence[Row]) -> list[float]:
        """Seconds of each row in a call of its own."""
        took = []
        for row in rows:
            began = time.perf_counter()
            self.run([row])
            took.append(time.perf_counter() - began)
        return took

    def open(self, policy: str, rows: Sequence[Row], due: Sequence[Due]) -> list[float]:
        """Latencies from the scheduled arrivals; 1e9 for those who were not reached before the run was given up."""
        waiting, latencies, came = list[int](), [1e9] * len(due), 0
        began = time.perf_counter()
        while waiting or came < len(due):
            now = time.perf_counter() - began
            while came < len(due) and due[came].at <= now:
                waiting.append(came)
                came += 1
            if not waiting:
                time.sleep(max(0.0, due[came].at - now))
                continue
            if now - due[waiting[0]].at > _LONG_LATE_S:
                break
            chosen = self._next(policy, rows, due, waiting, now)
            waiting = [number for number in waiting if number not in chosen]
            self.run([rows[due[number].row] for number in chosen])
            done_at = time.perf_counter() - began
            for number in chosen:
                latencies[number] = done_at - due[number].at
        return latencies

    def _next(self, policy: str, rows: Sequence[Row], due: Sequence[Due], waiting: list[int], now: float) -> list[int]:
        if policy == "fifo1":
            return waiting[:1]
        first = waiting[:_WINDOW]
        asked = [rows[due[number].row] for number in first]
        groups = [[first[index] for index in group] for group in self._groups(asked, SJF_ROWS)]
        aged = [group for group in groups if now - due[min(group)].at > AGED_S]
        if aged:
            return min(aged, key=min)
        lengths = {number: len(row) for number, row in zip(first, asked, strict=True)}
        return min(groups, key=lambda group: len(group) * max(lengths[number] for number in group))

    def _groups(self, rows: Sequence[Row], most: int) -> list[list[int]]:
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        runs = cheapest_runs([len(rows[index]) for index in order], self._cost_s, most)
        return [order[start:end] for start, end in runs]

    def _costs(self) -> list[float]:
        """Seconds of a call, by its padded tokens: the fastest of three, and straight lines between and beyond."""
        measured = dict[int, float]()
        for count, length in _SIZES:
            rows = [[101] * length] * count
            self.run(rows)
            took = []
            for _ in range(3):
                began = time.perf_counter()
                self.run(rows)
                took.append(time.perf_counter() - began)
            measured[count * length] = min(took)
        (before, shorter_s), (last, longer_s) = list(measured.items())[-2:]
        most = _LIMIT_ROWS * LONG
        measured[most] = longer_s + (most - last) * (longer_s - shorter_s) / (last - before)
        tokens = np.arange(most + 1)
        return list(np.interp(tokens, list(measured), list(measured.values())).tolist())

    def obey(self, op: str, words: dict[str, Any]) -> dict[str, Any]:
        rows = self._rows[words.get("mix", "mixed")]
        picked = [rows[due.row] for due in schedule(words.get("seed", 0), 100.0, words.get("count", 0) / 100.0)]
        gc.collect()
        match op:
            case "limit":
                return {"rps": self.limit(picked)}
            case "fifo1":
                return {"rps": len(picked) / sum(self.bare(picked))}
            case "bare":
                took = self.bare(picked)
                return {"p50_s": median(took), "took_s": took}
            case "open":
                due = schedule(words["seed"], words["rate"], words["seconds"])
                return {"latencies_s": self.open(words["policy"], rows, due)}
            case "answers":
                answers = np.concatenate([self.run([row]) for row in rows[: words["count"]]])
                np.save(words["into"], answers)
                return {"saved": len(answers)}
        raise ValueError(f"no such op: {op}")


def cheapest_runs(lengths: Sequence[int], cost_s: Sequence[float], most: int) -> list[tuple[int, int]]:
    """Of ascending lengths: (start, end) of the runs of at most so many that cost least together."""
    best_s, starts = [0.0], list[int]()
    for end in range(1, len(lengths) + 1):
        longest = lengths[end - 1]
        costs = [(best_s[start] + cost_s[(end - start) * longest], start) for start in range(max(0, end - most), end)]
        least_s, start = min(costs)
        best_s.append(least_s)
        starts.append(start)
    runs, end = list[tuple[int, int]](), len(lengths)
    while end:
        runs.append((starts[end - 1], end))
        end = starts[end - 1]
    return runs


def main(engine: str, artefact: str, rows: str) -> None:
    model = load_engine(engine, Path(artefact), outputs=(OUTPUT,), threads=1)  # type: ignore[arg-type]
    alone = Alone(model, read_rows(Path(rows)))
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        print(json.dumps(alone.obey(words.pop("op"), words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
