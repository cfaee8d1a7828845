"""GET /health, /version, /metrics and /v1/models: what the server tells of itself."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import BaseModel

from dspark import __version__
from dspark.server.errors import ERROR_RESPONSES, ApiError
from dspark.server.state import CurrentState, Lifecycle, ServerState

router = APIRouter(responses=ERROR_RESPONSES)


class Health(BaseModel):
    """The server is ready, and its engine runs."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Of dspark."""

    version: str


class Model(BaseModel):
    """What is served. ``max_model_len`` is in tokens, prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dspark"
    max_model_len: int


class ModelList(BaseModel):
    """The one model."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/health")
async def health(request: Request) -> Health:
    """Whether requests are answered: 503 while the models load, while the server ends, and if its engine has ended."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    if (why := lifecycle.why_unavailable) is not None:
        raise ApiError(503, why, code="unavailable")
    return Health()


@router.get("/version")
async def version() -> Version:
    """The version of dspark."""
    return Version(version=__version__)


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(state: CurrentState) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/models")
async def models(state: CurrentState) -> ModelList:
    """The model that is served."""
    return ModelList(data=[_model(state)])


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, state: CurrentState) -> Model:
    """The model that is served, by its name."""
    if model_id != state.model_name:
        raise ApiError(404, f"there is no such model here: it is {state.model_name}", "model", "model_not_found")
    return _model(state)


def _model(state: ServerState) -> Model:
    return Model(id=state.model_name, created=state.created, max_model_len=state.engine.max_length)
