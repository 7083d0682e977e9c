"""The replay against loops over whole lives, truncations and wrap-arounds."""

import numpy as np
import pytest
import torch

import spirl_rainbow as spirl

S, GAMMA, ALPHA = 4, 0.9, 0.7


def play(replay, steps, seed):
    """Fill the replay with made-up games, some of their lives about as long as the ring. Each frame is filled with its
    number. Yields after each new one the list of what the replay was told of all."""
    rng, history, life = np.random.default_rng(seed), [], 0
    capacity = replay.capacity
    lengths = [1, 2, 3, 5, 8, capacity - 3, capacity - 2, capacity - 1, capacity, capacity + 1, 2 * capacity]

    def append(starts):
        count = int(rng.integers(1, 4))
        history.append({"life": life, "count": count, "action": None, "ended": False})
        replay.append(torch.full((3, 2), len(history) - 1.0), count, starts)

    while len(history) < steps:
        length, cut_off = int(rng.choice(lengths)), rng.random() < 0.3
        for t in range(length):
            append(starts=t == 0)
            yield history
            action, reward, ended = int(rng.integers(6)), float(rng.integers(-1, 2)), t == length - 1 and not cut_off
            history[-1] |= {"action": action, "reward": reward, "ended": ended}
            replay.complete(action, reward, ended)
        if cut_off:
            append(starts=False)  # the game's last frame, on which no action is taken
            replay.release_all()
        life += 1


def oracle_stack(history, t, capacity=10**9):
    """The S frames that end at t, as a ring of this capacity has them by now (it may have overwritten some): the number
    of each and its count, or None and 0 where it is not of the same life."""
    newest, stack = len(history) - 1, []
    for k in range(t - S + 1, t + 1):
        there = newest - (newest - k) % capacity  # the frame that is in that place now
        own = there >= 0 and history[there]["life"] == history[t]["life"]
        stack.append((there, history[there]["count"]) if own else (None, 0))
    return stack


def oracle_return(history, t, n):
    """(return, discount, m) of the transition at t, or None while its m is not known or where there is none."""
    total = 0.0
    for m in range(n):
        at = history[t + m]
        if at["action"] is None:  # the newest, or the last frame of a truncated game
            return (total, GAMMA**m, m) if m > 0 and at is not history[-1] else None
        total += GAMMA**m * at["reward"]
        if at["ended"]:
            return total, 0.0, m + 1
    return total, GAMMA**n, n


@pytest.mark.parametrize("capacity, n", [(40, 5), (56, 20), (77, 3), (100, 20)])
def test_stacks_and_returns_against_the_whole_history(capacity, n):
    """At every moment of several laps: a slot can be drawn only where its return is known and its stack is whole, and
    then both are those of the history."""
    replay = spirl.Replay(capacity, (3, 2), torch.float16, "cpu", S, n, GAMMA)
    drawable = 0
    for history in play(replay, 7 * capacity, seed=capacity):
        newest = len(history) - 1
        for slot, priority in enumerate(replay.priorities.tolist()):
            t = newest - (newest - slot) % capacity  # the frame that the slot holds
            known = oracle_return(history, t, n) if t >= 0 else None
            whole = t >= 0 and oracle_stack(history, t, capacity) == oracle_stack(history, t)
            assert (priority > 0) == (known is not None and whole), (newest, t)
            oldest = t <= newest - capacity + S
            if not whole or not (oldest or newest % 7 == 0):  # the oldest each time, all of them each seventh
                continue
            frames, counts = replay.stacks(torch.tensor([slot]))
            for frame, count, (number, expected) in zip(frames[0], counts[0].tolist(), oracle_stack(history, t)):
                assert count == expected and (count == 0 or (frame == number).all())
            if not known:
                continue
            drawable += 1
            total, discount, m = known
            expected = [history[t]["action"], total, discount, (t + m) % capacity]
            got = [value.item() for value in replay.returns(torch.tensor([slot]))]
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert drawable > 1000


def filled(priorities):
    replay = spirl.Replay(len(priorities) + 10, (1,), torch.float32, "cpu", 1, 1, GAMMA, ALPHA)
    for t in range(len(priorities)):
        replay.append(torch.zeros(1), 1, t == 0)
        replay.complete(0, 0.0, False)
    replay.append(torch.zeros(1), 1, False)
    replay.set_priorities(torch.arange(len(priorities)), torch.tensor(priorities))
    return replay


def test_sampling_frequencies_against_the_definition():
    """P(i) = p_i**alpha / sum_k p_k**alpha and w_i = (1/P(i))**beta / max w (Schaul et al. 2016, Eqs. 1 and 3.4)."""
    priorities = [0.0, 1e-3, 0.5, 2.0, 0.1, 30.0, 1.0, 0.7]
    replay = filled(priorities)
    masses = [max(p, 1e-6) ** ALPHA for p in priorities]
    P = [mass / sum(masses) for mass in masses]
    generator, counts, batches, B = torch.Generator().manual_seed(0), np.zeros(8), 2000, 16
    for _ in range(batches):
        slots, weights = replay.sample(B, 0.6, generator)
        drawn = [(1 / P[i]) ** 0.6 for i in slots.tolist()]
        assert weights.tolist() == pytest.approx([w / max(drawn) for w in drawn], rel=1e-5)
        counts += np.bincount(slots, minlength=8)
        for i in range(8):  # stratified: each share of the mass gives one, so a slot's number is nearly fixed
            assert abs((slots == i).sum().item() - B * P[i]) < 2
    assert counts / (batches * B) == pytest.approx(P, abs=0.001)


def test_sampling_before_anything_can_be_drawn_gives_nan_weights():
    replay = spirl.Replay(64, (1,), torch.float32, "cpu", S, 1, GAMMA)
    replay.append(torch.zeros(1), 1, True)
    replay.complete(0, 0.0, False)
    assert replay.sample(2, 0.5, torch.Generator())[1].isnan().all()


def test_an_empty_slot_that_is_drawn_counts_for_nothing_and_stays_empty(monkeypatch):
    """Sums round otherwise on a GPU and may draw one: here the search is made to."""
    replay, empty, search = filled([0.5, 0.5, 1.0]), 7, torch.searchsorted
    wrong_search = lambda *args, **more: search(*args, **more).index_fill(0, torch.tensor([2]), empty)
    monkeypatch.setattr(torch, "searchsorted", wrong_search)
    slots, weights = replay.sample(8, 0.5, torch.Generator().manual_seed(0))
    assert slots[2] == empty and weights[2] == 0 and weights.max() == 1
    before = replay.max_priority.clone()
    replay.set_priorities(slots[2:3], torch.tensor([1e9]))
    assert replay.priorities[empty] == 0 and replay.max_priority == before


def test_new_slots_get_the_largest_priority_so_far():
    replay = filled([0.2, 9.0, 0.3])
    replay.set_priorities(torch.tensor([1]), torch.tensor([0.0]))
    assert replay.priorities[1].item() == pytest.approx(1e-6**ALPHA)  # p is at least 1e-6
    replay.complete(0, 0.0, False)
    replay.append(torch.zeros(1), 1, False)
    assert replay.priorities[3].item() == pytest.approx(9.0**ALPHA)


def test_memory_of_a_100k_replay():
    """MAE-All's, the largest: little more than its embeddings."""
    tensors = vars(spirl.Replay(100_000, (144, 64), torch.float16, "meta")).values()
    assert sum(value.nbytes for value in tensors if torch.is_tensor(value)) < 1.01 * 100_000 * 144 * 64 * 2
