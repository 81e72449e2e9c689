"""Gives traces of recoveries to an OpenTelemetry collector by OTLP over HTTP; without one, nothing is imported."""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from unicron.contracts.base import Message
from unicron.errors import InvalidInputError
from unicron.observe.accounts.chains import ChainCost
from unicron.observe.accounts.tracing import TraceSpan, spans, trace_id

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "UNICRON_TRACES"
OTLP_PATH = "/v1/traces"
"""Path at which collectors receive traces (OTLP specification, OTLP/HTTP)."""


class TraceSettings(Protocol):
    """The settings of a process that exports traces."""

    @property
    def traces(self) -> str:
        """URL of a collector, such as http://127.0.0.1:4318; its path, where it has none, is that of OTLP."""


class Traces:
    """Exports recoveries to a collector, or to nobody.

    A thread of the SDK sends what was exported; a collector that is away delays nobody, and what has no room in the
    thread's queue meanwhile is lost, with a line in the log. Headers, certificates, sizes and times are set by the
    environment variables of the SDK (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_BSP_MAX_QUEUE_SIZE` and others).
    """

    def __init__(self, settings: TraceSettings) -> None:
        """Begin to export.

        Raises:
            InvalidInputError: it is no address, or the SDK is not installed.
        """
        self._ids: deque[int] = deque()
        self._provider = _provider(_exporter(endpoint(settings.traces)), self._ids) if settings.traces else None

    def export(self, cost: ChainCost, messages: Iterable[Message]) -> None:
        """Export a recovery that is over; not one that goes on, a mere plan, or anything where nobody listens.

        Args:
            cost: of its chain.
            messages: of its chain.
        """
        if self._provider is not None:
            _send(self._provider, self._ids, trace_id(cost.chain), spans(cost, messages))

    def close(self) -> None:
        """Send what was exported and is not sent yet; this may take seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def endpoint(text: str) -> str:
    """Return the address that a setting names.

    Raises:
        InvalidInputError: it is none, or has a password in it.
    """
    if "@" in text:
        raise InvalidInputError(f"{NAME}: there is a user in the URL; give secrets in OTEL_EXPORTER_OTLP_HEADERS")
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidInputError(f"{NAME} {text!r}: give the URL of a collector, such as http://127.0.0.1:4318")
    return parts._replace(path=OTLP_PATH).geturl() if parts.path in {"", "/"} else text


def _exporter(url: str) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInputError(f"{NAME} needs packages: pip install '.[otel]'") from error
    return OTLPSpanExporter(endpoint=url)


def _provider(exporter: "SpanExporter", ids: deque[int]) -> "TracerProvider":
    """Return a provider of tracers whose spans get the ids that lie ready."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.id_generator import IdGenerator  # noqa: PLC0415

    class Given(IdGenerator):
        def generate_trace_id(self) -> int:
            return ids.popleft()

        def generate_span_id(self) -> int:
            return ids.popleft()

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # no variable names another
        resource = resource.merge(Resource({SERVICE_NAME: "unicron"}))
    provider = TracerProvider(resource=resource, id_generator=Given(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _send(provider: "TracerProvider", ids: deque[int], trace: int, found: list[TraceSpan]) -> None:
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

    tracer = provider.get_tracer("unicron")
    contexts = {0: Context()}
    for each in found:
        ids.clear()
        ids.extend([each.number] if each.parent else [trace, each.number])
        span = tracer.start_span(
            each.name, contexts[each.parent], attributes=each.attributes, start_time=_ns(each.begin)
        )
        for one in each.happenings:
            span.add_event(one.name, one.attributes, _ns(one.at))
        span.end(_ns(each.end))
        contexts[each.number] = set_span_in_context(span, Context())


def _ns(at: float) -> int:
    return round(at * 1e9)
