"""The dense and the tiled mask of packed blocks are one rule, and so are the kernels that apply them."""

import pytest
import torch
from tiny import tiny_assistant
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from lilicorr_hf import DFlashModel
from lilicorr_hf.training.blocks import TILE, PackedBlocks, pack_blocks


def random_rows(length: int, num_blocks: int, rows: int = 2, seed: int = 0):
    """Rows of up to three documents, unsorted anchors with the first and last token among them, dropped blocks."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (rows, length), generator=generator)
    positions = []
    for _ in range(rows):
        cuts = torch.randint(1, length, (2,), generator=generator).unique().tolist()
        pieces = zip([0, *cuts], [*cuts, length], strict=True)
        positions.append(torch.cat([torch.arange(end - start) for start, end in pieces]))
    anchors = torch.randint(0, length, (rows, num_blocks), generator=generator)
    anchors[0, :2] = torch.tensor([0, length - 1])
    keep = torch.rand(rows, num_blocks, generator=generator) > 0.2
    return ids, torch.stack(positions), anchors, keep


def packed(rows, block_size: int, tiled: bool) -> PackedBlocks:
    return pack_blocks(*rows, block_size, 63, tiled)


SIZES = [(5, 3, 4), (40, 9, 5), (200, 30, 7), (TILE, 16, 8), (3 * TILE + 1, 40, 16), (300, 3, 16)]


@pytest.mark.parametrize("length, num_blocks, block_size", SIZES[:3])
def test_a_block_sees_its_document_before_its_anchor_and_itself(length, num_blocks, block_size):
    rows = random_rows(length, num_blocks)
    _, positions, anchors, keep = rows
    mask = packed(rows, block_size, tiled=False).attention_mask
    documents = (positions == 0).cumsum(dim=1)
    expected = torch.zeros_like(mask)
    for row, block in keep.nonzero().tolist():
        queries = slice(block * block_size, (block + 1) * block_size)
        anchor = int(anchors[row, block])
        for key in range(anchor):
            expected[row, 0, queries, key] = documents[row, key] == documents[row, anchor]
        expected[row, 0, queries, length + block * block_size : length + (block + 1) * block_size] = True
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("length, num_blocks, block_size", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_tiles_are_those_of_the_dense_mask(length, num_blocks, block_size, seed):
    """Against torch's own, which asks the rule about every pair."""
    rows = random_rows(length, num_blocks, seed=seed)
    dense = packed(rows, block_size, tiled=False).attention_mask
    tiled = packed(rows, block_size, tiled=True).attention_mask
    b, _, queries, keys = dense.shape
    assert torch.equal(create_mask(tiled.mask_mod, b, 1, queries, keys, device="cpu"), dense)
    expected = create_block_mask(tiled.mask_mod, b, 1, queries, keys, device="cpu")
    assert tiled.shape == expected.shape == (b, 1, queries, keys)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(tiled, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(expected, f"{name}_num_blocks")), name
        listed = torch.arange(getattr(tiled, f"{name}_indices").shape[-1]) < counts.unsqueeze(-1)
        ours, theirs = (getattr(mask, f"{name}_indices")[listed] for mask in (tiled, expected))
        assert torch.equal(ours, theirs), name


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("length, num_blocks, block_size", [(40, 9, 5), (200, 30, 7)])
def test_flex_attention_and_sdpa_give_the_same_states(length, num_blocks, block_size, autocast):
    """Forward only: flex attention has no backward pass on CPUs."""
    model = tiny_assistant(0, DFlashModel, block_size=block_size)
    rows = random_rows(length, num_blocks)
    torch.manual_seed(0)
    inputs = torch.randn(2, num_blocks * block_size, 32), torch.randn(2, length, 64)
    states = []
    for tiled in (False, True):
        blocks = packed(rows, block_size, tiled)
        options = {"attention_mask": blocks.attention_mask, "position_ids": blocks.position_ids}
        with torch.autocast("cpu", enabled=autocast), torch.compiler.set_stance("force_eager"):
            hidden = model(*inputs, **options).last_hidden_state
        states.append(hidden.unflatten(1, (num_blocks, block_size))[rows[-1]].float())
    tolerance = 0.05 if autocast else 1e-5
    torch.testing.assert_close(*states, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_ready_made_masks_do_not_depend_on_the_configured_attention():
    """An eager model would add a boolean mask to its scores."""
    rows = random_rows(40, 9)
    torch.manual_seed(0)
    inputs = torch.randn(2, 45, 32), torch.randn(2, 40, 64)
    model = tiny_assistant(0, DFlashModel)
    states = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        blocks = packed(rows, 5, tiled=False)
        options = {"attention_mask": blocks.attention_mask, "position_ids": blocks.position_ids}
        states.append(model(*inputs, **options).last_hidden_state)
    assert torch.equal(*states)


@pytest.mark.gpu
def test_gradients_through_flex_attention_are_those_through_sdpa():
    rows = [tensor.cuda() for tensor in random_rows(200, 30)]
    torch.manual_seed(0)
    inputs = torch.randn(2, 30 * 16, 32).cuda(), torch.randn(2, 200, 64).cuda()
    direction = torch.randn(int(rows[-1].sum()), 16, 32).cuda()
    gradients = []
    for tiled in (False, True):
        model = tiny_assistant(0, DFlashModel, block_size=16, head_dim=16).cuda()
        blocks = packed(rows, 16, tiled)
        options = {"attention_mask": blocks.attention_mask, "position_ids": blocks.position_ids}
        hidden = model(*inputs, **options).last_hidden_state.unflatten(1, (30, 16))
        (hidden[rows[-1]] * direction).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                self.bytes = max(self.bytes, output.untyped_storage().nbytes())
        return outputs


def test_tiled_mask_of_long_rows_never_exists_densely():
    """16 rows of 512 blocks of 16 over 3072 tokens: the dense mask takes 1.5 GB."""
    rows = random_rows(3072, 512, rows=16)
    with LargestTensor() as largest:
        mask = packed(rows, 16, tiled=True).attention_mask
    assert mask.shape == (16, 1, 8192, 11264)
    assert largest.bytes < 0.01 * mask.numel()
