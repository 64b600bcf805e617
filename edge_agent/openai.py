"""What a device has for callers in text exists where a model takes text and the tokenizer library is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from edge_agent.config import EdgeConfig
from edge_agent.delivery.deployment import Deployment
from edge_agent.offline.local_host import LocalHost
from tidegate.oip.body_budget import BodyMemory
from tidegate.oip.guard import Guard

if TYPE_CHECKING:
    from tidegate.generate.text.text_models import TextModels

log = structlog.get_logger(__name__)


async def text_models_of(local: LocalHost, models: Deployment, config: EdgeConfig) -> TextModels | None:
    """The text sides of the models that generate; None where `openai` is off, or no model does as the agent starts."""
    manifests = [one for one in local.manifests() if one.generative is not None]
    if not (config.openai and manifests):
        return None
    try:
        # Not at the top: an edge is installed without `tokenizers`, and most need none.
        from tidegate.generate.text.text_models import TextModels
    except ModuleNotFoundError as error:
        log.info("models generate token ids only here", reason=str(error), way_out="pip install tokenizers jinja2")
        return None
    texts = TextModels(models)
    await texts.load(manifests)
    return texts


async def openai_table(
    local: LocalHost,
    models: Deployment,
    config: EdgeConfig,
    held: BodyMemory,
    texts: TextModels | None,
    guard: Guard | None = None,
) -> list[web.RouteDef]:
    """The routes; none where no model takes text when the agent starts.

    Args:
        texts: of models that generate.
        guard: notes what callers show; None: nothing.
    """
    manifests = [one for one in local.manifests() if one.text is not None]
    if not (config.openai and (manifests or texts is not None)):
        return []
    try:
        # Not at the top: an edge is installed without `tokenizers`, and most need none.
        from tidegate.openai.routes import openai_routes
        from tidegate.openai.tokens import Tokenizers
    except ModuleNotFoundError as error:
        log.info("no /v1/embeddings here", reason=str(error), way_out="pip install tokenizers")
        return []
    tokenizers = Tokenizers(models)
    await tokenizers.load(manifests)
    return openai_routes(
        local,
        tokenizers,
        max_body_bytes=config.max_message_bytes,
        limits=config.limits.content,
        body_limits=config.limits.body,
        held=held,
        texts=texts,
        guard=guard,
        most_rows=local.most_rows,
    )
