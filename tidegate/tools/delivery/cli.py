"""`tidegate model push`, `rollout`, `status`, `pause`, `resume`, `abort`, `rollback` bring models to devices and back.

They talk to a gateway's admin port and need no runtime. A rollout belongs to the gateway once it has begun: the
watching command may end (Ctrl-C) and be run again, from another machine too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import floor
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate import clock
from tidegate.admin_client import Admin, AdminError, admin_option
from tidegate.models.alike import differences
from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError
from tidegate.outcome import ModelNotFound
from tidegate.rollout.golden_prompts import GOLDEN_TOKENS_MIN
from tidegate.rollout.plan import ModelPlan, Net, Probe, Soak
from tidegate.rollout.root_chain import read_chain
from tidegate.runtime.duration import Duration
from tidegate.runtime.finite_range import FiniteRange
from tidegate.runtime.plain_text import plain
from tidegate.security.attestation.keys import read_key
from tidegate.storage import audit_log
from tidegate.tools.delivery.files import LocalArtefact
from tidegate.tools.delivery.follow import console, follow, newest, say_nothing_to_do, shipping, show
from tidegate.tools.delivery.order import ListedDevice, OrderError, OrderSigning, OrderTerms, make_order
from tidegate.tools.delivery.order_file import out_option, write_order
from tidegate.tools.delivery.plan import golden_of, plan_of, recorded_golden, version_files
from tidegate.tools.delivery.rows import device_rows
from tidegate.tools.delivery.screen import devices_view, rollouts_table
from tidegate.tools.delivery.shares import WaveSharesParam
from tidegate.tools.delivery.upload import push as push_files
from tidegate.tools.delivery.versions import versions_table, words_of_default

_repository = click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".tidegate/models"),
    show_default=True,
    help="Folder of the model repository.",
)
_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
_json = click.option("--json", "as_json", is_flag=True, help="The gateway's own JSON.")


@click.command()
@click.argument("name")
@click.option("--version", default="", help="Which version; the highest by default.")
@_repository
@admin_option
@_json
def push(name: str, version: str, repository: Path, admin: str, as_json: bool) -> None:
    """Bring a model version's files for devices into a gateway's store.

    Digests are checked first; what the gateway has is not sent again, and what broke off goes on where it was.

    \b
    Example:
      tidegate model push minilm --admin http://10.0.0.2:8003
    """
    manifest, files = _version(repository, name, version)
    gateway = Admin(admin, within_s=60.0)
    shipping(gateway)
    sent = _push(gateway, files, quiet=as_json)
    size = sum(one.artefact.size_bytes for one in files)
    if as_json:
        click.echo(json.dumps({"model": name, "version": manifest.version, "bytes": size, "sent_bytes": sent}))
    else:
        click.echo(f"{name} {manifest.version}: {len(files)} files, {size} bytes, of which {sent} were sent")


@click.command()
@click.argument("name")
@click.option("--version", default="", help="Which version; the highest by default.")
@click.option(
    "--device", "devices", multiple=True, metavar="GLOB",
    help="Only these devices, in this order; may be repeated. Default: all that are alive, by name.",
)  # fmt: skip
@click.option("--group", "groups", multiple=True, help="Only devices of these groups, one group after another.")
@click.option(
    "--waves",
    type=WaveSharesParam(),
    default="5%,25%,100%",
    show_default=True,
    help="Share of devices after each wave.",
)
@click.option(
    "--success", type=FiniteRange(0, 1, min_open=True), default=0.95, show_default=True,
    help="Share of a wave's devices that must have committed before the next wave.",
)  # fmt: skip
@click.option(
    "--max-errors",
    type=click.IntRange(0),
    help="One error more, and all devices go back. Default: what --success leaves.",
)
@click.option("--deadline", type=Duration(), default="24h", show_default=True, help="Time for each device.")
@click.option(
    "--expires", type=Duration(), default="90d", show_default=True,
    help="Time after which no device accepts the documents any more; what runs by then goes on.",
)  # fmt: skip
@click.option("--bake", type=Duration(), default="0s", show_default=True, help="Pause between waves.")
@click.option(
    "--soak", type=Duration(), default="60s", show_default=True, help="Trial with real requests on each device."
)
@click.option("--min-requests", type=click.IntRange(0), default=0, show_default=True, help="Least requests of a soak.")
@click.option("--err-max", type=FiniteRange(0, 1), default=0.05, show_default=True, help="Largest share of failures.")
@click.option(
    "--slower-max",
    type=FiniteRange(0, min_open=True),
    help="Largest ratio of its p95 to the old one's, as in 1.3.",
)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Cases with known answers, as .npz or .msgpack. A model that generates has its own, by `model golden`.",
)
@click.option("--atol", type=FiniteRange(0), help="Largest difference of an element to the golden answers.")
@click.option("--cosine-min", type=FiniteRange(-1, 1), help="Least cosine to the golden answers.")
@click.option(
    "--top1-min", type=FiniteRange(0, 1), help="Least share of rows with the golden class, or of golden tokens."
)
@click.option(
    "--p95-max-ms", "p95_max_s", type=Duration(bare="ms", above_zero=True), help="Slowest p95 of the probe's own calls."
)
@click.option("--window", default="", metavar="HH:MM-HH:MM", help="Fetch and switch only then, UTC.")
@click.option("--metered", type=click.Choice(["defer", "allow"]), default="defer", show_default=True)
@click.option(
    "--max-bytes", type=click.IntRange(0), default=0, help="Most bytes to fetch, with retries. Default: twice its size."
)
@click.option(
    "--ram-mb",
    type=click.IntRange(0),
    default=0,
    help="Memory that it takes when loaded; a handover waits for 1.3 times.",
)
@click.option("--activate", type=click.Choice(["handover", "stop_start"]), default="handover", show_default=True)
@click.option(
    "--key", "keys", multiple=True, required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Key that signs (`tidegate keys signing create`); may be repeated.",
)  # fmt: skip
@click.option(
    "--roots", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Chain of roots that leads devices to these keys (`tidegate keys signing rotate`).",
)  # fmt: skip
@click.option("--rotate", is_flag=True, help="Devices trust only the second and further --key from now on.")
@click.option(
    "--replace", "replace_unsigned", is_flag=True, help="Leave out other models that documents of foreign keys name."
)
@click.option("--detach", is_flag=True, help="Start the rollout and do not watch it.")
@out_option
@_repository
@admin_option
@_json
def rollout(name: str, version: str, repository: Path, admin: str, as_json: bool, **given: Any) -> None:
    """Bring a model version to devices in waves; what fails comes back by itself.

    Files are pushed first, those of the version that the devices run included. Then each device gets a document signed
    by your key, which never leaves this machine.

    \b
    Examples:
      tidegate model rollout minilm --key operator.key
      tidegate model rollout minilm --key operator.key --waves 10%,50%,100% --golden cases.npz --cosine-min 0.98
      tidegate model rollout minilm --key operator.key --device 'kiosk-*' --window 02:00-05:00 --detach
    """
    gateway = Admin(admin, within_s=60.0)
    manifest, files = _version(repository, name, version)
    golden = _golden(Repository(repository), manifest, given)
    plan = _plan(files, golden, manifest.version, given)
    report = shipping(gateway)
    chosen, there = _chosen(report["devices"], given["devices"], given["groups"], name, plan)
    if not chosen:
        nothing = {"id": None, "model": name, "version": manifest.version}
        say_nothing_to_do(
            f"all {there} devices have {name} {manifest.version} already", nothing, given, as_json=as_json
        )
        return
    olds: dict[str, tuple[LocalArtefact, ...]] = {}
    apart: dict[str, tuple[str, ...]] = {}

    def older(wanted: str) -> ModelPlan:
        if wanted not in olds:
            try:
                before, olds[wanted] = version_files(Repository(repository), name, wanted)
                apart[wanted] = differences(before, manifest)
            except (RepositoryError, ModelNotFound) as error:
                raise OrderError(
                    f"devices run {name} {wanted}, and to be able to go back its files are needed: {error}"
                ) from error
        return plan_of(olds[wanted], wanted, keep=plan.keep)

    roots = read_chain(given["roots"]) if given["roots"] else ()
    signing = OrderSigning([signing_key(path) for path in given["keys"]], given["rotate"], roots)
    issued_s = int(clock.utc_s())
    expires_s = issued_s + max(1, round(given["expires"]))
    terms = OrderTerms(name, plan, tuple(report["urls"]), issued_s, given["replace_unsigned"], expires_s)
    if not terms.urls:
        raise click.ClickException("the gateway serves no artefacts: set `artifacts.port`, or `artifacts.advertise`")
    spec = _spec(name, manifest.version, len(chosen), given)
    try:
        order = make_order(spec, chosen, terms, older, signing)
    except OrderError as error:
        raise click.ClickException(str(error)) from error
    _note_apart(name, manifest.version, apart)
    _push(gateway, (*files, *golden, *(one for each in olds.values() for one in each)), quiet=as_json)
    if given["out"]:
        write_order(given["out"], order, as_json=as_json)
        return
    begun = gateway.post("/v1/rollouts", order)
    audit_log.note(
        audit_log.of_repository(repository), "rollout-started", id=begun["id"], model=name, version=manifest.version,
        devices=len(chosen), gateway=gateway.address,
    )  # fmt: skip
    if there and not as_json:
        click.echo(f"{there} devices have it already")
    follow(gateway, begun, as_json=as_json, detach=given["detach"])
    if not given["detach"]:
        _say_default(gateway, name)


def _note_apart(name: str, version: str, apart: Mapping[str, Sequence[str]]) -> None:
    """Say which of the versions on devices the new one is not taken for. Args: apart: by version, what differs."""
    for wanted, keys in apart.items():
        if keys:
            click.echo(
                f"note: requests that name no version stay with {name} {wanted} while any target serves it: the "
                f"manifest of {version} differs in {', '.join(keys)}, so it is not taken for it",
                err=True,
            )


@click.command()
@click.argument("name", default="")
@click.option("--watch", is_flag=True, help="Stay, while the newest rollout is under way.")
@click.option("--all", "all_devices", is_flag=True, help="Every device of a large fleet.")
@admin_option
@_json
def status(name: str, watch: bool, all_devices: bool, admin: str, as_json: bool) -> None:
    """Show versions with their figures, rollouts, and what each device runs. NAME: a model, or a rollout's id.

    \b
    Examples:
      tidegate model status
      tidegate model status minilm --watch
      tidegate model status minilm --json | jq '.devices[] | select(.state == "rolled_back") | .reason'
    """
    gateway = Admin(admin)
    every = _shipped(gateway, "/v1/rollouts", "rollouts")
    models_only = [one for one in every if name or one.get("kind", "model") == "model"]
    wanted = [one for one in models_only if name in ("", one["model"], one["id"])]
    if watch and wanted:
        follow(gateway, gateway.read(f"/v1/rollouts/{wanted[-1]['id']}"), as_json=as_json)
        return
    whole = [gateway.read(f"/v1/rollouts/{one['id']}") for one in wanted[-20:]]
    of_models = [one for one in wanted if one.get("kind", "model") == "model"]
    models = {one["model"] for one in of_models} | ({name} if name and len(of_models) == len(wanted) else set())
    rows = device_rows(_shipped(gateway, "/v1/devices", "devices"), whole, models)
    every_model = gateway.read("/v1/versions")["models"]
    versions = [one for one in every_model if not name or one["name"] in models]
    if name and not (wanted or rows or versions):
        raise click.ClickException(
            f"no model and no rollout is called {name!r}; `tidegate model status` without a name shows all"
        )
    if as_json:
        click.echo(json.dumps({"rollouts": whole, "devices": rows, "versions": versions}))
        return
    screen = console()
    screen.print(versions_table(versions))
    if wanted:
        screen.print(rollouts_table(wanted))
    if rows:
        screen.print(devices_view(rows, whole=all_devices))
    for note in whole[-1]["notes"][-8:] if whole else ():
        screen.print(f"[dim]{note['at_s']:9.1f} s[/]  {plain(note['words'])}", highlight=False, soft_wrap=True)


def _shipped(gateway: Admin, path: str, key: str) -> list[dict[str, Any]]:
    """Empty of a gateway that ships nothing (no `artifacts`): it has versions to show all the same."""
    try:
        found: list[dict[str, Any]] = gateway.read(path)[key]
    except AdminError as error:
        if error.status != 404:
            raise
        return []
    return found


def _steering(verb: str, words: str, note: str, *examples: str) -> click.Command:
    @click.command(verb, help=words, epilog="\n".join(["\b\nExamples:", *(f"  {one}" for one in examples)]))
    @click.argument("name")
    @click.option("--why", default="", help="Goes into the rollout's notes.")
    @click.option("--detach", is_flag=True, help="Do not wait for what comes of it.")
    @admin_option
    @_json
    def command(name: str, why: str, detach: bool, admin: str, as_json: bool, leave_none: bool = False) -> None:
        gateway = Admin(admin)
        id = newest(gateway, name)
        path = f"/v1/rollouts/{id}/{'abort' if verb == 'rollback' else verb}"
        steering = {"why": why, "leave_none": True} if leave_none else {"why": why}
        one = gateway.post(path, json.dumps(steering).encode())
        click.echo(note.format(id=id), err=True)
        if verb == "pause" or detach:
            show(one, as_json)
        else:
            follow(gateway, one, as_json=as_json, good="succeeded" if verb == "resume" else "returned")
            if one.get("kind", "model") == "model":
                _say_default(gateway, one["model"])

    if verb in ("abort", "rollback"):
        option = click.option("--leave-none", is_flag=True, help="Also where no target would serve the model then.")
        return option(command)
    return command


def _say_default(gateway: Admin, model: str) -> None:
    """Say what requests get by now that name no version: a rollout changes it."""
    for one in gateway.read("/v1/versions")["models"]:
        if one["name"] == model:
            click.echo(f"requests that name no version get {words_of_default(one)}", err=True)


_NAME = "NAME: a model, or a group that settings were changed of (the newest rollout), or a rollout's id."
pause = _steering(
    "pause",
    f"Begin no further wave. {_NAME}",
    "rollout {id} begins no further wave",
    "tidegate model pause minilm",
    "tidegate model pause minilm --why 'until the fair is over'",
)
resume = _steering(
    "resume",
    f"Go on with a rollout that was paused or has stalled. {_NAME}",
    "rollout {id} goes on",
    "tidegate model resume minilm",
    "tidegate model resume minilm --detach",
)
abort = _steering(
    "abort",
    f"Call back every device that a rollout has reached. {_NAME}",
    "rollout {id} is called back",
    "tidegate model abort minilm",
    "tidegate model abort minilm --why 'p95 doubled on the kiosks' --admin http://10.0.0.2:8003",
)
rollback = _steering(
    "rollback",
    f"Bring devices back to what they ran before a rollout, also after it succeeded. Needs no key. {_NAME}",
    "the devices of rollout {id} go back to what they ran before",
    "tidegate model rollback minilm",
    "tidegate model rollback minilm --detach --admin http://10.0.0.2:8003",
)
COMMANDS: Final = (push, rollout, status, pause, resume, abort, rollback)


def _version(repository: Path, name: str, version: str) -> Any:
    try:
        return version_files(Repository(repository), name, version)
    except (RepositoryError, ModelNotFound) as error:
        raise click.ClickException(str(error)) from error


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs documents. Raises ClickException: there is none."""
    maker = "tidegate keys signing create"
    if not path.exists():  # that command takes a name, and writes NAME.key
        raise click.ClickException(f"there is no signing key {path}; `{maker} {path.stem}` makes one")
    return read_key(path, "signing key", maker)


def _golden(repository: Repository, manifest: Manifest, given: dict[str, Any]) -> tuple[LocalArtefact, ...]:
    """The golden cases of a plan, if there are any; `top1_min` is set where a model that generates has them."""
    try:
        if manifest.generative is None:
            return (golden_of(given["golden"], manifest),) if given["golden"] else ()
        if wrong := next((key for key in ("atol", "cosine_min") if given[key] is not None), ""):
            raise click.UsageError(
                f"--{wrong.replace('_', '-')} is of numbers, and {manifest.name} answers in tokens: give --top1-min"
            )
        found = golden_of(given["golden"], manifest) if given["golden"] else recorded_golden(repository, manifest)
    except RepositoryError as error:
        raise click.ClickException(str(error)) from error
    if found is None:
        return ()
    if given["top1_min"] is None:
        given["top1_min"] = GOLDEN_TOKENS_MIN
    if not given["golden"]:
        least = f"at least {given['top1_min']:g} of the golden tokens that were recorded with it"
        click.echo(f"note: each device compares {manifest.name} with {least}, before it serves", err=True)
    return (found,)


def _plan(
    files: tuple[LocalArtefact, ...], golden: tuple[LocalArtefact, ...], version: str, given: dict[str, Any]
) -> ModelPlan:
    probe = Probe(
        golden=golden[0].artefact if golden else None,
        atol=given["atol"],
        cosine_min=given["cosine_min"],
        top1_min=given["top1_min"],
        p95_max_s=given["p95_max_s"],
        p95_ratio_max=given["slower_max"],
    )
    asked = [key for key in ("atol", "cosine_min", "top1_min") if given[key] is not None]
    if asked and not golden:
        raise click.UsageError(f"--{asked[0].replace('_', '-')} is measured on cases: give --golden")
    if golden and not asked:
        raise click.UsageError("--golden needs a limit for the answers' distance: --atol, --cosine-min or --top1-min")
    soak = Soak(given["soak"], given["min_requests"], given["err_max"], given["slower_max"])
    net = Net(metered=given["metered"], max_bytes=given["max_bytes"], deadline_s=given["deadline"])
    rules = {
        "activate": given["activate"],
        "probe": probe,
        "soak": soak,
        "net": net,
        "window": given["window"],
        "ram_bytes": given["ram_mb"] * 2**20,
    }
    if given["window"] and not _WINDOW.fullmatch(given["window"]):
        raise click.UsageError(f"--window {given['window']}: HH:MM-HH:MM is meant, in UTC, as in 02:00-05:00")
    plan = plan_of(files, version, **rules)
    try:  # through its own decoder once: what a device would refuse is refused here
        return msgspec.json.decode(msgspec.json.encode(plan), type=ModelPlan)
    except msgspec.ValidationError as error:
        raise click.UsageError(f"no device would take this plan: {error}") from error


def _spec(name: str, version: str, devices: int, given: dict[str, Any]) -> dict[str, Any]:
    slug = re.sub(r"[^a-z0-9]+", "-", f"{name}-{version}".lower()).strip("-")[:40] or "model"
    errors = given["max_errors"]
    return {
        "id": f"{slug}-{int(clock.utc_s() * 1e3):x}",
        "model": name,
        "version": version,
        "waves": given["waves"],
        "success_ratio": given["success"],
        "max_errors": floor((1 - given["success"]) * devices + 1e-9) if errors is None else errors,
        "deadline_s": given["deadline"],
        "bake_s": given["bake"],
    }


def _chosen(
    report: list[Any], globs: tuple[str, ...], groups: tuple[str, ...], model: str, plan: ModelPlan
) -> tuple[list[ListedDevice], int]:
    """The devices to ask, in order, and how many have it already. Raises ClickException: there is no such device."""
    every = msgspec.convert(report, list[ListedDevice], strict=False)
    takers = [one for one in every if one.takes_documents]
    named = {one.name: one for glob in globs for one in every if fnmatchcase(one.name, glob)}
    grouped = {one.name: one for group in groups for one in takers if one.reported and group in one.reported.groups}
    for glob in globs:
        if not any(fnmatchcase(one.name, glob) for one in every):
            raise click.ClickException(f"no device is called {glob!r}; `tidegate status` lists them")
    if deaf := sorted(one.name for one in named.values() if not one.takes_documents):
        raise click.ClickException(f"{deaf[0]} takes no rollouts: set `rollout.keys` in its configuration")
    alive = {one.name: one for one in takers if one.freshness != "dead"}
    found = {**grouped, **named} if globs or groups else alive
    chosen = [one for one in found.values() if not one.has_committed(model, plan)]
    if not found:
        if takers and groups:
            groups_of_all = {group for one in takers if one.reported for group in one.reported.groups}
            known = ", ".join(sorted(groups_of_all)) or "none"
            raise click.ClickException(f"no device is in the group {', '.join(map(repr, groups))}; there are: {known}")
        raise click.ClickException("no device that takes rollouts (key `rollout` of its configuration) was found")
    return chosen, len(found) - len(chosen)


def _push(gateway: Admin, files: tuple[LocalArtefact, ...], *, quiet: bool) -> int:
    unique = tuple({one.artefact.sha256: one for one in files}.values())
    if quiet or not sys.stdout.isatty():
        return push_files(gateway, unique)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, transient=True) as bars:
        task = bars.add_task("pushing", total=sum(one.artefact.size_bytes for one in unique))
        return push_files(gateway, unique, lambda path, size: bars.update(task, advance=size, description=path))
