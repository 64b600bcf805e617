"""`tidegate edge doctor` reports the problems of this device, and what to do about each."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import structlog

from edge_agent.commands.doctor import run_checks
from edge_agent.config import EdgeConfig
from edge_agent.core.diagnosis import DoctorFinding
from tidegate.config import ConfigError, load

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@click.command(
    epilog="""\b
Examples:
  tidegate edge doctor --config edge.yaml
  tidegate edge --config edge.yaml doctor --json | jq '.findings[] | select(.verdict != "ok")'
"""
)
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="As of `tidegate edge`.")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.pass_context
def doctor(context: click.Context, path: Path | None, as_json: bool) -> None:
    """Check clock, disk, models, memory, processor, ports, certificate, broker and gateways, and say what to do.

    May be run beside the agent. Exits with 1 where something keeps the device from serving, with 0 else; warnings are
    no failures.
    """
    try:
        config = load(EdgeConfig, path or context.obj)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    with _errors_to_stderr():
        findings = asyncio.run(run_checks(config))
    healthy = all(one.verdict != "failure" for one in findings)
    if as_json:
        plain = [_plain(one) for one in findings]
        click.echo(json.dumps({"device": config.name, "healthy": healthy, "findings": plain}))
    else:
        for one in findings:
            _say(one)
    sys.exit(0 if healthy else 1)


@contextmanager
def _errors_to_stderr() -> Iterator[None]:
    """Send logged errors to stderr, so that stdout has only the findings."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _say(finding: DoctorFinding) -> None:
    verdict = click.style(f"{finding.verdict:7}", fg=_COLOURS[finding.verdict])
    click.echo(f"{verdict} {finding.check}: {finding.words}")
    if finding.advice:
        click.echo(f"        → {finding.advice}")


def _plain(finding: DoctorFinding) -> dict[str, str]:
    return {"check": finding.check, "verdict": finding.verdict, "words": finding.words, "advice": finding.advice}
