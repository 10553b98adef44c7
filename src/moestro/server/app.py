"""The HTTP application: which path is answered by what."""

from __future__ import annotations

import contextlib
import html
import shlex

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from moestro import __version__
from moestro.errors import EngineDeadError, RequestError
from moestro.server import failures
from moestro.server.access import Access
from moestro.server.answers import ERRORS, ChatAnswer, CompletionAnswer, answer_of
from moestro.server.chat import chat, messages_of
from moestro.server.completion import complete
from moestro.server.failures import ApiError
from moestro.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moestro.server.service import ClientGone, Service

# A step of a very large model on slow memory takes tens of seconds; nothing that works is silent for this long.
SILENCE_LIMIT_S = 300.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service) -> FastAPI:
    """The application around one started service."""
    app = FastAPI(title="moestro", version=__version__, docs_url=None, redoc_url=None, summary="OpenAI-compatible API")
    failures.install(app)
    app.add_exception_handler(ClientGone, _nobody_listens)
    app.add_middleware(Access, service=service)
    if service.config.allow_origin is not None:
        # Outside of Access: a browser's preflight request has no key yet.
        origins = [origin.strip() for origin in service.config.allow_origin.split(",") if origin.strip()]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    _add_openai_routes(app, service)
    _add_token_routes(app, service)
    _add_watching_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_class=Response, responses=answer_of(ChatAnswer))
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await chat(service, http, body)

    @app.post("/v1/completions", response_class=Response, responses=answer_of(CompletionAnswer))
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await complete(service, http, body)

    card = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "moestro",
        "root": service.name,
        "parent": None,
        "max_model_len": service.info.max_model_len,
    }

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(card)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.messages is not None:
            kwargs = body.chat_template_kwargs or {}
            ids = await service.encode_chat(messages_of(body.messages), body.add_generation_prompt is not False, kwargs)
        else:
            ids = await service.encode(body.prompt or "", "prompt", body.add_special_tokens is not False)
        pieces = None
        if body.return_token_strs and service.tokenizer is not None:
            pieces = [service.tokenizer.piece(i) for i in ids]
        limit = service.info.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": pieces})

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        service.check_model(body.model)
        service.check_ids(body.tokens, "tokens")
        if service.tokenizer is None:
            raise RequestError("this model has no tokenizer", "tokens")
        return JSONResponse({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_watching_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> JSONResponse:
        if service.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        if not service.client.ready:
            raise ApiError(503, f"the engine is {service.client.state}", code="engine_unavailable", retry_after_s=5)
        if service.client.silent_s > SILENCE_LIMIT_S:
            message = f"the engine has been silent for {service.client.silent_s:.0f} s"
            raise ApiError(503, message, code="engine_stuck")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        client = service.client
        stats = await client.fresh_stats()
        with contextlib.suppress(EngineDeadError):  # while the engine restarts the rest is still worth telling
            service.metrics.update_loads(await client.loads(timeout_s=1.0))
        page = service.metrics.page(stats, client.ready, client.generation)
        return Response(page, headers={"Content-Type": _METRICS_TYPE})

    @app.get("/moe/loads", responses=ERRORS)
    async def moe_loads(window: str = "total") -> JSONResponse:
        if window != "total":
            raise RequestError(f"window={window[:40]!r} is not there; 'total' is", "window")
        return JSONResponse(await service.client.loads())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index(http: Request) -> HTMLResponse:
        return HTMLResponse(_page(service, str(http.base_url).rstrip("/")))


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def curl_line(service: Service, url: str) -> str:
    """A command that gets an answer from this server."""
    prompt = '"The capital of France is"' if service.tokenizer else "[1, 2, 3]"
    body = f'{{"prompt": {prompt}, "max_tokens": 8, "temperature": 0}}'
    key = " -H 'Authorization: Bearer KEY'" if service.keys else ""
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _page(service: Service, url: str) -> str:
    info = service.info
    facts = f"{info.num_experts} experts in {len(info.moe_layers)} layers, top-{info.top_k}"
    facts += f", context {info.max_model_len} tokens"
    return (
        "<!doctype html><meta charset=utf-8><title>moestro</title>"
        f"<h1>{html.escape(service.name)}</h1><p>{html.escape(info.family)}: {facts}</p>"
        f"<pre>{html.escape(curl_line(service, url))}</pre>"
        "<p><a href=/v1/models>models</a> <a href=/health>health</a> <a href=/metrics>metrics</a> "
        "<a href=/moe/loads>expert loads</a> <a href=/openapi.json>OpenAPI</a></p>\n"
    )
