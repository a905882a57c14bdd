"""The gradient of an embedding: every row is added once, those of other ranks never."""

import pytest
import torch

from megatron5d.kernels.embedding import COLUMNS, ROWS, accumulate_rows

pytestmark = pytest.mark.alike

IDS = torch.arange(40)
CASES = {
    "each once": IDS,
    "one for all": torch.full((3 * ROWS + 1,), 2),
    "one for exactly one block of rows": torch.full((ROWS,), 39),
    "other ranks'": torch.cat((IDS - 20, IDS + 25, torch.tensor([-1, 39, 40, 10**12, -(10**12)]))),
    "a few are frequent": torch.randint(0, 5, (70,)).square(),
    "none": torch.arange(0),
}


@pytest.mark.parametrize("width", [1, COLUMNS + 8])
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_added_once(name, width):
    ids, table = CASES[name].to(torch.get_default_device()), torch.randn(40, width)
    rows = torch.randn(len(ids), width).bfloat16()
    expected = table.double()
    for index, row in zip(ids.tolist(), rows.double()):
        if 0 <= index < 40:
            expected[index] += row
    accumulate_rows(table, ids, rows)
    torch.testing.assert_close(table.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_wider_matrix_into_narrow_gradients():
    ids, rows = torch.tensor([1, 0, 1, 7]), torch.randn(4, 2, 24).bfloat16()[:, 1]
    table = torch.ones(2, 24, dtype=torch.bfloat16)
    accumulate_rows(table, ids, rows)
    expected = 1 + torch.stack((rows[1].double(), rows[0].double() + rows[2].double()))
    torch.testing.assert_close(table, expected.bfloat16(), rtol=1e-2, atol=1e-2)
