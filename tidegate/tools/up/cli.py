"""`tidegate up` turns its options into a running system, and ends it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from tidegate.config import without_credentials
from tidegate.models.repository import RepositoryError
from tidegate.mqtt.broker_url import BrokerUrl
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.storage.os_error_line import one_line
from tidegate.tools.build.errors import BuildError
from tidegate.tools.up import messages
from tidegate.tools.up.children import ChildFailed
from tidegate.tools.up.many_edges import memory_note
from tidegate.tools.up.models import build_models, left_out, missing_models, wanted_models
from tidegate.tools.up.plan import Options, Plan, PlanError, plan
from tidegate.tools.up.ports import PortsTaken, check_free
from tidegate.tools.up.screen import Screen
from tidegate.tools.up.secure import prepare, secure
from tidegate.tools.up.system import DirectoryInUse, System, only_one
from tidegate.workers.vitals import free_bytes

BROKER_ANSWERS_WITHIN_S: Final = 3.0
STOPPING: Final = "stopping, when what is under way is answered … (Ctrl-C again: at once)"
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.option("--edges", default=2, show_default=True, metavar="N", help="How many edge agents to start.")
@click.option(
    "--gateways",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="How many gateways, which share quotas and targets; the ports of those beside the first come last.",
)
@click.option(
    "--sites",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Share the edges out among N sites, each with a broker and a gateway of its own, behind a region's gateway.",
)
@click.option(
    "--gateway-workers",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="How many processes of each gateway serve callers, on the same ports.",
)
@click.option(
    "--ports-from",
    default=8000,
    show_default=True,
    metavar="N",
    help="First port. HTTP N, gRPC N+1, metrics N+2, console N+3, broker N+4, pool N+5, edges from N+6 (gRPC, HTTP).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the gateway listens; the rest stays local.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".tidegate"),
    show_default=True,
    help="Models, logs, configurations and state; kept for the next start.",
)
@click.option(
    "--models",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=None,
    metavar="DIR",
    help="The model repository, if it is not DATA_DIR/models. One that holds models is served as it is, without demos.",
)
@click.option(
    "--demo",
    "demos",
    default=None,
    metavar="NAMES",
    help="The demo models to build, with commas between: minilm, digits, smollm2 (default: all whose packages are "
    "installed).",
)
@click.option(
    "--broker", default=None, metavar="URL", help="Use this MQTT broker (mqtt://host:1883), not an embedded one."
)
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="PART=SCENARIO",
    help="Put a simulated network in front of pool, edge-1, …, site-1, … or broker; by name or file; repeatable.",
)
@click.option(
    "--secure",
    "is_secure",
    is_flag=True,
    help="TLS everywhere, certificates for each part, Mosquitto with an ACL, and API keys for callers.",
)
@click.option(
    "--ship",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Public key (`tidegate keys signing create`) whose rollouts the edges follow; the gateway ships model files.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of all simulated links.")
@click.option("--no-restart", is_flag=True, help="Do not restart a child that died (default: after 2 s).")
@click.option("--json", "as_json", is_flag=True, help="One JSON line on stdout when all is ready; the rest on stderr.")
@click.option(
    "--requests/--no-requests", default=None, help="Show a line for each request (default: yes, but not with --json)."
)
def up(
    edges: int,
    gateways: int,
    sites: int,
    gateway_workers: int,
    ports_from: int,
    host: str,
    data_dir: Path,
    models: Path | None,
    demos: str | None,
    broker: str | None,
    links: tuple[str, ...],
    is_secure: bool,
    ship: Path | None,
    seed: int,
    no_restart: bool,
    as_json: bool,
    requests: bool | None,
) -> None:
    """Start everything on this machine: broker, pool, edges and gateway.

    The first start builds the demo models and takes a few minutes; later ones take seconds. Ctrl-C stops everything,
    once the requests under way are answered; a second one stops it at once.

    \b
    Examples:
      tidegate up
      tidegate up --edges 3 --ports-from 9000
      tidegate up --demo minilm,digits
      tidegate up --gateways 2 --edges 6 --demo digits
      tidegate up --sites 2 --edges 2 --demo digits --link site-1=lte_driving
      tidegate up --gateway-workers 2 --demo digits
      tidegate up --broker mqtt://localhost:1883
      tidegate up --secure
      tidegate keys signing create operator && tidegate up --ship operator.pub
      tidegate up --link pool=lte_driving --link edge-1=flap_fast
      tidegate up --json --data-dir /tmp/tidegate | head -1
    """
    try:
        wanted = wanted_models(demos)
    except BuildError as error:
        raise click.BadParameter(str(error), param_hint="--demo") from error
    options = Options(
        demos=wanted,
        data_dir=data_dir.resolve(),
        models=(models or data_dir / "models").resolve(),
        own_models=models is not None,
        edges=edges,
        gateways=gateways,
        sites=sites,
        gateway_workers=gateway_workers,
        ports_from=ports_from,
        host=host,
        broker=broker,
        links=links,
        seed=seed,
        ship=ship.resolve() if ship else None,
        requests=not as_json if requests is None else requests,
        cores=len(os.sched_getaffinity(0)),
    )
    screen = Screen(to_stderr=as_json)
    try:
        if is_secure:
            options = replace(options, secure=secure(options))
        code = asyncio.run(_up(options, screen, restart=not no_restart, as_json=as_json))
    except (PlanError, PortsTaken, DirectoryInUse, ChildFailed, RepositoryError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"--data-dir {data_dir}: {one_line(error)}") from error
    sys.exit(code)


async def _up(options: Options, screen: Screen, *, restart: bool, as_json: bool) -> int:
    """Run the system until a signal stops it; return the exit code."""
    planned = plan(options)
    check_free(planned.ports)
    await _check_broker(options.broker)
    with only_one(options.data_dir):
        if options.secure is not None:
            with screen.step("certificates and keys"):
                await asyncio.to_thread(prepare, options, options.secure)
        async with System(planned, screen, restart=restart) as system:
            with _stop_signals(system) as stopped:
                return await _serve(system, planned, options, screen, stopped, as_json)


async def _serve(
    system: System, planned: Plan, options: Options, screen: Screen, stopped: asyncio.Event, as_json: bool
) -> int:
    starting = asyncio.create_task(_start(system, planned, options, screen, as_json), name="start")
    if not await _unless(stopped, starting):
        screen.say(STOPPING)
        return 0
    ended = asyncio.create_task(system.all_ended(), name="all ended")
    if await _unless(stopped, ended):
        screen.say("every part has ended", "red")
        return 1
    screen.say(STOPPING)
    return 0


async def _start(system: System, planned: Plan, options: Options, screen: Screen, as_json: bool) -> None:
    if missing := missing_models(options.models, own=options.own_models, wanted=options.demos):
        for words in left_out(options.demos):
            screen.say(words, "dim")
        log_path = options.data_dir / "logs" / "build.log"
        with screen.step(f"building the demo models {', '.join(missing)} (once)") as step:
            await build_models(missing, options.models, log_path, step.update)
    if note := memory_note(options.edges, options.models, (free_bytes() or (None,))[0]):
        screen.say(note, "yellow")
    state = await system.start()
    screen.table(messages.process_rows(planned, system.pids, state))
    screen.say(f"\nlogs: {options.data_dir / 'logs'}")
    screen.say(messages.admission(planned))
    screen.say(messages.console(planned), "bold")
    if as_json:
        print(messages.ready_line(planned, system.pids), flush=True)
        return
    for title, command in messages.commands(planned, sys.executable, state):
        screen.say(f"\n# {title}", "dim")
        screen.say(command)
    screen.say("\nrequests, as they are served (Ctrl-C stops everything):")


async def _unless(stopped: asyncio.Event, work: asyncio.Task[None]) -> bool:
    """Wait for the work or for the stop signal; return whether the work was done. Raises what the work raises."""
    signalled = asyncio.create_task(stopped.wait(), name="stop signal")
    try:
        await asyncio.wait({signalled, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return True
        return False
    finally:
        await cancel_and_wait(signalled, work)


@contextlib.contextmanager
def _stop_signals(system: System) -> Iterator[asyncio.Event]:
    """An event that is set by Ctrl-C, SIGTERM or a closed terminal; a second signal kills instead of waiting."""
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            system.kill()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    yield stopped
    # The handlers stay: while the system stops, a second Ctrl-C still means "now". The loop's end removes them.


async def _check_broker(url: str | None) -> None:
    """Raises PlanError unless a server listens at the address of `--broker`."""
    if url is None:
        return
    try:
        broker = BrokerUrl.parse(url)
        async with asyncio.timeout(BROKER_ANSWERS_WITHIN_S):
            _, writer = await asyncio.open_connection(broker.host, broker.port)
    except ValueError as error:
        raise PlanError(f"--broker {without_credentials(url)}: {error}") from error
    except (OSError, TimeoutError) as error:
        raise PlanError(f"--broker {broker}: nobody answers there ({error or 'timed out'})") from error
    writer.close()
