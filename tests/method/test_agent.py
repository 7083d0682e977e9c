"""The agent's network and learning step: equations in loops, and an update of which each number is known."""

import math
from itertools import product

import pytest
import torch
from test_mae import linear, oracle_block

import spirl_rainbow as spirl


def a_learner(patches=3, steps=40):
    """What `learn` works on: two networks, an optimiser, and a replay of made-up lives."""
    torch.manual_seed(3)
    online, target = (spirl.RainbowNetwork(spirl.SalientPatchTransformer(), 128, 4) for _ in range(2))
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, eps=1.5e-4, fused=True)
    replay = spirl.Replay(200, (patches, 64), torch.float32, "cpu", 4, 3, 0.9)
    for t in range(steps):
        replay.append(torch.randn(patches, 64), int(torch.randint(patches + 1, ())), t % 20 == 0)
        replay.complete(int(torch.randint(4, ())), float(torch.randint(-1, 2, ())), t % 20 == 19)
    return online, target, optimizer, replay


def oracle_trunk(trunk, patches, count, padding, pooling):
    """o_t of one frame (L, D): projection, then a layer without residuals; and the attention behind it, a row for each
    token that o_t is made of, with [cls] first."""
    tokens = [trunk.cls_token.flatten().tolist()]
    for n, patch in enumerate(patches):
        if n >= count:
            patch = trunk.pad if padding == "token" else torch.zeros(trunk.project.in_features)
        if n < count or padding != "mask":
            tokens.append(linear(patch.tolist(), trunk.project))
    outputs, attention = oracle_block(tokens, trunk.block, 4, residual=False)
    if pooling == "cls":
        return outputs[0], attention[:1]
    if len(outputs) == 1:  # no patch to average: a blank frame, masked
        return [0.0] * trunk.project.out_features, []
    return [sum(values) / len(values) for values in zip(*outputs[1:])], attention[1:]


@pytest.mark.parametrize("padding", ["zero", "token", "mask"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_trunk_and_the_attended_patches_of_fig_6_against_loops(padding, pooling):
    torch.manual_seed(1)
    trunk = spirl.SalientPatchTransformer(24, 16, 4, padding, pooling).requires_grad_(False)
    for p in trunk.parameters():  # so that it prefers some patches to others
        p.add_(torch.randn_like(p) * 0.5)
    embeddings, counts = torch.randn(3, 4, 6, 24), torch.randint(7, (3, 4))
    counts[0, :2] = torch.tensor([0, 6])  # a blank and a full frame
    frames = zip(embeddings.flatten(0, 1), counts.flatten())
    vectors = torch.tensor([oracle_trunk(trunk, *frame, padding, pooling)[0] for frame in frames])
    torch.testing.assert_close(trunk(embeddings, counts), vectors.view(3, 4 * 16), rtol=1e-4, atol=1e-5)

    for stack, k in product(embeddings, (1, 2, 4, 5, 6)):  # k patches in the newest frame
        patch_ids = torch.randperm(36)[:6]
        _, attention = oracle_trunk(trunk, stack[3], k, padding, pooling)
        paid = [sum(row[1 + n] for row in attention) / len(attention) for n in range(k)]
        order = sorted(range(k), key=lambda n: -paid[n])
        enough = (m for m in range(1, k + 1) if sum(paid[n] for n in order[:m]) >= 0.6 * sum(paid))
        expected = patch_ids[order[: next(enough)]].tolist()  # the fewest with 60 %
        got = spirl.attended_patches(trunk, (stack[None], torch.tensor([[6, 6, 6, k]])), patch_ids[None])
        assert got == (patch_ids[:k].tolist(), expected)


def test_noisy_linear_against_the_definition():
    torch.manual_seed(0)
    layer = spirl.NoisyLinear(16, 9, sigma0=0.5)
    assert layer.bias_sigma.unique().item() == pytest.approx(0.5 / 3)  # sigma0 / sqrt(out)
    generator = torch.Generator().manual_seed(3)
    layer.resample_noise(generator)
    generator.manual_seed(3)
    e_in, e_out = torch.randn(16, generator=generator), torch.randn(9, generator=generator)
    f_in, f_out = (e.sign() * e.abs().sqrt() for e in (e_in, e_out))
    x, expected = torch.randn(5, 16), torch.zeros(5, 9)
    for b, o in product(range(5), range(9)):
        expected[b, o] = layer.bias_mu[o] + layer.bias_sigma[o] * f_out[o]
        for i in range(16):
            expected[b, o] += (layer.weight_mu[o, i] + layer.weight_sigma[o, i] * f_out[o] * f_in[i]) * x[b, i]
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    quiet = layer.eval()(x)
    layer.resample_noise()
    assert torch.equal(layer(x), quiet) and not torch.equal(layer.train()(x), quiet)


def test_the_four_layers_of_the_head_begin_as_in_rainbow_each_with_noise_of_its_own():
    network = spirl.RainbowNetwork(torch.nn.Identity(), 128, 4, 200, 0.1, (-2, 8, 101))
    torch.testing.assert_close(network.support, -2 + torch.arange(101) / 10)
    network.resample_noise(torch.Generator().manual_seed(1))
    layers = [layer for layer in network.modules() if isinstance(layer, spirl.NoisyLinear)]
    assert [layer.weight_mu.shape for layer in layers] == [(200, 128), (101, 200), (200, 128), (404, 200)]
    for layer in layers:
        bound = layer.weight_mu.shape[1] ** -0.5
        assert layer.weight_sigma.unique().item() == pytest.approx(0.1 * bound)
        for mu in (layer.weight_mu, layer.bias_mu):
            assert -bound <= mu.min() < -0.8 * bound and 0.8 * bound < mu.max() <= bound
    noises = [noise for layer in layers for noise in (layer.noise_in, layer.noise_out)]
    assert len({noise[0].item() for noise in noises} - {0.0}) == 8


def test_the_network_is_dueling_and_its_trunk_gets_a_scaled_gradient():
    network, _, _, replay = a_learner()
    state = replay.stacks(torch.arange(10))
    q = network(*state).exp() @ (-10 + 0.4 * torch.arange(51))
    torch.testing.assert_close(network.q_values(*state), q, rtol=1e-4, atol=1e-5)

    o = network.trunk(*state).detach()
    network.trunk = torch.nn.Identity()
    given = [o.clone().requires_grad_(True) for _ in range(2)]
    value = network.value_out(torch.relu(network.value_hidden(given[1])))
    advantages = network.advantage_out(torch.relu(network.advantage_hidden(given[1]))).split(51, 1)  # one an action
    logits = [value + advantage - sum(advantages) / 4 for advantage in advantages]
    outputs = network(given[0]), torch.stack([row.log_softmax(1) for row in logits], 1)
    for out in outputs:
        (out * torch.arange(51)).sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])  # the values are untouched
    torch.testing.assert_close(given[0].grad, given[1].grad / math.sqrt(2), rtol=1e-4, atol=1e-6)


def oracle_projection(probabilities, reward, discount, support):
    """Eq. (7) of Bellemare et al. 2017, for one transition: what each atom gets of each shifted atom's mass."""
    spacing = (support[-1] - support[0]) / (len(support) - 1)
    m = [0.0] * len(support)
    for i, atom in enumerate(support):
        for probability, z in zip(probabilities, support):
            shifted = min(max(reward + discount * z, support[0]), support[-1])
            m[i] += max(0, 1 - abs(shifted - atom) / spacing) * probability
    return m


def test_the_projection_against_loops():
    torch.manual_seed(0)
    support = torch.linspace(-10, 10, 51)
    probabilities = torch.randn(40, 51).softmax(1)
    returns = torch.empty(40).uniform_(-12, 12)
    discounts = torch.tensor([0.0, 0.99**20, 0.99, 1.0])[torch.randint(4, (40,))]
    returns[:4] = torch.tensor([0.0, 0.4, 10.0, -10.0])  # exactly on an atom
    discounts[:4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    got = spirl.project_distribution(probabilities, returns, discounts, support)
    transitions = zip(probabilities.tolist(), returns.tolist(), discounts.tolist())
    expected = [oracle_projection(*transition, support.tolist()) for transition in transitions]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [10.0, 0.01])
def test_an_update_is_weighted_by_importance_and_clipped_as_the_equations_say(limit):
    """Adam's first step with the clipped gradient of the loss. Slots have unequal priorities, so unequal importance
    weights, and before the update both networks have another noise, and gradients that are left over."""
    online, target, optimizer, replay = a_learner()
    known = (replay.priorities > 0).nonzero()[:, 0]
    replay.set_priorities(known, torch.linspace(0.1, 3.0, len(known)))
    generator = torch.Generator().manual_seed(5)
    slots, weights = replay.sample(8, 0.7, generator)  # what the update will draw
    online.resample_noise(generator)
    target.resample_noise(generator)
    actions, returns, discounts, next_slots = replay.returns(slots)
    support, kls, q_values = online.support.tolist(), [], []
    for b in range(8):
        state, next_state = replay.stacks(slots[b : b + 1]), replay.stacks(next_slots[b : b + 1])
        best = int(online.q_values(*next_state)[0].argmax())
        probabilities = target(*next_state)[0, best].exp().tolist()
        target_probs = oracle_projection(probabilities, returns[b].item(), discounts[b].item(), support)
        log_probs = online(*state)[0, actions[b]]
        q_values.append(online.q_values(*state)[0, actions[b]].item())
        kls.append(sum(m * (math.log(m) - log_p) for m, log_p in zip(target_probs, log_probs) if m > 0))
    loss = sum(weight * kl for weight, kl in zip(weights, kls)) / 8
    gradients = torch.autograd.grad(loss, list(online.parameters()))
    before = [p.detach().clone() for p in online.parameters()]

    online.resample_noise(torch.Generator().manual_seed(6))
    target.resample_noise(torch.Generator().manual_seed(7))
    for p in online.parameters():
        p.grad = torch.ones_like(p)
    args, generator = spirl.Args(batch_size=8, max_grad_norm=limit), torch.Generator().manual_seed(5)
    metrics = spirl.learn(args, online, target, optimizer, replay, 0.7, generator)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    assert (norm > limit) == (limit == 0.01)  # clipped, and not
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"].item() == pytest.approx(norm, rel=1e-3)
    assert metrics["q_values"].item() == pytest.approx(sum(q_values) / 8, rel=1e-3)
    for slot, kl in zip(slots, kls):  # p is the KL, not weighted
        assert replay.priorities[slot].item() == pytest.approx(max(kl.item(), 1e-6) ** 0.5, rel=1e-3)
    for p, old, g in zip(online.parameters(), before, gradients, strict=True):
        g = g * min(1, limit / norm)
        torch.testing.assert_close(p.grad, g, rtol=1e-2, atol=1e-5 * min(norm, limit))
        torch.testing.assert_close(p, old - 1e-4 * g / (g.abs() + 1.5e-4), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_stays_to_be_seen():
    """Once a gradient is not finite, all later ones are not: main, which looks before it saves, cannot miss it."""
    online, target, optimizer, replay = a_learner()
    args, generator = spirl.Args(batch_size=40), torch.Generator().manual_seed(5)
    good = replay.frames[30].clone()
    for frame, finite in ((good, True), (math.nan, False), (good, False)):
        replay.frames[30] = frame
        spirl.learn(args, online, target, optimizer, replay, 0.7, generator)
        assert all(p.grad.isfinite().all() for p in online.parameters()) == finite


def test_the_transformer_begins_with_pytorchs_weights_and_small_tokens():
    torch.manual_seed(0)
    trunk = spirl.SalientPatchTransformer(padding="token")
    for layer in (layer for layer in trunk.modules() if isinstance(layer, torch.nn.Linear)):
        bound = layer.in_features**-0.5
        assert all(0.9 * bound < p.abs().max() <= bound for p in layer.parameters()), layer
    tokens = torch.cat([trunk.cls_token.flatten(), trunk.pad])
    assert tokens.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_gradient_is_not_all_in_one_bias_where_slots_are_padded():
    """With zero biases padding would reach a LayerNorm as exact zeros, where its slope is 1000: nearly all of the
    gradient's norm would be in `project.bias`, and clipping would shrink the rest."""
    online, target, optimizer, replay = a_learner(patches=28, steps=150)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        spirl.learn(spirl.Args(), online, target, optimizer, replay, 0.4, generator)
    norms = {name: p.grad.norm().item() for name, p in online.named_parameters()}
    assert norms["trunk.project.bias"] < 0.5 * math.sqrt(sum(norm**2 for norm in norms.values()))
