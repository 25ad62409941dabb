"""OpenTelemetry traces: one span per request, with a child span for each of its stages.

Attribute names follow OpenTelemetry's conventions for HTTP servers and for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/). The names under `gen_ai.latency.` are vLLM's
(vllm/tracing/utils.py). The spans of a request are made from its record after it has finished, so
tracing costs nothing while it runs.

OpenTelemetry's environment variables apply: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_* and others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_jax import __version__
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from forge_jax.sampling_params import SamplingParams
    from forge_serve.telemetry.request_log import RequestLog, RequestRecord

SERVICE_NAME = "forge-jax"
MAX_INT = 2**63 - 1  # largest integer of an attribute
_OPERATIONS = {
    "completions": "text_completion",
    "generate": "text_completion",
    "chat_completions": "chat",
    "messages": "chat",
    "responses": "chat",
    "compact_response": "chat",
}  # by handler; the pooling handlers have "embeddings"


class Tracing:
    """Exporter of finished requests as spans.

    Raises:
      ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, processor: SpanProcessor):
        try:
            from opentelemetry import propagate
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise _not_installed() from error
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("forge_serve", __version__)
        self._propagator = propagate.get_global_textmap()

    @classmethod
    def of(cls, config: ServerConfig) -> Tracing | None:
        """Return the tracing that the configuration selects, or None if tracing is off.

        Raises:
          ConfigError: OpenTelemetry is not installed.
        """
        if config.otlp_traces_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise _not_installed() from error
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.otlp_traces_endpoint)))

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that identify a request's trace, such as W3C's `traceparent`."""
        return {name: headers[name] for name in self._propagator.fields if name in headers}

    def record(self, record: RequestRecord, request_log: RequestLog) -> str | None:
        """Export the spans of a finished request. Return its trace id, or None if not sampled."""
        from opentelemetry import trace

        operation = None
        if request_log.generation is not None:
            operation = _OPERATIONS.get(request_log.handler or "", "embeddings")
        name = f"{operation} {record.model}" if operation else f"{record.method} {record.path}"
        span = self._tracer.start_span(
            name,
            self._propagator.extract(request_log.headers),
            trace.SpanKind.SERVER,
            attributes=dict(_attributes(record, request_log, operation)),
            start_time=request_log.begin_ns,
        )
        context = span.get_span_context()
        if not span.is_recording():
            return None
        if request_log.generation is not None:
            inside = trace.set_span_in_context(span)
            for stage, begin_s, end_s in request_log.generation.stages():
                begin_ns, end_ns = request_log.at_ns(begin_s), request_log.at_ns(end_s)
                self._tracer.start_span(stage, inside, start_time=begin_ns).end(end_ns)
        broke_off = record.error is not None and record.status < 400
        if record.status >= 500 or broke_off:
            span.set_status(trace.StatusCode.ERROR, record.error)
        span.end(request_log.begin_ns + round(record.e2e_s * 1e9))
        return trace.format_trace_id(context.trace_id)

    def close(self) -> None:
        """Send the remaining spans. This blocks if the collector does not respond."""
        self._provider.shutdown()


def _not_installed() -> ConfigError:
    return ConfigError(
        "--otlp-traces-endpoint requires the extra otel: "
        "pip install -c constraints.txt -e '.[otel]'"
    )


def _attributes(
    record: RequestRecord, request_log: RequestLog, operation: str | None
) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", record.method
    yield "http.route", record.path
    yield "http.response.status_code", record.status
    if record.error is not None:
        yield "error.type", record.error
    if record.tenant is not None:
        yield "forge.tenant", record.tenant
    generation = request_log.generation
    if operation is None or generation is None:
        return
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", SERVICE_NAME
    yield "gen_ai.request.model", record.model
    yield "gen_ai.response.model", record.model
    yield "gen_ai.response.id", record.response
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.cached_tokens
    yield "gen_ai.request.id", record.id
    yield "gen_ai.latency.e2e", record.e2e_s
    if record.queue_s is not None:
        yield "gen_ai.latency.time_in_queue", record.queue_s
    if operation == "embeddings":
        return
    if record.finish is not None:
        yield "gen_ai.response.finish_reasons", tuple(record.finish.split(","))
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "gen_ai.request.stream", record.stream
    yield from _asked(generation.params)
    yield "forge.draft_tokens", record.draft_tokens
    yield "forge.accepted_tokens", record.accepted_tokens
    yield "forge.preemptions", record.preemptions
    if record.ttft_s is not None:
        yield "gen_ai.latency.time_to_first_token", record.ttft_s
        if record.stream:
            yield "gen_ai.response.time_to_first_chunk", record.ttft_s
    stages = {stage: end_s - begin_s for stage, begin_s, end_s in generation.stages()}
    for stage in ("prefill", "decode"):
        if stage in stages:
            yield f"gen_ai.latency.time_in_model_{stage}", stages[stage]
    if "decode" in stages:
        in_model_s = stages["prefill"] + stages["decode"]
        yield "gen_ai.latency.time_in_model_inference", in_model_s


def _asked(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """Yield the sampling parameters of a request, without its texts."""
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k > 0:
        yield "gen_ai.request.top_k", params.top_k
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.seed is not None and params.seed <= MAX_INT:
        yield "gen_ai.request.seed", params.seed
    if params.n != 1:
        yield "gen_ai.request.choice.count", params.n
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(params, name):
            yield f"gen_ai.request.{name}", getattr(params, name)
