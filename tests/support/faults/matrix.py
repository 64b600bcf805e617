"""The fault matrix's stage: a fleet of processes behind simulated links, one fault at a time, seen in three phases.

    open loop (a process) ──HTTP──▶ gateway ──link──▶ 8 edges, a pool        link: a proxy of `proxy`, each
                                       └────link──▶ Mosquitto ◀──link── edges      with the delays of a WiFi or a WAN

One fleet serves many rows, since starting it takes longer than most faults: `run` sends one row's requests from before
the fault until after its end, breaks and heals at the instants that the row says, mends whatever is left broken, and
returns what was seen (`matrix_seen.py`). Who plays is `tests/support/gateway/casts.py`'s: a crowd of models that only
take their time, or two devices and a pool with real ones.

    with Matrix(folder) as matrix:
        seen = matrix.run(Row("4a", "cloud link blackholed", acts=lambda m: [(0.0, m.links["pool"].partition)]))
        seen.during.attainment(), seen.late_s, seen.accounts, seen.launches("pool/pool", after_s=1.0)

Everything is started and broken in the thread that made the matrix (a part dies with the thread that started it).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import yaml

from gateway.operate.admin import MOST_AT_ONCE
from tests.bench.open_loop import Answer
from tests.support.faults.fleet_stack import WHOLE_WITHIN_S, FleetStack, PartFailed
from tests.support.faults.matrix_seen import Flight, Look, Seen, outcomes_of
from tests.support.gateway.casts import Cast, paced
from tests.support.models.staged import Staged
from tidegate import clock
from tidegate.testing.links import LinkThread, SimLink

ROOT: Final = Path(__file__).parents[3]
WIFI: Final[Mapping[str, Any]] = {"delay_ms": 2, "jitter": {"dist": "lognormal", "ms": 0.5, "shape": 0.8}}
WAN: Final[Mapping[str, Any]] = {"delay_ms": 10, "jitter": {"dist": "lognormal", "ms": 1.0, "shape": 0.8}}
FOREIGN: Final = "tests.support.serving.foreign_server"
_LOOK_EVERY_S: Final = 0.05
_LEAD_S: Final = 0.7  # from the command to the load's first instant
_GRACE_S: Final = 30.0  # for the slowest of a row's answers to be told
_REMEMBER: Final = 20_000  # decisions: more than any row has requests

Act = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. `acts` says what happens when, in seconds from its begin; `end` undoes it.

    Args:
        number: as in the table, with a letter where a row has several sizes.
        recover_s: of the time after the end, what is not counted as after.
        step: how many times the load there is during the fault.
        retries: how often a caller without an answer asks again, at once.
        leaving: the share of callers that go before they have their answer.
        budget_ms: of every request; None: as the cast has them.
        changes: how often the fault changes the state of one target; logs may have a few lines for each.
    """

    number: str
    title: str
    acts: Callable[[Matrix], Iterable[tuple[float, Act]]]
    end: Callable[[Matrix], object] = lambda _matrix: None
    before_s: float = 4.0
    during_s: float = 8.0
    after_s: float = 6.0
    recover_s: float = 2.0
    load: float = 0.6
    step: float = 1.0
    retries: int = 0
    leaving: float = 0.0
    changes: int = 1
    budget_ms: float | None = None


_NOTHING: Final = Row("", "nothing is broken", lambda _matrix: (), during_s=0.0, after_s=0.0)


class Matrix(Staged):
    """The running fleet, inside `with`.

    Args:
        cast: makes models, devices and load in a folder; by default eight devices that only take their time.
        gateway, pool: further keys of their configurations.
        modules: by part, what is started in the place of its usual module.
        foreign: whether the pool is a server that is none of ours (`tests/support/serving/foreign_server.py`).
    """

    def __init__(
        self,
        folder: Path,
        cast: Callable[[Path], Cast] = paced,
        *,
        gateway: Mapping[str, Any] | None = None,
        pool: Mapping[str, Any] | None = None,
        modules: Mapping[str, str] | None = None,
        foreign: bool = False,
    ) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.links: dict[str, SimLink] = {}
        self.cast = cast(folder)
        self.edges = list(self.cast.edges)
        self.baseline: list[Answer] = []  # of all rows so far, before their faults
        self._folder = folder
        self._gateway = {"policy": "value", "log_level": "info", "remember_decisions": _REMEMBER, **(gateway or {})}
        self._pool = dict(pool or {})
        self._modules = {**(modules or {}), **({"pool": FOREIGN} if foreign else {})}
        self._foreign = foreign

    def run(self, row: Row, *, seed: int = 1) -> Seen:
        """Send the row's requests, let its fault happen and end, and mend what is left; what was seen."""
        seen = self._play(row, seed)
        self.baseline += seen.before.answers
        self.mend()
        return seen

    def _play(self, row: Row, seed: int) -> Seen:
        acts = [*row.acts(self), (row.during_s, lambda: row.end(self))]
        seconds = row.before_s + row.during_s + row.after_s
        logs = {name: len(part.log) for name, part in self.fleet.parts.items()}
        counted = self.outcomes()
        began_at = clock.now() + _LEAD_S
        self._load.send(
            scenario=str(self._scenario_of(row)), leaving=row.leaving,
            rate=row.load * self.cast.knee_rps, seconds=seconds, seed=seed, model=self.cast.model,
            tokens=self.cast.tokens, keep_outputs=self.cast.keep_outputs,
            port=self._port, answers=str(self._folder / "answers.json"), began_at=began_at,
        )  # fmt: skip
        with _Watcher(self.fleet, began_at) as watcher:
            instants = [self._at(began_at + row.before_s + at_s, act) - began_at for at_s, act in acts]
            late = self._load.line(within_s=seconds + _GRACE_S)
        answers = [Answer(**one) for one in json.loads((self._folder / "answers.json").read_text())]
        return Seen(
            row=row.title,
            answers=answers,
            phases=(1.0, instants[0], instants[-1], instants[-1] + row.recover_s),
            flights=self._flights(answers),
            looks=watcher.looks,
            counted=self.outcomes() - counted,
            logs={name: part.log[logs[name] :] for name, part in self.fleet.parts.items()},
            changes=row.changes,
            sent_late_p99_s=late["late_p99_s"],
            baseline=self.baseline,
        )

    def warm_up(self, seconds: float = 8.0) -> None:
        """Let a new gateway learn what it does not know yet; what is seen meanwhile is no row's baseline."""
        self.run(replace(_NOTHING, before_s=seconds), seed=0)
        self.baseline.clear()

    def calm(self, *, before_s: float = 0.2, after_s: float = 0.8, load: float = 1.0) -> Seen:
        """Send requests while nothing is broken, and say what came of them."""
        return self.run(replace(_NOTHING, before_s=before_s, after_s=after_s, load=load))

    def mend(self) -> None:
        """Every link whole and as it was, every part there, and the gateway sees them all ready."""
        for name, link in self.links.items():
            for toxic in [one for one in link.state()["layers"] if one != "base"]:
                link.remove(toxic)
            link.heal()
            link.apply(**self._usual(name))
        for part in self.fleet.parts.values():
            if not part.alive:
                part.start()
                part.wait_ready()
        self._wait_whole()

    def usual(self, name: str) -> None:
        """Make a link what it is without a fault."""
        self.links[name].apply(**self._usual(name))

    def outcomes(self) -> Counter[str]:
        """What the gateway has counted by outcome; nothing of a gateway that is down."""
        try:
            with urllib.request.urlopen(f"{self.fleet.gateway.addresses['metrics']}/metrics", timeout=30) as answer:
                return outcomes_of(answer.read().decode())
        except OSError:
            return outcomes_of("")

    def _scenario_of(self, row: Row) -> Path:
        if row.step == 1.0 and not row.retries and row.budget_ms is None:
            return self.cast.scenario
        raw = yaml.safe_load(self.cast.scenario.read_text())
        raw["arrivals"]["steps"] = [{"at_s": row.before_s, "for_s": row.during_s, "times": row.step}]
        for kind in raw["classes"]:
            kind["retries"] = row.retries
            kind["budget_ms"] = row.budget_ms or kind["budget_ms"]
        path = self._folder / f"fleet-{row.number}.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    def _wait_whole(self) -> None:
        """Ask while there is somebody to wait for: a target whose breaker is open is tried by requests alone."""
        give_up_at = clock.now() + WHOLE_WITHIN_S
        while clock.now() < give_up_at:
            with suppress(PartFailed):
                self.fleet.wait_whole(within_s=1.0)
                return
            self._play(replace(_NOTHING, before_s=1.0), seed=0)
        self.fleet.wait_whole()

    @property
    def _port(self) -> int:
        return int(self.fleet.http.rpartition(":")[2])

    def _start(self) -> None:
        edges = {name: {"log_level": "info", **config} for name, config in self.cast.edges.items()}
        pool = {"log_level": "info", **self.cast.pool, **self._pool}
        self._thread = LinkThread()
        self._stack.callback(self._thread.close)
        self.fleet = FleetStack(
            self._folder / "run", self.cast.models, edges=edges, pool=pool, gateway=self._gateway,
            via=self._via, broker_via=lambda url: f"mqtt://{self._via('broker', url.removeprefix('mqtt://'))}",
            modules=self._modules, at_once=self.cast.at_once, foreign=self.cast.model if self._foreign else "",
        )  # fmt: skip
        self._stack.enter_context(self.fleet)
        self._load = self._stack.enter_context(LoadProcess())

    def _via(self, name: str, own: str) -> str:
        link = self.links[name] = self._thread.link(own, name=name, **self._usual(name))
        return link.address

    def _usual(self, name: str) -> dict[str, Any]:
        return dict(WAN if name == "pool" else WIFI)

    def _at(self, instant: float, act: Act) -> float:
        """Do it then; when it was done."""
        time.sleep(max(0.0, instant - clock.now()))
        done_at = clock.now()
        act()
        return done_at

    def _flights(self, answers: list[Answer]) -> list[Flight]:
        """What the gateway decided for each of them, as far as it still knows: one that was restarted knows less."""
        admin = self.fleet.gateway.addresses["admin"].removeprefix("http://")
        decisions: list[dict[str, Any]] = []
        while (more := min(MOST_AT_ONCE, len(answers) - len(decisions))) > 0:  # before these are other rows' requests
            url = f"http://{admin}/debug/decisions?last={more}&skip={len(decisions)}"
            try:
                with urllib.request.urlopen(url, timeout=30) as found:
                    page = json.load(found)["decisions"]
            except OSError:
                return []
            decisions += page
            if len(page) < more:
                break
        sent = {str(one.number): one.at for one in answers}
        return [Flight.of(one, sent[one["id"]]) for one in reversed(decisions) if one["id"] in sent]

    def __repr__(self) -> str:
        return f"<Matrix {len(self.edges)} edges and a pool, {self.fleet!r}>"


class LoadProcess:
    """`tests.bench.open_loop` as a process, inside `with`: `send` a command, `line` is its answer."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.open_loop"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="load's words", daemon=True)
        self._reader.start()
        self.line(within_s=60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def send(self, **words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def line(self, *, within_s: float) -> dict[str, Any]:
        """Raises queue.Empty: it was silent for so long, or has ended."""
        return self._lines.get(timeout=within_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def __repr__(self) -> str:
        return f"<LoadProcess pid {self._process.pid}>"


class _Watcher:
    """Looks at the gateway's state all the time, on a thread, inside `with`."""

    def __init__(self, fleet: FleetStack, began_at: float) -> None:
        self.looks: list[Look] = []
        self._fleet = fleet
        self._began_at = began_at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="matrix watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            at = clock.now() - self._began_at
            try:
                targets = self._fleet.targets()
            except (OSError, ValueError):  # a gateway that is down, or ends in the middle of its answer
                continue
            states = {id: (one["state"], one["reason"]) for id, one in targets.items()}
            self.looks.append(Look(at, states, {id: one["rtt_ms"] / 1e3 for id, one in targets.items()}))
