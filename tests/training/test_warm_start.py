"""A drafter that starts from its target's last layers."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target

from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.training.warm_start import balance_head, start_from_target, warm_start


def test_layers_come_from_the_end_of_the_target():
    target, drafter = tiny_target("llama").float(), tiny_assistant()
    start_from_target(drafter, target, torch.randint(1, 64, (1, 50)))
    layers = target.model.layers
    for ours, theirs in zip(drafter.layers, layers[-2:], strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(ours.input_layernorm.weight, theirs.input_layernorm.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    # The context is the last tapped state, normalised.
    states = torch.randn(1, 3, 64)
    assert torch.equal(drafter.fc(states), states[..., 32:])


def test_norms_take_the_size_of_the_projections():
    """Query and key norms rescale to what the target's attention was used to."""
    target, drafter = tiny_target("llama").float(), tiny_assistant()
    ids = torch.randint(1, 64, (1, 200))
    start_from_target(drafter, target, ids)
    hidden = target.model(ids, output_hidden_states=True).hidden_states[2]
    layer = target.model.layers[2]
    keys = layer.self_attn.k_proj(layer.input_layernorm(hidden)).unflatten(-1, (-1, 8))
    normed = drafter.layers[0].self_attn.k_norm(keys)
    ratio = normed.pow(2).mean().sqrt() / keys.pow(2).mean().sqrt()
    assert 0.7 < ratio < 1.4


def test_other_geometry_is_named():
    target, drafter = tiny_target("llama").float(), tiny_assistant(intermediate_size=40)
    with pytest.raises(ValueError, match="mlp.gate_proj.*48.*40"):
        start_from_target(drafter, target, torch.randint(1, 64, (1, 20)))


def test_tokens_and_states_enter_the_head_at_one_size():
    target, model = tiny_target("llama").float(), tiny_assistant(head_hidden_size=64)
    tables = TargetTables(target)
    balance_head(model.lilicorr, tables.embed(torch.arange(64)), model.norm.weight)
    states = model.norm(torch.randn(500, 32))
    for term in (model.lilicorr.token_proj(tables.embed(torch.arange(64))), model.lilicorr.pass_hidden_proj(states)):
        assert 0.8 < term.pow(2).mean().sqrt() < 1.25


def test_only_what_is_new_is_started():
    target, model = tiny_target("llama").float(), tiny_assistant()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = {name for name in before if name.startswith("lilicorr.")}
    warm_start(model, head, target, torch.randint(1, 64, (1, 20)))
    changed = {name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])}
    assert changed and changed <= head
    warm_start(model, set(), target, torch.randint(1, 64, (1, 20)))
    assert changed == {name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])}
