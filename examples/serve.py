"""A server that is ready once its plan is proved: FastAPI over a real diffusers pipeline.

    python examples/serve.py                       a tiny pipeline on a simulated card
    python examples/serve.py --device cuda:0       the same on a card of this machine
    python examples/serve.py FOLDER --device cuda:0 --shape 1024x1024:steps=40

GET /health     503 until the pipeline is settled, and says what is being done
POST /generate  {"shape": "64x64:steps=2", "seed": 0} -> a PNG
GET /residency  the report: JSON, or a page for browsers
GET /metrics    Prometheus text
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

from residency.cli.render.plan import report_page
from residency.offload.cards import find_card
from residency.offload.device import Device
from residency.offload.errors import InputError, ResidencyError
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline, is_pretrained, load_pretrained
from residency.phases.limit import Limit
from residency.phases.shape import Shape
from residency.planner import Settlement, settle
from residency.planner.plan import Status
from residency.planner.serving.metrics import CONTENT_TYPE
from residency.planner.verdict import Event

logger = logging.getLogger("serve")

T = TypeVar("T")


class Asked(BaseModel):
    """One request."""

    shape: str
    seed: int = 0


@dataclass
class Server:
    """All work on the device is one thread's: settling first, then requests in turn."""

    name: str
    device: str
    shapes: list[str]
    journal: Path | None
    limit: Limit = field(default_factory=Limit)
    settlement: Settlement | None = None
    doing: str = "starting"
    pipeline: DiffusersPipeline | None = None
    _open: ExitStack = field(default_factory=ExitStack)
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    async def work(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)

    def start(self) -> None:
        self.doing = f"loading {self.name}"
        self.pipeline = self._load()
        settlement = settle(
            self.pipeline,
            device=self._card(),
            envelope=self.shapes or [self.pipeline.request or Shape(512, 512)],
            journal=self.journal,
            limit=self.limit,
            listen=self._listen,
        )
        self._open.callback(settlement.close)
        for warning in settlement.warnings:
            logger.warning(warning)
        self.doing = settlement.status
        if settlement.status is not Status.INFEASIBLE:
            self.doing = "ready"
        self.settlement = settlement

    def stop(self) -> None:
        self._open.close()

    def generate(self, asked: Asked) -> bytes:
        assert self.settlement is not None
        assert self.pipeline is not None
        pipeline, shape = self.pipeline, Shape.parse(asked.shape)
        value = self.settlement.serve(
            shape, lambda: pipeline.run(shape, seed=asked.seed).value.float().cpu()
        )
        return _png(value)

    def _load(self) -> DiffusersPipeline:
        if is_pretrained(self.name):
            return load_pretrained(self.name)
        family = find_family(self.name, tiny=True)
        return DiffusersPipeline(family.build(), name=family.name, request=family.request)

    def _card(self) -> Device | str:
        if self.device.startswith("cuda"):
            return self.device
        return self._open.enter_context(SimulatedCard(find_card(self.device)))

    def _listen(self, event: Event) -> None:
        self.doing = event.doing
        logger.info("%s: %s", event.step, event.doing)


def _png(images: Any) -> bytes:
    """The first image, or the first frame of the first video."""
    from PIL import Image

    image = images[0] if images.dim() == 4 else images[0, 0]
    array = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    made = io.BytesIO()
    Image.fromarray(array).save(made, format="PNG")
    return made.getvalue()


def make_app(server: Server) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settling = asyncio.create_task(server.work(server.start))
        settling.add_done_callback(_report)
        yield
        server.limit.cancel()
        await asyncio.wait([settling])
        await server.work(server.stop)

    def _report(settling: asyncio.Task[None]) -> None:
        if not settling.cancelled() and (error := settling.exception()) is not None:
            server.doing = f"failed: {error}"
            logger.error("settling failed", exc_info=error)

    app = FastAPI(title="residency", lifespan=lifespan)

    def settled() -> Settlement:
        if server.settlement is None or server.doing != "ready":
            raise HTTPException(503, {"status": server.doing})
        return server.settlement

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": server.doing, "plan": settled().status}

    @app.post("/generate")
    async def generate(asked: Asked) -> Response:
        settled()
        try:
            image = await server.work(lambda: server.generate(asked))
        except InputError as error:
            raise HTTPException(422, {"error": error.message, "hint": error.hint}) from error
        except ResidencyError as error:
            raise HTTPException(503, {"error": error.message, "hint": error.hint}) from error
        return Response(image, media_type="image/png")

    @app.get("/residency")
    def residency(request: Request) -> Response:
        if server.settlement is None:
            raise HTTPException(503, {"status": server.doing})
        report = server.settlement.report
        if "text/html" in request.headers.get("accept", ""):
            return Response(report_page(report), media_type="text/html")
        return Response(report.to_json(), media_type="application/json")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(settled().metrics.text(), media_type=CONTENT_TYPE)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a pipeline once its plan is proved.")
    parser.add_argument("name", nargs="?", default="qwen-image", help="a tiny family, or a folder")
    parser.add_argument("--device", default="RTX 4090", help="cuda:0, or a card to simulate")
    parser.add_argument("--shape", action="append", default=[], help="repeatable")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    server = Server(asked.name, asked.device, asked.shape, asked.journal)
    uvicorn.run(make_app(server), host=asked.host, port=asked.port)


if __name__ == "__main__":
    main()
