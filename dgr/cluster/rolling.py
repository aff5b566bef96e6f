"""Restarting the stages of a route one after another, under load."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from dgr.cluster.keeper import Keeper, Report
from dgr.cluster.occupancy import drain, open_asking
from dgr.errors import DgrError
from dgr.wire.frames import Drain

__all__ = ["restart_all"]

_log = logging.getLogger("dgr.up")

#: Seconds without work after which a session does not hold up the restart of a stage that others can replace.
_IDLE = 5
#: Seconds between two looks at a stage that came back.
_LOOK = 0.1


async def restart_all(keepers: Sequence[Keeper], *, replaceable: frozenset[str], settle: float, report: Report) -> None:
    """Restart stages, each only when the one before is ready and the route sessions it had are admitted there again.

    ``replaceable``: addresses of stages whose layers another stage has too; they are drained first. ``settle``: seconds for
    that, and for route sessions to come back and prefill again: a session is lost once for each restart, and bears few
    losses at a time. Pipelines may leave meanwhile, so what does not come back is not waited for any longer.
    """
    for keeper in keepers:
        address = keeper.ref.address
        report(keeper.ref, "restarting")
        if address in replaceable:
            try:
                await drain(address, keeper.policy, seconds=settle, idle=_IDLE)
            except DgrError as error:
                _log.warning("stage %s is restarted with sessions on it: %s", address, error)
        before = await _routes(keeper)
        await keeper.restart()
        with trio.move_on_after(settle) as patience:
            await _come_back(keeper, before)
        if patience.cancelled_caught:
            _log.warning(
                "not all of the %d route sessions that stage %s had came back in %g s", before, address, settle
            )
        report(keeper.ref, "live", routes=await _routes(keeper))


async def _routes(keeper: Keeper) -> int:
    """Route sessions that are admitted on a stage now; 0 when it does not say."""
    try:
        async with open_asking(keeper.ref.address, keeper.policy, "dgr up") as ask:
            return (await ask(Drain(None))).routes
    except DgrError:
        return 0


async def _come_back(keeper: Keeper, routes: int) -> None:
    """Wait until as many route sessions are admitted, and none of their sessions is being prefilled for a while."""
    calm = 0
    while calm < 3:
        await trio.sleep(_LOOK)
        try:
            async with open_asking(keeper.ref.address, keeper.policy, "dgr up") as ask:
                while calm < 3:
                    seen = await ask(Drain(None))
                    calm = calm + 1 if seen.routes >= routes and not seen.prefilling else 0
                    await trio.sleep(_LOOK)
        except DgrError as error:
            calm = 0
            _log.debug("stage %s does not say how it is: %s", keeper.ref.address, error)
