"""The agent's network and learning step: equations in loops, invariances, and a problem whose best value is known."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch

import spirl_rainbow as spirl

TRUNKS = [(padding, pooling) for padding in ("zero", "token", "mask") for pooling in ("cls", "mean")]
each_trunk = pytest.mark.parametrize("padding, pooling", TRUNKS)


def made_up(B=3, L=6, D=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, L + 1, (B, 4), generator=generator)
    counts[0, 0], counts[0, 1] = 0, L  # a blank and a full frame
    return torch.randn(B, 4, L, D, generator=generator), counts


def trunk_of(padding, pooling, scale=1.0):
    torch.manual_seed(1)
    trunk = spirl.SalientPatchTransformer(padding=padding, pooling=pooling)
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(torch.randn_like(p) * 0.1 * scale)
    return trunk


def oracle_trunk(trunk, frame, count, padding, pooling):
    """o_t of one frame: projection, LN, attention with keys and values written out, LN, MLP; no residuals.

    And the attention behind it, averaged over the heads: a row for each token that o_t is made of, [cls] first in it.
    """
    rows = [trunk.cls_token[0, 0]]
    for n in range(len(frame)):
        patch = frame[n]
        if n >= count:
            patch = trunk.pad if padding == "token" else torch.zeros(64)
        if n < count or padding != "mask":
            rows.append(trunk.project(patch))
    X = [trunk.block.norm1(row) for row in rows]
    Q, K, V = zip(*(trunk.block.attn.qkv(x).split(32) for x in X))
    d, outputs, attention = 4, [], []
    for i in range(len(X)):
        heads, looked = [], [0.0] * len(X)
        for h in range(8):
            part = slice(h * d, h * d + d)
            scores = [math.exp((Q[i][part] @ k[part]).item() / math.sqrt(d)) for k in K]
            heads.append(sum(s / sum(scores) * v[part] for s, v in zip(scores, V)))
            looked = [total + s / sum(scores) / 8 for total, s in zip(looked, scores)]
        attention.append(looked)
        x = trunk.block.norm2(trunk.block.attn.proj(torch.cat(heads)))
        outputs.append(trunk.block.mlp.fc2(torch.nn.functional.gelu(trunk.block.mlp.fc1(x))))
    if pooling == "cls":
        return outputs[0], attention[:1]
    return sum(outputs[1:]) / (len(outputs) - 1) if len(outputs) > 1 else torch.zeros(32), attention[1:]


@each_trunk
def test_the_trunk_against_loops(padding, pooling):
    trunk = trunk_of(padding, pooling)
    embeddings, counts = made_up()
    with torch.no_grad():
        got = trunk(embeddings, counts)
        assert got.shape == (3, 128)
        for b in range(3):
            stack = [oracle_trunk(trunk, embeddings[b, f], counts[b, f], padding, pooling)[0] for f in range(4)]
            torch.testing.assert_close(got[b], torch.cat(stack), rtol=1e-4, atol=1e-5)


@each_trunk
def test_the_attended_patches_of_fig_6_against_loops(padding, pooling):
    trunk = trunk_of(padding, pooling, scale=5.0)  # it prefers some patches to others
    embeddings, counts = made_up(B=1)
    sizes = set()
    for k in (1, 2, 4, 5, 6):
        counts[0, 3] = k  # of the newest frame
        patch_ids = torch.randperm(36)[:6]
        with torch.no_grad():
            _, attention = oracle_trunk(trunk, embeddings[0, 3], k, padding, pooling)
        paid = [sum(row[1 + n] for row in attention) / len(attention) for n in range(k)]
        expected, mass = [], 0.0
        for n in sorted(range(k), key=lambda n: -paid[n]):
            if mass < 0.6 * sum(paid):  # the fewest with 60 %
                expected.append(int(patch_ids[n]))
                mass += paid[n]
        got = spirl.attended_patches(trunk, (embeddings, counts), patch_ids[None])
        assert got == (patch_ids[:k].tolist(), expected)
        sizes.add((k, len(expected)))
    assert any(1 < few < k for k, few in sizes)


def test_noisy_linear_against_the_definition():
    torch.manual_seed(0)
    layer = spirl.NoisyLinear(16, 9, sigma0=0.5)
    assert layer.weight_sigma.unique().item() == pytest.approx(0.5 / 4)  # sigma0 / sqrt(in)
    assert layer.bias_sigma.unique().item() == pytest.approx(0.5 / 3)  # sigma0 / sqrt(out)
    generator = torch.Generator().manual_seed(3)
    layer.resample_noise(generator)
    generator.manual_seed(3)
    e_in, e_out = torch.randn(16, generator=generator), torch.randn(9, generator=generator)
    f_in, f_out = (e.sign() * e.abs().sqrt() for e in (e_in, e_out))
    x, expected = torch.randn(5, 16), torch.zeros(5, 9)
    for b in range(5):
        for o in range(9):
            expected[b, o] = layer.bias_mu[o] + layer.bias_sigma[o] * f_out[o]
            for i in range(16):
                expected[b, o] += (layer.weight_mu[o, i] + layer.weight_sigma[o, i] * f_out[o] * f_in[i]) * x[b, i]
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    quiet = layer.eval()(x)
    layer.resample_noise()
    assert torch.equal(layer(x), quiet) and not torch.equal(layer.train()(x), quiet)


def test_the_network_is_dueling_and_its_trunk_gets_a_scaled_gradient():
    torch.manual_seed(0)
    network = spirl.RainbowNetwork(spirl.SalientPatchTransformer(), 128, 5).eval()
    state = made_up()
    log_probs = network(*state)
    assert log_probs.shape == (3, 5, 51)
    support = [-10 + 0.4 * i for i in range(51)]
    q = [[sum(p * z for p, z in zip(row, support)) for row in rows] for rows in log_probs.exp().tolist()]
    torch.testing.assert_close(network.q_values(*state), torch.tensor(q), rtol=1e-4, atol=1e-5)

    o = network.trunk(*state).detach()
    network.trunk = torch.nn.Identity()
    given = [o.clone().requires_grad_(True) for _ in range(2)]
    value = network.value_out(torch.relu(network.value_hidden(given[1])))[:, None]
    advantage = network.advantage_out(torch.relu(network.advantage_hidden(given[1]))).unflatten(1, (5, 51))
    outputs = network(given[0]), (value + advantage - advantage.mean(1, keepdim=True)).log_softmax(2)
    for out in outputs:
        (out * torch.arange(51)).sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])  # the values are untouched
    torch.testing.assert_close(given[0].grad, given[1].grad / math.sqrt(2), rtol=1e-4, atol=1e-6)


def oracle_projection(probabilities, reward, discount, support):
    """Algorithm 1 of Bellemare et al. 2017, for one transition."""
    Z = len(support)
    spacing = (support[-1] - support[0]) / (Z - 1)
    m = [0.0] * Z
    for j in range(Z):
        shifted = min(max(reward + discount * support[j], support[0]), support[-1])
        b = (shifted - support[0]) / spacing
        low, up = math.floor(b + 1e-6), math.ceil(b - 1e-6)  # an atom hit exactly, give or take its rounding
        if low == up:
            m[low] += probabilities[j]
        else:
            m[low] += probabilities[j] * (up - b)
            m[up] += probabilities[j] * (b - low)
    return m


def test_the_projection_against_algorithm_1():
    rng = np.random.default_rng(0)
    support = torch.linspace(-10, 10, 51)
    probabilities = torch.tensor(rng.dirichlet(np.full(51, 0.3), 40), dtype=torch.float32)
    returns = torch.tensor(rng.uniform(-12, 12, 40), dtype=torch.float32)
    discounts = torch.tensor(rng.choice([0.0, 0.99**20, 0.99, 1.0], 40), dtype=torch.float32)
    returns[:4] = torch.tensor([0.0, 0.4, 10.0, -10.0])  # exactly on an atom
    discounts[:4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    got = spirl.project_distribution(probabilities, returns, discounts, support)
    exact = [-10 + 0.4 * i for i in range(51)]
    transitions = zip(probabilities.tolist(), returns.tolist(), discounts.tolist())
    expected = [oracle_projection(p, r, d, exact) for p, r, d in transitions]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[0], probabilities[0], rtol=1e-4, atol=1e-5)  # nothing moves


def a_learner():
    """What `learn` works on: two networks, an optimiser, and a replay of made-up lives."""
    torch.manual_seed(0)
    online, target = (spirl.RainbowNetwork(spirl.SalientPatchTransformer(), 128, 4) for _ in range(2))
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, eps=1.5e-4, fused=True)
    replay = spirl.Replay(64, (3, 64), torch.float32, "cpu", 4, 3, 0.9)
    for t in range(40):
        replay.append(torch.randn(3, 64), int(torch.randint(4, ())), t in (0, 20))
        replay.complete(int(torch.randint(4, ())), float(torch.randint(-1, 2, ())), t == 19)
    return online, target, optimizer, replay


def an_update(limit=10.0):
    """What one call of `learn` must do, one transition at a time by the equations, and what it did: two dicts.

    The slots have unequal priorities, so unequal importance weights, and both networks a noise that is not the
    update's.
    """
    online, target, optimizer, replay = a_learner()
    known = (replay.priorities > 0).nonzero()[:, 0]
    replay.set_priorities(known, torch.linspace(0.1, 3.0, len(known)))
    generator = torch.Generator().manual_seed(5)
    slots, weights = replay.sample(8, 0.7, generator)  # what the update will draw
    online.resample_noise(generator)
    target.resample_noise(generator)
    noise = {name: value.clone() for name, value in target.named_buffers() if "noise" in name}
    actions, returns, discounts, after = replay.returns(slots)
    support, losses, unweighted, priorities = online.support.tolist(), [], [], {}
    with torch.no_grad():
        for b in range(8):
            now, then = replay.stacks(slots[b : b + 1]), replay.stacks(after[b : b + 1])
            best = int(online.q_values(*then)[0].argmax())
            judged = target(*then)[0, best].exp().tolist()
            goal = oracle_projection(judged, returns[b].item(), discounts[b].item(), support)
            prediction = online(*now)[0, actions[b]].tolist()
            kl = sum(m * (math.log(m) - log_p) for m, log_p in zip(goal, prediction) if m > 0)
            unweighted.append(kl)
            losses.append(weights[b].item() * kl)
            priorities[slots[b].item()] = max(kl, 1e-6) ** 0.5
    expected = {"loss": sum(losses) / 8, "unweighted": sum(unweighted) / 8, "priorities": priorities, "noise": noise}
    expected["before"] = {name: p.clone() for name, p in online.named_parameters()}
    online.resample_noise(torch.Generator().manual_seed(6))
    target.resample_noise(torch.Generator().manual_seed(7))
    args, generator = spirl.Args(batch_size=8, max_grad_norm=limit), torch.Generator().manual_seed(5)
    metrics = spirl.learn(args, online, target, optimizer, replay, 0.7, generator)
    return expected, {"metrics": metrics, "replay": replay, "online": online, "target": target, "weights": weights}


def test_the_loss_of_an_update_is_weighted_by_importance():
    expected, got = an_update()
    assert got["weights"].min() < 0.7 and got["weights"].max() == 1
    assert got["metrics"]["loss"].item() == pytest.approx(expected["loss"], rel=1e-4)
    assert expected["loss"] < 0.95 * expected["unweighted"]


def test_new_priorities_are_the_kl_before_it_is_weighted():
    expected, got = an_update()
    for slot, priority in expected["priorities"].items():
        assert got["replay"].priorities[slot].item() == pytest.approx(priority, rel=1e-3)


@pytest.mark.parametrize("limit", [10.0, 0.01])
def test_an_update_moves_every_parameter_clips_the_gradients_norm_and_draws_the_targets_noise(limit):
    expected, got = an_update(limit)
    online, norm = got["online"], got["metrics"]["grad_norm"].item()
    assert all(not torch.equal(p, expected["before"][name]) for name, p in online.named_parameters())
    clipped = math.sqrt(sum(p.grad.square().sum().item() for p in online.parameters()))
    assert clipped == pytest.approx(min(norm, limit), rel=1e-3)
    assert (norm > limit) == (limit == 0.01)  # clipped, and not
    buffers = dict(got["target"].named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in expected["noise"].items())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_to_be_seen(wrong):
    """`learn` does not look, since a look waits for a GPU; what main looks at before it saves does not heal."""
    online, target, optimizer, replay = a_learner()
    args, generator = spirl.Args(batch_size=40), torch.Generator().manual_seed(5)

    def update_and_look():
        spirl.learn(args, online, target, optimizer, replay, 0.7, generator)
        torch.nn.utils.clip_grad_norm_(online.parameters(), math.inf, error_if_nonfinite=True)  # main's look

    update_and_look()
    good = replay.frames[30].clone()
    replay.frames[30] = wrong
    for _ in range(3):
        with pytest.raises(RuntimeError, match="non-finite"):
            update_and_look()
        replay.frames[30] = good


LENGTH, KINDS, DISCOUNT = 4, 4, 0.9
BEST = sum(DISCOUNT**k for k in range(LENGTH))  # 3.439: one point a step until the corridor's end


def walk(steps, update):
    """A corridor of LENGTH rooms. A room shows two patches, in any order; the right action is which kind they are.

    It scores a point and leads on; a wrong one ends the life. So the best value of the first room is BEST. The stack
    tells which room it is: the rooms before the first are blank. Returns the value that the agent gives the first room
    and how many rooms it now passes when it acts without noise.
    """
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    kinds = torch.randn(KINDS, 2, 16)

    def room(kind):
        return torch.cat([kinds[kind][torch.randperm(2)], torch.zeros(1, 16)])

    trunk = spirl.SalientPatchTransformer(embed_dim=16, dim=16, heads=4)
    online = spirl.RainbowNetwork(trunk, LENGTH * 16, KINDS, hidden_size=64)
    target = deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4, fused=True)
    replay = spirl.Replay(1000, (3, 16), torch.float16, "cpu", LENGTH, 3, DISCOUNT)
    generator = torch.Generator().manual_seed(1)

    def best_action():
        with torch.no_grad():
            q = online.q_values(*replay.stacks(torch.tensor([replay.slot])))[0]
        return int(q.argmax()), q.max().item()

    values, passed, at, starts = [], [], 0, True
    for step in range(steps + 100):
        if step == steps:  # learned; now to be watched
            online.eval()
        kind = int(rng.integers(KINDS))
        replay.append(room(kind), 2, starts)
        action, value = best_action()
        if step < 200:
            action = int(rng.integers(KINDS))
        at = at + 1
        ends = action != kind or at == LENGTH
        if step >= steps and starts:
            values.append(value)
        if step >= steps and ends:
            passed.append(at - (action != kind))
        replay.complete(action, float(action == kind), ends)
        starts, at = ends, 0 if ends else at
        if update and 200 <= step < steps:
            spirl.learn(spirl.Args(), online, target, optimizer, replay, 0.6, generator)
            if step % 25 == 0:
                target.load_state_dict(online.state_dict())
    return np.mean(values), np.mean(passed)


def test_learning_reaches_the_best_value():
    value, passed = walk(steps=1600, update=True)
    assert passed > LENGTH - 0.2
    assert value == pytest.approx(BEST, rel=0.03)


def test_without_updates_nothing_is_learned():
    value, passed = walk(steps=300, update=False)
    assert passed < LENGTH / 2 and abs(value - BEST) > 0.3 * BEST
