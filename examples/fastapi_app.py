"""dgr inside FastAPI under uvicorn: one pipeline, a bounded line, streams that end with their client.

python examples/fastapi_app.py build/demo.gguf          # asks itself twice and ends
python examples/fastapi_app.py build/demo.gguf 8000     # serves: curl -N '127.0.0.1:8000/complete?prompt=Once'
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx2
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from dgr import ContextParams
from dgr.errors import InputError, QueueFull
from dgr.serving import embed
from dgr.serving.engine import Job, ServingLimits


async def admitted(request: Request, prompt: str, max_tokens: int = 12) -> AsyncIterator[embed.EmbeddedAnswer]:
    """A place in the line until the response has ended, or its client has left."""
    serving: embed.EmbeddedServing = request.app.state.serving
    try:
        async with serving.admit(Job(await serving.encode(prompt), max_tokens), deadline=60) as answer:
            yield answer
    except QueueFull as full:
        raise HTTPException(429, str(full), {"Retry-After": f"{full.retry_after:.0f}"}) from None
    except InputError as error:
        raise HTTPException(400, str(error)) from None


async def complete(answer: Annotated[embed.EmbeddedAnswer, Depends(admitted)]) -> StreamingResponse:
    return StreamingResponse((token.text async for token in answer), media_type="text/plain")


def make_app(model: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context = ContextParams(n_ctx=1024, n_seq_max=2)
        async with (
            embed.open_pipeline(model, "0:22,22:43", context=context) as pipeline,
            pipeline.serving(ServingLimits(max_waiting=4)) as app.state.serving,
        ):
            yield

    app = FastAPI(lifespan=lifespan)
    app.get("/complete")(complete)
    return app


async def main(model: str, port: int) -> None:
    server = uvicorn.Server(uvicorn.Config(make_app(model), log_level="warning"))
    listening = socket.create_server(
        ("127.0.0.1", port)
    )  # who connects from now on is answered when the model is there
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    if not port:
        host, port = listening.getsockname()
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            prompts = "The quick brown fox", "Once upon a time"
            for reply in await asyncio.gather(*[client.get("/complete", params={"prompt": text}) for text in prompts]):
                print(reply.status_code, reply.text)
            print((await client.get("/complete", params={"prompt": "x", "max_tokens": 5000})).text)
        server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
