"""OpenTelemetry traces: a span a request. An extra: `pip install 'moestro[tracing]'`."""

from __future__ import annotations

import importlib
from typing import Any

from moestro.errors import SettingError
from moestro.server.facts import Facts


class Tracer:
    """Sends spans to a collector in the background. Attribute names are those of OpenTelemetry's GenAI conventions."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("moestro")
        self._model = model
        self._api = importlib.import_module("opentelemetry.trace")
        self._propagator = importlib.import_module(
            "opentelemetry.trace.propagation.tracecontext"
        ).TraceContextTextMapPropagator()

    @classmethod
    def connect(cls, endpoint: str | None, model: str) -> Tracer | None:
        """None without an endpoint. Raises SettingError when the packages are missing."""
        if endpoint is None:
            return None
        try:
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ModuleNotFoundError:
            raise SettingError(
                f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install 'moestro[tracing]'"
            ) from None
        provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "moestro"}))
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model)

    def record(self, facts: Facts) -> None:
        """Tell about a request that has ended, as a child of the client's span when it sent one."""
        context = self._propagator.extract({"traceparent": facts.traceparent}) if facts.traceparent else None
        span = self._tracer.start_span(
            f"{facts.method} {facts.path}",
            context=context,
            kind=self._api.SpanKind.SERVER,
            start_time=facts.started_ns,
        )
        attributes = {
            "http.request.method": facts.method,
            "url.path": facts.path,
            "http.response.status_code": facts.status,
            "moestro.request_id": facts.request_id,
            "gen_ai.request.model": self._model if facts.answer_id else None,
            "gen_ai.response.id": facts.answer_id,
            "gen_ai.usage.input_tokens": facts.prompt_tokens or None,
            "gen_ai.usage.output_tokens": facts.completion_tokens or None,
            "gen_ai.server.time_to_first_token": facts.ttft_s,
            "gen_ai.response.finish_reasons": facts.finish or None,
        }
        span.set_attributes({k: v for k, v in attributes.items() if v is not None})
        if facts.ttft_s is not None:
            span.add_event("first token", timestamp=facts.started_ns + int(facts.ttft_s * 1e9))
        if facts.status >= 500 or "error" in facts.finish:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end_time=facts.started_ns + int(facts.duration_s * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
