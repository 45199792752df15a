import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm import codec

LIMIT = 1 << 30


def there_and_back(tree: Any) -> Any:
    """Through a packed buffer, as over the wire; checks that loose tensors give the same."""
    header, tensors = codec.flatten(tree)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
    packed = codec.pack(tensors)
    layout = codec.specs(header, LIMIT)
    assert codec.packed_size(layout) == packed.numel()
    assert all(spec.offset % codec.ALIGNMENT == 0 for spec in layout)
    received = codec.unpack(bytes(header), packed.clone())
    assert_same(codec.unflatten(header, tensors), received)
    return received


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(codec.as_bytes(a.detach().contiguous()), codec.as_bytes(b.contiguous()))
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, float | np.floating) and math.isnan(a):
        assert math.isnan(b)
    else:
        assert a == b


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none()
trees = st.recursive(
    scalars,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(keys, below, max_size=4)
        | st.dictionaries(keys, below, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(trees)
def test_any_tree_of_plain_values_comes_back_as_it_was(tree: Any) -> None:
    assert_same(tree, there_and_back(tree))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(codec.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)])
def test_tensors_of_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    dtype = codec.DTYPES[name]
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.int64).remainder(2 if name == "bool" else 120).to(torch.uint8)
    tensor = raw.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
    assert_same([tensor], there_and_back([tensor]))


def test_not_finite_numbers_and_the_sign_of_zero_survive() -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, -0.0], dtype=torch.bfloat16)
    tree = [math.inf, -math.inf, math.nan, -0.0, 1e-320, tensor]
    result = there_and_back(tree)
    assert_same(tree, result)
    assert math.copysign(1, result[3]) == -1


def test_views_that_are_not_contiguous_are_copied_in_order() -> None:
    base = torch.arange(24.0).view(4, 6)
    for view in (base.t(), base[:, ::2], base[1:, 2], base.expand(3, 4, 6), torch.tensor(2 + 3j).conj()):
        assert torch.equal(there_and_back(view), view)


def test_tensor_in_several_places_comes_back_as_one() -> None:
    shared, equal = torch.ones(3), torch.ones(3)
    result = there_and_back({"a": shared, "b": [shared, shared[:]], "c": equal, "d": shared[:2]})
    assert result["a"] is result["b"][0] is result["b"][1]
    assert result["a"] is not result["c"]
    result["a"].zero_()
    assert result["c"].tolist() == [1, 1, 1]
    assert result["d"].tolist() == [1, 1]


def test_the_containers_of_schedulers_keep_their_types() -> None:
    tree = {
        "counter": Counter({30: 2, 80: 1}),
        "default": defaultdict(list, {"a": [1]}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
    }
    result = there_and_back(tree)
    assert_same(tree, result)
    assert result["default"]["new"] == []


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "u2", "u8", "?", "c16", ">i4"])
def test_numpy_scalars_and_arrays(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    tree = {
        "scalar": array[1, 2],
        "array": array,
        "part": array.T[1:],
        "empty": array[:0],
        "none": array[0, 0] * 0,
    }
    result = there_and_back(tree)
    assert_same(tree, result)
    result["array"][0, 0] = 1  # memory of its own, and writable


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, list[Any]]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True, foreach=False)
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            ],
            [2],
        ),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ]
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(
                *([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
            )
    return model, optimizer, schedulers


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_state_dicts_of_models_optimizers_and_schedulers() -> None:
    model, optimizer, schedulers = trained()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [s.state_dict() for s in schedulers],
    }
    result = there_and_back(tree)
    assert_same({**tree, "model": dict(tree["model"])}, {**result, "model": dict(result["model"])})
    other, other_optimizer, other_schedulers = trained()
    other.load_state_dict(result["model"])
    other_optimizer.load_state_dict(result["optimizer"])
    for scheduler, state in zip(other_schedulers, result["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    again = codec.flatten(
        [other.state_dict(), other_optimizer.state_dict(), [s.state_dict() for s in other_schedulers]]
    )
    before = codec.flatten([model.state_dict(), optimizer.state_dict(), [s.state_dict() for s in schedulers]])
    assert torch.equal(codec.pack(again[1]), codec.pack(before[1]))


def test_the_sent_tensors_are_not_copied_and_the_packed_ones_are() -> None:
    tensor = torch.ones(3)
    _, tensors = codec.flatten(tensor)
    packed = codec.pack(tensors)
    tensor.zero_()
    assert tensors[0].tolist() == [0, 0, 0]
    assert packed.view(torch.float32).tolist() == [1, 1, 1]


class Unknown:
    pass


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"scheduler": {"foo": [1, 2, Unknown()]}}, r"scheduler\.foo\[2\]: .*Unknown cannot"),
        ({"a": {3: {"b c": (Unknown(),)}}}, r"a\[3\]\['b c'\]\[0\]: "),
        ({"f": lambda: 0}, r"f: builtins\.function"),
        ({"s": {1, 2}}, r"s: builtins\.set"),
        ({"c": 1j}, r"c: builtins\.complex"),
        ({"d": defaultdict(lambda: 0)}, r"d: a defaultdict of <function"),
        ({"n": np.array(["a"])}, r"n: numpy values of <U1"),
        ({"t": torch.eye(2).to_sparse()}, r"t: .*dense tensors, not torch\.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"m: .*dense tensors"),
        (Unknown(), r"^state: "),
        ({Unknown(): 1}, r"\(key .*Unknown"),
    ],
)
def test_what_is_no_state_is_refused_with_its_path(tree: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        codec.flatten(tree)


def test_the_name_of_the_tree_begins_the_path() -> None:
    with pytest.raises(TypeError, match=r"^tracked\.ema\[0\]: "):
        codec.flatten({"ema": [Unknown()]}, "tracked")


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(TypeError, match="does it contain itself"):
        codec.flatten(tree)


# ---- headers from a peer


def header(**change: Any) -> bytes:
    made, _ = codec.flatten({"a": torch.zeros(2, 3)})
    return json.dumps(json.loads(made) | change).encode()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "expected an object of version"),
        (header(more=1), "expected an object of version"),
        (header(version=2), "version 2, this process reads version 1"),
        (header(tensors=7), "tensors is no list"),
        (header(tensors=[["float32"]]), "tensor 0 is not described"),
        (header(tensors=[["float32", [2]], ["object", [1]]]), "tensor 1 has the unknown dtype 'object'"),
        (header(tensors=[[["float32"], [1]]]), "unknown dtype"),
        (header(tensors=[["float32", [-1]]]), "impossible shape"),
        (header(tensors=[["float32", [2.0]]]), "impossible shape"),
        (header(tensors=[["float32", [True]]]), "impossible shape"),
        (header(tensors=[["float32", [0, 1 << 40, 1 << 40]]]), "impossible shape"),
        (header(tensors=[["float32", [1] * 65]]), "impossible shape"),
        (header(tensors=[["float32", [1 << 40]]]), "more than the limit"),
        (
            header(tensors=[["float32", [1 << 27]], ["float32", [1 << 27]], ["uint8", [1]]]),
            "tensors 0..2 need",
        ),
    ],
)
def test_a_malformed_header_is_refused_before_memory_is_taken(data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        codec.specs(data, LIMIT)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 1},
        {"tensor": -1},
        {"tensor": True},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"default": [], "factory": "os.system"},
        {"float": "1e5"},
        {"bytes": "!!"},
        {"dtype": "save"},
        {"device": "nonsense"},
        {"scalar": {"index": 0, "dtype": "O"}},
        {"array": {"index": 0, "dtype": "f4", "shape": [7]}},
        {"nonsense": 1},
        {},
    ],
)
def test_a_malformed_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"^state header: malformed"):
        codec.unflatten(header(tree=tree), [torch.zeros(2, 3)])


def test_tensors_that_do_not_fit_the_header_are_refused() -> None:
    for tensors in ([], [torch.zeros(3, 2)], [torch.zeros(2, 3).double()], [torch.zeros(2, 3)] * 2):
        with pytest.raises(ValueError, match=r"does not fit the header|more than the limit"):
            codec.unflatten(header(), tensors)
    good = torch.zeros(24, dtype=torch.uint8)
    assert codec.unpack(header(), good)["a"].shape == (2, 3)
    for buffer in (good[:23], torch.zeros(25, dtype=torch.uint8), good.view(2, 12), good.view(torch.float32)):
        with pytest.raises(ValueError, match=r"the buffer has|packed buffer must be|more than the limit"):
            codec.unpack(header(), buffer)


def test_what_nobody_could_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_TENSORS", 3)
    tree = {"a": [torch.full((1,), float(n)) for n in range(3)]}
    assert codec.unflatten(*codec.flatten(tree))["a"][2] == 2.0
    with pytest.raises(TypeError, match="state: 4 tensors are more than the 3"):
        codec.flatten([tree, torch.ones(2)])


@pytest.mark.slow
def test_a_mixture_of_many_experts_comes_back() -> None:
    one = torch.ones(1)
    header, _ = codec.flatten([one])
    value = json.loads(header)
    value["tensors"] *= 200_000
    assert len(codec.specs(json.dumps(value).encode(), 1 << 40)) == 200_000
