import pytest
import torch


@pytest.fixture(autouse=True)
def _same_conditions_for_every_test() -> None:
    """Two threads, so that results and times do not depend on the machine's size; one seed, so that no test depends on
    another."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
