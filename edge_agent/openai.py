"""The OpenAI routes of a device exist where a model takes text and the tokenizer library is installed."""

from __future__ import annotations

import structlog
from aiohttp import web

from edge_agent.config import EdgeConfig
from edge_agent.delivery.deployment import Deployment
from edge_agent.offline.local_host import LocalHost
from tidegate.oip.body_budget import BodyMemory

log = structlog.get_logger(__name__)


async def openai_table(
    local: LocalHost, models: Deployment, config: EdgeConfig, held: BodyMemory
) -> list[web.RouteDef]:
    """The routes; none where no model takes text when the agent starts."""
    manifests = [one for one in local.manifests() if one.text is not None]
    if not (config.openai and manifests):
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
    )
