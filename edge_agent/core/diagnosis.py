"""The diagnosis judges a device's readings for `tidegate edge doctor`, and advises what to do about each.

Every check is a function from readings to a `DoctorFinding`: fine, a warning (the device serves, but something will be
worse), or a failure (it does not serve, or not for long). `edge_agent/commands/doctor.py` reads; so every odd machine
is a row in a test.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tidegate.fleet.offers import SERVING

Verdict = Literal["ok", "warning", "failure"]

OLDEST_SANE_UTC_S: Final = 1_735_689_600.0  # 2025: a clock before this was never set
_SKEWED_S: Final = 60.0
_SLOW_FSYNC_S: Final = 0.25
_LOW_DISK_BYTES, _NO_DISK_BYTES = 200 * 10**6, 20 * 10**6
_AGENT_BYTES: Final = 120 * 10**6  # the agent itself, resident
_WORKER_BYTES: Final = 60 * 10**6  # a worker before it has loaded anything
_PER_ARTEFACT: Final = 2.0  # times an artefact's size that its session takes, with what a computation needs
_X86_INT8: Final = (("avx512_vnni", "AVX-512 VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx512_vnni_int8", "AVX-VNNI-INT8"))
_ARM_INT8: Final = (("i8mm", "i8mm"), ("asimddp", "dot product"))
DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
_SLOW: Final = 2.0  # times what was measured at the warm-up
_LOST_LATELY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One check's outcome. `advice` says what to do, and is empty where nothing is to be done."""

    check: str
    verdict: Verdict
    words: str
    advice: str = ""


def clock(utc_s: float, synchronized: bool | None, skew_s: float | None) -> DoctorFinding:
    """Args: synchronized: as the kernel reports; skew_s: of this clock to a gateway's, None: no gateway was heard."""
    if utc_s < OLDEST_SANE_UTC_S:
        return DoctorFinding(
            "clock",
            "failure",
            "the clock was never set: certificates look as if they were not valid yet",
            "set it (`timedatectl set-ntp true`, or a battery for the RTC); ordering needs no clock, TLS does",
        )
    if skew_s is not None and abs(skew_s) > _SKEWED_S:
        return DoctorFinding(
            "clock",
            "warning",
            f"the clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} a gateway's",
            "synchronize both: `timedatectl timesync-status`, `chronyc tracking`",
        )
    if synchronized is False:
        return DoctorFinding(
            "clock", "warning", "the kernel says that the clock is not synchronized", "`timedatectl set-ntp true`"
        )
    how = "synchronized" if synchronized else "sane; whether it is synchronized cannot be told here"
    return DoctorFinding("clock", "ok", how)


def accelerator(
    configured: str, *, found: Sequence[str], problem: str, untried: Collection[str], told: Sequence[str]
) -> DoctorFinding:
    """Args:
    configured: the key `device`.
    found: what there is beside the processor, by the installed ONNX Runtime.
    problem: why it does not say so, or does not have what is configured; "" where nothing is wrong.
    untried: those that this project has never seen compute.
    told: of the running agent, what became of each device that it tried, a line each.
    """
    if problem:
        return DoctorFinding("device", "failure", problem, "install what is named, or set `device: cpu`")
    marked = [f"{name} (never tried by this project)" if name in untried else name for name in found]
    if configured == "cpu":
        if not found:
            return DoctorFinding("device", "ok", "models compute on the processor")
        words = f"models compute on the processor; `device: auto` would try {', '.join(marked)} too"
        return DoctorFinding("device", "ok", words)
    if not found:
        return DoctorFinding("device", "ok", "this ONNX Runtime has the processor alone")
    if any(": left out" in line for line in told) and not any(": taken" in line for line in told):
        return DoctorFinding("device", "warning", "; ".join(told), "the processor does it; see docs/accelerators.md")
    return DoctorFinding("device", "ok", "; ".join(told) or f"to be tried when models start: {', '.join(marked)}")


def disk(folder: str, *, error: str, full: bool = False, free_bytes: int, fsync_s: float) -> DoctorFinding:
    """Args: error: why the folder cannot be written, "" if it can; full: whether the disk is full."""
    if error:
        advice = (
            "make room there: until then the agent serves with its session's number in memory, and takes no rollouts"
            if full
            else "give the agent's user the folder of `state_dir`"
        )
        return DoctorFinding("disk", "failure", f"{folder} cannot be written: {error}", advice)
    free = f"{free_bytes / 1e6:.0f} MB free in {folder}"
    if free_bytes < _NO_DISK_BYTES:
        return DoctorFinding(
            "disk", "failure", f"only {free}", "make room: what is rolled out, kept or measured needs it"
        )
    if free_bytes < _LOW_DISK_BYTES:
        return DoctorFinding(
            "disk", "warning", f"only {free}", "make room, or lower `store`'s bytes: new models need it"
        )
    speed = f"a write is safe after {fsync_s * 1e3:.1f} ms"
    if fsync_s > _SLOW_FSYNC_S:
        return DoctorFinding(
            "disk", "warning", f"{free}; {speed}", "a worn or cheap card: move `state_dir` to better storage"
        )
    return DoctorFinding("disk", "ok", f"{free}; {speed}")


def memory(available_bytes: int, artefacts_bytes: Iterable[int]) -> DoctorFinding:
    """Args: artefacts_bytes: of all variants that will be loaded, by model."""
    sizes = list(artefacts_bytes)
    needed = _AGENT_BYTES + sum(int(_WORKER_BYTES + _PER_ARTEFACT * size) for size in sizes)
    words = f"{available_bytes / 1e6:.0f} MB available, about {needed / 1e6:.0f} MB needed for {len(sizes)} models"
    if available_bytes < needed:
        return DoctorFinding(
            "memory", "failure", words, "serve fewer (`models`), or smaller variants; close other programs"
        )
    if available_bytes < 1.5 * needed:
        return DoctorFinding("memory", "warning", words, "little is left for bursts: serve fewer `models`")
    return DoctorFinding("memory", "ok", words)


def processor(machine: str, flags: Collection[str]) -> DoctorFinding:
    """Args: flags: of /proc/cpuinfo: `flags` on x86, `Features` on ARM."""
    if not flags:
        return DoctorFinding(
            "processor", "warning", f"what this {machine} can do is not told", "compare int8 and fp32 here"
        )
    known = _ARM_INT8 if machine.startswith(("aarch64", "arm")) else _X86_INT8
    found = [words for flag, words in known if flag in flags]
    if found:
        return DoctorFinding("processor", "ok", f"{machine} with {', '.join(found)}: int8 is quick here")
    if "avx2" in flags or "asimd" in flags or "neon" in flags:
        return DoctorFinding(
            "processor",
            "warning",
            f"{machine} without instructions for int8 products",
            "int8 may be no quicker than fp32 here: the warm-up measures both, where a model has both for edges",
        )
    return DoctorFinding(
        "processor",
        "warning",
        f"{machine} without AVX2 or NEON: models run, slowly",
        "use small models, or another device",
    )


def worker(
    model: str, *, state: str, overdue_s: float = 0.0, slowness: float = 1.0, lost: int = 0, lost_ago_s: float = 0.0,
    reason: str = "",
) -> DoctorFinding:  # fmt: skip
    """Judge a model's worker process by what the running agent says of it.

    Args:
        overdue_s: of a call for which the worker has been silent suspiciously long; 0: there is none.
        slowness: how many times longer than at its warm-up it computes now.
        lost: workers that hung or died since the agent began; the last one `lost_ago_s` ago, for `reason`.
    """
    past = f"{lost} lost since the agent's start, the last {_ago(lost_ago_s)}: {reason}" if lost else ""
    log = f"the agent's log says when: `worker lost … model={model}`"
    if state == "bad":
        words = f"{model} does not come up again; {past}"
        return DoctorFinding("worker", "failure", words, f"{log}; give the device another version of the model")
    if state not in SERVING:
        return DoctorFinding("worker", "warning", f"{model} is {state}; {past or 'none was lost'}", log)
    if overdue_s > 0.0:
        words = f"{model} hangs: silent for {overdue_s:.1f} s in one call{f'; {past}' if past else ''}"
        return DoctorFinding(
            "worker", "warning", words, "it is ended and replaced by itself; if it comes again, report the model"
        )
    if slowness >= _SLOW:
        words = f"{model} computes {slowness:.1f} times longer than at its warm-up{f'; {past}' if past else ''}"
        advice = "look for another program on the processor, for heat, or a governor; then restart the agent"
        return DoctorFinding("worker", "warning", words, advice)
    if lost and lost_ago_s < _LOST_LATELY_S:
        advice = f"{log}; a model that hangs or dies again and again needs another version, or more memory"
        return DoctorFinding("worker", "warning", f"{model} is {state} again; {past}", advice)
    return DoctorFinding("worker", "ok", f"{model} is {state}{f'; {past}' if past else ''}")


def absent(reasons: Mapping[str, str]) -> list[DoctorFinding]:
    """One for each model that the running agent is to serve and cannot, by its reasons."""
    advice = (
        "mend what it says: the running agent tries again by itself, and soon where files have changed; "
        "where models come by request (model_control: explicit) load it again: tidegate model load"
    )
    return [
        DoctorFinding("worker", "failure", f"{model} is not served: {reason}", advice)
        for model, reason in sorted(reasons.items())
    ]


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120.0 else f"{seconds / 60.0:.0f} min ago"


def certificate(own: str, ends_in_s: float | None, *, begins_in_s: float = 0.0, error: str = "") -> DoctorFinding:
    """Args: own: the name that it should have; ends_in_s: None without `tls`; error: why it cannot be used."""
    if error:
        return DoctorFinding("certificate", "failure", error, f"`tidegate pki issue {own}`, and copy the files here")
    if ends_in_s is None:
        return DoctorFinding("certificate", "ok", "no `tls`: nothing is encrypted", "")
    if ends_in_s <= 0:
        return DoctorFinding("certificate", "failure", "the certificate has ended", f"`tidegate pki renew {own}`")
    if begins_in_s > 0:
        return DoctorFinding(
            "certificate",
            "failure",
            f"the certificate is not valid for another {begins_in_s / HOUR_S:.1f} h",
            f"one of two clocks is wrong: this device's, or that of the machine with the CA when it issued {own}'s",
        )
    words = f"valid for {ends_in_s / DAY_S:.0f} more days"
    if ends_in_s < 7 * DAY_S:
        return DoctorFinding("certificate", "warning", words, f"`tidegate pki renew {own}`; no restart is needed")
    return DoctorFinding("certificate", "ok", words)


def port(key: str, address: str, *, free: bool, ours: bool) -> DoctorFinding:
    """Args: ours: whether the running agent of this name reports that it listens there."""
    if free:
        return DoctorFinding(key, "ok", f"{address} is free")
    if ours:
        return DoctorFinding(key, "ok", f"{address} is this device's running agent's")
    return DoctorFinding(
        key, "failure", f"{address} is taken by another program", f"free it, or set `{key}` to another"
    )


def sandbox(mode: str, missing: Sequence[str]) -> DoctorFinding:
    """Args: mode: the key `sandbox`; missing: the parts that this machine cannot do."""
    if mode == "off":
        return DoctorFinding("sandbox", "warning", "workers have the network and the disk", "key `sandbox`: auto")
    if missing:
        worst: Verdict = "failure" if mode == "require" else "warning"
        return DoctorFinding("sandbox", worst, f"missing here: {'; '.join(missing)}", "a newer kernel, with Landlock")
    return DoctorFinding("sandbox", "ok", "workers have neither the network nor the disk")


def broker(url: str, error: str, acl: Iterable[tuple[str, str]]) -> DoctorFinding:
    """Args: error: why there is no session; acl: (severity, words) of each finding of the ACL check."""
    if error:
        return DoctorFinding(
            "broker", "failure", f"{url}: {error}", "check `mqtt`, the network, and this device's user there"
        )
    worst: Verdict = "ok"
    said = []
    for severity, words in acl:
        said.append(words)
        worst = "failure" if severity == "error" else "warning" if severity == "warning" and worst == "ok" else worst
    advice = "" if worst == "ok" else "`tidegate broker config --for mosquitto` writes an ACL that keeps devices apart"
    return DoctorFinding("broker", worst, "; ".join([f"{url} answers", *said]), advice)


def name_taken(reason: str) -> list[DoctorFinding]:
    """Nothing, or that a gateway has given this device's name to another agent.

    Args:
        reason: what the running agent was told; "" where it has its name.
    """
    advice = "end one of the two agents, or give this one another `name` (and certificate)"
    return [DoctorFinding("name", "failure", reason, advice)] if reason else []


def event_loop(reason: str) -> list[DoctorFinding]:
    """Nothing, or that the agent's event loop is held up so that deadlines are missed.

    Args:
        reason: what the running agent says of its loop; "" while it is in time.
    """
    advice = "give the agent a core: stop what else runs here, or lower `threads`; the log says when it began"
    return [DoctorFinding("event loop", "warning", reason, advice)] if reason else []


def store(*, unavailable: str, waiting: int, dead: int, gateway: str, has_gateway: bool) -> list[DoctorFinding]:
    """Judge what the running agent keeps for gateways; nothing where there is nothing to say.

    Args:
        unavailable: why nothing can be kept; waiting: things to be sent; dead: that no gateway takes.
        gateway: who takes them in now, "" while nobody does; has_gateway: whether a gateway is there at all.
    """
    found = []
    if unavailable:
        advice = "tickets are refused until it is mended; the agent tries again by itself"
        found.append(DoctorFinding("store", "warning", f"nothing can be kept: {unavailable}", advice))
    if dead:
        advice = "`tidegate edge store list` says why; `retry` sends them again, `drop` deletes them"
        found.append(DoctorFinding("store", "warning", f"dead letters, which no gateway takes: {dead}", advice))
    if waiting and has_gateway and not gateway:
        advice = "give a gateway the section `ingest` (docs/offline.md): until then tickets get no answer"
        words = f"things to be sent: {waiting}, and no gateway that is there takes them in"
        found.append(DoctorFinding("store", "warning", words, advice))
    return found


def settings(
    *, changed: Mapping[str, object], trying: bool, at_start: Sequence[str], taken_back: Sequence[str], file: str
) -> list[DoctorFinding]:
    """Judge the settings that are changed from outside; nothing where none are.

    Args:
        changed: those in force or on trial, over the agent's own configuration.
        at_start: keys that wait for the agent's next start.
        taken_back: why settings were, the newest last.
        file: why the device's own file is refused; "" where it is not, or there is none.
    """
    found = []
    if file:
        advice = "correct the file: the agent reads it again within a second; until then what it said before counts"
        found.append(DoctorFinding("device_file", "warning", file, advice))
    said = ", ".join(f"{key}={value}" for key, value in sorted(changed.items()))
    if taken_back:
        words = f"settings were taken back: {taken_back[-1]}{f'; in force: {said}' if said else ''}"
        advice = "other settings, or the same by a new document (`tidegate fleet configure`) once the cause is gone"
        found.append(DoctorFinding("settings", "warning", words, advice))
    elif at_start:
        words = f"{said}; {', '.join(at_start)} for the agent's next start"
        found.append(DoctorFinding("settings", "warning", words, "start the agent again when it suits"))
    elif said:
        found.append(DoctorFinding("settings", "ok", f"{said}{', on trial' if trying else ''}"))
    return found


def fleets(own: str, gateways_here: Collection[str], others: Mapping[str, str]) -> list[DoctorFinding]:
    """Nothing, or that this device's fleet has no gateway at its broker while another fleet has.

    Args:
        gateways_here: gateways of this device's fleet at the broker.
        others: other fleets at the broker, each with one of its gateways.
    """
    if gateways_here or not others:
        return []
    seen = ", ".join(f"gateway/{gateway} of the fleet {fleet}" for fleet, gateway in sorted(others.items()))
    words = f"this device's fleet is {own}, which has no gateway at this broker; there is {seen}"
    fleet = min(others)
    advice = f"set `fleet: {fleet}` here, or `fleet: {own}` at the gateway and `tidegate broker config --fleet {own}`"
    return [DoctorFinding("fleet", "failure", words, advice)]


def gateways(
    reached: Mapping[str, str],
    *,
    dial_out: str,
    advertised: str,
    callers: Collection[str],
    fleet: bool = True,
    unheard: bool = False,
) -> DoctorFinding:
    """Judge whether gateways reach this device, or it reaches them.

    Args:
        reached: address of a gateway's link port → why it cannot be dialled, "" where it can.
        advertised: the address that gateways are told, "" for none.
        callers: gateways that have a stream with the running agent, with their path.
        fleet: whether there is a broker through which gateways learn of this device.
        unheard: whether what gateways say at the broker was left to the running agent.
    """
    if callers:
        return DoctorFinding("gateways", "ok", f"served now: {', '.join(sorted(callers))}")
    if not fleet and not reached:
        words = "neither `mqtt` nor `gateways` is set: local callers and gateways with a static target find this device"
        return DoctorFinding("gateways", "ok", words)
    good = sorted(address for address, why_not in reached.items() if not why_not)
    bad = sorted(f"{address} ({why_not})" for address, why_not in reached.items() if why_not)
    direct = f"gateways are told to dial {advertised}" if advertised else "gateways have no address to dial"
    if dial_out != "never" and good:
        return DoctorFinding("gateways", "ok", f"{direct}; this device can dial {', '.join(good)} if they do not")
    if dial_out == "never" and advertised:
        return DoctorFinding("gateways", "ok", f"{direct}, and must be able to: dial_out is never")
    if unheard and not bad:
        words = f"{direct}; which of them reach it says `tidegate status` at a gateway, and the running agent's log"
        return DoctorFinding("gateways", "ok", words)
    why = f"none can be dialled: {', '.join(bad)}" if bad else "no gateway has told where it may be dialled"
    advice = "set a gateway's `link_port` (and `link_advertise`), or this device's `gateways`; open that port outwards"
    return DoctorFinding("gateways", "warning" if advertised else "failure", f"{direct}; {why}", advice)


def asking_for_help(
    *,
    configured: bool,
    reached: Mapping[str, str],
    told: Sequence[Mapping[str, object]] | None,
    neighbours: Sequence[str] = (),
) -> DoctorFinding:
    """Judge whether this device can ask others for help with requests of its local callers.

    Args:
        configured: whether it has the section `help`.
        reached: as in `gateways`.
        told: what the running agent says of each gateway and neighbour; None: none runs, or it says nothing.
        neighbours: those that are configured.
    """
    if not configured:
        return DoctorFinding("help", "ok", "off: what does not fit this device is refused (key `help`)")
    page = "docs/asking-for-help.md"
    if told is None:
        good = sorted(address for address, why_not in reached.items() if not why_not)
        if good:
            words = f"{', '.join(good)} can be dialled; whether it helps this device the running agent says"
            return DoctorFinding("help", "ok", words)
        if neighbours:
            words = f"neighbours: {', '.join(neighbours)}; whether they help this device the running agent says"
            return DoctorFinding("help", "ok", words)
        words = "no gateway's link port can be dialled"
        return DoctorFinding("help", "warning", words, f"see `gateways` below, and {page}")
    able = sorted(_peer_in_words(one) for one in told if one.get("helps"))
    silent = sorted(f"{_peer_name(one)}: {one.get('why_not')}" for one in told if not one.get("helps"))
    heard = {_peer_name(one).removeprefix("edge/") for one in told}
    silent += [f"edge/{one}: no address of it is known" for one in neighbours if "@" not in one and one not in heard]
    if able:
        words = f"can be asked now: {', '.join(able)}" + (f"; not {'; not '.join(silent)}" if silent else "")
        return DoctorFinding("help", "ok", words)
    advice = f"give the gateway `link_port` and a section `help` with an entry for this device: {page}"
    if neighbours:
        advice = f"give each neighbour a section `answer_neighbours` with an entry for this device: {page}"
    return DoctorFinding(
        "help", "warning", f"nobody can be asked: {'; '.join(silent) or 'no gateway is known'}", advice
    )


def mdns(*, looks: bool, told: Mapping[str, object] | None) -> DoctorFinding:
    """Judge whether neighbours are found on the local network.

    Args:
        looks: whether this device looks for others, beside announcing itself.
        told: what the running agent says; None: none runs, or it says nothing.
    """
    advice = "let multicast DNS (224.0.0.251, UDP 5353) through between the devices: docs/asking-for-help.md"
    if told is None:
        return DoctorFinding("mdns", "ok", "on; what it finds the running agent says")
    if trouble := str(told.get("trouble") or ""):
        return DoctorFinding("mdns", "warning", trouble, f"see `mdns.interfaces`; {advice}")
    announced = str(told.get("announced") or "")
    words = f"announced at {announced}" if announced else "not announced: it answers no neighbours"
    if not looks:
        return DoctorFinding("mdns", "ok", words)
    found = told.get("found")
    names = [f"{name} at {at}" for name, at in sorted(found.items())] if isinstance(found, dict) else []
    if not names:
        return DoctorFinding("mdns", "warning", f"{words}; nobody was found who may be asked", advice)
    return DoctorFinding("mdns", "ok", f"{words}; found: {', '.join(names)}")


def _peer_name(told: Mapping[str, object]) -> str:
    return str(told.get("gateway") or told.get("neighbour"))


def _peer_in_words(told: Mapping[str, object]) -> str:
    first = told.get("asked_first_for")
    models = [str(one) for one in first] if isinstance(first, list) else []
    return f"{_peer_name(told)} (first for {', '.join(models)})" if models else _peer_name(told)
