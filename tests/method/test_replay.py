"""The replay against loops over whole lives, truncations and wrap-arounds."""

import numpy as np
import pytest
import torch

import spirl_rainbow as spirl

S, N, GAMMA = 4, 5, 0.9


def play(replay, steps, seed):
    """Fill the replay with made-up games, and keep every frame ever appended in a plain list, in order: a dict with
    what the replay was told. A frame is its own number."""
    rng, history = np.random.default_rng(seed), []

    def append(starts):
        frame, count = float(len(history)), int(rng.integers(1, 4))
        history.append({"frame": frame, "count": count, "starts": starts, "action": None, "ended": False})
        replay.append(torch.full((3, 2), frame), count, starts)

    starts = True
    for _ in range(steps):
        append(starts)
        what = rng.choice(["goes on", "ends", "is cut off"], p=[0.85, 0.1, 0.05])
        action, reward, ended = int(rng.integers(6)), float(rng.integers(-1, 2)), what == "ends"
        history[-1] |= {"action": action, "reward": reward, "ended": ended}
        replay.complete(action, reward, ended)
        starts = what != "goes on"
        if what == "is cut off":
            append(starts=False)  # the game's last frame, on which no action is taken
            replay.truncate()
    if history[-1]["action"] is None:  # one more frame, so that the truncation is a fact of the past
        append(starts=True)
    return history


def oracle_stack(history, t):
    """The S frames that end at t as (frame, count), blank (None, 0) before the life's first."""
    stack, blank = [], False
    for k in range(S):
        stack.insert(0, (None, 0) if blank else (history[t - k]["frame"], history[t - k]["count"]))
        blank = blank or history[t - k]["starts"]
    return stack


def oracle_return(history, t):
    """(return, discount, m) of the transition at t, or None while its m is not known."""
    total = 0.0
    for m in range(N):
        at = history[t + m]
        if at["action"] is None:  # the last frame of a truncated game, or the newest of all
            return (total, GAMMA**m, m) if t + m + 1 < len(history) else None
        total += GAMMA**m * at["reward"]
        if at["ended"]:
            return total, 0.0, m + 1
        if t + m + 1 == len(history):
            return None
    return total, GAMMA**N, N


@pytest.mark.parametrize("capacity, steps", [(64, 40), (64, 63), (64, 64), (64, 65), (64, 300), (40, 1000)])
def test_stacks_and_returns_against_loops(capacity, steps):
    replay = spirl.Replay(capacity, (3, 2), torch.float16, "cpu", S, N, GAMMA)
    history = play(replay, steps, seed=steps)
    first = max(0, len(history) - capacity)  # the oldest that is still in the ring
    sampled = 0
    for t in range(first, len(history)):
        slot = torch.tensor([t % capacity])
        reaches = t  # the oldest frame of its stack
        while t - reaches < S - 1 and not history[reaches]["starts"]:
            reaches -= 1
        known = oracle_return(history, t) if history[t]["action"] is not None else None
        assert (replay.priorities[slot] > 0).item() == (known is not None and reaches >= first), t
        if reaches >= first:
            frames, counts = replay.stacks(slot)
            for got, count, (frame, expected) in zip(frames[0], counts[0].tolist(), oracle_stack(history, t)):
                assert count == expected and (expected == 0 or (got == frame).all())
        if replay.priorities[slot] > 0:
            sampled += 1
            action, total, discount, after = replay.returns(slot)
            assert action.item() == history[t]["action"]
            assert total.item() == pytest.approx(known[0], abs=1e-6)
            assert discount.item() == pytest.approx(known[1])
            if known[1]:
                assert after.item() == (t + known[2]) % capacity
    assert sampled > 20


@pytest.mark.parametrize("capacity, n_step", [(56, 20), (57, 5), (64, 20), (77, 3), (100, 20), (131, 20)])
def test_wrap_around_with_lives_about_as_long_as_the_ring_against_the_whole_history(capacity, n_step):
    """Each stack that can be drawn, at every moment of several laps, is that of the history; and a slot cannot be drawn
    only where its return is not known or a place of its stack has a newer frame of its life or none of its own."""
    rng = np.random.default_rng(capacity)
    replay = spirl.Replay(capacity, (1,), torch.float32, "cpu", S, n_step, GAMMA)
    history, life, rest, drawable, spared = [], -1, 0, 0, 0
    for t in range(7 * capacity):
        starts = rest == 0
        if starts:
            life += 1
            rest = int(rng.choice([3, capacity - 3, capacity - 2, capacity - 1, capacity, capacity + 1, 2 * capacity]))
        history.append(life)
        replay.append(torch.tensor([float(t)]), 1, starts)
        can_be_drawn = {slot for slot, priority in enumerate(replay.priorities.tolist()) if priority > 0}
        for slot in range(min(capacity, t + 1)):
            at = t - (t - slot) % capacity  # the number of the frame that the slot holds
            before = [at - k for k in range(1, S)]
            own = [k >= 0 and history[k] == history[at] for k in before]
            held = [t - (t - k) % capacity for k in before]  # the frames that are in those places now
            whole = all(
                k == there if mine else there < 0 or history[there] != history[at]
                for k, there, mine in zip(before, held, own)
            )
            known = at + n_step <= t or any(history[k] != history[at] for k in range(at + 1, t + 1))
            assert (slot in can_be_drawn) == (whole and known), (t, slot)
            spared += known and not whole
            if slot in can_be_drawn and (t % 7 == 0 or at - S < t - capacity):  # the oldest each time, all now and then
                frames, counts = replay.stacks(torch.tensor([slot]))
                assert counts[0].tolist() == [*reversed([int(mine) for mine in own]), 1]
                seen = [float(k) for k, mine in zip([at, *before], [True, *own]) if mine]
                assert frames[0][counts[0] > 0].flatten().tolist() == seen[::-1], (t, slot)
                drawable += 1
        rest -= 1
        replay.complete(0, 0.0, ended=rest == 0)
    assert drawable > 1000 and spared > 100


def filled(priorities):
    replay = spirl.Replay(len(priorities) + 10, (1,), torch.float32, "cpu", 1, 1, GAMMA)
    for t in range(len(priorities) + 1):
        replay.append(torch.tensor([float(t)]), 1, t == 0)
        if t < len(priorities):
            replay.complete(0, 0.0, False)
    replay.set_priorities(torch.arange(len(priorities)), torch.tensor(priorities))
    return replay


def test_sampling_frequencies_against_the_definition():
    """P(i) = p_i**alpha / sum_k p_k**alpha and w_i = (1/P(i))**beta / max w (Schaul et al. 2016, Eqs. 1 and 3.4)."""
    priorities = [0.0, 1e-3, 0.5, 2.0, 0.1, 30.0, 1.0, 0.7]
    replay = filled(priorities)
    masses = [max(p, 1e-6) ** 0.5 for p in priorities]
    P = [mass / sum(masses) for mass in masses]
    generator, counts, batches, B = torch.Generator().manual_seed(0), np.zeros(8), 2000, 16
    for _ in range(batches):
        slots, weights = replay.sample(B, 0.6, generator)
        drawn = [(1 / P[i]) ** 0.6 for i in slots.tolist()]
        assert weights.tolist() == pytest.approx([w / max(drawn) for w in drawn], rel=1e-5)
        counts += np.bincount(slots, minlength=8)
        for i in range(8):  # stratified: each share of the mass gives one, so a slot's number is nearly fixed
            assert abs((slots == i).sum().item() - B * P[i]) < 2
    expected = np.array(P) * batches * B
    assert (((counts - expected) ** 2 / expected)[1:].sum()) < 30  # chi-square; 7 degrees of freedom, p < 1e-4


def test_sampling_before_anything_can_be_drawn_gives_nan_and_not_a_number_to_learn_from():
    replay = spirl.Replay(64, (1,), torch.float32, "cpu", S, N, GAMMA)
    for t in range(N):
        replay.append(torch.zeros(1), 1, t == 0)
        replay.complete(0, 0.0, False)
    assert replay.sample(2, 0.5, torch.Generator())[1].isnan().all()
    replay.append(torch.zeros(1), 1, False)
    assert replay.sample(2, 0.5, torch.Generator())[0].tolist() == [0, 0]


def test_an_empty_slot_that_is_drawn_counts_for_nothing_and_stays_empty(monkeypatch):
    """Sums round otherwise on a GPU and may draw one: here the search is made to."""
    replay = spirl.Replay(40, (3, 2), torch.float32, "cpu", S, N, GAMMA)
    play(replay, 30, 3)
    empty = int((replay.priorities == 0).nonzero()[-1])
    search = torch.searchsorted
    monkeypatch.setattr(
        torch, "searchsorted", lambda mass, at, **more: search(mass, at, **more).index_fill(0, torch.tensor([2]), empty)
    )
    slots, weights = replay.sample(8, 0.5, torch.Generator().manual_seed(0))
    assert slots[2] == empty and weights[2] == 0 and weights.max() == 1
    before = replay.max_priority.clone()
    replay.set_priorities(slots[2:3], torch.tensor([1e9]))
    assert replay.priorities[empty] == 0 and replay.max_priority == before
    replay.set_priorities(slots[:1], torch.tensor([1e9]))
    assert replay.priorities[slots[0]] == 1e9**0.5 == replay.max_priority


def test_new_slots_get_the_largest_priority_so_far():
    replay = filled([0.2, 9.0, 0.3])
    replay.complete(0, 0.0, False)
    replay.append(torch.zeros(1), 1, False)
    assert replay.priorities[3].item() == pytest.approx(3.0)  # 9 ** 0.5
    replay.set_priorities(torch.tensor([1]), torch.tensor([0.0]))
    assert replay.priorities[1].item() == pytest.approx(1e-3)  # at least 1e-6, to the power 0.5
    fresh = filled([0.5])
    assert fresh.max_priority.item() == 1.0  # at first 1


@pytest.mark.parametrize(
    "shape, dtype, limit",
    [
        ((28, 64), torch.float16, 0.5e9),  # SPIRL on Seaquest
        ((50, 64), torch.float16, 0.8e9),  # on Frostbite
        ((144, 64), torch.float16, 2e9),  # MAE-All
        ((84, 84), torch.uint8, 0.8e9),  # DE-Rainbow
    ],
)
def test_memory_of_a_100k_replay(shape, dtype, limit):
    tensors = [value for value in vars(spirl.Replay(100_000, shape, dtype, "cpu")).values() if torch.is_tensor(value)]
    assert sum(value.numel() * value.element_size() for value in tensors) < limit
