"""A nursery that is an implementation detail: it changes neither which error leaves nor what cancelling means."""

from __future__ import annotations

import traceback

import pytest
import trio
from trio.testing import MockClock

from dgr.errors import LinkBroken
from dgr.wire.nurseries import cancelled_first, open_nursery


class OurError(Exception):
    pass


async def fail(error: BaseException) -> None:
    raise error


async def run(*children: BaseException, block: BaseException | None = None, depth: int = 1) -> None:
    """Leave nested nurseries with errors of children and of the block itself."""
    async with open_nursery() as nursery:
        if depth > 1:
            await run(*children, block=block, depth=depth - 1)
        for child in children:
            nursery.start_soon(fail, child)
        if block is not None:
            raise block
        await trio.sleep_forever()


async def test_nothing_wrong_is_nothing_changed() -> None:
    done = []

    async def work() -> None:
        await trio.lowlevel.checkpoint()
        done.append(True)

    async with open_nursery() as nursery:
        nursery.start_soon(work)
    assert done == [True]


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_a_childs_lone_error_leaves_as_itself_with_a_clean_context(depth: int) -> None:
    error = OurError("child")
    with pytest.raises(OurError) as caught:
        await run(error, depth=depth)
    assert caught.value is error
    assert error.__context__ is None
    assert error.__cause__ is None
    told = "".join(traceback.format_exception(error))
    assert "Cancelled" not in told
    assert "Group" not in told


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_the_blocks_own_error_leaves_as_itself_and_keeps_what_it_came_of(depth: int) -> None:
    reason = KeyError("reason")
    try:
        raise OurError("block") from reason
    except OurError as error:
        blocks = error
    with pytest.raises(OurError) as caught:
        await run(block=blocks, depth=depth)
    assert caught.value is blocks
    assert blocks.__cause__ is reason


async def test_an_error_with_a_context_of_its_own_keeps_it() -> None:
    async def child() -> None:
        try:
            raise KeyError("reason")
        except KeyError:
            raise OurError("child")  # noqa: B904 (the context is what is tested)

    async def main() -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(child)
            await trio.sleep_forever()

    with pytest.raises(OurError) as caught:
        await main()
    assert isinstance(caught.value.__context__, KeyError)


async def test_a_nursery_opened_while_an_error_is_handled_does_not_blame_it() -> None:
    async def main() -> None:
        try:
            raise KeyError("handled")
        except KeyError:
            await run(OurError("child"))

    with pytest.raises(OurError) as caught:
        await main()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("inside", [True, False])
async def test_two_errors_leave_as_a_group(inside: bool) -> None:
    children: list[BaseException] = [OurError("one")]
    block = KeyError("two")
    if not inside:
        children.append(block)
    with pytest.raises(ExceptionGroup) as caught:
        await run(*children, block=block if inside else None)
    assert {type(error) for error in caught.value.exceptions} == {OurError, KeyError}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2])
async def test_a_group_that_the_block_raised_leaves_as_it_is(depth: int, size: int) -> None:
    group = ExceptionGroup("the caller's own", [OurError(f"{number}") for number in range(size)])
    inside = group.exceptions
    with pytest.raises(ExceptionGroup) as caught:
        await run(block=group, depth=depth)
    assert caught.value is group
    assert group.exceptions == inside


async def test_a_callers_own_nursery_keeps_its_meaning() -> None:
    async def main() -> None:
        async with open_nursery(), trio.open_nursery() as inner:
            inner.start_soon(fail, OurError("inner"))

    with pytest.raises(ExceptionGroup) as caught:
        await main()
    assert [type(error) for error in caught.value.exceptions] == [OurError]


async def test_start_hands_on_the_error_of_a_task_that_did_not_start() -> None:
    async def refuse(*, task_status: trio.TaskStatus[None]) -> None:
        raise OurError("not started")

    async with open_nursery() as nursery:
        with pytest.raises(OurError):
            await nursery.start(refuse)


async def test_an_outer_cancellation_is_caught_by_its_own_scope(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1) as scope:
        async with open_nursery(), open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(1)


async def test_an_inner_cancellation_ends_the_nursery_and_nothing_else(autojump_clock: MockClock) -> None:
    async with open_nursery() as outer:
        async with open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.cancel_scope.cancel()
        await trio.sleep(5)
        outer.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("beside", [0, 1, 3])
async def test_an_error_that_meets_a_cancellation_leaves_as_itself(
    autojump_clock: MockClock, depth: int, beside: int
) -> None:
    """A refusal may be on its way while whoever asked is being cancelled: ``except`` must still see it."""
    error = OurError("cleaning up")

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    async def nest(depth: int) -> None:
        async with open_nursery() as nursery:
            for _ in range(beside):
                nursery.start_soon(trio.sleep_forever)
            if depth:
                await nest(depth - 1)
            nursery.start_soon(fail_when_cancelled)
            await trio.sleep_forever()

    with trio.move_on_after(1) as scope:
        with pytest.raises(OurError) as caught:
            await nest(0)
        assert caught.value is error
        assert error.__context__ is None or isinstance(error.__context__, trio.Cancelled)
        await trio.lowlevel.checkpoint()  # whoever handled it hears of the cancellation again
    assert scope.cancelled_caught


async def test_several_errors_leave_without_the_cancellations_among_them(autojump_clock: MockClock) -> None:
    async def fail_when_cancelled(error: OurError) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    async def main() -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled, OurError("one"))
            nursery.start_soon(fail_when_cancelled, OurError("two"))
            await trio.sleep_forever()

    with trio.move_on_after(1), pytest.raises(ExceptionGroup) as caught:
        await main()
    assert sorted(str(error) for error in caught.value.exceptions) == ["one", "two"]


async def test_one_error_told_to_several_tasks_is_one_error() -> None:
    error = OurError("the link is gone")
    with pytest.raises(OurError) as caught:
        await run(error, error, error)
    assert caught.value is error


@pytest.mark.parametrize("cancelled", [True, False])
async def test_what_broke_gives_way_to_a_cancellation(cancelled: bool) -> None:
    with trio.CancelScope() as scope:
        if cancelled:
            scope.cancel()
        try:
            async with cancelled_first():
                raise LinkBroken("because we leave")
        except LinkBroken:
            assert not cancelled
            return
    assert cancelled
    assert scope.cancelled_caught


async def test_what_is_not_of_a_link_stays_what_it_is_beside_a_cancellation() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(OurError):
            async with cancelled_first():
                raise OurError("the caller's own")


async def test_a_deadline_inside_stays_a_too_slow_error(autojump_clock: MockClock) -> None:
    async def main() -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            with trio.fail_after(1):
                await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError):
        await main()


def test_an_interrupt_leaves_as_itself() -> None:
    with pytest.raises(KeyboardInterrupt):
        trio.run(run, KeyboardInterrupt())


def test_links_that_break_because_of_an_interrupt_do_not_hide_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        trio.run(run, KeyboardInterrupt(), LinkBroken("one"), LinkBroken("two"))
    with pytest.raises(BaseExceptionGroup):
        trio.run(run, KeyboardInterrupt(), OurError("the caller's own"))
