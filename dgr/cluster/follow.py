"""A pipeline that follows its route file: whoever places stages writes where they are, and running clients go there."""

from __future__ import annotations

import logging

import trio

from dgr.client.pipeline import Pipeline
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.errors import DgrError
from dgr.protocol.threads import in_thread

__all__ = ["follow_route"]

_log = logging.getLogger("dgr.route")

#: Seconds between two looks at the file.
_EVERY = 1.0


async def follow_route(pipeline: Pipeline, file: RouteFile) -> None:
    """Change a pipeline's route and spares whenever its file names others, until cancelled.

    ``file``: what the pipeline was opened with. A file that cannot be read, or that the stages do not fit, changes nothing and
    is told of once; the next look may find a better one. Of what else stands in the file nothing is taken.
    """
    known, said = (file.route, file.spares), ""
    while True:
        await trio.sleep(_EVERY)
        try:
            found = await in_thread(lambda: read_route_file(file.path))
            if (found.route, found.spares) != known:
                await pipeline.change_route(found.route, found.spares)
                known, said = (found.route, found.spares), ""
                _log.info(
                    "the route is now %s", ", ".join(f"{ref.layers} at {ref.address}" for ref in found.route.stages)
                )
        except DgrError as error:
            if str(error) != said:
                said = str(error)
                _log.warning("%s names a route that cannot be taken: %s", file.path, said)
