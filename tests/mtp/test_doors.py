"""Every way of asking for MTP is refused with a typed error that names the contract; a model with the block still runs."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import dgr
from dgr.artifact.artifact import Artifact
from dgr.cli import main
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.cluster.local import open_cluster
from dgr.cluster.route_file import read_route_file
from dgr.cluster.server import StageServer
from dgr.core.mtp import CONTRACT, asks_for_mtp, refuse_capabilities, refuse_value
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import StageIdentity
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.errors import ArtifactError, DgrError, InputError, InvalidRoute, MtpNotExecutable, PeerRefused
from dgr.gguf.reader import MetaValue, ValueType
from dgr.gguf.writer import u32
from dgr.protocol.identity import check_alike, check_wants
from dgr.selftest.fixture import edit_gguf, write_fixture
from dgr.stage.shard import open_shard
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.mtp_contract.golden import sample_messages
from dgr.testing.offline import open_fake_pipeline
from dgr.v4.hyper_parameters import ARCHITECTURE
from dgr.v4.mtp import Shipped, mtp_packaging, refuse_artifact
from dgr.wire.framing import decode_message
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import listen

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four main layers and the MTP block in one file."""
    path = tmp_path_factory.mktemp("doors") / "merged.gguf"
    write_fixture(path, preset="min", layers=4, mtp=True)
    return path


@pytest.fixture(scope="module")
def alone(merged: Path) -> Path:
    """As the MTP conversion writes it: the block, and the globals under root names; no main layer."""
    trunk = [name for name in Artifact.open(merged).file.tensors if re.match(r"blk\.[0-3]\.", name)]
    return edit_gguf(merged, merged.with_name("mtp-model.gguf"), drop=trunk)


def refuses(do: Callable[[], object], *words: str) -> str:
    """The message, which names the contract's version."""
    with pytest.raises(MtpNotExecutable) as caught:
        do()
    message = str(caught.value)
    assert CONTRACT in message
    assert isinstance(caught.value, InputError)
    for word in words:
        assert word in message
    return message


async def refuses_to_open(open_it: Callable[[], Any], *words: str) -> None:
    with pytest.raises(MtpNotExecutable, match=CONTRACT) as caught:
        async with open_it():
            raise AssertionError("it opened")
    for word in words:
        assert word in str(caught.value)


# --- command line ----------------------------------------------------------------------------------------------------

FLAGS = ("--mtp", "--mtp=3", "--draft", "--draft=4", "--draft-max=4", "--spec-type=draft-mtp", "--model-draft=m.gguf")
COMMANDS = {
    "generate": ["generate", "--model", "m.gguf", "--prompt", "x"],
    "generate on a route": ["generate", "--route", "r.toml", "--prompt", "x"],
    "logits": ["logits", "--model", "m.gguf", "--tokens", "t.i32", "--out", "o.f32"],
    "stage": ["stage", "m.gguf", "--layers", "0:4", "--listen", "127.0.0.1:0"],
    "up": ["up", "r.toml"],
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_is_refused(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMANDS[command], flag]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"dgr: error: the flag {flag.split('=')[0]} asks for multi-token prediction")
    assert CONTRACT in told.err
    assert told.err.count("\n") == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_before_a_positional_argument_is_refused_all_the_same(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = COMMANDS[command]
    for flags in (["--mtp"], ["--mtp", "2"], ["-md", "m.gguf"]):
        assert main([name, *flags, *rest]) == 2
        assert CONTRACT in capsys.readouterr().err


def test_help_says_that_the_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert f"executed ({CONTRACT})" in " ".join(capsys.readouterr().out.split())


# --- route files -----------------------------------------------------------------------------------------------------

ROUTE = '[[stage]]\naddress = "127.0.0.1:7701"\nlayers = "0:4"\n'


@pytest.mark.parametrize(
    "text",
    [
        "mtp = true\n" + ROUTE,
        "mtp = false\n" + ROUTE,
        'speculative = "draft-mtp"\n' + ROUTE,
        'draft_model = "mtp-model.gguf"\n' + ROUTE,
        "[mtp]\nn_max = 3\n" + ROUTE,
        "[context]\nn_draft = 3\n" + ROUTE,
        "[context]\nmtp = 0\n" + ROUTE,
        ROUTE + "mtp = true\n",
        ROUTE + "nextn_predict_layers = 1\n",
    ],
    ids=lambda text: text.replace(ROUTE, "…").strip().replace("\n", " "),
)
def test_a_key_of_a_route_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(text, encoding="utf-8")
    refuses(lambda: read_route_file(path), str(path))
    assert main(["generate", "--route", str(path), "--prompt", "x"]) == 2


def test_an_unknown_key_of_another_kind_is_still_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text("colour = 3\n" + ROUTE, encoding="utf-8")
    with pytest.raises(InvalidRoute, match="unknown key 'colour'"):
        read_route_file(path)


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, 0, 3, "draft-mtp", CONTRACT])
async def test_an_argument_is_refused_before_anything_is_read(value: object, tmp_path: Path) -> None:
    nowhere: Any = tmp_path / "nothing.gguf"
    asked: Any = {"mtp": value}
    await refuses_to_open(lambda: dgr.open_pipeline(nowhere, **asked), f"mtp = {value!r}")
    await refuses_to_open(lambda: dgr.open_route(nowhere, **asked), f"mtp = {value!r}")
    refuses(lambda: LlamaEngine(nowhere, **asked), f"mtp = {value!r}")
    refuse_value("mtp", None)


def test_an_argument_is_refused_from_asyncio_too(tmp_path: Path) -> None:
    import asyncio

    from dgr.serving import embed

    async def ask() -> None:
        async with embed.open_pipeline(tmp_path / "nothing.gguf", mtp=3):
            raise AssertionError("it opened")

    refuses(lambda: asyncio.run(ask()))


# --- handshakes ------------------------------------------------------------------------------------------------------


def stage(**changes: Any) -> StageIdentity:
    return replace(FakeEngine(LayerRange(0, 3)).describe(), **changes)


@pytest.mark.parametrize("name", ["mtp", "MTP", "mtp-contract/1", "mtp-contract/2", "nextn", "draft", "speculative/3"])
def test_a_wanted_capability_is_refused_by_every_name(name: str) -> None:
    for offered in ({"decode": "executable", "mtp": "reserved"}, {"decode": "executable", name: "executable"}):
        identity = stage(capabilities=offered)
        refuses(partial(check_wants, ("decode", name), identity), repr(name), "(executable: ")


def test_an_unknown_future_capability_is_refused() -> None:
    with pytest.raises(InvalidRoute, match=re.escape(CONTRACT)) as caught:
        check_wants(("telepathy",), stage())
    assert "capability 'telepathy' is unknown" in str(caught.value)
    check_wants(("decode",), stage())
    check_wants((), stage())


@pytest.mark.parametrize(
    "capabilities",
    [{"mtp": "executable"}, {"mtp": ""}, {"mtp-contract/1": "reserved"}, {"mtp-contract/2": "executable"}],
    ids=str,
)
def test_a_stage_that_offers_it_is_refused(capabilities: dict[str, str]) -> None:
    ours = stage()
    theirs = stage(capabilities={"decode": "executable", **capabilities})
    refuses(lambda: check_alike("stage x", theirs, ours), "stage x")
    refuses(lambda: refuse_capabilities(capabilities, "a stage"))
    check_alike("stage x", ours, ours)


class OffersMtp(FakeEngine):
    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "executable", "mtp": "executable"})


async def test_nothing_routes_a_stage_that_offers_it() -> None:
    """In one process too: the pipeline does not open over it, whatever the engine says it can do."""
    engine = OffersMtp()
    layers = engine.describe().layers
    async with open_cluster() as cluster:
        await cluster.start("only", engine)
        route = Route((StageRef("only", layers),))
        await refuses_to_open(lambda: dgr.open_pipeline_on(cluster.connect, route), "stage only", "'executable'")


def test_what_this_version_says_of_itself(merged: Path) -> None:
    engine = LlamaEngine(merged, context=dgr.ContextParams(n_ctx=256), certified_only=False)
    try:
        assert engine.describe().capabilities == {"decode": "executable", "fork": "executable", "mtp": "reserved"}
    finally:
        engine.stop()


async def test_an_engine_that_says_nothing_of_it_is_routed() -> None:
    """It is V4's to reserve; of another model nothing is demanded."""
    assert FakeEngine().describe().capabilities == {"decode": "executable", "fork": "executable"}
    async with open_fake_pipeline() as offline, offline.pipeline.session() as session:
        assert [token.id async for token in session.generate("x", max_tokens=2, stop=())]


@pytest.mark.parametrize("name", sample_messages())
def test_a_message_of_the_contract_is_no_frame(name: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.encode(sample_messages()[name]))


# --- artifacts -------------------------------------------------------------------------------------------------------


def test_a_file_of_the_block_alone_is_refused(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(lambda: Artifact.open(alone), str(alone), "no main layer")
    refuses(lambda: LlamaEngine(alone))
    refuses(lambda: estimate_memory(alone))
    for command in (["inspect", str(alone)], ["generate", "--model", str(alone), "--prompt", "x"]):
        assert main(command) == 2
        assert CONTRACT in capsys.readouterr().err


async def test_a_file_of_the_block_alone_opens_no_pipeline(alone: Path) -> None:
    await refuses_to_open(lambda: dgr.open_pipeline(alone, "0:2,2:4"))


@pytest.mark.parametrize("key", ["mtp", "draft_model", "speculative.type"])
def test_a_file_that_asks_for_it_is_refused(key: str, merged: Path, tmp_path: Path) -> None:
    name = f"{ARCHITECTURE}.dgr.{key}"
    path = edit_gguf(merged, tmp_path / "asks.gguf", keys={name: MetaValue(ValueType.BOOL, True)})
    refuses(lambda: Artifact.open(path), name)


def test_more_than_one_block_is_not_v4(merged: Path, tmp_path: Path) -> None:
    path = edit_gguf(merged, tmp_path / "two.gguf", keys={f"{ARCHITECTURE}.nextn_predict_layers": u32(2)})
    with pytest.raises(ArtifactError):
        Artifact.open(path).check(LayerRange(0, 3))


def test_how_a_block_is_shipped(merged: Path, alone: Path) -> None:
    names = set(Artifact.open(merged).tensors)
    assert mtp_packaging(names, 4) is Shipped.MERGED
    assert mtp_packaging({name for name in names if ".nextn." not in name}, 4) is Shipped.ABSENT
    assert mtp_packaging({name for name in names if not re.match(r"blk\.[0-3]\.", name)}, 4) is Shipped.ALONE
    refuse_artifact(alone, (), Shipped.MERGED)


def test_parts_that_are_elsewhere_are_not_taken_for_a_block_alone(merged: Path, tmp_path: Path) -> None:
    """The last part of a merged model holds the block; that the others are missing is another error."""
    first = Path(write_fixture(tmp_path / "parts.gguf", preset="min", layers=4, mtp=True, parts=4).path)
    for index in (2, 3):
        first.with_name(first.name.replace("00001", f"{index:05d}")).unlink()
    artifact = Artifact.open(first)
    assert any(".nextn." in name for name in artifact.located)
    with pytest.raises(ArtifactError, match="none of the parts"):
        artifact.check(LayerRange(0, 4))


def _keep(rows: list[bytes], _at: int, values: memoryview) -> None:
    rows.append(bytes(values))


async def test_a_model_with_the_block_runs_without_it(merged: Path, tmp_path: Path) -> None:
    """The same bits as the model without the block: it is neither loaded nor run."""
    plain = tmp_path / "plain.gguf"
    write_fixture(plain, preset="min", layers=4)
    context = dgr.ContextParams(n_ctx=256, numerics=dgr.Numerics.NATIVE)
    found = []
    for path, split in ((merged, None), (merged, "0:2,2:4"), (plain, None)):
        rows: list[bytes] = []
        async with dgr.open_pipeline(path, split, context=context) as pipeline, pipeline.session() as session:
            await session.logits([5, 17, 3, 9, 44], partial(_keep, rows))
        found.append(b"".join(rows))
    assert found[0] == found[1] == found[2]
    assert estimate_memory(merged).weights == estimate_memory(plain).weights


def test_inspect_says_that_the_block_is_ignored(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(merged)]) == 0
    text = capsys.readouterr().out
    assert "4 + 1 MTP block (reserved, never run)" in text
    assert f"ignored: stages load and run the main layers alone ({CONTRACT})" in text
    assert main(["inspect", str(merged), "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["mtp"] == {"blocks": 1, "status": "reserved", "contract": CONTRACT}
    assert main(["inspect", "v4-flash"]) == 0
    assert "ignored" not in capsys.readouterr().out


# --- no switch -------------------------------------------------------------------------------------------------------


def sources(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".c", ".in", ".txt", ".map") and path.is_file():
                yield path, path.read_text(encoding="utf-8")


def test_native_code_never_loads_the_block() -> None:
    """``load_mtp`` is set in one place, to false; no MTP context is made, and no rollback plane asked for."""
    found = [(path.name, line.strip()) for path, text in sources("cffi_build") for line in text.splitlines()]
    assigned = [" ".join(line.split()) for _, line in found if re.search(r"\bload_mtp\b", line)]
    assert assigned == ["mp.load_mtp = false;"]
    code = "\n".join(line for _, line in found)
    for word in ("CONTEXT_TYPE_MTP", "ctx_type", "n_rs_seq", "common_speculative", "nextn_layer_offset"):
        assert word not in code, word


def test_our_patches_never_turn_it_on() -> None:
    added = [
        line
        for patch in sorted((REPOSITORY / "vendor" / "llama.cpp" / "patches").glob("*.patch"))
        for line in patch.read_text(encoding="utf-8").splitlines()
        if line.startswith("+") and "load_mtp" in line
    ]
    assert added, "the patch keeps the loader's own condition"
    assert not any(re.search(r"load_mtp\s*=\s*true", line) for line in added)
    assert any("const bool load_mtp = ml.load_mtp && hparams.dgr_is_tail();" in line for line in added)


def _code_of(text: str) -> str:
    """Python without comments and strings."""
    kept = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if not tokenize.tok_name[token.type].startswith(("COMMENT", "STRING", "FSTRING"))
    ]
    return " ".join(kept)


#: Identifiers by which what runs may speak of MTP: all of them refuse it, or say that it is refused.
_REFUSING = {"mtp", "asks_for_mtp", "MtpNotExecutable"}


def test_no_python_code_sets_it() -> None:
    """No environment variable, no attribute, no native field: what runs speaks of MTP only to refuse it."""
    for path, text in sources("dgr"):
        if path.suffix != ".py":
            continue
        name, code = path.relative_to(REPOSITORY).as_posix(), _code_of(text)
        assert not re.search(r"environ[^\n]{0,40}(mtp|draft|spec)", code, re.IGNORECASE), name
        assert not re.search(r"load_mtp|n_rs_seq|ctx_type", code), name
        if re.match(r"dgr/(core/mtp|v4|artifact|testing|selftest/fixture)\b|dgr/cli/(inspect|fixture|plan)", name):
            continue  # values, which run nothing; and what only shows or writes them
        for harmless in ("refuse_value ( , mtp )", "mtp : None = None", "from dgr . core . mtp import"):
            code = code.replace(harmless, "")
        left = set(re.findall(r"\b\w*mtp\w*\b", code, re.IGNORECASE))
        assert left <= _REFUSING - {"mtp"}, (name, left)


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("mtp", True), ("MTP", True), ("n_mtp_layers", True), ("mtpContract", True), ("SpeculativeTokens", True),
        ("draft-n-max", True), ("nextn_predict_layers", True), ("speculation", True), ("model", False),
        ("numerics", False), ("spec", False), ("context", False), ("special", False), ("decode", False), ("", False),
    ],
)  # fmt: skip
def test_which_names_ask_for_it(name: str, asks: bool) -> None:
    assert asks_for_mtp(name) is asks


def test_the_error_is_one_of_the_tree() -> None:
    assert issubclass(MtpNotExecutable, DgrError)


# --- a real link -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", [("mtp",), ("decode", "mtp"), ("decode", "mtp-contract/2"), ("decode", "telepathy")])
async def test_a_stage_denies_a_link_that_wants_it(wants: tuple[str, ...]) -> None:
    """Over TCP: the stage says why and names the contract, serves on, and holds nothing."""
    policy = LinkPolicy()
    listeners = await listen("127.0.0.1:0", credentials=None)
    server = StageServer(policy)
    async with open_shard(FakeEngine(), server.dial, name="only") as shard, open_nursery() as nursery:
        await nursery.start(server.serve, shard, listeners)
        address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        with pytest.raises(PeerRefused, match=re.escape(CONTRACT)) as caught:
            async with RemoteConnector(policy, wants=wants)(address):
                raise AssertionError("it was let in")
        assert repr(wants[-1]) in str(caught.value)
        async with RemoteConnector(policy)(address) as (_, description):
            assert description.capabilities == {"decode": "executable", "fork": "executable"}
        assert shard.statistics().sessions == 0
        nursery.cancel_scope.cancel()
