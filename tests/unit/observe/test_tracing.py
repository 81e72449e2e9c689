"""A recovery as an OpenTelemetry trace: its spans, its receivers, and nothing where no collector is set."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from helpers.accounts import (
    FAILED,
    NEW,
    SUBMITTED,
    account,
    admitted,
    began,
    exited,
    failure,
    journal,
    killed,
    regroup,
    regrouped,
)
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from unicron.contracts import events
from unicron.errors import InvalidInputError
from unicron.observe.accounts import otel, tracing
from unicron.observe.accounts.otel import Traces, endpoint

RECOVERED = events.TaskRecovered(task="gpt", epoch=2, workers=4, seconds=1.0)
HEALED = [*began(), *killed(), (150, FAILED, RECOVERED)]


class Settings:
    traces = "http://127.0.0.1:4318"


def recovery_of(lines=HEALED, chain=FAILED, until=200):
    """Return the cost of a chain, and the messages of all."""
    return account(lines).chain(chain, until), journal(lines)


@pytest.fixture
def heard(monkeypatch):
    """Return a function that tells a recovery by the SDK, and gives the spans that came out."""

    def tell(cost, messages):
        exporter = InMemorySpanExporter()
        monkeypatch.setattr(otel, "_exporter", lambda _: exporter)
        traces = Traces(Settings())
        traces.export(cost, messages)
        traces.close()
        return exporter.get_finished_spans()

    return tell


def seconds(span):
    return span.start_time / 1e9, span.end_time / 1e9


def children(found, parent):
    of_it = [span for span in found if span.parent and span.parent.span_id == parent.context.span_id]
    return sorted(of_it, key=lambda span: (span.start_time, span.name))


def test_the_root_is_the_recovery_and_its_children_are_the_phases_of_the_task(heard):
    found = heard(*recovery_of())
    [root] = [span for span in found if span.parent is None]
    assert root.name == "recovery gpt"
    assert seconds(root) == (121, 150)
    assert root.attributes["unicron.chain"] == FAILED
    assert root.attributes["unicron.what"] == "exited_abnormally"
    assert root.attributes["unicron.severity"] == 2
    assert root.attributes["unicron.slot_s"] == pytest.approx(81)
    assert root.attributes["unicron.slot_s.detection"] == pytest.approx(4)
    phases = [span for span in children(found, root) if "unicron.phase" in span.attributes]
    again = pytest.approx(130 + 10 / 3)
    assert [(span.name, *seconds(span)) for span in phases] == [
        ("detection", 121, 122),
        ("decision", 122, 124),
        ("transition", 124, 130),
        ("recomputed", 130, again),
        ("training", again, 145),
        ("transition", 145, 150),
    ]
    assert {span.attributes["unicron.task"] for span in phases} == {"gpt"}
    whole = sum(end - begin for begin, end in map(seconds, phases))
    assert whole == pytest.approx(150 - 121)
    assert {span.context.trace_id for span in found} == {tracing.trace_id(FAILED)}
    assert root.resource.attributes["service.name"] == "unicron"


def test_each_slot_has_a_span_with_its_phases_and_workers(heard):
    found = heard(*recovery_of())
    [root] = [span for span in found if span.parent is None]
    slots = {span.name: span for span in children(found, root) if "unicron.phase" not in span.attributes}
    assert set(slots) == {"n1:0", "n1:1", "n2:0", "n2:1"}
    killed_at = slots["n2:1"]
    assert seconds(killed_at) == (121, 150)
    phases = children(found, killed_at)
    of_w4 = [(phase, "w4") for phase in ("detection", "decision", "transition")]
    assert [(span.name, span.attributes["unicron.worker"]) for span in phases] == [*of_w4, ("sub_healthy", "w5")]
    assert {(span.attributes["unicron.node"], span.attributes["unicron.slot"]) for span in phases} == {("n2", 1)}


def test_what_happened_is_told_with_the_reason_and_nothing_else_that_programs_wrote(heard):
    lines = [
        *began(),
        (121, FAILED, replace(exited("w4", "n2", 1, iteration=10, signal=9), stderr=["password=hunter2"])),
        (122, FAILED, failure(reason="w4 was ended by SIGKILL; " + "x" * 500), *regroup(1, NEW[:3])),
        (130, FAILED, *regrouped(1, NEW[:3], iteration=10), RECOVERED),
        (131, "another", exited("w1", "n1", 0, iteration=11)),
    ]
    found = heard(*recovery_of(lines))
    [root] = [span for span in found if span.parent is None]
    assert [event.name for event in root.events][:3] == ["WorkerExited", "FailureDetected", "Regroup"]
    assert root.events[0].attributes["unicron.worker"] == "w4"
    assert root.events[0].timestamp == 121 * 10**9
    assert all(event.timestamp < 131 * 10**9 for event in root.events)
    assert root.attributes["unicron.reason"].startswith("w4 was ended by SIGKILL")
    everything = "".join(span.to_json() for span in found)
    assert "hunter2" not in everything
    values = [value for span in found for each in (span, *span.events) for value in each.attributes.values()]
    assert max(len(value) for value in values if isinstance(value, str)) == tracing.TEXT


def test_whoever_tells_it_again_tells_the_same_spans(heard):
    found = [heard(*recovery_of(until=at)) for at in (150, 999)]
    ids = [{(span.context.trace_id, span.context.span_id, span.name, *seconds(span)) for span in one} for one in found]
    assert ids[0] == ids[1]
    assert len({span_id for _, span_id, *_ in ids[0]}) == len(ids[0])
    other = account([(at, *("other" if each == FAILED else each for each in line)) for at, *line in HEALED])
    assert not {span.context.span_id for span in heard(other.chain("other"), [])} & {span for _, span, *_ in ids[0]}


def test_a_recovery_that_is_not_over_is_not_told_and_a_plan_is_none(heard):
    assert heard(*recovery_of([*began(), *killed()])) == ()
    plan, messages = recovery_of([*began(), (21, SUBMITTED, RECOVERED)], SUBMITTED)
    assert plan.recovered_at == 21
    assert heard(plan, messages) == ()


def test_a_trace_is_bounded():
    many = [(f"w{each}", f"m{each}", 0) for each in range(tracing.SLOTS * 3)]
    lines = [
        (0, *(admitted(node, 1) for _, node, _ in many)),
        (20, *regroup(0, many)),
        (21, *regrouped(0, many, iteration=0)),
        (50, FAILED, exited(*many[0], iteration=3), failure(*many[0])),
        (51, FAILED, *regroup(1, many[1:])),
        (52, FAILED, *regrouped(1, many[1:], iteration=3), RECOVERED),
    ]
    found = tracing.spans(*recovery_of(lines))
    slots = [span for span in found if span.name.startswith("m") and ":" in span.name]
    assert len(slots) == tracing.SLOTS
    assert len(found) <= tracing.MOST
    assert len(found[0].happenings) == tracing.SLOTS
    known = {0}
    for span in found:
        assert span.parent in known, "a parent comes before its children"
        known.add(span.number)


class Collector(BaseHTTPRequestHandler):
    """Takes what is posted to it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


def test_a_collector_gets_it_by_otlp_over_http(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.taken = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = Settings()
        settings.traces = f"http://127.0.0.1:{server.server_port}"
        traces = Traces(settings)
        cost, messages = recovery_of()
        traces.export(cost, messages)
        traces.close()
        server.shutdown()
    [(path, headers, request)] = server.taken
    assert (path, headers["x-key"]) == ("/v1/traces", "abc")
    [of_resource] = request.resource_spans
    assert {each.key: each.value.string_value for each in of_resource.resource.attributes}["service.name"] == "mine"
    [of_scope] = of_resource.scope_spans
    assert {span.name for span in of_scope.spans} >= {"recovery gpt", "detection", "n2:1"}
    assert {span.trace_id for span in of_scope.spans} == {tracing.trace_id(FAILED).to_bytes(16, "big")}
    assert len(of_scope.spans) == len(tracing.spans(cost, messages))


def test_where_no_collector_is_named_nothing_is_imported():
    program = """
import sys
from unicron.observe.accounts.otel import Traces
class Settings:
    traces = ""
traces = Traces(Settings())
traces.export(None, [])
traces.close()
print([name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf", "requests"))])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_the_packages_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInputError, match=r"UNICRON_TRACES needs packages: pip install '\.\[otel\]'"):
        Traces(Settings())


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_that_of_otlp(given, used):
    assert endpoint(given) == used


NO_ADDRESSES = ["collector:4318", "http://", "ftp://collector", "http://c:99999", "http://u:p@c", "http://u:p@c:99999"]


@pytest.mark.parametrize("given", NO_ADDRESSES)
def test_what_is_no_address_is_refused_and_no_password_is_repeated(given):
    with pytest.raises(InvalidInputError, match="UNICRON_TRACES") as told:
        endpoint(given)
    assert "u:p" not in str(told.value)
