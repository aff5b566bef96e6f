"""`route.toml`: every key, and what is said of one that is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgr.cluster.route_file import RouteFile, format_route_file, read_route_file
from dgr.core.route import LayerRange, Route, StageRef
from dgr.engine.devices import Placement
from dgr.errors import InvalidRoute

STAGE = '[[stage]]\naddress = "10.0.0.1:7701"\nlayers = "0:22"\n'
WHOLE = f"""
artifact = "b5c9"
model = "models/model.gguf"

[context]
n_ctx = 8192
n_batch = 512
n_ubatch = 256
n_seq_max = 4
type_k = "f16"
flash_attn = true
numerics = "exact"

[tls]
ca = "keys/ca.pem"
certificate = "keys/client.pem"
key = "/etc/dgr/client.key"

{STAGE}
[[stage]]
address = "[::1]:7702"
layers = "22:43"
model = "slice.gguf"
metrics = "[::1]:9702"
device = "CUDA0, CUDA1"
gpu_layers = 20
"""


def test_every_key_is_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(WHOLE)
    stages = StageRef("10.0.0.1:7701", LayerRange(0, 22)), StageRef("[::1]:7702", LayerRange(22, 43))
    expected = RouteFile(
        path=path,
        route=Route(stages),
        context={
            "n_ctx": 8192, "n_batch": 512, "n_ubatch": 256, "n_seq_max": 4, "type_k": "f16", "flash_attn": True,
            "numerics": "exact",
        },
        artifact="b5c9",
        model=tmp_path / "models/model.gguf",
        tls=(tmp_path / "keys/ca.pem", tmp_path / "keys/client.pem", Path("/etc/dgr/client.key")),
        stage_models={"[::1]:7702": tmp_path / "slice.gguf"},
        stage_metrics={"[::1]:7702": "[::1]:9702"},
        stage_devices={"[::1]:7702": Placement(("CUDA0", "CUDA1"), 20)},
    )  # fmt: skip
    assert read_route_file(path) == expected


def test_a_stage_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(STAGE)
    file = read_route_file(path)
    assert (file.context, file.artifact, file.model, file.tls, file.stage_models) == ({}, None, None, None, {})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(WHOLE.replace("/etc/dgr", "keys"))
    file = read_route_file(path)
    path.write_text(format_route_file(file))
    assert read_route_file(path) == file


def test_another_stage_of_the_same_layers_is_a_spare_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(
        "".join(
            f'[[stage]]\naddress = "h:{port}"\nlayers = "{layers}"\nmetrics = "h:{port + 100}"\n'
            for port, layers in ((1, "0:22"), (2, "22:43"), (3, "0:22"), (4, "22:43"), (5, "0:22"))
        )
    )
    file = read_route_file(path)
    assert [ref.address for ref in file.route.stages] == ["h:1", "h:2"]
    assert [ref.address for ref in file.spares] == ["h:3", "h:4", "h:5"]
    assert [ref.address for ref in file.stages] == ["h:1", "h:3", "h:5", "h:2", "h:4"]
    assert file.stage_metrics["h:5"] == "h:105"
    file.route.check(43)
    path.write_text(format_route_file(file))
    again = read_route_file(path)
    assert (again.route, again.stages) == (file.route, file.stages)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (STAGE + STAGE, "[[stage]] 1: address '10.0.0.1:7701' is named twice"),
        ("", "names no [[stage]]"),
        ("stage = []", "names no [[stage]]"),
        ("[stage]\naddress = 'x'", "stage is {'address': 'x'}, but must be a list"),
        ("stage = [1]", "[[stage]] 0 must be a table with address and layers"),
        ("x = [", "is not TOML"),
        ("model = 7\n" + STAGE, "model is 7, but must be a str"),
        ("artifact = 7\n" + STAGE, "artifact is 7, but must be a str"),
        ("nodel = 'x'\n" + STAGE, "unknown key 'nodel'; known are artifact, model, context, tls, stage"),
        ("context = 7\n" + STAGE, "context is 7, but must be a dict"),
        ("tls = 7\n" + STAGE, "tls is 7, but must be a dict"),
        (STAGE.replace("address", "adress"), "[[stage]] 0: unknown key 'adress'; known are address, layers, model"),
        ('[[stage]]\nlayers = "0:22"', "[[stage]] 0 has no 'address'"),
        ('[[stage]]\naddress = "a:1"', "[[stage]] 0 has no 'layers'"),
        (STAGE.replace('"10.0.0.1:7701"', "7701"), "[[stage]] 0: address is 7701, but must be a str"),
        (STAGE.replace('"0:22"', "22"), "[[stage]] 0: layers is 22, but must be a str"),
        (STAGE.replace("0:22", "22"), "[[stage]] 0: layer range '22' is not of the form A:B"),
        (STAGE + STAGE.replace("0:22", "9:9"), "[[stage]] 1: layer range 9:9 is empty"),
        (STAGE + "model = 7", "[[stage]] 0: model is 7, but must be a str"),
        (STAGE + "device = 7", "[[stage]] 0: device is 7, but must be a str"),
        (STAGE + "device = 'GPU 1'", "[[stage]] 0: device 'GPU 1' is no name like CUDA0"),
        (STAGE + "gpu_layers = -1", "[[stage]] 0: gpu_layers is -1"),
        (STAGE + "[context]\nn_ctx = 8192.0", "[context]: n_ctx is 8192.0, but must be a int"),
        (STAGE + "[context]\nn_batch = true", "[context]: n_batch is True, but must be a int"),
        (STAGE + "[context]\nn_ubatch = '512'", "[context]: n_ubatch is '512', but must be a int"),
        (STAGE + "[context]\nn_seq_max = []", "[context]: n_seq_max is [], but must be a int"),
        (STAGE + "[context]\ntype_k = 1", "[context]: type_k is 1, but must be a str"),
        (STAGE + "[context]\nflash_attn = 1", "[context]: flash_attn is 1, but must be a bool"),
        (STAGE + "[context]\nnumerics = 1", "[context]: numerics is 1, but must be a str"),
        (STAGE + "[context]\nthreads = 1", "[context]: unknown key 'threads'; known are n_ctx, n_batch"),
        (STAGE + "[tls]\nca = 'a'\nkey = 'b'", "[tls] has no 'certificate'; give ca, certificate and key"),
        (STAGE + "[tls]\nca = 1", "[tls]: ca is 1, but must be a str"),
        (STAGE + "[tls]\ncert = 'a'", "[tls]: unknown key 'cert'; known are ca, certificate, key"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text(text)
    with pytest.raises(InvalidRoute) as caught:
        read_route_file(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRoute, match=r"cannot read .*none\.toml: No such file"):
        read_route_file(tmp_path / "none.toml")
    with pytest.raises(InvalidRoute, match="Is a directory"):
        read_route_file(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xfe\xfd")
    with pytest.raises(InvalidRoute, match="is not UTF-8"):
        read_route_file(binary)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_bytes(b"\xef\xbb\xbf" + STAGE.encode())
    assert read_route_file(path).route.stages == (StageRef("10.0.0.1:7701", LayerRange(0, 22)),)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (STAGE.encode("utf-16"), "is UTF-16, TOML is UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        ("\ufeff".encode("utf-16-be") + STAGE.encode("utf-16-be"), "is UTF-16"),
        ("# café".encode("latin-1"), "is not UTF-8, which TOML is"),
        (b"x = " + b"[" * 100_000, "is not TOML"),
        (b"x = " + b"9" * 10_000, "is not TOML"),
        (b"#" * (2 << 20), "is not a route file: it has more than 1048576 bytes"),
        (b'model = "a\\u0000b"\n' + STAGE.encode(), "model is 'a\\x00b'; no name has a NUL character"),
    ],
    ids=["utf-16", "utf-16-be", "latin-1", "deep", "long number", "large", "NUL"],
)
def test_bytes_that_are_no_route_file(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_bytes(data)
    with pytest.raises(InvalidRoute) as refused:
        read_route_file(path)
    assert said in str(refused.value)


def test_a_device_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(InvalidRoute, match="more than 1048576 bytes"):
        read_route_file("/dev/zero")


@pytest.mark.parametrize("field", ["model", "address"])
def test_a_name_that_is_not_utf8_cannot_be_written(field: str, tmp_path: Path) -> None:
    odd = os.fsdecode(b"m\xff")
    ref = StageRef(odd if field == "address" else "h:1", LayerRange(0, 22))
    model = tmp_path / (odd if field == "model" else "m")
    with pytest.raises(InvalidRoute, match=r"cannot name .*m\\udcff"):
        format_route_file(RouteFile(tmp_path / "r.toml", Route((ref,)), {}, model=model))
