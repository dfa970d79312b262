"""The key/value cache: one slot per application of the schedule, preallocated.

Shapes: B rows, H key/value heads, P positions, L new positions, K head size.
"""

import torch
from torch import Tensor

from hrmlm.errors import UserError


class KVCache:
    """Keys and values of every application for up to `max_length` positions of each row.

    Rows may hold different numbers of tokens. A row's tokens always stand at positions 0, 1, 2, … whatever its
    neighbours hold (right padding), so rows do not influence each other's positions. What lies behind a row's length is
    never read: attention lets a query see only positions up to its own.
    """

    def __init__(
        self,
        n_slots: int,
        batch_size: int,
        n_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (n_slots, batch_size, n_kv_heads, max_length, head_dim)
        # Zeros, not empty memory: a masked value is multiplied by weight 0, and 0 · NaN would be NaN.
        self.keys_SBHPK = torch.zeros(shape, dtype=dtype, device=device)
        self.values_SBHPK = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long)  # on the CPU: it steers Python code

    @property
    def n_slots(self) -> int:
        """Number of applications it has room for."""
        return self.keys_SBHPK.shape[0]

    @property
    def max_length(self) -> int:
        """Number of positions each row has room for."""
        return self.keys_SBHPK.shape[3]

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.keys_SBHPK.nbytes

    def reserve(self, n_new: int) -> Tensor:
        """Positions (B, L) at which the next `n_new` tokens of each row will stand.

        Raises: UserError if they do not fit.
        """
        needed = int(self.lengths_B.max()) + n_new
        if needed > self.max_length:
            raise UserError(f"the cache has room for {self.max_length} positions and {needed} are needed")
        return self.lengths_B[:, None] + torch.arange(n_new)

    def append(
        self, slot: int, positions_BL: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all stored ones up to the last new position, (B, H, P, K) each.

        rows: which rows of the cache these are (None: all, in order).
        """
        keys_BHPK, values_BHPK = self.keys_SBHPK[slot], self.values_SBHPK[slot]
        first, last = int(positions_BL.min()), int(positions_BL.max())
        if rows is not None:
            keys_BHPK[rows[:, None], :, positions_BL] = k_BHLK.transpose(1, 2).to(keys_BHPK.dtype)
            values_BHPK[rows[:, None], :, positions_BL] = v_BHLK.transpose(1, 2).to(values_BHPK.dtype)
            return keys_BHPK[rows, :, : last + 1], values_BHPK[rows, :, : last + 1]
        if last - first + 1 == positions_BL.shape[1]:  # all rows write the same positions: a plain copy
            keys_BHPK[:, :, first : last + 1] = k_BHLK
            values_BHPK[:, :, first : last + 1] = v_BHLK
        else:
            rows_B1 = torch.arange(positions_BL.shape[0])[:, None]
            keys_BHPK[rows_B1, :, positions_BL] = k_BHLK.transpose(1, 2).to(keys_BHPK.dtype)
            values_BHPK[rows_B1, :, positions_BL] = v_BHLK.transpose(1, 2).to(values_BHPK.dtype)
        return keys_BHPK[:, :, : last + 1], values_BHPK[:, :, : last + 1]

    def carry(self, positions_BL: Tensor, first_slot: int, stride: int, steps_BL: Tensor) -> None:
        """Copy keys and values of each position's last executed step to the slots of the steps it did not execute.

        Step s (from 1) owns the slots first_slot + (s − 1)·stride to first_slot + s·stride − 1, up to the last slot.
        """
        n_steps = (self.n_slots - first_slot) // stride
        for row, (positions, steps) in enumerate(zip(positions_BL.tolist(), steps_BL.tolist(), strict=True)):
            for done in set(steps) - {n_steps}:
                places = [position for position, step in zip(positions, steps, strict=True) if step == done]
                source = first_slot + (done - 1) * stride
                for tensor_SBHPK in (self.keys_SBHPK, self.values_SBHPK):
                    kept = tensor_SBHPK[source : source + stride, row][:, :, places]
                    rest = tensor_SBHPK[source + stride : first_slot + n_steps * stride, row]
                    rest.unflatten(0, (n_steps - done, stride))[:, :, :, places] = kept

    def crop(self, lengths_B: Tensor | int) -> None:
        """Forget what stands behind these lengths; rows that are shorter stay as they are."""
        self.lengths_B = torch.minimum(self.lengths_B, torch.as_tensor(lengths_B, dtype=torch.long))

    def select(self, rows: list[int] | Tensor) -> None:
        """Keep only these rows, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        self.keys_SBHPK = self.keys_SBHPK[:, rows.to(self.keys_SBHPK.device)]
        self.values_SBHPK = self.values_SBHPK[:, rows.to(self.values_SBHPK.device)]
        self.lengths_B = self.lengths_B[rows]
