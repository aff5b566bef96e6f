"""Decode runs between stages behind real sockets: the tail's own link to the head is greeted like any other."""

from __future__ import annotations

from cluster.remote_stages import PROMPT, THREE, TWO, Authority, Host, open_hosts, reference
from conversations import seen, take

from dgr.client.events import StateLost
from dgr.client.pipeline import Pipeline
from dgr.cluster.connect import LinkPolicy
from dgr.core.load import Side
from dgr.testing.waits import until


async def warm(pipeline: Pipeline, tail: Host, head: Host) -> None:
    """The tail has its link to the head."""
    async with pipeline.session() as session:
        await take(session.generate([1], max_tokens=2, ahead=1))
    await until(lambda: (tail.address, head.address) in tail.server.statistics().leaving)


async def test_a_run_goes_from_the_tail_to_the_head(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, middle, tail = await hosts.start_all(THREE)
        async with hosts.pipeline([head, middle, tail], ahead=5) as pipeline:
            await warm(pipeline, tail, head)
            events = pipeline.events()
            async with pipeline.session() as session:
                await session.prefill(PROMPT)
                before = head.server.statistics().traffic[Side.PIPELINE, ""].frames_received
                assert await take(session.generate([7], max_tokens=12)) == reference([*PROMPT, 7], 12)
                said = head.server.statistics().traffic[Side.PIPELINE, ""].frames_received - before
                assert said == 2, "two runs of a token and five further ones"
            assert not [event for event in seen(events) if isinstance(event, StateLost)]
        await hosts.assert_empty()


async def test_a_tail_that_dies_in_a_run_costs_a_prefill_and_no_token() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with hosts.pipeline([head, tail], ahead=40) as pipeline, pipeline.session() as session:
            await warm(pipeline, tail, head)
            answer = session.generate(PROMPT, max_tokens=30)
            said = await take(answer, 4)
            await hosts.restart(tail)
            assert said + await take(answer) == reference(PROMPT, 30)
        await hosts.assert_empty()


async def test_a_tail_whose_certificate_names_another_host_gets_no_link_to_the_head(authority: Authority) -> None:
    """Its pipeline reaches it by a name that its certificate has; the head knows it by another."""
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        head = await hosts.start("0:2")
        tail = await hosts.start("2:6", policy=authority.policy("127.0.0.1", "elsewhere.example"))
        dial = tail.server.dial

        async def under_another_name(own: str, successor: str) -> object:
            return await dial("10.9.9.9:7701", successor)

        tail.shard._dial = under_another_name  # type: ignore[assignment]
        async with hosts.pipeline([head, tail], ahead=5) as pipeline, pipeline.session() as session:
            assert await take(session.generate(PROMPT, max_tokens=8)) == reference(PROMPT, 8)
            assert not tail.server.statistics().leaving
            assert Side.PREVIOUS not in {side for side, _ in head.server.statistics().traffic}
