import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from springtide.randomness import seed_part


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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_seeded_once_it_is_in_use() -> None:
    torch.cuda.init()
    seed_part(0, 0, 0)
    first = torch.rand(3, device="cuda")
    seed_part(0, 0, 1)
    assert not torch.equal(torch.rand(3, device="cuda"), first)
    seed_part(0, 0, 0)
    assert torch.equal(torch.rand(3, device="cuda"), first)
