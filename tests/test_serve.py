"""The example server, started as a process and called over HTTP."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape
from residency.planner import Settlement, settle
from residency.planner.journal.journal import Journal, read_records
from residency.planner.journal.record import Kind
from residency.planner.serving.metrics import CONTENT_TYPE

PROGRAM = Path(__file__).parent.parent / "examples" / "serve.py"
INSIDE = "64x64:tokens=16,steps=2"
OUTSIDE = "640x64:tokens=16,steps=2"
START_S = 180.0
"""Given to a server to become ready, on whatever machine this is."""


@dataclass
class Answer:
    status: int
    kind: str
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Running:
    """One server process."""

    def __init__(self, journal: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-W", "error", str(PROGRAM), "--port", str(self.port)]
        self.log = journal.with_name(f"log-{self.port}").open("w+b")
        self.process = subprocess.Popen(
            [*command, "--journal", str(journal)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, path: str, *, body: object = None, accept: str = "*/*") -> Answer | None:
        """None while nobody listens."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json", "accept": accept},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as found:
                return Answer(found.status, found.headers.get_content_type(), found.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.headers.get_content_type(), refused.read())
        except (urllib.error.URLError, ConnectionError):
            return None

    def generate(self, shape: str, seed: int = 0) -> Answer:
        found = self.ask("/generate", body={"shape": shape, "seed": seed})
        assert found is not None
        return found

    def wait(self, until) -> None:
        deadline = time.monotonic() + START_S
        while not until():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(Path(self.log.name).read_text())
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        self.wait(lambda: (found := self.ask("/health")) is not None and found.status == 200)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self.log.close()
        return code


@pytest.fixture
def start(tmp_path):
    running: list[Running] = []

    def start() -> Running:
        running.append(Running(tmp_path / "journal"))
        return running[-1]

    yield start
    for server in running:
        if server.process.poll() is None:
            server.end()


def counted(server: Running, name: str) -> float:
    text = server.ask("/metrics").body.decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("many", [12, pytest.param(100, marks=pytest.mark.long)])
def test_it_is_not_ready_before_it_is_settled_and_serves_many_at_once(start, many):
    server = start()
    server.wait(lambda: server.ask("/health") is not None)
    early = server.ask("/health")
    assert (early.status, server.generate(INSIDE).status) == (503, 503)
    assert early.json["detail"]["status"] != "ready"
    assert server.ask("/metrics").status == 503
    server.wait_until_ready()

    first = server.generate(INSIDE)
    assert (first.status, first.kind) == (200, "image/png")
    with ThreadPoolExecutor(many) as pool:
        answers = [*pool.map(lambda n: server.generate(INSIDE, n % 4), range(many))]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 4, "an image for each seed"
    assert answers[0].body == first.body
    assert counted(server, 'residency_requests_total{outcome="planned"}') == many + 1

    refused = server.generate(OUTSIDE)
    assert refused.status == 422
    assert "outside the validated envelope" in refused.json["detail"]["error"]
    assert counted(server, 'residency_requests_total{outcome="outside"}') == 1
    assert counted(server, "residency_settled") == 1

    (plan,) = server.ask("/residency").json["plans"]
    assert (plan["status"], plan["in_effect"]) == ("committed", True)
    page = server.ask("/residency", accept="text/html")
    assert page.kind == "text/html"
    assert b"Retains text_encoder" in page.body
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)


@pytest.mark.long
def test_killed_while_it_settles_it_boots_and_does_not_try_the_same_again(start, tmp_path):
    journal = tmp_path / "journal"

    def kinds() -> list[Kind]:
        if not journal.exists():
            return []
        return [record.kind for record in read_records(journal.read_bytes())[0]]

    killed = start()
    killed.wait(lambda: Kind.INTENT in kinds())
    killed.end()
    records = Journal.open(journal).records()
    assert Kind.COMMITTED not in {record.kind for record in records}, "it was killed too late"
    left = next(record.candidate for record in records if record.kind is Kind.INTENT)

    server = start()
    server.wait_until_ready()
    assert server.generate(INSIDE).status == 200
    later = Journal.open(journal).records()[len(records) :]
    assert later[0].kind is Kind.CRASH
    tried = {record.candidate.key for record in later if record.kind is Kind.INTENT}
    assert left.key not in tried
    assert later[-1].kind is Kind.END


def test_terminated_while_it_settles_it_puts_back_and_ends(start, tmp_path):
    server = start()
    server.wait(lambda: server.ask("/health") is not None)
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)


def test_two_settlements_in_one_process_count_each_for_itself(monkeypatch):
    program = importlib.util.spec_from_file_location("serve", PROGRAM)
    serve = importlib.util.module_from_spec(program)
    monkeypatch.setitem(sys.modules, "serve", serve)  # where dataclasses look up its names
    program.loader.exec_module(serve)
    family = find_family("flux.1-dev", tiny=True)

    def metrics_of(settlement: Settlement):
        """As a GET /metrics finds it."""
        server = serve.Server("", "", [], None, settlement=settlement, doing="ready")
        app = serve.make_app(server)
        (route,) = (each for each in app.routes if getattr(each, "path", "") == "/metrics")
        page = route.endpoint()
        server.settlement = None  # FastAPI keeps each endpoint that it has seen
        return page

    with SimulatedCard(find_card("RTX 4090")) as card, ExitStack() as stack:
        pages = []
        for requests in (1, 2):
            pipeline = DiffusersPipeline(family.build(), name=family.name, request=family.request)
            settlement = settle(pipeline, device=card, envelope=[INSIDE])
            stack.callback(settlement.close)
            for _ in range(requests):
                settlement.serve(INSIDE, partial(pipeline.run, Shape.parse(INSIDE)))
            pages.append(metrics_of(settlement))
    for page, requests in zip(pages, (1, 2), strict=True):
        assert page.headers["content-type"] == CONTENT_TYPE
        read = {
            (each.name, *each.labels.values()): each.value
            for found in text_string_to_metric_families(page.body.decode())
            for each in found.samples
        }
        assert read["residency_request_seconds_count", "planned"] == requests
        assert read["residency_requests_total", "planned"] == requests
