import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from gpu_capabilities import needs_cuda

from springtide.train_step.randomness import isolated, seed_part


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def draw(seed: int, step: int, part: int) -> tuple[float, ...]:
    seed_part(seed, step, part)
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_part_that_is_done_again_draws_the_same_numbers() -> None:
    first = draw(1, 2, 3)
    draw(1, 3, 3)
    assert draw(1, 2, 3) == first


def test_seed_step_and_part_all_count_and_so_does_their_order() -> None:
    draws = [
        draw(*where)
        for where in [(1, 2, 3), (2, 1, 3), (1, 3, 2), (1, 2, 4), (0, 0, 0), (-1, 0, 0), (2**40, 0, 0)]
    ]
    for generator in range(3):
        assert len({values[generator] for values in draws}) == len(draws)


def test_what_a_device_draws_is_isolated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two make-believe devices, each with one number as its generator's state."""
    states = [torch.tensor([5]), torch.tensor([6])]

    def seed(value: int) -> None:
        states[:] = [torch.tensor([value]), torch.tensor([value])]

    def put_back(saved: Sequence[torch.Tensor]) -> None:
        states[:] = saved

    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed)
    with isolated(1, 2):
        assert [int(state) for state in states] == [5, 6], "no device is in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    inside = []
    for names in ((1, 2), (1, 2), (1, 3)):
        with isolated(*names):
            inside.append(int(states[0]))
            seed(99)  # something is drawn
        assert [int(state) for state in states] == [5, 6]
    assert inside[0] == inside[1] != inside[2]


@needs_cuda("random")
def test_cuda_is_seeded_once_it_is_in_use() -> None:
    torch.cuda.init()
    seed_part(0, 0, 0)
    first = torch.rand(3, device="cuda")
    seed_part(0, 0, 1)
    assert not torch.equal(torch.rand(3, device="cuda"), first)
    seed_part(0, 0, 0)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    with isolated(7):
        torch.rand(3, device="cuda")
    assert not torch.equal(torch.rand(3, device="cuda"), first)
    seed_part(0, 0, 0)
    with isolated(7):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), first)
