"""A web service of your own around one Runtime: GET /stories?begin=... streams text.

`python examples/web_app.py --serve` serves; without it the app is asked once, in this process.
"""

import asyncio
import contextlib
import sys

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

import aprefetch


@contextlib.asynccontextmanager
async def lifespan(app):
    async with aprefetch.Runtime.open() as app.state.rt:  # one runtime for all requests
        yield


async def stories(request):
    begin = request.query_params.get("begin", "Once upon a time")

    async def text():
        yield begin
        async with request.app.state.rt.stream(begin, max_tokens=24, seed=1) as stream:
            async for event in stream:  # leaving early, as for a client that went, cancels
                yield event.text

    return StreamingResponse(text(), media_type="text/plain")


app = Starlette(routes=[Route("/stories", stories)], lifespan=lifespan)


async def ask():
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/stories",
        "headers": [],
        "query_string": b"",
    }
    async with lifespan(app):
        await app(scope, asyncio.Event().wait, show)


async def show(message):
    print(message.get("body", b"").decode(), end="")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        import uvicorn

        uvicorn.run(app)
    else:
        asyncio.run(ask())
